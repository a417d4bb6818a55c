"""What is not decoded is named for what it is, in the planner as in the decoder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from mm_encoder.config import MediaLimits
from mm_encoder.errors import UnsupportedMediaError
from mm_encoder.media.decode import decode
from mm_encoder.media.header import read_header
from mm_encoder.planner import MediaPlanner

from ..helpers.abuse import ERRORS, Row, case, file_of, rows
from ..helpers.images import LIMITS, bmp_file, decoded, noise, png_with, saved


@pytest.mark.parametrize("row", rows("D39"), ids=file_of)
def test_a_legal_variety_is_unsupported_and_not_corrupt(row: Row, planner: MediaPlanner) -> None:
    data = case(row["file"])
    for read in (lambda: read_header(data, LIMITS), lambda: planner.plan(data), lambda: decoded(data)):
        with pytest.raises(ERRORS[row["error"]]) as error:
            read()
        assert not any(words in str(error.value) for words in row["message_lacks"])


JPEG_START = saved(noise(8, 8), "JPEG")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((JPEG_START.replace(b"\xff\xc0", bytes([0xFF, m])), "hierarchical JPEG") for m in (0xC5, 0xCE)),
        (JPEG_START.replace(b"\xff\xc0", b"\xff\xc3"), "lossless JPEG"),
        (JPEG_START.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"), "12 bits per sample"),
        *((bmp_file(bytes(99), (2, 2), bits), f"BMP with {bits} bits") for bits in (2, 3, 64)),
        *((bmp_file(bytes(99), (2, 2), 24, compression=n), "BMP with compression") for n in (4, 6, 11, 99)),
        (b"BM" + bytes(12) + struct.pack("<I", 16) + bytes(40), "BMP with a header of 16 bytes"),
        (png_with((b"ABCD", b"")), "PNG with a critical chunk"),
    ],
)
def test_what_is_not_decoded_is_named_in_plan_and_decoder(
    data: bytes, words: str, planner: MediaPlanner
) -> None:
    for read in (lambda: planner.plan(data), lambda: decoded(data)):
        with pytest.raises(UnsupportedMediaError, match=words):
            read()


def test_formats_may_be_narrowed(glm53_checkpoint: Path) -> None:
    limits = MediaLimits(formats=["jpeg", "webp"])
    assert limits.formats == ("JPEG", "WebP")
    assert hash(limits) == hash(MediaLimits(formats=("WebP", "JPEG")))
    planner = MediaPlanner(glm53_checkpoint, limits=limits)
    png, jpeg = saved(noise(60, 60), "PNG"), saved(noise(60, 60), "JPEG")
    for read in (lambda: read_header(png, limits), lambda: planner.plan(png), lambda: decode(png, limits)):
        with pytest.raises(UnsupportedMediaError, match="PNG is not among the formats .*JPEG, WebP"):
            read()
    assert planner.plan(jpeg).length == MediaPlanner(glm53_checkpoint).plan(png).length
    assert planner.plan(noise(60, 60)).length  # pixels that the host has made are of no format


@pytest.mark.parametrize("formats", [[], ["JPG"], ["PNG", 3], [b"PNG"]])
def test_formats_are_checked(formats: Any) -> None:
    with pytest.raises(ValueError, match="AVIF, BMP, GIF, HEIC, JPEG, PNG, TIFF, WebP"):
        MediaLimits(formats=formats)
    for other in ("PNG", None, 5):
        with pytest.raises(TypeError, match="formats"):
            MediaLimits(formats=other)  # type: ignore[arg-type]
