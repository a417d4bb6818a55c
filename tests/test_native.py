"""The native kernels against what they stand in for: Pillow's and Torch's resize, NumPy's reordering, a plain
reading of the PNG standard; whatever is asked of them, and in every instruction set that this CPU has.
"""

from __future__ import annotations

import io
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_encoder import _native
from mm_encoder._native import Kernels, kernels
from mm_encoder.contract import ImageSize, Plan
from mm_encoder.errors import MediaDecodeError
from mm_encoder.families.registry import load_family
from mm_encoder.media import png
from mm_encoder.media.geometry import pad_to_canvas, resize_bicubic_pillow, resize_bicubic_torch
from mm_encoder.media.patches import Bicubic, patchify, resize_and_patchify
from mm_encoder.media.picture import Picture, Pixels

from .conftest import GOLDEN
from .helpers.images import decoded, ihdr, noise, png_chunk, png_file, png_rows, saved

pytestmark = pytest.mark.needs_native
NATIVE = Path(__file__).parent.parent / "native"
RESIZE = {Bicubic.PILLOW: resize_bicubic_pillow, Bicubic.TORCH: resize_bicubic_torch}


@pytest.fixture
def native() -> Kernels:
    assert kernels is not None
    return kernels


def resized(
    native: Kernels, pixels: Pixels, size: tuple[int, int], bicubic: Bicubic, level: int = -1
) -> Pixels:
    """[height, width, 3], by way of patches of one pixel."""
    width, height = size
    out = np.empty((height, width, 3), np.uint8)
    native.resize_and_patchify(
        pixels,
        content=size,
        canvas=size,
        offset=(0, 0),
        fill=0,
        patch=1,
        merge=1,
        arithmetic=bicubic,
        out=out,
        level=level,
    )
    return out


def random_pair(random: np.random.Generator) -> tuple[tuple[int, int], tuple[int, int]]:
    """A source's and a target's size: single pixels, thin strips, steep and slight changes, none."""
    kinds = (1, 2, 5, 40, 130, 400)

    def size() -> tuple[int, int]:
        width, height = (int(random.integers(1, kinds[i] + 1)) for i in random.integers(0, len(kinds), 2))
        return width, height

    def near(side: int) -> int:
        return max(1, side + int(random.integers(-3, 4)) * int(random.integers(0, 2)))

    source = size()
    if random.random() < 0.3:  # a little more or less, or one side as it is
        return source, (near(source[0]), near(source[1]))
    return source, size()


# --- resizing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bicubic", "count"), [(Bicubic.PILLOW, 5000), (Bicubic.TORCH, 2000)])
def test_any_size_to_any_other_bit_for_bit(native: Kernels, bicubic: Bicubic, count: int) -> None:
    random = np.random.default_rng(int(bicubic))
    for turn in range(count):
        source, target = random_pair(random)
        pixels = random.integers(0, 256, (source[1], source[0], 3), np.uint8)
        if turn % 3 == 0:
            pixels = pixels // 128 * np.uint8(255)  # edges that overshoot, and are clamped
        wanted = RESIZE[bicubic](pixels, ImageSize(*target))
        found = resized(native, pixels, target, bicubic, turn // 3 % len(native.levels))
        assert np.array_equal(found, wanted), (source, target)


@pytest.mark.parametrize("bicubic", Bicubic)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((1, 1), (300, 200)),
        ((1, 5000), (1, 3)),
        ((5000, 1), (3, 1)),
        ((20_000, 2), (7, 2)),
        ((3, 9000), (3, 2)),
        ((2, 2), (1, 4000)),
        ((1920, 1080), (1918, 1078)),
        ((1920, 1080), (1708, 961)),
        ((1001, 777), (2003, 1555)),
    ],
)
def test_extreme_and_usual_sizes(
    native: Kernels, source: tuple[int, int], target: tuple[int, int], bicubic: Bicubic
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (source[1], source[0], 3), np.uint8)
    wanted = RESIZE[bicubic](pixels, ImageSize(*target))
    for level in range(len(native.levels)):
        assert np.array_equal(resized(native, pixels, target, bicubic, level), wanted)


def test_pillow_s_order_of_passes_is_the_references(native: Kernels) -> None:
    # Pillow 13 resizes a tall picture down before it goes across; before that it never did.
    pixels = np.random.default_rng(3).integers(0, 2, (90, 30, 3), np.uint8) * np.uint8(255)
    across = Image.fromarray(pixels).resize((20, 90), Image.Resampling.BICUBIC)
    wanted = np.asarray(across.resize((20, 60), Image.Resampling.BICUBIC))
    down = Image.fromarray(pixels).resize((30, 60), Image.Resampling.BICUBIC)
    assert not np.array_equal(down.resize((20, 60), Image.Resampling.BICUBIC), wanted)
    assert np.array_equal(resize_bicubic_pillow(pixels, ImageSize(20, 60)), wanted)
    assert np.array_equal(resized(native, pixels, (20, 60), Bicubic.PILLOW), wanted)


def test_torch_for_a_cpu_without_avx2_gives_the_same(native: Kernels) -> None:
    program = """
        import numpy, torch
        from mm_encoder._native import kernels
        from mm_encoder.contract import ImageSize
        from mm_encoder.media.geometry import resize_bicubic_torch

        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        random = numpy.random.default_rng(0)
        for turn in range(600):
            width, height, new_height = (int(side) for side in random.integers(1, 120, 3))
            size = ImageSize(1 if turn % 2 else int(random.integers(1, 120)), new_height)
            pixels = random.integers(0, 256, (height, width, 3), numpy.uint8)
            out = numpy.empty((size.height, size.width, 3), numpy.uint8)
            kernels.resize_and_patchify(
                pixels, content=size, canvas=size, offset=(0, 0), fill=0, patch=1, merge=1, arithmetic=1,
                out=out,
            )
            assert (resize_bicubic_torch(pixels, size) == out).all(), (pixels.shape, size)
    """
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_two_arithmetics_differ() -> None:
    # The control of the tests above: they would tell one from the other.
    pixels = np.random.default_rng(1).integers(0, 256, (90, 120, 3), np.uint8)
    size = ImageSize(70, 50)
    assert not np.array_equal(resize_bicubic_pillow(pixels, size), resize_bicubic_torch(pixels, size))


# --- any view, any place, any patch ------------------------------------------------------------------


def views(pixels: Pixels) -> dict[str, Pixels]:
    """The same kind of picture in other memory: [h, w, 3 or 4] views."""
    wide = np.zeros((pixels.shape[0] * 2 + 1, pixels.shape[1] * 3 + 2, 5), np.uint8)
    wide[1::2, 2::3, 1:4] = pixels
    four = np.dstack([pixels, np.full(pixels.shape[:2], 99, np.uint8)])
    return {
        "contiguous": pixels,
        "upside down": pixels[::-1],
        "mirrored": pixels[:, ::-1],
        "turned": pixels.transpose(1, 0, 2),
        "turned and mirrored": pixels.transpose(1, 0, 2)[::-1, ::-1],
        "part of a larger": wide[1::2, 2::3, 1:4],
        "of four channels": four,
        "of four channels, mirrored": four[:, ::-1],
        "one row again and again": np.broadcast_to(pixels[:1], pixels.shape),
        "one pixel again and again": np.broadcast_to(pixels[:1, :1], pixels.shape),
        "read only": _read_only(pixels),
    }


def _read_only(pixels: Pixels) -> Pixels:
    pixels = pixels.copy()
    pixels.flags.writeable = False
    return pixels


@pytest.mark.parametrize("name", views(np.zeros((2, 2, 3), np.uint8)))
def test_pixels_may_lie_in_memory_in_any_way(native: Kernels, name: str) -> None:
    for height, width in ((31, 45), (1, 9), (9, 1), (1, 1), (17, 4)):
        view = views(np.random.default_rng(2).integers(0, 256, (height, width, 3), np.uint8))[name]
        plain = view[:, :, :3].copy()
        same = (view.shape[1], view.shape[0])
        targets = (same, (20, 12), (same[0], 12), (20, same[1]), (60, 50))
        for target, bicubic, level in product(targets, Bicubic, range(len(native.levels))):
            wanted = RESIZE[bicubic](plain, ImageSize(*target))
            assert np.array_equal(resized(native, view, target, bicubic, level), wanted)


@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    st.integers(0, 255),
    st.sampled_from(Bicubic),
    st.integers(0, 2**32),
)
def test_canvas_patches_and_their_order(
    patch: int,
    merge: int,
    blocks: tuple[int, int],
    where: tuple[float, float, float, float],
    fill: int,
    bicubic: Bicubic,
    seed: int,
) -> None:
    assert kernels is not None
    random = np.random.default_rng(seed)
    canvas = ImageSize(*(count * patch * merge for count in blocks))
    content = ImageSize(*(max(1, round(side * part)) for side, part in zip(canvas, where[:2], strict=True)))
    offset = (
        round((canvas.width - content.width) * where[2]),
        round((canvas.height - content.height) * where[3]),
    )
    source = ImageSize(*(int(side) for side in random.integers(1, 60, 2)))
    pixels = random.integers(0, 256, (source.height, source.width, 3), np.uint8)
    plan = Plan.on_canvas(source, content, canvas, patch=patch, rows=lambda h, w: h * w, offset=offset)
    page = pad_to_canvas(RESIZE[bicubic](pixels, content), canvas, offset, fill)
    wanted = patchify(page, patch, merge)
    rows = resize_and_patchify(pixels, plan, patch=patch, merge=merge, bicubic=bicubic, fill=fill)
    assert np.array_equal(rows.data, wanted)
    out = np.empty(wanted.shape, np.uint8)
    for level in range(len(kernels.levels)):
        out[:] = 1
        kernels.resize_and_patchify(
            pixels,
            content=content,
            canvas=canvas,
            offset=offset,
            fill=fill,
            patch=patch,
            merge=merge,
            arithmetic=bicubic,
            out=out,
            level=level,
        )
        assert np.array_equal(out, wanted)


def test_patches_go_where_the_caller_wants_them() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (20, 30, 3), np.uint8)
    plan = Plan.on_canvas(
        ImageSize(30, 20), ImageSize(25, 17), ImageSize(28, 28), patch=14, rows=lambda h, w: h * w
    )
    settings: dict[str, Any] = {"patch": 14, "bicubic": Bicubic.PILLOW, "fill": 0}
    larger = torch.zeros(6, 588, dtype=torch.uint8)
    rows = resize_and_patchify(pixels, plan, **settings, out=larger[1:5])
    assert rows.data.data_ptr() == larger[1:5].data_ptr()
    assert torch.equal(larger[1:5], resize_and_patchify(pixels, plan, **settings).data)
    assert not larger[0].any()
    assert not larger[5].any()
    for wrong in (larger[:3], torch.zeros(588, 4, dtype=torch.uint8).T):
        with pytest.raises(ValueError, match=r"contiguous, of shape \(4, 588\); got"):
            resize_and_patchify(pixels, plan, **settings, out=wrong)


def test_a_picture_that_is_one_line_has_patches_too() -> None:
    # Longer than the kernels take.
    for width, height in ((2**24 + 2, 1), (1, 2**24 + 2)):
        pixels = np.broadcast_to(np.arange(3, dtype=np.uint8) * np.uint8(90), (height, width, 3)).copy()
        size = ImageSize(width, height)
        content = ImageSize(min(width, 70), min(height, 70))
        canvas = ImageSize(*(-(-side // 14) * 14 for side in content))
        plan = Plan.on_canvas(size, content, canvas, patch=14, rows=lambda h, w: h * w)
        rows = resize_and_patchify(pixels, plan, patch=14, bicubic=Bicubic.PILLOW, fill=7)
        first = rows.data.reshape(-1, 3, 14, 14)[0]
        # Of a million weights in fixed point each is rounded.
        assert first[:, 0, 0].tolist() == pytest.approx([0, 90, 180], abs=2)
        assert first[:, 13, 13].tolist() == [7, 7, 7]


@pytest.mark.threads
def test_threads_do_not_share_anything(native: Kernels) -> None:
    pictures = [np.random.default_rng(i).integers(0, 256, (90 + i, 70, 3), np.uint8) for i in range(4)]
    wanted = [resize_bicubic_pillow(pixels, ImageSize(61, 47)) for pixels in pictures]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(100):
            rows = resized(native, pictures[index], (61, 47), Bicubic.PILLOW)
            if not np.array_equal(rows, wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- what is refused ---------------------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "content": (8, 8),
    "canvas": (28, 28),
    "offset": (0, 0),
    "fill": 0,
    "patch": 14,
    "merge": 2,
    "arithmetic": 0,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"content": (0, 8)}, "sides must be"),
        ({"content": (8, -1)}, "sides must be"),
        ({"content": (2**40, 8)}, "sides must be"),
        ({"content": (2**64 + 8, 8)}, "64 bits"),
        ({"fill": 2**64}, "64 bits"),
        ({"canvas": (2**25, 28)}, "sides must be"),
        ({"patch": 0}, "sides must be"),
        ({"merge": -2}, "sides must be"),
        ({"content": (29, 8)}, "on the canvas"),
        ({"offset": (21, 0)}, "on the canvas"),
        ({"offset": (0, -1)}, "on the canvas"),
        ({"offset": (2**62, 0)}, "on the canvas"),
        ({"canvas": (28, 42)}, "whole blocks"),
        ({"patch": 2**20, "merge": 2**20}, "whole blocks"),
        ({"fill": 256}, "fill must be"),
        ({"fill": -1}, "fill must be"),
        ({"arithmetic": 2}, "arithmetic"),
        ({"level": 9}, "instruction set"),
        ({"out": np.empty((4, 587), np.uint8)}, "three bytes for each pixel"),
        ({"out": np.empty((4, 589), np.uint8)}, "three bytes for each pixel"),
        ({"out": np.empty((588, 4), np.uint8).T}, "contiguous"),
        ({"out": np.empty((4, 588), np.int8)}, "uint8"),
        ({"pixels": np.zeros((8, 8, 2), np.uint8)}, "3 or 4 channels"),
        ({"pixels": np.zeros((8, 8, 5), np.uint8)}, "3 or 4 channels"),
        ({"pixels": np.zeros((8, 0, 3), np.uint8)}, "must be uint8|sides must be"),
        ({"pixels": np.zeros((8, 8), np.uint8)}, r"\[h, w, 3 or 4\]"),
        ({"pixels": np.zeros((8, 8, 3), np.int16)}, "uint8"),
        ({"pixels": np.zeros((3, 8, 8), np.uint8).transpose(1, 2, 0)}, "uint8"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    native: Kernels, change: dict[str, Any], says: str
) -> None:
    pixels = np.full((9, 10, 3), 7, np.uint8)
    out = np.full((4, 588), 5, np.uint8)
    native.resize_and_patchify(**{"pixels": pixels, "out": out.copy(), **ASKED})
    asked = {"pixels": pixels, "out": out, **ASKED, **change}
    with pytest.raises(ValueError, match=says):
        native.resize_and_patchify(**asked)
    assert (out == 5).all()


def test_no_memory_is_an_error_like_any_other(native: Kernels) -> None:
    # Weights of a picture that is one pixel repeated, so that only they are large.
    pixels = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (1, 2**24, 3))
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, before[1]))
    try:
        with pytest.raises(MemoryError):
            resized(native, pixels, (8, 1), Bicubic.PILLOW)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- PNG ---------------------------------------------------------------------------------------------


def filtered(rows: Pixels, filters: Pixels, size: int) -> bytes:
    """Rows [h, n] as the standard filters them (PNG, 9.2), one row and one byte after another."""
    data = bytearray()
    for y, (row, kind) in enumerate(zip(rows, filters, strict=True)):
        data.append(kind)
        for x, value in enumerate(row):
            left = int(row[x - size]) if x >= size else 0
            up = int(rows[y - 1][x]) if y else 0
            corner = int(rows[y - 1][x - size]) if y and x >= size else 0
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda v: abs(guess - v))
            data.append((int(value) - (0, left, up, (left + up) // 2, nearest)[kind]) % 256)
    return bytes(data)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_filters_are_undone(native: Kernels, size: int) -> None:
    random = np.random.default_rng(size)
    for width, height in ((1, 1), (1, 7), (2, 6), (9, 5), (40, 30), (3, 1)):
        for _ in range(4):
            rows = random.integers(0, 256, (height, width * size), np.uint8)
            if random.random() < 0.5:
                rows //= 64  # ties between neighbours
            filters = random.integers(0, 5, height).astype(np.uint8)
            data = np.frombuffer(filtered(rows, filters, size), np.uint8)
            for level in range(len(native.levels)):
                out = np.empty_like(rows)
                native.unfilter(data, height, width * size, size, out, level)
                assert np.array_equal(out, rows)


def test_rows_that_are_not_there_and_unknown_filters_are_refused(native: Kernels) -> None:
    data, out = np.zeros(4 * 7, np.uint8), np.empty((4, 6), np.uint8)
    native.unfilter(data, 4, 6, 3, out)
    for height, row_bytes, pixel_bytes in (
        (5, 6, 3),
        (4, 5, 3),
        (0, 6, 3),
        (2**40, 6, 3),
        (4, 2**62, 3),
        (4, 6, 0),
    ):
        with pytest.raises(ValueError, match="must|has"):
            native.unfilter(data, height, row_bytes, pixel_bytes, out)
    with pytest.raises(ValueError, match="out must hold"):
        native.unfilter(data, 4, 6, 3, out[:3])
    data[7] = 5
    with pytest.raises(ValueError, match="filter"):
        native.unfilter(data, 4, 6, 3, out)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_png_decodes_as_by_pillow(mode: str) -> None:
    for size in ((1, 1), (3, 50), (64, 64), (201, 99)):
        for picture in (noise(*size, mode), Image.new(mode, size, (1, 2, 3, 4)[: len(mode)])):
            for level in (0, 1, 9):
                data = saved(picture, "PNG", compress_level=level)
                assert png.pixel_chunks(data).pixels() is not None
                assert np.array_equal(decoded(data), np.asarray(Image.open(io.BytesIO(data))))


def test_kinds_of_png_that_are_left_to_pillow() -> None:
    usual = np.zeros((4, 4, 3))
    assert png.pixel_chunks(png_file(usual)).pixels() is not None
    assert png.pixel_chunks(png_file(usual, interlace=True)).pixels() is None
    assert png.pixel_chunks(png_file(usual, 16)).pixels() is None
    for mode in ("L", "LA", "P", "1"):
        assert png.pixel_chunks(saved(Image.new(mode, (4, 4)), "PNG")).pixels() is None
    assert png.pixel_chunks(saved(Image.new("RGB", (4, 4)), "PNG", transparency=(0, 0, 0))).pixels() is None


def test_damaged_pixel_data_fails_where_pillow_fails_and_else_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(5)
    pixels = np.asarray(noise(20, 15))
    failed = 0
    for turn in range(400):
        rows = bytearray(png_rows(pixels, 8))
        if turn % 2:  # bytes of the rows, filters among them
            for _ in range(random.integers(1, 4)):
                rows[random.integers(len(rows))] = random.integers(0, 256)
            data = png_file(pixels, rows=bytes(rows))
        else:  # bits of the compressed data, with a checksum of the chunk that fits
            packed = bytearray(zlib.compress(rows))
            packed[random.integers(len(packed))] ^= 1 << int(random.integers(8))
            chunks = ihdr(20, 15) + png_chunk(b"IDAT", bytes(packed)) + png_chunk(b"IEND")
            data = b"\x89PNG\r\n\x1a\n" + chunks
        outcomes = []
        for native in (kernels, None):
            monkeypatch.setattr(_native, "kernels", native)
            try:
                outcomes.append(decoded(data).tobytes())
            except Exception as error:
                outcomes.append(type(error).__name__.encode())
        assert outcomes[0] == outcomes[1], turn
        failed += outcomes[0] == b"MediaDecodeError"
    assert 100 < failed < 300


@pytest.mark.parametrize("size", [(1, 1), (3, 50), (200, 90)])
def test_odd_files_decode_on_both_ways_or_on_neither(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.asarray(noise(*size))
    packed = zlib.compress(png_rows(pixels, 8))
    head, end = ihdr(*size), png_chunk(b"IEND")

    def changed(at: int, value: int) -> bytes:
        return png_chunk(b"IHDR", head[8 : 8 + at] + bytes([value]) + head[9 + at : -4])

    def parts(*pieces: bytes, between: bytes = b"") -> bytes:
        return between.join(png_chunk(b"IDAT", piece) for piece in pieces)

    wide = bytes([0x88, 0x1C]) + packed[2:]  # a window of 64 KiB, with a header's checksum that fits
    assert int.from_bytes(wide[:2]) % 31 == 0
    half = len(packed) // 2
    files = {
        "as it should be": (head + parts(packed), True),
        "in pieces": (head + parts(packed[:half], b"", packed[half:]), True),
        "with text in between": (
            head + parts(packed[:5], packed[5:], between=png_chunk(b"tEXt", b"a")),
            True,
        ),
        "with a palette in between": (
            head + parts(packed[:half], packed[half:], between=png_chunk(b"PLTE", b"abc")),
            False,
        ),
        "filtered otherwise": (changed(11, 1) + parts(packed), False),
        "compressed otherwise": (changed(10, 1) + parts(packed), False),
        "of a wide window": (head + parts(wide), False),
        "with a wrong checksum behind the rows": (head + parts(packed[:-4], b"abcd"), True),
        "with more behind the end": (head + parts(packed + b"more"), True),
        "without pixels": (head + parts(b""), False),
    }
    for name, (chunks, good) in files.items():
        data = b"\x89PNG\r\n\x1a\n" + chunks + end
        for native in (kernels, None):
            monkeypatch.setattr(_native, "kernels", native)
            if good:
                assert np.array_equal(decoded(data), pixels), name
            else:
                with pytest.raises(MediaDecodeError):
                    decoded(data)


# --- the same without them ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glm53", "kimi_k3", "deepseek41"])
def test_families_make_the_same_patches_without_the_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, family = load_family(GOLDEN / name / "checkpoint")
    for size, mode in product(((224, 224), (640, 480), (33, 900), (5, 5)), ("RGB", "RGBA", "L", "P", "LA")):
        picture = Picture.of(noise(*size, "RGBA").convert(mode))
        plan = family.plan(picture.size)
        found = []
        for native in (kernels, None):
            monkeypatch.setattr(_native, "kernels", native)
            found.append(family.patches(picture, plan).data)
        assert torch.equal(*found)


# --- sanitizers --------------------------------------------------------------------------------------


def test_no_sanitizer_finds_anything(tmp_path: Path) -> None:
    """Random geometry and hostile arguments under ASan and UBSan; FUZZ=1 (`make fuzz`) tries many more."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the kernels are here, and the compiler that made them is not"
    program = tmp_path / "fuzz"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w"]
    sources = [str(path) for path in sorted(NATIVE.glob("*.cpp"))]
    build = [compiler, *flags, f"-I{NATIVE}", *sources, str(NATIVE / "fuzz" / "fuzz.cpp"), "-o", str(program)]
    subprocess.run(build, check=True, timeout=300)
    for fault, finder in (("overrun", "AddressSanitizer"), ("overflow", "runtime error")):
        control = subprocess.run([program, fault], capture_output=True, text=True, check=False)
        assert control.returncode
        assert finder in control.stderr
    rounds = "200000" if os.environ.get("FUZZ") else "3000"
    run = subprocess.run([program, rounds], capture_output=True, text=True, timeout=3000, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    done, refused, differences = map(int, re.findall(r"\d+", run.stdout))
    assert done > refused > 0
    assert differences == 0
