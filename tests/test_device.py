"""The device seam: names, the CPU's lane, and the CUDA lane against a model of what CUDA promises.

On a GPU a missing wait may go unnoticed for years, since work is usually done by the time somebody looks.
The model runs everything as late as it may be run, so that each wait is needed, every time; and every test
of an order has a control, in which one step is left out and a wrong value must be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from mm_encoder.device import CpuLane, CudaLane, consumer_stream, default_dtype, open_lane, parse_device

GPU = torch.device("cuda:0")


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_device("cuda") == torch.device("cuda:0")
    assert parse_device("cuda:1") == torch.device("cuda:1")
    assert parse_device(torch.device("cuda", 1)) == torch.device("cuda:1")
    for wrong in ("", "cuda:", "cuda:-1", "cuda:1x", "CPU", "mps", "meta", "cpu:0", "1"):
        with pytest.raises(ValueError, match="device must be 'cpu', 'cuda' or 'cuda:N'"):
            parse_device(wrong)
    with pytest.raises(ValueError, match=r"no device 'cuda:2': this process sees 2 CUDA devices$"):
        parse_device("cuda:2")


def test_defaults_by_device() -> None:
    assert default_dtype(torch.device("cpu")) == torch.float32
    assert default_dtype(torch.device("cuda:0")) == torch.bfloat16
    assert consumer_stream(torch.device("cpu")) is None


def test_the_cpu_lane_copies_nothing_and_waits_for_nothing() -> None:
    lane = open_lane(torch.device("cpu"), 1)
    assert isinstance(lane, CpuLane)
    host = torch.arange(6, dtype=torch.uint8).view(2, 3)
    with lane.entered():
        assert lane.upload(host) is host
        lane.wait()
        lane.make_wait(None)
        lane.hand_over(host, None)
        assert lane.settle()
    assert lane.priority == 0


# --- the model ---------------------------------------------------------------------------------------


class Stream:
    """Work, run in the order in which it was enqueued, and only when somebody has to wait for it."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        assert priority <= 0, "older releases of Torch refuse positive priorities"
        self.device, self.priority = device, max(priority, -5)  # what the device has
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.work))

    def wait_event(self, event: Event) -> None:
        # For what the event stands for now: it may be recorded again for something else.
        self.work.append(partial(event.stream.run, event.end))


class Event:
    """A place in a stream; before it is recorded there is nothing to wait for."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "the host's thread would spin while it waits"
        self.stream, self.end = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.run(self.end)


@dataclass(eq=False)
class Block:
    """Memory of the caching allocator; it belongs to the stream on which it was first allocated."""

    owner: Stream
    memory: torch.Tensor
    readers: set[Stream] = field(default_factory=set)
    """Named by record_stream since the last allocation."""
    pending: list[tuple[Stream, int]] = field(default_factory=list)
    """How far those must get before the block can be allocated again."""


class OnDevice:
    """A tensor. When it is dropped its block is free, whatever is still enqueued that reads or writes it."""

    def __init__(self, gpu: Gpu, block: Block) -> None:
        self.gpu, self.block = gpu, block

    def record_stream(self, stream: Stream) -> None:
        self.block.readers.add(stream)

    def __del__(self) -> None:
        self.block.pending = [(stream, len(stream.work)) for stream in self.block.readers]
        self.block.readers.clear()
        self.gpu.free.append(self.block)


class Gpu:
    """The device with its current stream, its allocator, and what was pinned on the host."""

    def __init__(self) -> None:
        self.default = Stream()
        self.current: list[Any] = [self.default]
        """Devices and streams entered, the innermost last."""
        self.free: list[Block] = []
        self.blocks = 0
        self.pinned: list[int] = []

    @property
    def stream(self) -> Stream:
        return next(entry for entry in reversed(self.current) if isinstance(entry, Stream))

    @contextmanager
    def entered(self, entry: Any) -> Iterator[None]:
        self.current.append(entry)
        yield
        assert self.current.pop() is entry

    def pin(self, size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert (dtype, device, pin_memory) == (torch.uint8, "cpu", True)
        self.pinned.append(size)
        return torch.zeros(size, dtype=dtype)

    def allocate(self, shape: torch.Size) -> OnDevice:
        for block in self.free:
            over = all(stream.done >= end for stream, end in block.pending)
            if block.owner is self.stream and block.memory.shape == shape and over:
                self.free.remove(block)
                return OnDevice(self, block)
        self.blocks += 1
        return OnDevice(self, Block(self.stream, torch.zeros(shape, dtype=torch.uint8)))

    def copy(self, staged: torch.Tensor, device: torch.device, *, non_blocking: bool) -> OnDevice:
        assert non_blocking, "the host would wait"
        arrived = self.allocate(staged.shape)
        self.stream.work.append(partial(arrived.block.memory.copy_, staged))
        return arrived

    def tower(self, patches: Any) -> OnDevice:
        rows = self.allocate(patches.block.memory.shape)
        self.stream.work.append(partial(torch.bitwise_not, patches.block.memory, out=rows.block.memory))
        return rows

    def read(self, rows: OnDevice, consumer: Stream) -> torch.Tensor:
        seen = torch.zeros_like(rows.block.memory)
        consumer.work.append(partial(seen.copy_, rows.block.memory))
        return seen


def refuse(*_: Any) -> None:
    raise AssertionError("nobody may wait for this")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The model in place of what the lane calls. On the default stream and on the device as a whole there is
    work that nobody may wait for.
    """
    gpu = Gpu()
    gpu.default.work.append(refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: gpu.default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", gpu.entered)
    monkeypatch.setattr(torch.cuda, "stream", gpu.entered)
    monkeypatch.setattr(torch, "empty", gpu.pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda *arguments, **named: gpu.copy(*arguments, **named))
    return gpu


# --- both hand-offs, and what each of their steps is for (tests/test_cuda.py runs the same on a GPU) ---

HANDOFFS = ("host", "stream")
# A hand-off, and the step that is left out.
CONTROLS = (
    ("stream", "staging"),
    ("host", "wait"),
    ("stream", "wait_event"),
    ("host", "record_stream"),
    ("stream", "record_stream"),
)


def pictures(seed: int) -> list[torch.Tensor]:
    """Of one size, and of no value in common."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (256, 588), dtype=torch.uint8, generator=generator) for _ in range(12)]


def leave_out(step: str, lane: CudaLane, consumer: Any) -> None:
    owner, name = {
        "staging": (lane._copied, "synchronize"),
        "wait": (lane, "wait"),
        "wait_event": (consumer, "wait_event"),
        "record_stream": (lane, "hand_over"),
    }[step]
    setattr(owner, name, lambda *_: None)


def right(
    lane: CudaLane,
    consumer: Any,
    handoff: str,
    tower: Callable[[Any], Any],
    read: Callable[[Any, Any], torch.Tensor],
    seed: int = 0,
) -> list[bool]:
    """Take the lane through jobs as a replica does, with a `tower` that inverts bits. For each: whether
    `consumer` reads its rows, when it gets there, though the caller has kept neither picture nor rows.
    """
    seen, wanted = [], []
    for number, picture in enumerate(pictures(seed)):
        wanted.append(~picture)
        with lane.entered():
            rows = tower(lane.upload(picture))
            picture.zero_()
            if handoff == "host":
                lane.wait()
            else:
                lane.make_wait(consumer)
            lane.hand_over(rows, consumer)
        seen.append(read(rows, consumer))
        del rows
        if number % 4 == 3:
            consumer.synchronize()  # it catches up, and what it has read can be allocated again
    return [torch.equal(a.cpu(), b) for a, b in zip(seen, wanted, strict=True)]


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_every_row_is_read_right_from_memory_that_is_used_again(gpu: Gpu, handoff: str) -> None:
    lane = CudaLane(GPU, 0)
    assert all(right(lane, Stream(), handoff, gpu.tower, gpu.read))
    assert gpu.blocks <= 6  # and not two a picture


@pytest.mark.parametrize(("handoff", "step"), CONTROLS)
def test_control_wrong_rows_are_read_when_a_step_is_left_out(gpu: Gpu, handoff: str, step: str) -> None:
    lane, consumer = CudaLane(GPU, 0), Stream()
    leave_out(step, lane, consumer)
    assert not all(right(lane, consumer, handoff, gpu.tower, gpu.read))


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_the_lane_waits_for_no_work_but_its_own(gpu: Gpu, handoff: str) -> None:
    lane, consumer, other = CudaLane(GPU, 0), Stream(), Stream(GPU)
    other.work.append(refuse)
    right(lane, consumer, handoff, gpu.tower, gpu.read)
    with lane.entered():
        gpu.tower(lane.upload(pictures(1)[0]))
        assert lane.settle()
    assert other.done == gpu.default.done == 0


def test_the_host_hand_off_waits_and_the_stream_hand_off_does_not(gpu: Gpu) -> None:
    lane, consumer = CudaLane(GPU, 0), Stream()
    with lane.entered():
        stream = gpu.stream
        lane.upload(pictures(0)[0])
        lane.make_wait(consumer)
        assert stream.done == 0
        consumer.synchronize()
        assert stream.done == 1
        lane.upload(pictures(0)[0])
        lane.wait()
        assert stream.done == 2


@pytest.mark.parametrize(("requested", "granted"), [(5, 0), (1, 0), (0, 0), (-1, -1), (-5, -5), (-100, -5)])
def test_a_positive_priority_becomes_0_and_the_device_grants_the_rest(
    gpu: Gpu, requested: int, granted: int
) -> None:
    lane = open_lane(GPU, requested)
    assert lane.priority == granted
    with lane.entered():
        assert gpu.stream.priority == granted


def test_device_and_stream_are_current_only_inside_the_lane(gpu: Gpu) -> None:
    lane, outside = CudaLane(GPU, 0), [gpu.default]
    assert gpu.current == outside
    with lane.entered():
        assert gpu.current == [gpu.default, GPU, lane._stream]
    lane.wait()
    lane.make_wait(Stream())
    assert lane.settle()
    assert gpu.current == outside


def test_the_consumer_is_the_stream_that_is_current_for_the_caller(gpu: Gpu) -> None:
    side = Stream()
    assert consumer_stream(GPU) is gpu.default
    with gpu.entered(side):
        assert consumer_stream(GPU) is side


def test_staging_grows_at_least_twofold_and_serves_smaller_uploads(gpu: Gpu) -> None:
    lane = CudaLane(GPU, 0)
    uploads: list[tuple[Any, torch.Tensor]] = []
    with lane.entered():
        for size in (5, 50, 7, 51, 100, 1, 300):
            host = torch.arange(size, dtype=torch.uint8)
            uploads.append((lane.upload(host), host))
        lane.wait()
    assert all(torch.equal(arrived.block.memory, host) for arrived, host in uploads)
    assert gpu.pinned == [5, 50, 100, 300]


# --- after a failed job ------------------------------------------------------------------------------


def test_settling_lets_nothing_of_a_failed_job_run_on(gpu: Gpu) -> None:
    lane = CudaLane(GPU, 0)
    with lane.entered():
        gpu.tower(lane.upload(pictures(0)[0]))
        assert lane.settle()
        assert gpu.stream.done == len(gpu.stream.work) == 2


@pytest.mark.parametrize("call", ["record", "synchronize"])
@pytest.mark.parametrize(("reports", "usable"), [(1, True), (10**6, False)])
def test_an_error_is_reported_once_unless_the_context_is_spoilt(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, call: str, reports: int, usable: bool
) -> None:
    lane, left = CudaLane(GPU, 0), [reports]
    real = getattr(Event, call)

    def reporting(event: Event, *arguments: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        real(event, *arguments)

    with lane.entered():
        gpu.tower(lane.upload(pictures(0)[0]))
        monkeypatch.setattr(Event, call, reporting)
        assert lane.settle() is usable
        assert gpu.stream.done == (2 if usable else 0)
