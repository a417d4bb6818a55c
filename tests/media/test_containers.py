from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image

from mm_encoder.errors import MediaDecodeError, MediaError
from mm_encoder.media import containers
from mm_encoder.media.containers import (
    Chunk,
    check_jpeg_scans,
    gif_first_frame,
    jpeg_segments,
    png_chunks,
    repair_jpeg_headers,
    riff_chunks,
)
from mm_encoder.media.header import read_header

from ..helpers.images import (
    LIMITS,
    decoded,
    gif_control,
    gif_file,
    inserted,
    noise,
    png_chunk,
    riff,
    same_pixels,
    saved,
    scans_apart,
    segment,
    shown_by_pillow,
)

SMALL = np.arange(16).reshape(4, 4)
PNG = saved(noise(9, 7), "PNG")
JPEG = saved(noise(37, 23), "JPEG")
PROGRESSIVE = saved(noise(37, 23), "JPEG", progressive=True)
GIF = gif_file(SMALL)
LOSSY = saved(noise(9, 7), "WEBP")[20:]

LIMIT, SUB_LIMIT = 1 << 17, 1 << 20
MANY = {
    "PNG": PNG[:33] + png_chunk(b"teXt") * LIMIT + PNG[33:],
    "JPEG": inserted(JPEG, segment(0xFE) * LIMIT),
    "WebP": riff((b"VP8 ", LOSSY), *[(b"JUNK", b"")] * LIMIT),
    "GIF extensions": gif_file(SMALL, before=b"!\xfe\0" * LIMIT),
    "GIF stray bytes": gif_file(SMALL, before=b"\x01" * LIMIT),
    "GIF sub-blocks": gif_file(SMALL, before=b"!\xfe" + b"\x01x" * SUB_LIMIT + b"\0"),
}


@pytest.mark.parametrize("kind", MANY)
def test_a_file_of_countless_tiny_pieces_is_refused(kind: str) -> None:
    with pytest.raises(MediaDecodeError, match="more than 1"):
        read_header(MANY[kind], LIMITS)


@pytest.mark.parametrize("kind", MANY)
def test_it_is_their_number_that_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "MAX_CHUNKS", LIMIT + 100)
    monkeypatch.setattr(containers, "MAX_SUB_BLOCKS", SUB_LIMIT + 100)
    assert read_header(MANY[kind], LIMITS).size in {(9, 7), (37, 23), (4, 4)}


def test_pixels_in_countless_sub_blocks_are_refused() -> None:
    data = GIF[:-2] + b"\x01x" * SUB_LIMIT + b"\0;"
    assert read_header(data, LIMITS).size == (4, 4)
    with pytest.raises(MediaDecodeError, match=f"more than {SUB_LIMIT}"):
        decoded(data)


def test_fill_bytes_cost_no_more_than_their_number() -> None:
    filled = inserted(JPEG, b"\xff" * 3_000_000)
    assert read_header(filled, LIMITS).size == (37, 23)
    with pytest.raises(MediaDecodeError, match="frame"):
        read_header(b"\xff\xd8" + b"\xff" * 3_000_000, LIMITS)


# --- PNG and RIFF ------------------------------------------------------------------------------------


def test_png_chunks_are_walked_up_to_the_end_chunk() -> None:
    chunks = list(png_chunks(PNG + b"what follows is no chunk"))
    assert [chunk.name for chunk in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    assert chunks[0] == Chunk(b"IHDR", 16, 29)


def test_a_png_chunk_longer_than_the_file_ends_the_walk() -> None:
    chunks = list(png_chunks(PNG[:33] + b"\xff\xff\xff\xffIDAT"))
    assert chunks[-1] == Chunk(b"IDAT", 41, 41 + 0xFFFFFFFF)


def test_riff_chunks_are_walked_up_to_the_end_that_the_file_gives() -> None:
    data = riff((b"VP8 ", LOSSY), (b"odd ", b"123"), (b"last", b""))
    names = [b"VP8 ", b"odd ", b"last"]
    assert [chunk.name for chunk in riff_chunks(data)] == names
    assert [chunk.name for chunk in riff_chunks(data + b"EXIF\x04\0\0\0beyond")] == names


def test_a_riff_chunk_may_not_reach_over_the_end() -> None:
    data = riff((b"VP8 ", LOSSY), (b"EXIF", b"1234"))
    longer = data[:-8] + struct.pack("<I", 5) + data[-4:]
    with pytest.raises(MediaDecodeError, match="end"):
        list(riff_chunks(longer))


# --- JPEG --------------------------------------------------------------------------------------------


def test_segments_are_found_behind_scans_fill_and_stray_bytes() -> None:
    data = (
        b"\xff\xd8"
        + segment(0xE0, b"abc")
        + b"stray \xff\x00 \xff\xd0"
        + b"\xff\xff\xff"
        + segment(0xDA, b"\x01")
        + b"codes \xff\x00 \xff\xd3 \xff\xd7 more"
        + segment(0xFE, b"comment \xff\xd9 of any bytes")
        + b"\xff\xd9"
        + segment(0xFE, b"after the end")
    )
    walked = [(marker, data[start:end]) for marker, start, end in jpeg_segments(data)]
    assert walked == [
        (0xE0, b"abc"),
        (0xDA, b"\x01"),
        (0xFE, b"comment \xff\xd9 of any bytes"),
        (0xD9, b""),
    ]


@pytest.mark.parametrize("length", [0, 1])
def test_a_segment_is_no_shorter_than_its_length(length: int) -> None:
    data = inserted(JPEG, b"\xff\xfe" + struct.pack(">H", length))
    with pytest.raises(MediaDecodeError, match="shorter"):
        read_header(data, LIMITS)


def starts_of_scans(data: bytes) -> list[int]:
    """Where each scan's tables begin, or the scan itself."""
    cuts, tables = [], None
    for marker, start, _ in jpeg_segments(data):
        if marker == 0xC4:
            tables = start - 4 if tables is None else tables
        elif marker == 0xDA:
            cuts.append(start - 4 if tables is None else tables)
            tables = None
    return cuts


def test_a_progressive_file_needs_a_dc_scan_of_each_component() -> None:
    check_jpeg_scans(PROGRESSIVE)
    cuts = starts_of_scans(PROGRESSIVE)
    assert len(cuts) == 10
    with pytest.raises(MediaDecodeError, match="scans"):
        check_jpeg_scans(PROGRESSIVE[: cuts[0]] + b"\xff\xd9")
    for cut in cuts[1:]:
        check_jpeg_scans(PROGRESSIVE[:cut] + b"\xff\xd9")


def test_a_progressive_file_may_leave_scans_out() -> None:
    for cut in starts_of_scans(PROGRESSIVE)[1:]:
        early = PROGRESSIVE[:cut] + b"\xff\xd9"
        assert same_pixels(decoded(early), shown_by_pillow(early))


def three_scans() -> bytes:
    return scans_apart([noise(37, 23, seed=i) for i in range(3)], [0x11] * 3, (37, 23))


def test_a_sequential_file_needs_a_scan_of_each_component() -> None:
    data = three_scans()
    assert same_pixels(decoded(data), shown_by_pillow(data))
    for cut in starts_of_scans(data)[1:]:
        with pytest.raises(MediaDecodeError, match="scans"):
            decoded(data[:cut] + b"\xff\xd9")


def test_more_scans_than_any_encoder_writes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "MAX_SCANS", 9)
    with pytest.raises(MediaDecodeError, match="more than 9 scans"):
        decoded(PROGRESSIVE)
    monkeypatch.setattr(containers, "MAX_SCANS", 10)
    assert decoded(PROGRESSIVE).shape == (23, 37, 3)


def patched(data: bytes, marker: int, offset: int, value: bytes) -> bytes:
    """A JPEG with bytes of its first such segment replaced."""
    start = next(segment.start for segment in jpeg_segments(data) if segment.marker == marker)
    return data[: start + offset] + value + data[start + offset + len(value) :]


def with_bad_headers(kind: str, data: bytes) -> bytes:
    if kind == "stray bytes":
        cut = data.index(b"\xff\xdb")
        return data[:cut] + b"zz" + data[cut:]
    if kind == "JFIF revision":
        return patched(data, 0xE0, 5, b"\x02")
    if kind == "scan parameters":
        return patched(data, 0xDA, 7, b"\x00\x00\x01")
    return inserted(data, segment(0xEE, b"Adobe\0\x64\0\0\0\0\x07"))


UNTIDY = ["stray bytes", "JFIF revision", "scan parameters", "Adobe transform"]


@pytest.mark.parametrize("kind", UNTIDY)
def test_what_libjpeg_warns_of_before_the_pixels_costs_none(kind: str) -> None:
    data = with_bad_headers(kind, JPEG)
    assert same_pixels(decoded(data), decoded(JPEG))
    assert same_pixels(decoded(data), shown_by_pillow(data))


@pytest.mark.parametrize("kind", UNTIDY)
def test_such_a_warning_hides_no_missing_half(kind: str) -> None:
    data = with_bad_headers(kind, JPEG)
    with pytest.raises(MediaDecodeError):
        decoded(data[: len(data) * 2 // 3] + b"\xff\xd9")


def test_repairing_leaves_good_headers_as_they_are() -> None:
    for data in (JPEG, PROGRESSIVE, saved(noise(8, 8, "CMYK"), "JPEG"), three_scans()):
        channels = read_header(data, LIMITS).channels
        assert repair_jpeg_headers(data, channels) == data


def test_segments_too_short_to_be_believed_are_left_as_they_are() -> None:
    short = segment(0xE0, b"JFIF\0") + segment(0xEE, b"Adobe\0\x64\0\0\0\0")
    data = inserted(with_bad_headers("stray bytes", JPEG), short)
    assert short in repair_jpeg_headers(data, 3)
    assert same_pixels(decoded(data), decoded(JPEG))


def test_an_unknown_transform_of_four_inks_is_taken_as_ycck() -> None:
    cmyk = saved(noise(16, 16, "CMYK"), "JPEG")
    ycck = patched(cmyk, 0xEE, 11, b"\x02")
    assert same_pixels(decoded(patched(cmyk, 0xEE, 11, b"\x07")), decoded(ycck))
    assert not same_pixels(decoded(ycck), decoded(cmyk))


# --- GIF ---------------------------------------------------------------------------------------------


def test_the_last_control_before_the_first_frame_is_its_own() -> None:
    before = gif_control(1, 7) + b"!\xfe\x03abc\0" + gif_control(0, 9)
    data = gif_file(SMALL, before=before)
    frame = gif_first_frame(data, whole=True)
    assert frame.control is not None
    assert data[frame.control : frame.control + 8] == gif_control(0, 9)
    assert data[frame.start : frame.start + 1] == b","
    assert data[frame.end :] == b";"


@pytest.mark.parametrize(
    ("screen", "at", "canvas"),
    [((4, 4), (0, 0), (4, 4)), ((9, 8), (2, 1), (9, 8)), ((4, 4), (2, 3), (6, 7)), ((0, 0), (0, 0), (4, 4))],
)
def test_a_frame_widens_the_canvas_that_it_reaches_over(
    screen: tuple[int, int], at: tuple[int, int], canvas: tuple[int, int]
) -> None:
    data = gif_file(SMALL, screen=screen, at=at)
    assert gif_first_frame(data, whole=False).canvas == canvas
    assert decoded(data).shape[1::-1] == canvas
    assert same_pixels(decoded(data), shown_by_pillow(data))


def test_a_gif_without_a_frame_says_so() -> None:
    with pytest.raises(MediaDecodeError, match="no frame"):
        read_header(GIF[: 13 + 768] + b";", LIMITS)


@pytest.mark.parametrize("extension", [b"!\xff\xff" + b"x" * 255, b"!\xf9\x04", b"!\x01\x01", b"!"])
def test_an_extension_that_runs_to_the_end_is_a_cut_file(extension: bytes) -> None:
    with pytest.raises(MediaDecodeError, match="truncated"):
        read_header(GIF[: 13 + 768] + extension, LIMITS)


@pytest.mark.parametrize("data", [PNG, JPEG, PROGRESSIVE, GIF, saved(Image.new("RGBA", (5, 4)), "WEBP")])
def test_walking_a_file_cut_anywhere_ends_or_raises_media_errors(data: bytes) -> None:
    whole = read_header(data, LIMITS).size
    for cut in range(len(data)):
        try:
            assert read_header(data[:cut], LIMITS).size == whole
        except MediaError:
            continue
