"""AVIF and HEIC: as Pillow and pillow-heif decode them, within the limits, on no thread of their own."""

from __future__ import annotations

import importlib.util
import io
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import AvifImagePlugin, Image, ImageFile, ImageOps

from mm_encoder.config import MediaLimits
from mm_encoder.errors import MediaDecodeError, MediaError, MediaTooLargeError, UnsupportedMediaError
from mm_encoder.media.decode import decode
from mm_encoder.media.header import read_header
from mm_encoder.media.iso import largest_image
from mm_encoder.media.source import open_source, size_of
from mm_encoder.planner import MediaPlanner

from ..helpers.images import LIMITS, decoded, exif, noise, same_pixels, saved, shown_by_pillow

AVIF = saved(noise(45, 37), "AVIF", speed=10)
HEIC_HEAD = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
needs_heif = pytest.mark.skipif(
    importlib.util.find_spec("pillow_heif") is None, reason="needs pillow-heif (extra heif)"
)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("options", [{}, {"quality": 100}, {"subsampling": "4:4:4"}], ids=str)
def test_an_avif_is_what_pillow_makes_of_it(mode: str, options: dict[str, object]) -> None:
    data = saved(noise(45, 37, mode), "AVIF", speed=10, **options)
    channels = 4 if mode == "RGBA" else 3
    assert same_pixels(decoded(data), shown_by_pillow(data, channels))


def test_of_an_avif_sequence_the_first_frame_counts() -> None:
    frames = [noise(20, 16, seed=seed) for seed in range(3)]
    data = saved(frames[0], "AVIF", speed=10, save_all=True, append_images=frames[1:])
    assert same_pixels(decoded(data), np.array(Image.open(io.BytesIO(data))))


def test_an_avifs_orientation_is_applied_once(planner: MediaPlanner) -> None:
    for orientation in range(1, 9):
        data = saved(noise(45, 37), "AVIF", speed=10, exif=exif(orientation))
        wanted = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        for given in (data, Image.open(io.BytesIO(data))):
            source = open_source(given, LIMITS)
            assert source.size == size_of(given, LIMITS) == wanted.shape[1::-1]
            assert planner.plan(given).original_size == wanted.shape[1::-1]
            assert same_pixels(source.decode(LIMITS).pixels, wanted)


def test_a_cut_avif_is_an_error() -> None:
    for cut in range(0, len(AVIF), 3):
        with pytest.raises(MediaError):
            decoded(AVIF[:cut])


def test_no_setting_of_the_host_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    before = decoded(AVIF)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(AvifImagePlugin, "DECODE_CODEC_CHOICE", "no codec")
    assert same_pixels(decoded(AVIF), before)
    with pytest.raises(MediaDecodeError):
        decoded(AVIF[:-60])


def test_sizes_are_refused_from_the_header(planner: MediaPlanner) -> None:
    with pytest.raises(MediaTooLargeError, match="45x37"):
        decode(AVIF, MediaLimits(max_pixels=45 * 37 - 1))
    at = AVIF.index(b"ispe") + 8
    for size in (20_000, 100_000, 1 << 31):
        large = AVIF[:at] + struct.pack(">II", size, size) + AVIF[at + 8 :]
        for read in (lambda large=large: planner.plan(large), lambda large=large: decoded(large)):
            with pytest.raises(MediaTooLargeError, match=f"{size}x{size}"):
                read()


@pytest.mark.parametrize("sequence", [False, True], ids=["still", "sequence"])
def test_what_the_stream_itself_says_counts_too(sequence: bool) -> None:
    """A file may say less than its stream, and the decoder believes the stream."""
    frames = [noise(45, 37, seed=1)] if sequence else []
    data = saved(noise(45, 37), "AVIF", speed=10, save_all=sequence, append_images=frames)
    smaller = data.replace(struct.pack(">II", 45, 37), struct.pack(">II", 4, 4))
    assert smaller != data
    assert largest_image(data) == largest_image(smaller) == (45, 37)
    with pytest.raises(MediaTooLargeError, match="45x37"):
        read_header(smaller, MediaLimits(max_pixels=1000))


def test_boxes_end(planner: MediaPlanner) -> None:
    start = b"\0\0\0\x10ftypavif\0\0\0\0"
    for rest in (b"\0\0\0\x08free" * 50_000, b"\0\0\0\0meta" * 9, b"\0\0\0\1meta" + b"\xff" * 8):
        with pytest.raises(MediaDecodeError):
            planner.plan(start + rest)


def test_decoding_starts_no_thread() -> None:
    tasks = Path("/proc/self/task")
    decoded(AVIF)
    before = len(list(tasks.iterdir()))
    decoded(saved(noise(900, 700), "AVIF", speed=10))
    assert len(list(tasks.iterdir())) <= before


# --- HEIC --------------------------------------------------------------------------------------------


def test_without_its_package_a_heic_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, planner: MediaPlanner
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for read in (lambda: planner.plan(HEIC_HEAD), lambda: decoded(HEIC_HEAD)):
        with pytest.raises(UnsupportedMediaError, match="install with the extra heif, see docs/install.md"):
            read()


@needs_heif
def test_a_heic_is_what_pillow_heif_makes_of_it(planner: MediaPlanner) -> None:
    import pillow_heif

    for mode in ("RGB", "RGBA"):
        for orientation in range(1, 9):
            buffer = io.BytesIO()
            image = noise(64, 48, mode)
            image.info["exif"] = b"Exif\0\0" + exif(orientation)
            pillow_heif.from_pillow(image).save(buffer)
            data = buffer.getvalue()
            wanted = np.array(pillow_heif.open_heif(data).to_pillow())
            assert same_pixels(decoded(data), wanted)
            assert wanted.shape[1::-1] == planner.plan(data).original_size
            assert wanted.shape[:2] == (48, 64)  # stored turned, with the turn that undoes it


@needs_heif
def test_a_cut_or_large_heic_is_an_error() -> None:
    import pillow_heif

    buffer = io.BytesIO()
    pillow_heif.from_pillow(noise(64, 48)).save(buffer)
    data = buffer.getvalue()
    for cut in range(24, len(data), 50):
        with pytest.raises(MediaError):
            decoded(data[:cut])
    with pytest.raises(MediaTooLargeError):
        decode(data, MediaLimits(max_pixels=64 * 48 - 1))
