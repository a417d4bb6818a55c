from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from mm_encoder.config import MediaLimits
from mm_encoder.errors import MediaError
from mm_encoder.media.decode import decode
from mm_encoder.media.header import read_header
from mm_encoder.media.source import open_source, read_data_url

from ..helpers.images import (
    exif,
    gif_control,
    gif_file,
    inserted,
    noise,
    png_chunk,
    png_file,
    saved,
    scans_apart,
    segment,
)

SMALL = MediaLimits(max_bytes=1 << 16, max_pixels=1 << 14)
ADDRESS = re.compile(r"\bat 0x|0x[0-9a-f]{11,}")

EXIF_6 = Image.Exif()
EXIF_6[0x0112] = 6
PALETTE = noise(19, 13).quantize(9)
SEEDS = [
    saved(noise(19, 13), "JPEG"),
    saved(noise(19, 13), "JPEG", progressive=True),
    saved(noise(19, 13), "JPEG", restart_marker_blocks=1, subsampling=1),
    saved(noise(19, 13, "CMYK"), "JPEG"),
    inserted(saved(noise(19, 13, "L"), "JPEG"), segment(0xE1, b"Exif\0\0" + exif(6))),
    scans_apart([noise(19, 13)] * 3, [0x11] * 3, (19, 13)),
    saved(noise(19, 13), "PNG", exif=exif(5)),
    saved(noise(19, 13, "RGBA"), "PNG"),
    saved(PALETTE, "PNG", transparency=bytes([0, 90])),
    png_file(np.arange(99).reshape(9, 11, 1) % 16, 4, interlace=True, before=png_chunk(b"tRNS", b"\0\5")),
    png_file(np.arange(99).reshape(9, 11, 1) * 500, 16),
    saved(PALETTE, "GIF", transparency=2, save_all=True, append_images=[PALETTE.rotate(180)]),
    gif_file(np.arange(99).reshape(9, 11), before=gif_control(9, 7), interlace=True, screen=(9, 9)),
    saved(noise(19, 13), "BMP"),
    saved(PALETTE, "BMP"),
    saved(noise(19, 13, "1"), "BMP"),
    saved(noise(19, 13), "WEBP", exif=exif(6)),
    saved(noise(19, 13, "RGBA"), "WEBP"),
    saved(noise(19, 13, "RGBA"), "WEBP", lossless=True),
    saved(noise(9, 8), "WEBP", save_all=True, append_images=[noise(9, 8, seed=1)]),
    saved(noise(19, 13), "AVIF", speed=10, exif=exif(6)),
    saved(noise(19, 13, "RGBA"), "AVIF", speed=10),
]
TIFF_SEEDS = [
    saved(noise(19, 13), "TIFF"),
    saved(noise(19, 13), "TIFF", compression="tiff_lzw"),
    saved(noise(19, 13), "TIFF", compression="jpeg"),
    saved(noise(19, 13, "1"), "TIFF", compression="group4"),
    saved(PALETTE, "TIFF", compression="tiff_adobe_deflate"),
    saved(noise(19, 13, "RGBA"), "TIFF", compression="packbits", exif=EXIF_6),
]
MAGIC = [
    b"\xff\xd8\xff\xe0",
    b"\xff\xd8" + segment(0xC0, b"\x08\0\x09\0\x08\x01\x01\x11\0") + b"\xff",
    b"\x89PNG\r\n\x1a\n",
    SEEDS[6][:33],
    b"GIF89a",
    b"GIF89a\x09\0\x08\0\0\0\0,",
    b"BM",
    SEEDS[13][:54],
    b"RIFF\xff\0\0\0WEBPVP8 ",
    b"RIFF\xff\0\0\0WEBPVP8L",
    b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0",
    b"\0\0\0\x20ftyp",
    b"\0\0\0\x10ftypavif\0\0\0\0\0\0\0\x99meta\0\0\0\0",
    b"II*\0\x08\0\0\0\x0a\0",
    b"MM\0*\0\0\0\x08\0\x0a",
    b"<",
    b"",
]

spots = st.integers(0, 1 << 16)
pieces = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0" * 4, b"\0\0\xff\xff", b"\xff\xd9", b"\xff\xda"]),
)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("write"), spots, pieces),
        st.tuples(st.just("insert"), spots, pieces),
        st.tuples(st.just("delete"), spots, st.integers(1, 30)),
        st.tuples(st.just("repeat"), spots, st.integers(1, 60)),
        st.tuples(st.just("cut"), spots, st.none()),
    ),
    min_size=1,
    max_size=4,
)


def changed(data: bytes, how: list[tuple[str, int, bytes | int | None]]) -> bytes:
    for action, spot, value in how:
        at = spot % (len(data) + 1)
        if isinstance(value, bytes):
            kept = data[at:] if action == "insert" else data[at + len(value) :]
            data = data[:at] + value + kept
        elif isinstance(value, int):
            kept = data[at:] if action == "repeat" else data[at + value :]
            data = data[:at] + (data[at : at + value] if action == "repeat" else b"") + kept
        else:
            data = data[:at]
    return data


def with_checksums(png: bytes) -> bytes:
    """A PNG whose chunks have the checksums that they should have, as far as it can be followed."""
    fixed, at = png[:8], 8
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4])
        fixed += png[at:end] + zlib.crc32(png[at + 4 : end]).to_bytes(4)
        at = end + 4
    return fixed


def check(data: bytes) -> None:
    """Either a picture as its header says, or a media error; the same under a lenient host."""
    outcomes = []
    for lenient in (False, True):
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("error")
            patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
            outcomes.append(outcome(data))
    assert outcomes[0] == outcomes[1]


def outcome(data: bytes) -> tuple[object, ...]:
    try:
        header = read_header(data, SMALL)
        source = open_source(data, SMALL)
    except MediaError as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            decode(data, SMALL)
        return check_message(data, error)
    assert source.size == header.display_size()
    try:
        pixels = source.decode(SMALL).pixels
    except MediaError as error:
        return check_message(data, error)
    assert pixels.shape[1::-1] == source.size
    assert pixels.shape[2] in (3, 4)
    assert pixels.dtype == np.uint8
    assert pixels.nbytes <= 4 * SMALL.max_pixels
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    return pixels.shape, pixels.tobytes()


def check_message(data: bytes, error: MediaError) -> tuple[object, ...]:
    message = str(error)
    assert len(message) < 250
    assert not ADDRESS.search(message)
    return type(error), message


EXAMPLES = 1500 if os.environ.get("FUZZ") else 300

quickly = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@quickly
@given(st.sampled_from(SEEDS), changes, st.booleans())
def changed_files(seed: bytes, how: list[tuple[str, int, bytes | int | None]], repair: bool) -> None:
    data = changed(seed, how)
    check(with_checksums(data) if repair and data[:4] == b"\x89PNG" else data)


@quickly
@given(st.sampled_from(TIFF_SEEDS), changes)
def changed_tiffs(seed: bytes, how: list[tuple[str, int, bytes | int | None]]) -> None:
    check(changed(seed, how))


@quickly
@given(st.sampled_from(MAGIC), st.binary(max_size=200))
def anything_behind_a_magic(start: bytes, rest: bytes) -> None:
    check(start + rest)


@quickly
@given(st.one_of(st.text(max_size=60), st.text("data:;,bse64=AZ+/-_ \n", max_size=60)), st.booleans())
def anything_as_a_data_url(text: str, prefixed: bool) -> None:
    try:
        assert isinstance(read_data_url("data:;base64," + text if prefixed else text, SMALL), bytes)
    except MediaError as error:
        if len(text) > 8 and text in str(error):
            raise AssertionError("the message repeats what was given") from error


@pytest.mark.parametrize("fuzz", [changed_files, anything_behind_a_magic, anything_as_a_data_url])
def test_only_media_errors_and_not_a_word_to_the_terminal(
    fuzz: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    fuzz()
    assert capfd.readouterr() == ("", "")


def test_only_media_errors_from_tiffs() -> None:
    changed_tiffs()  # libtiff reports damage on standard error too, and Pillow lets it


@pytest.mark.parametrize("seed", SEEDS + TIFF_SEEDS)
def test_the_files_that_are_changed_are_good(seed: bytes) -> None:
    assert outcome(seed)[0] in {
        (13, 19, 3),
        (13, 19, 4),
        (19, 13, 3),
        (19, 13, 4),
        (9, 11, 3),
        (9, 11, 4),
        (8, 9, 3),
    }
