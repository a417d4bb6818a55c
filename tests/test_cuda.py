"""The device contract on a GPU. Not run on a GPU yet: written from the documentation of torch.cuda.

A stream is held with `torch.cuda._sleep`, a kernel that spins, so that what is enqueued behind it is late
for certain. CUDA_LAUNCH_BLOCKING=1 would undo that: the controls would fail, and rightly. What spoils the
CUDA context, or needs a process that has none yet, runs in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.dlpack import from_dlpack

from mm_encoder import CacheConfig, DeviceOutOfMemoryError, Encoder, ImageResult
from mm_encoder.device import CudaLane, CudaTransfers, open_lane
from mm_encoder.families.glm53 import GlmTower

from .conftest import GOLDEN
from .helpers.handoff import (
    CONTROLS,
    DOWNLOAD_CONTROLS,
    HANDOFFS,
    UPLOAD_CONTROLS,
    downloaded_by_the_lane,
    downloaded_for_the_cache,
    hits_are_right,
    leave_out,
    leave_out_transfer_step,
    rows_are_right,
)
from .helpers.waiting import HANG, until

pytestmark = pytest.mark.needs_cuda

GPU = torch.device("cuda:0")
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Handoff = Literal["host", "stream"]
Results = Literal["cpu", "device"]
Hold = Callable[[float], None]


def noise(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def of_many_sizes(count: int) -> list[Pixels]:
    random = np.random.default_rng(5)
    sizes = random.integers(1, 300, (count, 2)).tolist()
    return [noise(width, height, seed) for seed, (width, height) in enumerate(sizes)]


def rows_of(results: Sequence[ImageResult]) -> list[torch.Tensor]:
    return [result.tensor.cpu() for result in results]


def all_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def hold() -> Hold:
    """Return a function that holds the current stream for about this many seconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sample = 20_000_000
    torch.cuda._sleep(sample)  # loads the kernel
    start.record()
    torch.cuda._sleep(sample)
    end.record()
    end.synchronize()
    a_second = sample / start.elapsed_time(end) * 1000
    # The first use of a kernel loads it, which may wait for the device and so hide a missing wait.
    (~torch.zeros(9, dtype=torch.uint8, device=GPU)).clone()
    torch.cuda.synchronize()
    return lambda seconds: torch.cuda._sleep(int(a_second * seconds))


@pytest.fixture
def float32_is_exact() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32, which has 10 bits of mantissa
    yield
    torch.set_float32_matmul_precision(before)


# --- rows --------------------------------------------------------------------------------------------


def golden(family: str) -> tuple[list[Path], dict[str, torch.Tensor]]:
    folder = GOLDEN / family
    return sorted((folder / "images").iterdir()), load_file(folder / "expected.safetensors")


@pytest.mark.parametrize("family", ["glm53", "kimi_k3", "deepseek41"])
@pytest.mark.usefixtures("float32_is_exact")
def test_float32_rows_are_the_references(family: str) -> None:
    # The tolerance of the CPU tests. It allows for another order of summation, but not for TF32.
    paths, wanted = golden(family)
    with Encoder(GOLDEN / family / "checkpoint", device=GPU, dtype=torch.float32) as encoder:
        results = encoder.generate(paths)
    for path, (rows, metadata) in zip(paths, results, strict=True):
        assert rows.device == GPU
        assert (metadata.device, metadata.dtype) == ("cuda:0", "torch.float32")
        assert metadata.strides == rows.stride()
        difference = rows.cpu() - wanted[f"{path.stem}.embedding"]
        assert difference.abs().max().item() <= 2e-5, path.name


@pytest.mark.parametrize("family", ["glm53", "kimi_k3", "deepseek41"])
def test_bfloat16_rows_are_as_close_to_float32_as_the_reference_is(family: str) -> None:
    paths, wanted = golden(family)
    with Encoder(GOLDEN / family / "checkpoint", device=GPU) as encoder:
        assert encoder.dtype == torch.bfloat16
        results = encoder.generate(paths)
    for path, rows in zip(paths, rows_of(results), strict=True):
        exact, theirs = wanted[f"{path.stem}.embedding"], wanted[f"{path.stem}.embedding_bf16"]
        assert rows.dtype == torch.bfloat16
        assert (rows.float() - exact).norm() <= (theirs.float() - exact).norm(), path.name
        near = torch.nn.functional.cosine_similarity(rows.float().flatten(), exact.flatten(), dim=0)
        assert near.item() > 0.9999, path.name


@pytest.mark.parametrize("handoff", HANDOFFS)
@pytest.mark.parametrize("share_weights", [False, True])
def test_replicas_and_threads_give_bit_identical_rows(
    glm53_checkpoint: Path, handoff: Handoff, share_weights: bool
) -> None:
    images = of_many_sizes(24)
    with Encoder(glm53_checkpoint, device=GPU) as encoder:
        alone = rows_of([encoder.generate(image)[0] for image in images])

    def caller(encoder: Encoder) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            return rows_of(encoder.generate(images))

    settings: dict[str, Any] = {"share_weights": share_weights, "handoff": handoff}
    with (
        Encoder(glm53_checkpoint, device=GPU, replicas_per_gpu=4, **settings) as encoder,
        ThreadPoolExecutor(8) as callers,
    ):
        together = list(callers.map(caller, [encoder] * 8))
    assert all(all_equal(rows, alone) for rows in together)


# --- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("requested", [5, 1, 0, -1, -100])
def test_the_priority_is_clamped_to_the_range_of_the_device(glm53_checkpoint: Path, requested: int) -> None:
    lowest, highest = torch.cuda.Stream(GPU).priority_range()
    assert lowest == 0 > highest
    with Encoder(glm53_checkpoint, device=GPU, stream_priority=requested, replicas_per_gpu=2) as encoder:
        assert encoder.stream_priority == min(0, max(requested, highest))


def test_a_lane_does_not_change_the_callers_stream() -> None:
    before = torch.cuda.current_stream(GPU)
    lane = open_lane(GPU, -1)
    host = torch.arange(250, dtype=torch.uint8)
    with lane.entered():
        assert torch.cuda.current_stream(GPU) != before
        assert torch.cuda.current_device() == 0
        arrived = lane.upload(host)
        lane.wait()
    assert torch.cuda.current_stream(GPU) == before
    assert arrived.device == GPU
    assert torch.equal(arrived.cpu(), host)


def read_of(hold: Hold, seconds: float) -> Callable[[torch.Tensor, torch.cuda.Stream], torch.Tensor]:
    def read(rows: torch.Tensor, consumer: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(consumer):
            hold(seconds)
            return rows.clone()

    return read


def tower_of(hold: Hold, seconds: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def tower(patches: torch.Tensor) -> torch.Tensor:
        hold(seconds)
        return ~patches

    return tower


def rows_are_right_on_the_gpu(hold: Hold, handoff: str, late: str, left_out: str = "") -> list[bool]:
    """Do the check that test_device.py does on its model, with one side held for 50 ms every time."""
    lane, consumer = CudaLane(GPU, 0), torch.cuda.Stream(GPU)
    if left_out:
        leave_out(left_out, lane, consumer)
    tower = tower_of(hold, 0.05 if late == "lane" else 0)
    read = read_of(hold, 0.05 if late == "consumer" else 0)
    # Distinct inputs, so that values left in memory by another run are wrong here.
    seed = zlib.crc32(f"{handoff} {late} {left_out}".encode())
    outcome = rows_are_right(lane, consumer, handoff, tower, read, seed)
    torch.cuda.synchronize()
    return outcome


@pytest.mark.parametrize("late", ["lane", "consumer"])
@pytest.mark.parametrize("handoff", HANDOFFS)
def test_rows_are_correct_when_lane_or_consumer_is_late(hold: Hold, handoff: str, late: str) -> None:
    assert all(rows_are_right_on_the_gpu(hold, handoff, late))


@pytest.mark.parametrize(("handoff", "step"), CONTROLS)
def test_control_rows_are_wrong_without_one_step(hold: Hold, handoff: str, step: str) -> None:
    # Without record_stream a late consumer loses its memory; the others are missed when the lane is late.
    late = "consumer" if step == "record_stream" else "lane"
    assert not all(rows_are_right_on_the_gpu(hold, handoff, late, step))


@pytest.fixture
def late_lanes(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    """Holds every lane for a millisecond before its copy, and again before its tower."""
    upload, forward = CudaLane.upload, GlmTower.forward

    def late_upload(lane: CudaLane, host: torch.Tensor) -> torch.Tensor:
        hold(0.001)
        return upload(lane, host)

    def late_forward(tower: GlmTower, *arguments: Any) -> torch.Tensor:
        hold(0.001)
        return forward(tower, *arguments)

    monkeypatch.setattr(CudaLane, "upload", late_upload)
    monkeypatch.setattr(GlmTower, "forward", late_forward)


@pytest.mark.usefixtures("late_lanes")
@pytest.mark.parametrize("handoff", HANDOFFS)
def test_a_thousand_images_are_correct_with_late_lanes_and_a_late_consumer(
    glm53_checkpoint: Path, hold: Hold, handoff: Handoff
) -> None:
    # Of one size, so that the staging buffer and memory are reused every time.
    images = [noise(140, 140, seed) for seed in range(7)]
    with Encoder(glm53_checkpoint, device=GPU) as encoder:
        wanted = rows_of([encoder.generate(image)[0] for image in images])
    seen: list[torch.Tensor] = []
    ahead: deque[Future[ImageResult]] = deque()

    def read() -> None:
        rows = ahead.popleft().result(timeout=HANG).tensor
        hold(0.001)
        seen.append(rows.clone())  # enqueued now, executed long after `rows` is dropped

    with Encoder(glm53_checkpoint, device=GPU, handoff=handoff) as encoder:
        side = torch.cuda.Stream(GPU)
        with torch.cuda.stream(side):
            for number in range(1000):
                ahead.append(encoder.submit(images[number % len(images)]))
                if len(ahead) == 3:
                    read()
            while ahead:
                read()
        side.synchronize()
    assert len(seen) == 1000
    assert all(torch.equal(rows.cpu(), wanted[number % len(images)]) for number, rows in enumerate(seen))


@pytest.mark.usefixtures("late_lanes")
@pytest.mark.parametrize("handoff", HANDOFFS)
def test_dlpack_rows_are_correct_on_the_requested_stream(glm53_checkpoint: Path, handoff: Handoff) -> None:
    image = noise(140, 140)
    with Encoder(glm53_checkpoint, device=GPU) as encoder:
        wanted = rows_of(encoder.generate(image))[0]
    with Encoder(glm53_checkpoint, device=GPU, handoff=handoff) as encoder:
        side, other = (torch.cuda.Stream(GPU) for _ in range(2))
        # None is the default stream; -1 means that the consumer stays on its current stream.
        takers = [(None, torch.cuda.default_stream(GPU)), (-1, side), (other.cuda_stream, other)]
        for stream, taker in takers * 10:
            with torch.cuda.stream(side):
                rows = encoder.generate(image)[0].tensor
                capsule = rows.__dlpack__(stream=stream)
            with torch.cuda.stream(taker):
                seen = from_dlpack(capsule).clone()
            taker.synchronize()
            assert torch.equal(seen.cpu(), wanted)
            with torch.cuda.stream(side):
                assert torch.equal(from_dlpack(rows).cpu(), wanted)


# --- cached results ----------------------------------------------------------------------------------


class LateTransfers(CudaTransfers):
    """Transfers that are held for this many seconds before each copy."""

    def __init__(self, handoff: str, hold: Hold, seconds: float) -> None:
        super().__init__(GPU, handoff)
        self._hold, self._seconds = hold, seconds

    def download(self, rows: torch.Tensor, since: Any) -> torch.Tensor:
        with torch.cuda.stream(self._down):
            self._hold(self._seconds)
        return super().download(rows, since)

    def upload(self, result: ImageResult, consumer: Any) -> ImageResult:
        with torch.cuda.stream(self._up):
            self._hold(self._seconds)
        return super().upload(result, consumer)


def seed_of(*names: str) -> int:
    """Return a seed for distinct inputs, so that values left in memory by another run are wrong here."""
    return zlib.crc32(" ".join(names).encode())


def test_a_lanes_cpu_results_are_complete_and_pinned(hold: Hold) -> None:
    lane = CudaLane(GPU, 0)
    at_once, in_the_end = downloaded_by_the_lane(lane, tower_of(hold, 0.05), seed_of("lane"))
    assert all(at_once + in_the_end)
    with lane.entered():
        assert lane.download(torch.ones(3, 5, device=GPU)).is_pinned()


def test_control_a_lanes_cpu_results_are_wrong_without_the_wait(hold: Hold) -> None:
    lane = CudaLane(GPU, 0)
    leave_out("wait", lane, None)
    at_once, _ = downloaded_by_the_lane(lane, tower_of(hold, 0.05), seed_of("lane", "control"))
    assert not all(at_once)


@pytest.mark.parametrize("late", ["lane", "transfers"])
@pytest.mark.parametrize("handoff", HANDOFFS)
def test_downloads_for_the_cache_are_correct_when_lane_or_transfers_are_late(
    hold: Hold, handoff: str, late: str
) -> None:
    transfers = LateTransfers(handoff, hold, 0.05 if late == "transfers" else 0)
    lane, consumer = CudaLane(GPU, 0), torch.cuda.Stream(GPU)
    tower = tower_of(hold, 0.05 if late == "lane" else 0)
    seed = seed_of("writer", handoff, late)
    at_once, in_the_end = downloaded_for_the_cache(transfers, lane, consumer, handoff, tower, seed)
    assert all(at_once + in_the_end)


@pytest.mark.parametrize(("handoff", "step"), DOWNLOAD_CONTROLS)
def test_control_downloads_for_the_cache_are_wrong_without_one_step(
    hold: Hold, monkeypatch: pytest.MonkeyPatch, handoff: str, step: str
) -> None:
    late = "transfers" if step == "synchronize" else "lane"
    transfers = LateTransfers(handoff, hold, 0.05 if late == "transfers" else 0)
    lane, consumer = CudaLane(GPU, 0), torch.cuda.Stream(GPU)
    leave_out_transfer_step(step, transfers, consumer, monkeypatch)
    tower = tower_of(hold, 0.05 if late == "lane" else 0)
    seed = seed_of("writer", handoff, step)
    at_once, in_the_end = downloaded_for_the_cache(transfers, lane, consumer, handoff, tower, seed)
    assert not all(at_once)
    assert not all(in_the_end)


@pytest.mark.parametrize("late", ["transfers", "consumer"])
@pytest.mark.parametrize("handoff", HANDOFFS)
def test_hits_are_correct_when_transfers_or_consumer_are_late(hold: Hold, handoff: str, late: str) -> None:
    transfers = LateTransfers(handoff, hold, 0.05 if late == "transfers" else 0)
    read = read_of(hold, 0.05 if late == "consumer" else 0)
    assert all(hits_are_right(transfers, torch.cuda.Stream(GPU), read, seed_of("hits", handoff, late)))


@pytest.mark.parametrize(("handoff", "step"), UPLOAD_CONTROLS)
def test_control_hits_are_wrong_without_one_step(
    hold: Hold, monkeypatch: pytest.MonkeyPatch, handoff: str, step: str
) -> None:
    late = "consumer" if step == "record_stream" else "transfers"
    transfers = LateTransfers(handoff, hold, 0.05 if late == "transfers" else 0)
    consumer, read = torch.cuda.Stream(GPU), read_of(hold, 0.05 if late == "consumer" else 0)
    leave_out_transfer_step(step, transfers, consumer, monkeypatch)
    assert not all(hits_are_right(transfers, consumer, read, seed_of("hits", handoff, step)))


@pytest.fixture
def late_transfers(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    """Holds every copy of cached rows for a millisecond."""
    monkeypatch.setattr(
        "mm_encoder.encoder.open_transfers", lambda device, handoff: LateTransfers(handoff, hold, 0.001)
    )


def cache_of(results: Results) -> CacheConfig:
    return CacheConfig(memory_bytes=64 * 1024**2, results=results)


@pytest.mark.usefixtures("late_lanes", "late_transfers")
@pytest.mark.parametrize("handoff", HANDOFFS)
@pytest.mark.parametrize("results", ["cpu", "device"])
def test_hits_and_misses_give_the_rows_of_an_encoder_without_a_cache(
    glm53_checkpoint: Path, hold: Hold, results: Results, handoff: Handoff
) -> None:
    images = [noise(140, 140, seed) for seed in range(7)]
    with Encoder(glm53_checkpoint, device=GPU) as encoder:
        wanted = rows_of([encoder.generate(image)[0] for image in images])
    seen: list[torch.Tensor] = []
    with Encoder(glm53_checkpoint, device=GPU, handoff=handoff, cache=cache_of(results)) as encoder:
        side = torch.cuda.Stream(GPU)
        with torch.cuda.stream(side):
            for again in range(30):
                for image in images:
                    rows, metadata = encoder.generate(image)[0]
                    assert metadata.cache == ("memory" if again else "miss")
                    assert rows.device.type == ("cpu" if results == "cpu" else "cuda")
                    assert metadata.device == str(rows.device)
                    hold(0.001)
                    seen.append(rows.clone())  # on the device: enqueued now, executed when `rows` is gone
                    del rows
        side.synchronize()
        stats = encoder.cache_stats()
        assert (stats.misses, stats.memory_hits) == (7, 29 * 7)
        until(lambda: encoder.cache_stats().memory_entries == 7)
    assert all(torch.equal(rows.cpu(), wanted[number % 7]) for number, rows in enumerate(seen))


def test_results_on_the_cpu_are_pinned_and_shared(glm53_checkpoint: Path) -> None:
    with Encoder(glm53_checkpoint, device=GPU, cache=cache_of("cpu")) as encoder:
        miss, hit = (encoder.generate(noise(140, 140))[0].tensor for _ in range(2))
    assert hit is miss
    assert hit.is_pinned()
    assert hit.untyped_storage().nbytes() == hit.nbytes


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_hits_on_the_device_are_ordinary_tensors_and_copies(glm53_checkpoint: Path, handoff: Handoff) -> None:
    image = noise(140, 140)
    with Encoder(glm53_checkpoint, device=GPU, handoff=handoff, cache=cache_of("device")) as encoder:
        wanted = rows_of(encoder.generate(image))[0]
        with torch.inference_mode():
            first = encoder.generate(image)[0].tensor
        assert not first.is_inference()
        until(lambda: encoder.cache_stats().memory_entries == 1)
        second = encoder.generate(image)[0].tensor
        second.zero_()
        assert torch.equal(first.cpu(), wanted)
        assert all_equal(rows_of(encoder.generate(image)), [wanted])


# The profiler warns at the end of a cycle, and about libraries that it could not load.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("handoff", HANDOFFS)
@pytest.mark.parametrize("cached", [False, True])
def test_no_call_synchronizes_the_whole_device(
    glm53_checkpoint: Path, handoff: Handoff, cached: bool
) -> None:
    images = of_many_sizes(12)
    settings: dict[str, Any] = {"handoff": handoff, "cache": cache_of("device") if cached else None}
    with Encoder(glm53_checkpoint, device=GPU, replicas_per_gpu=2, **settings) as encoder:
        for _ in range(3):
            encoder.generate(images)  # both replicas have staging buffer, memory and kernels
        if cached:
            encoder.bump_weights()
            encoder.generate(images[:6])  # then half of the images are hits
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities) as recorded, record_function("steady"):
            encoder.generate(images)
    events = recorded.events()
    assert events is not None
    # Only events that start in this range count: the profiler itself waits for the device at start and end.
    steady = min((e.time_range for e in events if e.name == "steady"), key=lambda time: time.start)
    inside = {e.name for e in events if steady.start <= e.time_range.start <= steady.end}
    assert "cudaEventSynchronize" in inside  # the control: calls from replica threads are recorded
    assert not [name for name in inside if "DeviceSynchronize" in name or "CtxSynchronize" in name]


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_encoding_goes_on_while_another_thread_captures_a_graph(glm53_checkpoint: Path, mode: str) -> None:
    capturing, encoded = threading.Event(), threading.Event()
    images = of_many_sizes(12)
    with Encoder(glm53_checkpoint, device=GPU) as encoder:
        wanted = rows_of(encoder.generate(images))
    # Not the priority of the lanes: Torch hands out 32 streams per priority in turn, and a kernel that a lane
    # enqueued on the captured stream would end up in the graph.
    stream = torch.cuda.Stream(GPU, priority=-1)

    def capture() -> torch.Tensor:
        graph, x = torch.cuda.CUDAGraph(), torch.ones(1000, device=GPU)
        x * 2 + 1  # loads the kernels, which is not allowed during the capture
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            y = x * 2
            capturing.set()
            assert encoded.wait(HANG)
            z = y + 1
        x.fill_(3)
        torch.cuda.synchronize()
        graph.replay()
        return z.cpu()

    with ThreadPoolExecutor(1) as host:
        captured = host.submit(capture)
        try:
            assert capturing.wait(HANG)
            # New encoders too: staging, memory and weights are allocated during the capture.
            settings: dict[str, Any]
            for handoff in HANDOFFS:
                settings = {"replicas_per_gpu": 2, "handoff": handoff}
                with Encoder(glm53_checkpoint, device=GPU, **settings) as encoder:
                    assert all_equal(rows_of(encoder.generate(images)), wanted)
        finally:
            encoded.set()
        assert captured.result(timeout=HANG).eq(7).all()


def test_the_callers_device_stream_and_dtype_are_unchanged(glm53_checkpoint: Path) -> None:
    side = torch.cuda.Stream(GPU)

    def state() -> tuple[object, ...]:
        streams = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
        return torch.cuda.current_device(), streams, torch.get_default_dtype(), torch.is_grad_enabled()

    before, images = state(), of_many_sizes(4)
    with Encoder(glm53_checkpoint, device=GPU) as encoder:
        wanted = rows_of(encoder.generate(images))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.cuda.stream(side):
            inside = state()
            with Encoder(glm53_checkpoint, device=GPU, replicas_per_gpu=2) as encoder:
                assert state() == inside
                results = encoder.generate(images)
                assert state() == inside
            assert state() == inside
            assert torch.cuda.current_stream(GPU) == side
            assert all_equal(rows_of(results), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert state() == before


# --- memory ------------------------------------------------------------------------------------------


@pytest.fixture
def unlimited_checkpoint(glm53_checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint without its small limit on the image size."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(glm53_checkpoint, folder)
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"]["max_image_tokens"] = 40_000
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_a_full_device_fails_one_job_and_its_error_holds_no_memory(
    unlimited_checkpoint: Path, handoff: Handoff
) -> None:
    small = noise(140, 140)
    # 102,400 patches: their 60 million bytes become 4-byte indices, more than the memory left.
    large = np.zeros((4480, 4480, 3), np.uint8)
    with Encoder(unlimited_checkpoint, device=GPU, handoff=handoff) as encoder:
        wanted = rows_of(encoder.generate(small))
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(GPU)
        filler = torch.empty(free - 200 * 1024**2, dtype=torch.uint8, device=GPU)
        try:
            before = torch.cuda.memory_allocated(GPU)
            kept = []
            for _ in range(3):
                future = encoder.submit(large)
                kept.append(future.exception(timeout=HANG))
                until(lambda: torch.cuda.memory_allocated(GPU) == before)
                assert all_equal(rows_of(encoder.generate(small)), wanted)
            for error in kept:
                assert isinstance(error, DeviceOutOfMemoryError)
                assert isinstance(error.__cause__, torch.OutOfMemoryError)
            assert encoder.health().state == "ready"
        finally:
            del filler
            torch.cuda.empty_cache()


# --- processes ---------------------------------------------------------------------------------------


def outcome_of(program: str, checkpoint: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a Python program and return its exit code, output and errors."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(checkpoint), *arguments],
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    return run.returncode, run.stdout.strip(), run.stderr


ONLY_ONE_DEVICE = """
import sys
import numpy as np
import torch
from mm_encoder import CacheConfig, Encoder

assert not torch.cuda.is_initialized()  # by the imports
last = torch.cuda.device_count() - 1
cache = CacheConfig(results="device") if sys.argv[2] == "True" else None
with Encoder(sys.argv[1], device=f"cuda:{last}", replicas_per_gpu=2, cache=cache) as encoder:
    images = [np.zeros((60, 60, 3), np.uint8)] * 4
    results = [*encoder.generate(images), *encoder.generate(images)]
assert all(result.tensor.device.index == last for result in results)
used = [index for index in range(last + 1) if torch._C._cuda_hasPrimaryContext(index)]
assert used == [last], used
assert torch.cuda.current_device() == 0
print("one")
"""


@pytest.mark.parametrize("cached", [False, True])
def test_no_other_device_is_initialized(glm53_checkpoint: Path, cached: bool) -> None:
    # Most useful on a machine with several devices.
    code, output, errors = outcome_of(ONLY_ONE_DEVICE, glm53_checkpoint, str(cached))
    assert (code, output) == (0, "one"), errors


# It ends by os._exit, because how Torch shuts down with an unusable context is not tested here. No result is
# kept either: freeing a tensor that record_stream was called on ends the process in such a context.
LOST_CONTEXT = """
import os
import sys
import threading
import numpy as np
import torch
from mm_encoder import Encoder, ReplicaError
from mm_encoder.families.glm53 import GlmTower

image = np.zeros((60, 60, 3), np.uint8)
replicas = int(sys.argv[2])
encoder = Encoder(sys.argv[1], device="cuda", replicas_per_gpu=replicas)
encoder.generate([image] * 4)
torch._assert_async(torch.ones(1, device="cuda"))  # loads the kernel
begun, forward = threading.Event(), GlmTower.forward

def asserting(tower, patches, grids):
    torch._assert_async(torch.zeros(1, device=patches.device))
    begun.set()
    return forward(tower, patches, grids)

GlmTower.forward = asserting
first = encoder.submit(image)
assert begun.wait(30)
errors = [first.exception(timeout=1)]
for left in reversed(range(replicas)):
    health = encoder.health()
    assert health.state == ("degraded" if left else "failed"), health
    assert "CUDA error" in health.last_error, health
    if left:  # the next job finds the context unusable, whichever replica takes it
        errors.append(encoder.submit(image).exception(timeout=10))
for error in errors:
    assert type(error) is ReplicaError, repr(error)
    assert isinstance(error.__cause__, RuntimeError), repr(error.__cause__)
try:
    encoder.submit(image)
except ReplicaError:
    print("failed as expected", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failed_device_assertion_fails_every_job_at_once(glm53_checkpoint: Path, replicas: int) -> None:
    code, output, errors = outcome_of(LOST_CONTEXT, glm53_checkpoint, str(replicas))
    assert code == 0, errors
    assert output.splitlines()[-1:] == ["failed as expected"], errors


LEFT_OPEN = """
import sys
import numpy as np
from mm_encoder import Encoder

images = [np.full((60, 60, 3), value, np.uint8) for value in range(4)]
encoder = Encoder(sys.argv[1], device="cuda", replicas_per_gpu=2, handoff=sys.argv[2])
results = encoder.generate(images)
waiting = [encoder.submit(image) for image in images]
"""


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_a_process_with_an_open_encoder_exits_without_output(glm53_checkpoint: Path, handoff: str) -> None:
    assert outcome_of(LEFT_OPEN, glm53_checkpoint, handoff) == (0, "", "")


FORKED = """
import os
import sys
import numpy as np
from mm_encoder import Encoder, ForkedProcessError

image = np.zeros((60, 60, 3), np.uint8)
encoder = Encoder(sys.argv[1], device="cuda")
before = encoder.generate(image)[0].tensor
calls = [
    lambda: encoder.generate(image),
    lambda: encoder.submit(image),
    lambda: encoder.encode_image(image),
    encoder.health,
    encoder.stats,
]
child = os.fork()
if child == 0:
    refused = 0
    for call in calls:
        try:
            call()
        except ForkedProcessError:
            refused += 1
    os._exit(0 if refused == len(calls) else 1)
assert os.waitpid(child, 0)[1] == 0
assert encoder.generate(image)[0].tensor.equal(before)
encoder.close()
print("unharmed")
"""


def test_a_forked_child_gets_an_error_and_its_parent_goes_on(glm53_checkpoint: Path) -> None:
    code, output, errors = outcome_of(FORKED, glm53_checkpoint)
    assert (code, output) == (0, "unharmed"), errors
