from __future__ import annotations

import builtins
import re
import socket
import struct
import tracemalloc
from typing import Any

import pytest
from PIL import Image

from mm_encoder.config import MediaLimits
from mm_encoder.contract import ImageSize
from mm_encoder.errors import MediaDecodeError, MediaError, MediaTooLargeError, UnsupportedMediaError
from mm_encoder.media import decode as decode_module
from mm_encoder.media.header import Header, read_header
from mm_encoder.media.kinds import sniff
from mm_encoder.media.orientation import orientation_of
from mm_encoder.planner import MediaPlanner

from ..helpers.abuse import ERRORS, Row, case, file_of, rows
from ..helpers.images import (
    LIMITS,
    bmp_file,
    decoded,
    exif,
    ihdr,
    inserted,
    noise,
    png_chunk,
    riff,
    same_pixels,
    saved,
    segment,
)

# --- kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"GIF87a", "GIF"),
        (b"GIF89a", "GIF"),
        (b"BM", "BMP"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "WebP"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
        (b"\0\0\0\x10ftypavif", "AVIF"),
        (b"\0\0\0\x10ftypavis", "AVIF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif", "AVIF"),
    ],
)
def test_kinds_that_are_decoded_are_known_by_their_first_bytes(start: bytes, kind: str) -> None:
    assert sniff(start) == kind
    with pytest.raises(MediaDecodeError):
        read_header(start, LIMITS)


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"II+\0\x08\0\0\0", "BigTIFF"),
        (b"MM\0+\0\x08\0\0", "BigTIFF"),
        (b"\0\0\1\0\1\0", "ICO"),
        (b"\0\0\2\0\1\0", "CUR"),
        (b"\0\0\2\0\0\1", "CUR"),
        (saved(noise(8, 8), "TGA"), "TGA"),
        (b"\xff\x4f\xff\x51\0\x2f", "JPEG 2000"),
        (b"\x76\x2f\x31\x01\2\0\0\0", "OpenEXR"),
        (b"P6\n4 4\n255\n", "PNM"),
        (b"P1 4 4", "PNM"),
        (b"qoif\0\0\0\4", "QOI"),
        (b"DDS \x7c\0\0\0", "DDS"),
        (b"8BPS\0\1", "PSD"),
        (b"\xff\x0a", "JPEG XL"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"%PDF-1.7", "PDF"),
        (b"\x1aE\xdf\xa3", "Matroska/WebM video"),
        (b"OggS", "Ogg audio/video"),
        (b"ID3\x04", "MP3 audio"),
        (b"fLaC", "FLAC audio"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"PK\x03\x04", "ZIP"),
        (b"RIFF\0\0\0\0WAVE", "WAV audio"),
        (b"RIFF\0\0\0\0AVI ", "AVI video"),
        (b"\0\0\0\x10ftypjp2 ", "JPEG 2000"),
        (b"\0\0\0\x10ftypcrx ", "Canon CR3 camera raw"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avci", "HEIF with AVC"),
        (b"\0\0\0\x10ftypwhat", "ISO media file (brand 'what')"),
        (b"\0\0\0\x20ftypmif1", "HEIF"),
        (b"\0\0\0\x20ftypisom", "MP4/QuickTime video"),
        (b"<svg>", "SVG"),
        (b'\xef\xbb\xbf  <?xml version="1.0"?><!-- a picture --><SVG\nwidth="1">', "SVG"),
    ],
)
def test_other_kinds_are_named_and_refused(start: bytes, kind: str) -> None:
    assert kind in sniff(start)
    with pytest.raises(UnsupportedMediaError, match=re.escape(kind)) as error:
        read_header(start, LIMITS)
    assert "AVIF, BMP, GIF, HEIC, JPEG, PNG, TIFF, WebP" in str(error.value)


def test_a_plain_tga_is_no_icon() -> None:
    tga = saved(noise(8, 8), "TGA").removesuffix(b"TRUEVISION-XFILE.\0")
    assert tga[:6] == b"\0\0\2\0\0\0"  # a cursor file without images, but for the type
    with pytest.raises(MediaDecodeError, match="of no image format"):
        read_header(tga, LIMITS)


@pytest.mark.parametrize("row", rows("D07"), ids=file_of)
def test_what_is_no_raster_image_is_told_apart(row: Row, planner: MediaPlanner) -> None:
    data = case(row["file"])
    if "error" not in row:
        assert read_header(data, LIMITS) == Header("PNG", ImageSize(*row["size"]))
        return
    for read in (lambda: read_header(data, LIMITS), lambda: planner.plan(data), lambda: decoded(data)):
        with pytest.raises(ERRORS[row["error"]]) as error:
            read()
        assert len(str(error.value)) < 120


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("D07_empty.jpg", "empty"),
        ("D07_svg.svg", "SVG"),
        ("D07_pdf.pdf", "PDF"),
        ("D07_html_as.jpg", "HTML"),
        ("D07_zeros.bin", "no image format"),
        ("D07_one_byte.png", "no image format"),
    ],
)
def test_a_message_says_what_was_got(name: str, words: str) -> None:
    with pytest.raises(MediaError, match=words) as error:
        read_header(case(name), LIMITS)
    assert not re.search("at 0x", str(error.value))
    assert "404" not in str(error.value)


def test_an_svg_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = case("D07_svg.svg")

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("an SVG must not make anything be opened")

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(UnsupportedMediaError):
        decoded(data)


# --- limits ------------------------------------------------------------------------------------------


class DecoderReached(Exception):
    pass


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes, header: Header) -> Any:
        raise DecoderReached

    for kind in decode_module._DECODERS:
        monkeypatch.setitem(decode_module._DECODERS, kind, refuse)


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize("row", rows("D08"), ids=file_of)
def test_a_bomb_is_refused_from_its_header(row: Row, planner: MediaPlanner) -> None:
    data = case(row["file"])
    tracemalloc.start()
    try:
        for read in (lambda: read_header(data, LIMITS), lambda: planner.plan(data), lambda: decoded(data)):
            with pytest.raises(ERRORS[row["error"]]) as error:
                read()
            if "size" in row:
                assert "{}x{}".format(*row["size"]) in str(error.value)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("no_decoding")
def test_it_is_the_limit_that_keeps_the_decoder_from_a_bomb() -> None:
    with pytest.raises(DecoderReached):
        decode_module.decode(case("D08_bomb_1bit_16000.png"), MediaLimits(max_pixels=16_000**2))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_limits_are_the_last_that_is_allowed(kind: str) -> None:
    data = saved(noise(20, 10), kind)
    exact = MediaLimits(max_bytes=len(data), max_pixels=200)
    assert read_header(data, exact).size == (20, 10)
    with pytest.raises(MediaTooLargeError, match="max_pixels"):
        read_header(data, MediaLimits(max_pixels=199))
    with pytest.raises(MediaTooLargeError, match="max_bytes"):
        read_header(data, MediaLimits(max_bytes=len(data) - 1))


PNG_START = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "data",
    [
        PNG_START + ihdr(0, 5),
        PNG_START + ihdr(5, 0),
        b"GIF89a" + struct.pack("<HHBBB", 0, 0, 0, 0, 0) + b"," + bytes(9),
        bmp_file(b"", (0, 5), 24),
        bmp_file(b"", (-5, 5), 24),
        b"\xff\xd8" + segment(0xC0, struct.pack(">BHHB", 8, 5, 0, 3)),
        riff((b"VP8 ", b"\0\0\0\x9d\x01\x2a\0\0\5\0")),
    ],
)
def test_a_side_of_nothing_is_no_picture(data: bytes) -> None:
    with pytest.raises(MediaDecodeError, match="no pixels"):
        read_header(data, LIMITS)


@pytest.mark.parametrize("size", [(5, -(2**31)), (2**31 - 1, -1), (2**31 - 1, -(2**31))])
def test_the_largest_negative_height_overflows_nothing(size: tuple[int, int]) -> None:
    with pytest.raises(MediaTooLargeError, match=f"{size[0]}x{-size[1]}"):
        read_header(bmp_file(b"", size, 24), LIMITS)


def test_the_largest_png_is_measured_exactly() -> None:
    data = PNG_START + ihdr(2**32 - 1, 2**32 - 1)
    with pytest.raises(MediaTooLargeError, match=str((2**32 - 1) ** 2)):
        read_header(data, LIMITS)


@pytest.mark.parametrize(
    "chunks",
    [
        [(b"VP8L", b"\x2f" + struct.pack("<I", 16382 | 16382 << 14)), (b"VP8X", bytes(10))],
        [(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383)), (b"VP8X", bytes(10))],
        [(b"VP8X", bytes(4) + b"\xfe\x3f\0\xfe\x3f\0"), (b"VP8X", bytes(10))],
    ],
)
def test_the_first_size_in_a_webp_is_the_one_that_counts(chunks: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(MediaTooLargeError, match="163"):
        read_header(riff(*chunks), LIMITS)


# --- orientation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_orientation_is_read_in_either_byte_order_and_width(order: str, kind: int) -> None:
    for value in range(1, 9):
        block = exif(value, order, kind=kind)
        assert orientation_of({"exif": block}) == value
        assert orientation_of({"exif": b"Exif\0\0" + block}) == value


@pytest.mark.parametrize("value", [0, 9, 255, 65535])
def test_an_illegal_orientation_is_none(value: int) -> None:
    assert orientation_of({"exif": exif(value)}) == 1
    assert orientation_of({"exif": exif(value), "xmp": b'tiff:Orientation="6"'}) == 1


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"junk of any kind",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        exif(6)[:12],
        exif(6)[:19],
        b"MM*\0" + exif(6)[4:],
    ],
)
def test_a_broken_exif_block_is_passed_over(block: bytes) -> None:
    assert orientation_of({"exif": block}) == 1
    assert orientation_of({"exif": block, "xmp": b"<tiff:Orientation>8</tiff:Orientation>"}) == 8


def test_orientation_may_stand_behind_other_entries() -> None:
    other = struct.pack("<HHII", 0x010F, 2, 1, 0)
    block = b"II*\0" + struct.pack("<IH", 8, 2) + other + exif(5)[10:]
    assert orientation_of({"exif": block}) == 5


@pytest.mark.parametrize("text", ['="3"', ">3<"])
def test_xmp_is_read_where_exif_has_none(text: str) -> None:
    xmp = f"<rdf:Description tiff:Orientation{text}/>".encode()
    assert orientation_of({"xmp": xmp}) == 3
    assert orientation_of({"exif": exif(6), "xmp": xmp}) == 6


def test_a_webp_must_announce_its_metadata() -> None:
    frame = saved(noise(9, 7), "WEBP")[20:]
    size = b"\x08\0\0\x06\0\0"
    for flags, orientation in [(0x08, 6), (0x00, 1)]:
        data = riff((b"VP8X", bytes([flags, 0, 0, 0]) + size), (b"VP8 ", frame), (b"EXIF", exif(6)))
        assert read_header(data, LIMITS).orientation == orientation
        assert decoded(data).shape == ((9, 7, 3) if orientation == 6 else (7, 9, 3))


def test_a_webps_scaling_bits_are_none_of_its_size() -> None:
    data = saved(noise(9, 7), "WEBP")
    scaled = data[:27] + bytes([data[27] | 0xC0]) + data[28:29] + bytes([data[29] | 0x40]) + data[30:]
    assert scaled != data
    assert read_header(scaled, LIMITS).size == (9, 7)
    assert same_pixels(decoded(scaled), decoded(data))


def test_metadata_behind_a_webps_end_is_none_of_its_own() -> None:
    data = saved(noise(9, 7), "WEBP", exif=exif(1))
    assert read_header(data + b"EXIF" + struct.pack("<I", 26) + exif(6), LIMITS).orientation == 1


def test_shown_swaps_sides_only_when_orientation_is_applied() -> None:
    for orientation in range(1, 9):
        header = Header("JPEG", ImageSize(30, 20), orientation)
        assert header.display_size() == ((20, 30) if orientation >= 5 else (30, 20))
        assert header.display_size(exif_orientation=False) == (30, 20)


# --- cut and lying headers ---------------------------------------------------------------------------


def smallest(kind: str) -> bytes:
    return saved(Image.new("RGB", (3, 2), (1, 2, 3)), kind)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_a_header_cut_anywhere_is_a_media_error_or_whole(kind: str) -> None:
    data = smallest(kind)
    seen = set()
    for cut in range(len(data)):
        try:
            seen.add(read_header(data[:cut], LIMITS).size)
        except MediaError:
            seen.add(ImageSize(0, 0))
    assert seen <= {(3, 2), (0, 0)}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
@pytest.mark.parametrize("value", [b"\xff" * 4, b"\x7f" + b"\xff" * 3, b"\x80" + bytes(3), bytes(4)])
def test_lengths_of_any_size_anywhere_end_in_a_size_or_a_media_error(kind: str, value: bytes) -> None:
    data = smallest(kind)
    for at in range(len(data) - 4):
        lying = data[:at] + value + data[at + 4 :]
        try:
            size = read_header(lying, LIMITS).size
        except MediaError:
            continue
        assert 0 < size.width * size.height <= LIMITS.max_pixels


def test_a_jpeg_that_comes_to_its_scan_without_a_frame_is_refused() -> None:
    with pytest.raises(MediaDecodeError, match="frame"):
        read_header(b"\xff\xd8" + segment(0xDA, bytes(6)), LIMITS)
    with pytest.raises(MediaDecodeError, match="frame"):
        read_header(b"\xff\xd8\xff\xd9" + smallest("JPEG")[2:], LIMITS)


def test_a_png_begins_with_its_header_chunk() -> None:
    with pytest.raises(MediaDecodeError, match="IHDR"):
        read_header(PNG_START + png_chunk(b"tEXt", b"k\0v") + ihdr(3, 2), LIMITS)


@pytest.mark.parametrize("chunk", [(b"VP8 ", bytes(10)), (b"VP8L", bytes(5)), (b"ALPH", bytes(5))])
def test_a_webps_frame_begins_as_it_must(chunk: tuple[bytes, bytes]) -> None:
    with pytest.raises(MediaDecodeError, match="WebP"):
        read_header(riff(chunk), LIMITS)


def test_many_comments_are_walked_over() -> None:
    comments = segment(0xFE, bytes(60_000)) * 20
    assert read_header(inserted(smallest("JPEG"), comments), LIMITS).size == (3, 2)
