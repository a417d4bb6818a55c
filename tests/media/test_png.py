from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from isal import isal_zlib
from PIL import Image

from mm_encoder.errors import MediaDecodeError, MediaError, UnsupportedMediaError
from mm_encoder.media.png import pixel_chunks

from ..helpers.images import (
    decoded,
    ihdr,
    noise,
    png_chunk,
    png_file,
    png_rows,
    same_pixels,
    saved,
    shown_by_pillow,
)

LAYOUTS = [(depth, 1) for depth in (1, 2, 4, 8, 16)] + [(d, c) for d in (8, 16) for c in (2, 3, 4)]
SIZES = [(1, 1), (2, 1), (1, 5), (3, 3), (5, 2), (8, 8), (9, 7), (17, 6)]


def samples(width: int, height: int, depth: int = 8, channels: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(width * height).integers(0, 2**depth, (height, width, channels))


@pytest.mark.parametrize("interlace", [False, True])
@pytest.mark.parametrize(("depth", "channels"), LAYOUTS)
def test_a_picture_has_all_its_rows_and_one_byte_less_it_has_not(
    depth: int, channels: int, interlace: bool
) -> None:
    for size in SIZES:
        pixels = samples(*size, depth, channels)
        packed = png_rows(pixels, depth, interlace=interlace)
        whole = png_file(pixels, depth, interlace=interlace)
        short = png_file(pixels, depth, interlace=interlace, rows=packed[:-1])
        assert pixel_chunks(whole).has_all_rows()
        assert not pixel_chunks(short).has_all_rows()


@pytest.mark.parametrize("size", [1, 5, 100])
def test_pixel_data_in_any_pieces_is_counted_to_its_end(size: int) -> None:
    pixels = np.zeros((300, 300, 3), np.uint8)
    data = zlib.compress(png_rows(pixels, 8), 9)
    pieces = b"".join(png_chunk(b"IDAT", data[i : i + size]) for i in range(0, len(data), size))
    start = b"\x89PNG\r\n\x1a\n" + ihdr(300, 300)
    assert pixel_chunks(start + pieces + png_chunk(b"IEND")).has_all_rows()
    assert not decoded(start + pieces + png_chunk(b"IEND")).any()


def test_counting_inflates_no_more_than_a_picture_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for channels in (1, 3):  # Pillow decodes one, the native kernels the other
        bomb = png_file(np.zeros((2, 2, channels)), rows=bytes(50_000_000))
        inflated = count_inflated(monkeypatch)
        assert not decoded(bomb).any()
        assert 0 < sum(inflated) <= 1 << 16


def test_pieces_behind_the_end_of_the_pixel_data_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.zeros((300, 300, 1), np.uint8)
    short = png_file(pixels, rows=png_rows(pixels, 8)[:-301], after=png_chunk(b"IDAT", b"more") * 1000)
    inflated = count_inflated(monkeypatch)
    with pytest.raises(MediaDecodeError, match="rows"):
        decoded(short)
    assert len(inflated) < 20


def count_inflated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each call from now on inflates."""
    inflated: list[int] = []

    class Counting:
        def __init__(self, begin: Callable[[], Any]) -> None:
            self.inner = begin()

        def decompress(self, data: bytes, most: int) -> bytes:
            part: bytes = self.inner.decompress(data, most)
            inflated.append(len(part))
            return part

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    for module in (zlib, isal_zlib):
        monkeypatch.setattr(module, "decompressobj", partial(Counting, module.decompressobj))
    return inflated


@pytest.mark.parametrize("interlace", [False, True])
@pytest.mark.parametrize("fill", [0, 77])
@pytest.mark.parametrize(("depth", "channels"), LAYOUTS)
def test_pixel_data_that_ends_a_row_early_is_an_error(
    depth: int, channels: int, fill: int, interlace: bool
) -> None:
    pixels = np.full((11, 9, channels), fill % 2**depth)
    packed = png_rows(pixels, depth, interlace=interlace)
    row = len(packed) // 11
    assert decoded(png_file(pixels, depth, interlace=interlace)).shape[:2] == (11, 9)
    for cut in (1, row, 4 * row):
        with pytest.raises(MediaDecodeError, match="truncated"):
            decoded(png_file(pixels, depth, interlace=interlace, rows=packed[:-cut]))


def test_pillow_alone_fills_missing_rows_with_black() -> None:
    pixels = np.full((11, 9, 3), 77)
    data = png_file(pixels, rows=png_rows(pixels, 8)[: 28 * 5])
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.getpixel((8, 10)) == (0, 0, 0)


def test_more_pixel_data_than_the_picture_holds_is_left() -> None:
    pixels = samples(9, 7)
    data = png_file(pixels, rows=png_rows(pixels, 8) * 2)
    assert (decoded(data) == pixels).all()


# --- colour keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_a_grey_key_is_found_at_every_depth(depth: int) -> None:
    pixels = np.arange(2**depth if depth < 16 else 65536).reshape(1 if depth < 16 else 256, -1, 1)
    for key in {1, 2**depth - 1, 2**depth // 2}:
        data = png_file(pixels, depth, before=png_chunk(b"tRNS", struct.pack(">H", key)))
        alpha = decoded(data)[:, :, 3]
        assert (alpha == np.where(pixels[:, :, 0] == key, 0, 255)).all()


@pytest.mark.parametrize("depth", [8, 16])
def test_a_colour_key_is_found_at_every_depth(depth: int) -> None:
    pixels = samples(5, 4, depth)
    key = tuple(int(v) for v in pixels[2, 3])
    data = png_file(pixels, depth, before=png_chunk(b"tRNS", struct.pack(">3H", *key)))
    assert np.argwhere(decoded(data)[:, :, 3] == 0).tolist() == [[2, 3]]


def test_bits_of_a_key_beyond_the_depth_count_for_nothing() -> None:
    pixels = np.arange(4).reshape(1, 4, 1)
    keys = [png_chunk(b"tRNS", struct.pack(">H", key)) for key in (2, 0xFF02)]
    plain, odd = (decoded(png_file(pixels, 2, before=key)) for key in keys)
    assert same_pixels(plain, odd)


@pytest.mark.parametrize(("colour", "size"), [(0, 1), (2, 5)])
def test_a_cut_key_is_an_error(colour: int, size: int) -> None:
    pixels = samples(3, 3, channels=3 if colour else 1)
    with pytest.raises(MediaDecodeError):
        decoded(png_file(pixels, before=png_chunk(b"tRNS", bytes(size))))


def test_a_palettes_alphas_are_passed_on() -> None:
    alphas = bytes([255, 128, 0])
    palette = png_chunk(b"PLTE", bytes([9, 9, 9, 20, 30, 40, 1, 2, 3])) + png_chunk(b"tRNS", alphas)
    data = png_file(np.arange(3).reshape(1, 3, 1), colour=3, before=palette)
    assert decoded(data).tolist() == [[[9, 9, 9, 255], [20, 30, 40, 128], [1, 2, 3, 0]]]


# --- chunks ------------------------------------------------------------------------------------------


def test_only_chunks_that_carry_pixels_are_kept() -> None:
    extra = png_chunk(b"tEXt", b"k\0v") + png_chunk(b"acTL", bytes(8)) + png_chunk(b"pHYs", bytes(9))
    pixels = samples(9, 7)
    kept = pixel_chunks(png_file(pixels, before=extra, after=extra))
    assert kept.data == png_file(pixels)


def test_a_second_header_may_not_stand_in_for_the_one_that_was_checked() -> None:
    second = ihdr(30_000, 30_000)
    for data in (png_file(samples(9, 7), before=second), png_file(samples(9, 7), after=second)):
        with pytest.raises(MediaDecodeError, match="second IHDR"):
            decoded(data)


def test_pillow_alone_would_take_the_second_headers_size() -> None:
    image = Image.open(io.BytesIO(png_file(samples(9, 7), before=ihdr(300, 200))))
    assert image.size == (300, 200)


def test_a_png_ends_with_its_end_chunk() -> None:
    whole = png_file(samples(9, 7))
    with pytest.raises(MediaDecodeError, match="no IEND"):
        decoded(whole[:-12])
    with pytest.raises(MediaDecodeError, match="CRC"):
        decoded(whole[:-1])
    assert same_pixels(decoded(whole + b"anything"), decoded(whole))


@pytest.mark.parametrize("palette", [b"", png_chunk(b"PLTE"), png_chunk(b"tRNS", b"\0\1\2")])
def test_a_picture_of_indices_needs_a_palette(palette: bytes) -> None:
    with pytest.raises(MediaDecodeError, match="palette"):
        decoded(png_file(samples(3, 3, channels=1), colour=3, before=palette))


def test_a_critical_chunk_that_nobody_knows_is_not_passed_over() -> None:
    data = png_file(samples(3, 3), before=png_chunk(b"CgBI", b"\0\0\0\0"))
    with pytest.raises(UnsupportedMediaError, match="critical"):
        decoded(data)
    assert decoded(png_file(samples(3, 3), before=png_chunk(b"cgBI", b"\0\0\0\0"))).shape == (3, 3, 3)


def test_a_chunks_name_is_letters() -> None:
    with pytest.raises(MediaDecodeError, match="letters"):
        decoded(png_file(samples(3, 3), before=png_chunk(b"te\xd8t")))


WITH_EVERYTHING = [
    saved(noise(6, 5), "PNG"),
    saved(noise(6, 5, "RGBA"), "PNG"),
    saved(noise(6, 5).quantize(8), "PNG", transparency=2),
    saved(noise(6, 5, "L"), "PNG", transparency=9, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"),
]


@pytest.mark.parametrize("data", WITH_EVERYTHING)
@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_no_byte_can_be_flipped_unseen(data: bytes, flip: int) -> None:
    for at in range(len(data)):
        with pytest.raises(MediaError):
            decoded(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


def test_pillow_alone_does_not_see_a_flipped_bit_of_stored_pixels() -> None:
    pixels = samples(9, 7)
    stored = zlib.compress(png_rows(pixels, 8), 0)
    good = b"\x89PNG\r\n\x1a\n" + ihdr(9, 7) + png_chunk(b"IDAT", stored[:-4]) + png_chunk(b"IEND")
    assert (decoded(good) == pixels).all()
    bad = bytearray(good)
    bad[80] ^= 1
    assert not same_pixels(shown_by_pillow(bytes(bad)), decoded(good))
    with pytest.raises(MediaDecodeError, match="CRC"):
        decoded(bytes(bad))
