"""Plans from a header or a size, and the model inputs, without weights."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_encoder import (
    Encoder,
    ImageOptions,
    MediaDecodeError,
    MediaLimits,
    MediaPlanner,
    MediaTooLargeError,
)

from .helpers.images import noise
from .helpers.waiting import HANG


def jpeg(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (90, 120, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_plans_from_a_header_and_from_a_size_match_the_encoder(glm53_checkpoint: Path) -> None:
    planner = MediaPlanner(glm53_checkpoint)
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        for size in [(1, 1), (640, 480), (33, 700), (56, 56)]:
            plan = planner.plan(jpeg(*size))
            metadata = encoder.generate(jpeg(*size))[0].metadata
            assert plan == planner.plan(size)
            assert plan.length == metadata.length
            assert plan.grid_thws == metadata.grid_thws
            assert plan.embedding_offsets == metadata.embedding_offsets == (0, plan.length)
            assert plan.original_size == metadata.original_size == size


def test_planning_needs_no_weights(glm53_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(glm53_checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    planner = MediaPlanner(tmp_path / "bare", model="name")
    assert planner.model == planner.plan((50, 50)).model == "name"
    assert planner.plan((50, 50)).family == planner.family == "glm53"
    assert planner.plan((50, 50)).preprocessing_hash == planner.preprocessing_hash


def test_planning_reads_only_the_header(glm53_checkpoint: Path) -> None:
    planner = MediaPlanner(glm53_checkpoint)
    whole = jpeg(1920, 1080)
    start_of_scan = whole.index(b"\xff\xda")
    assert planner.plan(whole[:start_of_scan]) == planner.plan(whole)
    with pytest.raises(MediaDecodeError):
        planner.prepare_inputs(whole[:start_of_scan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_have_the_references_shape_and_dtype(glm53_checkpoint: Path, dtype: torch.dtype) -> None:
    plan, inputs = MediaPlanner(glm53_checkpoint).prepare_inputs(jpeg(100, 60), dtype=dtype)
    t, h, w = plan.grid_thws[0]
    assert inputs["pixel_values"].shape == (t * h * w, 3 * 2 * 14 * 14)
    assert inputs["pixel_values"].dtype == dtype
    assert inputs["grid_thws"].dtype == torch.int64
    assert inputs["grid_thws"].tolist() == [[t, h, w]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "float32", None])
def test_inputs_of_a_dtype_that_is_not_floating_are_refused(glm53_checkpoint: Path, dtype: Any) -> None:
    message = f"dtype must be a floating torch dtype, such as torch.float32, got {dtype!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        MediaPlanner(glm53_checkpoint).prepare_inputs(jpeg(100, 60), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, "float32"])
def test_an_encoder_of_another_dtype_is_refused(glm53_checkpoint: Path, dtype: Any) -> None:
    message = f"dtype must be one of torch.float32, torch.bfloat16, torch.float16, got {dtype!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        Encoder(glm53_checkpoint, device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        ((0, 5), ValueError),
        ((5, -1), ValueError),
        ((5,), ValueError),
        ((5, 5, 3), ValueError),
        ((5.0, 5), TypeError),
        ((True, 5), TypeError),
        ((1, 10**400), ValueError),
        (("5", "5"), TypeError),
    ],
)
def test_an_invalid_size_raises(glm53_checkpoint: Path, size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="width|height|size"):
        MediaPlanner(glm53_checkpoint).plan(size)


def test_the_planner_refuses_what_the_encoder_refuses(glm53_checkpoint: Path) -> None:
    planner = MediaPlanner(glm53_checkpoint)
    with pytest.raises(MediaDecodeError):
        planner.plan(b"nothing")
    with pytest.raises(MediaTooLargeError):
        planner.plan(np.broadcast_to(np.uint8(0), (50_000, 50_000)))
    with pytest.raises(MediaTooLargeError, match="^the size says 60000x60000, 3600000000 pixels; the limit"):
        planner.plan((60_000, 60_000))


class Untouchable(np.ndarray):
    """Fails when its elements are read."""

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the pixels were read")


def test_planning_reads_no_pixels_of_arrays_and_pillow_images(glm53_checkpoint: Path) -> None:
    planner = MediaPlanner(glm53_checkpoint)
    whole = jpeg(640, 480)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.open(io.BytesIO(whole)).save(buffer, "JPEG", exif=exif)
    opened = Image.open(io.BytesIO(buffer.getvalue()[:-2000]))  # truncated, so that loading it would fail
    assert planner.plan(opened).original_size == (480, 640)
    stored = ImageOptions(exif_orientation=False)
    assert planner.plan(opened, image_options=stored).original_size == (640, 480)
    assert opened.fp is not None
    assert planner.plan(np.zeros((480, 640, 3)).view(Untouchable)).original_size == (640, 480)
    with pytest.raises(TypeError, match="image_options must be"):
        planner.plan(whole, image_options=6)  # type: ignore[arg-type]


def test_every_kind_of_image_gives_the_same_size(glm53_checkpoint: Path, tmp_path: Path) -> None:
    planner = MediaPlanner(glm53_checkpoint)
    data = jpeg(33, 70)
    (tmp_path / "x.jpg").write_bytes(data)
    opened = Image.open(io.BytesIO(data))
    tiff = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    opened.save(tiff, "TIFF", exif=exif)
    turned = planner.plan(Image.open(tiff))
    assert turned.original_size == (70, 33)
    assert turned.grid_thws == planner.prepare_inputs(Image.open(tiff))[0].grid_thws
    for image in (data, tmp_path / "x.jpg", opened, np.asarray(opened)):
        plan, inputs = planner.prepare_inputs(image)
        assert planner.plan(image) == plan
        assert plan.original_size == (33, 70)
        assert len(inputs["pixel_values"]) == np.prod(plan.grid_thws[0])


def test_a_size_may_be_of_numpys_integers(glm53_checkpoint: Path) -> None:
    plan: Any = MediaPlanner(glm53_checkpoint).plan
    assert plan((np.int64(640), 480)) == plan((640, np.uint16(480))) == plan((640, 480))
    for side in (np.float64(640), np.True_, True, "640"):
        with pytest.raises(TypeError, match="width must be an int, got"):
            plan((side, 480))
    for size in (np.int64(0), np.int64(2**31)):
        with pytest.raises(ValueError, match="width must be from 1 to 2147483647, got"):
            plan((size, 480))


def test_limits_are_configurable(glm53_checkpoint: Path) -> None:
    assert MediaPlanner(glm53_checkpoint, limits=MediaLimits(max_pixels=10**10)).plan(
        np.broadcast_to(np.uint8(0), (50_000, 50_000))
    )
    for size in ((11, 9), (99, 1)):
        assert MediaPlanner(glm53_checkpoint, limits=MediaLimits(max_pixels=99)).plan(size)
    with pytest.raises(MediaTooLargeError):
        MediaPlanner(glm53_checkpoint, limits=MediaLimits(max_pixels=99)).plan((10, 10))
    with pytest.raises(MediaTooLargeError):
        MediaPlanner(glm53_checkpoint, limits=MediaLimits(max_pixels=99)).plan(jpeg(10, 10))
    with pytest.raises(TypeError, match="limits must be a MediaLimits, got int"):
        MediaPlanner(glm53_checkpoint, limits=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the checkpoint must be a path, got NoneType"):
        MediaPlanner(None)  # type: ignore[arg-type]


FORKED = """
import multiprocessing, os, sys
import numpy as np
import torch
from mm_encoder import ForkedProcessError, MediaPlanner, _native

checkpoint, kernels, threads = sys.argv[1:]
if kernels == "plain":
    _native.kernels = None
planner = MediaPlanner(checkpoint)
random = np.random.default_rng(0)
shapes = (900, 1200, 3), (1, 900, 3), (300, 200, 4)
images = [random.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
tasks = len(os.listdir("/proc/self/task"))
here = [planner.prepare_inputs(image)[1]["pixel_values"] for image in images]
assert len(os.listdir("/proc/self/task")) == tasks, "preparing started a thread"
torch.rand(3000, 3000).exp()  # the host starts Torch's pool


def work(answers):
    torch.set_num_threads(int(threads)) if threads == "1" else None
    plans = [planner.plan(image).length for image in images]
    try:
        there = [planner.prepare_inputs(image)[1]["pixel_values"] for image in images]
        same = all((a.numpy() == b.numpy()).all() for a, b in zip(here, there, strict=True))
        answers.put((plans, "same" if same else "other"))
    except ForkedProcessError:
        answers.put((plans, "refused"))


context = multiprocessing.get_context("fork")
answers = context.Queue()
child = context.Process(target=work, args=(answers,), daemon=True)
child.start()
plans, outcome = answers.get(timeout=HANG)
assert plans == [planner.plan(image).length for image in images]
print(outcome)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc, and forks")
@pytest.mark.parametrize("kernels", ["native", "plain"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_planner_in_a_forked_child_never_hangs(kernels: str, threads: str, glm53_checkpoint: Path) -> None:
    """The same values where Torch has one thread; else tensors would hang at their next use: refused."""
    program = "import torch; torch.set_num_threads(2)\n" + FORKED.replace("HANG", str(HANG))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(glm53_checkpoint), kernels, threads],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * HANG,
    )
    assert (run.returncode, run.stdout) == (0, "same\n" if threads == "1" else "refused\n"), run.stderr


def test_values_are_looked_up_as_torch_would(glm53_checkpoint: Path) -> None:
    """In every dtype: the table is cast before it is looked up, and the bits are those of casting after."""
    planner = MediaPlanner(glm53_checkpoint)
    image = noise(90, 70)
    exact = planner.prepare_inputs(image)[1]["pixel_values"]
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        values = planner.prepare_inputs(image, dtype=dtype)[1]["pixel_values"]
        assert values.dtype == dtype
        assert values.shape == exact.shape
        assert torch.equal(values.view(torch.uint8), exact.to(dtype).view(torch.uint8))
