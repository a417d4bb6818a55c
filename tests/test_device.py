"""The device interface: names, the CPU lane, and the CUDA lane on a model of CUDA streams.

On a GPU a missing wait may go unnoticed for years, since the work is usually done by the time it is read.
The model runs all work as late as it is allowed to, so that every wait is needed every time. Each test of an
order has a control, in which one step is left out and a wrong value must be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from mm_encoder import device
from mm_encoder.device import (
    CpuLane,
    CpuTransfers,
    CudaLane,
    CudaTransfers,
    consumer_stream,
    default_dtype,
    open_lane,
    open_transfers,
    parse_device,
)

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
    random_inputs,
    result_of,
    rows_are_right,
)

GPU = torch.device("cuda:0")


def test_parse_device_accepts_cpu_and_cuda_names(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert lane.download(host) is host
        lane.wait()
        lane.make_consumer_wait(None)
        lane.record_stream(host, None)
        assert lane.drain()
    assert lane.priority == 0


@pytest.mark.parametrize("handoff", ["host", "stream"])
def test_cpu_transfers_return_the_same_rows(handoff: str) -> None:
    transfers = open_transfers(torch.device("cpu"), handoff)
    assert isinstance(transfers, CpuTransfers)
    result = result_of(torch.zeros(2, 3))
    assert transfers.download(result.tensor, None) is result.tensor
    assert transfers.upload(result, None) is result


# --- the model ---------------------------------------------------------------------------------------


class Stream:
    """Work that runs in the order in which it was enqueued, and only when something waits for it."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        assert priority <= 0, "older releases of Torch refuse positive priorities"
        self.device, self.priority = device, max(priority, -5)  # the range of the device
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.work))

    def wait_event(self, event: Event) -> None:
        # Waits for the current record of the event: it may be recorded again later.
        self.work.append(partial(event.stream.run, event.end))

    def wait_stream(self, stream: Stream) -> None:
        self.work.append(partial(stream.run, len(stream.work)))

    def record_event(self, event: Event) -> None:
        event.record(self)


class Event:
    """A position in a stream; waiting for an event that was never recorded returns at once."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "the host's thread would spin while it waits"
        self.stream, self.end = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.run(self.end)


GLOBAL, RELAXED = 0, 2  # a thread's capture mode


@dataclass(eq=False)
class Block:
    """Memory of the caching allocator; it belongs to the stream on which it was first allocated, and to the
    pool of the graph whose capture allocated it, else to the common one.
    """

    owner: Stream
    memory: torch.Tensor
    pool: object
    readers: set[Stream] = field(default_factory=set)
    """Streams named by record_stream since the last allocation."""
    pending: list[tuple[Stream, int]] = field(default_factory=list)
    """How far those streams must get before the block can be allocated again."""


class OnDevice:
    """A tensor. When it is dropped its block is free, even if enqueued work still reads or writes it."""

    device = GPU

    def __init__(self, gpu: Gpu, block: Block) -> None:
        self.gpu, self.block = gpu, block
        self.shape, self.dtype = block.memory.shape, block.memory.dtype

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, arguments: Any, named: Any) -> torch.Tensor:
        # Pinned memory may be dropped before it is written or read: Torch keeps it until the copies are
        # done; here the enqueued work keeps it.
        assert function is torch.Tensor.copy_
        assert named == {"non_blocking": True}, "the host would wait"
        host, rows = arguments
        rows.gpu.stream.work.append(partial(host.copy_, rows.block.memory))
        return host  # type: ignore[no-any-return]

    def record_stream(self, stream: Stream) -> None:
        self.block.readers.add(stream)

    def __del__(self) -> None:
        self.block.pending = [(stream, len(stream.work)) for stream in self.block.readers]
        self.block.readers.clear()
        self.gpu.free.append(self.block)


class Gpu:
    """The device with its current stream, its allocator, and the sizes of pinned host buffers."""

    def __init__(self) -> None:
        self.default = Stream()
        self.current: list[Any] = [self.default]
        """Devices and streams that are entered, the innermost last."""
        self.free: list[Block] = []
        self.blocks = 0
        self.mode = GLOBAL
        self.capture: tuple[Stream, list[Callable[[], object]]] | None = None
        """The stream that the host captures in another thread, and the graph so far."""
        self.pinned: list[int | torch.Size] = []

    @property
    def stream(self) -> Stream:
        return next(entry for entry in reversed(self.current) if isinstance(entry, Stream))

    @contextmanager
    def entered(self, entry: Any) -> Iterator[None]:
        self.current.append(entry)
        yield
        assert self.current.pop() is entry

    @contextmanager
    def captured(self, stream: Stream) -> Iterator[list[Callable[[], object]]]:
        """Capture what is enqueued on `stream` in the default mode, as another thread of the host does."""
        before, stream.work = stream.work, []
        self.capture = stream, stream.work
        try:
            yield stream.work
        finally:
            stream.work, self.capture = before, None

    def exchange(self, mode: int) -> int:
        before, self.mode = self.mode, mode
        return before

    def unsafe(self) -> None:
        """Refuse a call that invalidates a capture: to wait or allocate in a thread that is not relaxed."""
        assert self.capture is None or self.mode == RELAXED, "the capture is invalid from here on"

    def open_stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:
        self.unsafe()  # Torch makes all of its streams with the first one, and the context before them
        return Stream(device, priority)

    def pin(
        self, size: int | torch.Size, *, dtype: torch.dtype, device: str, pin_memory: bool
    ) -> torch.Tensor:
        assert (device, pin_memory) == ("cpu", True)
        self.unsafe()
        self.pinned.append(size)
        return torch.zeros(size, dtype=dtype)

    def allocate(self, shape: torch.Size) -> OnDevice:
        capturing = self.capture is not None and self.capture[0] is self.stream
        pool = self.capture[1] if self.capture is not None and capturing else None
        for block in self.free:
            over = all(stream.done >= end for stream, end in block.pending)
            ours = block.owner is self.stream and block.pool is pool
            if ours and block.memory.shape == shape and over:
                self.free.remove(block)
                return OnDevice(self, block)
        if not capturing:  # the allocator itself relaxes what it does for the graph
            self.unsafe()
        self.blocks += 1
        return OnDevice(self, Block(self.stream, torch.zeros(shape, dtype=torch.uint8), pool))

    def copy(self, staged: torch.Tensor, device: torch.device, *, non_blocking: bool) -> OnDevice:
        assert non_blocking, "the host would wait"
        assert not torch.is_inference_mode_enabled(), "an inference tensor has restrictions for the caller"
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
    raise AssertionError("this must not be waited for")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Replace the functions of torch.cuda that a lane calls by the model.

    Waiting for the default stream or for the whole device fails.
    """
    gpu = Gpu()
    gpu.default.work.append(refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: gpu.default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.stream)
    monkeypatch.setattr(torch.cuda, "Stream", gpu.open_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", gpu.entered)
    monkeypatch.setattr(torch.cuda, "stream", gpu.entered)
    monkeypatch.setattr(torch, "empty", gpu.pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda *arguments, **named: gpu.copy(*arguments, **named))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host.clone())
    monkeypatch.setattr(device, "exchange_capture_mode", gpu.exchange)
    synchronize = Event.synchronize

    def synchronized(event: Event) -> None:
        gpu.unsafe()
        synchronize(event)

    monkeypatch.setattr(Event, "synchronize", synchronized)
    return gpu


# --- both hand-offs, and each of their steps (tests/test_cuda.py runs the same on a GPU) ---------------


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_rows_are_correct_in_reused_memory(gpu: Gpu, handoff: str) -> None:
    lane = CudaLane(GPU, 0)
    assert all(rows_are_right(lane, Stream(), handoff, gpu.tower, gpu.read))
    assert gpu.blocks <= 6  # and not two per input


@pytest.mark.parametrize(("handoff", "step"), CONTROLS)
def test_control_rows_are_wrong_without_one_step(gpu: Gpu, handoff: str, step: str) -> None:
    lane, consumer = CudaLane(GPU, 0), Stream()
    leave_out(step, lane, consumer)
    assert not all(rows_are_right(lane, consumer, handoff, gpu.tower, gpu.read))


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_the_lane_waits_only_for_its_own_work(gpu: Gpu, handoff: str) -> None:
    lane, consumer, other = CudaLane(GPU, 0), Stream(), Stream(GPU)
    other.work.append(refuse)
    rows_are_right(lane, consumer, handoff, gpu.tower, gpu.read)
    with lane.entered():
        gpu.tower(lane.upload(random_inputs(1)[0]))
        assert lane.drain()
    assert other.done == gpu.default.done == 0


def test_the_host_hand_off_waits_and_the_stream_hand_off_does_not(gpu: Gpu) -> None:
    lane, consumer = CudaLane(GPU, 0), Stream()
    with lane.entered():
        stream = gpu.stream
        lane.upload(random_inputs(0)[0])
        lane.make_consumer_wait(consumer)
        assert stream.done == 0
        consumer.synchronize()
        assert stream.done == 1
        lane.upload(random_inputs(0)[0])
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
    lane.make_consumer_wait(Stream())
    assert lane.drain()
    assert gpu.current == outside


def test_the_consumer_is_the_callers_current_stream(gpu: Gpu) -> None:
    side = Stream()
    assert consumer_stream(GPU) is gpu.default
    with gpu.entered(side):
        assert consumer_stream(GPU) is side


def test_the_staging_buffer_at_least_doubles_and_serves_smaller_uploads(gpu: Gpu) -> None:
    lane = CudaLane(GPU, 0)
    uploads: list[tuple[Any, torch.Tensor]] = []
    with lane.entered():
        for size in (5, 50, 7, 51, 100, 1, 300):
            host = torch.arange(size, dtype=torch.uint8)
            uploads.append((lane.upload(host), host))
        lane.wait()
    assert all(torch.equal(arrived.block.memory, host) for arrived, host in uploads)
    assert gpu.pinned == [5, 50, 100, 300]


# --- results copied to the host and back (tests/test_cuda.py runs the same on a GPU) -----------------


def test_a_lanes_cpu_results_are_complete_pinned_and_separate(gpu: Gpu) -> None:
    at_once, in_the_end = downloaded_by_the_lane(CudaLane(GPU, 0), gpu.tower)
    assert all(at_once + in_the_end)
    assert gpu.pinned[1:] == [torch.Size([256, 588])] * 12  # after the staging buffer for uploads
    assert gpu.blocks == 2


def test_control_a_lanes_cpu_results_are_wrong_without_the_wait(gpu: Gpu) -> None:
    lane = CudaLane(GPU, 0)
    leave_out("wait", lane, None)
    at_once, _ = downloaded_by_the_lane(lane, gpu.tower)
    assert not any(at_once)


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_downloads_for_the_cache_are_correct_from_reused_memory(gpu: Gpu, handoff: str) -> None:
    transfers, lane, consumer = CudaTransfers(GPU, handoff), CudaLane(GPU, 0), Stream()
    at_once, in_the_end = downloaded_for_the_cache(transfers, lane, consumer, handoff, gpu.tower)
    assert all(at_once + in_the_end)
    assert gpu.pinned[1:] == [torch.Size([256, 588])] * 12
    assert gpu.blocks <= 3


@pytest.mark.parametrize(("handoff", "step"), DOWNLOAD_CONTROLS)
def test_control_downloads_for_the_cache_are_wrong_without_one_step(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, handoff: str, step: str
) -> None:
    transfers, lane, consumer = CudaTransfers(GPU, handoff), CudaLane(GPU, 0), Stream()
    leave_out_transfer_step(step, transfers, consumer, monkeypatch, OnDevice)
    at_once, in_the_end = downloaded_for_the_cache(transfers, lane, consumer, handoff, gpu.tower)
    assert not all(at_once)
    # Wrong for good, not only too early: without the wait the rows are dropped and their memory is reused
    # before the copy runs.
    assert not all(in_the_end)


def read_in(gpu: Gpu, transfers: CudaTransfers, late: str) -> Callable[[Any, Any], torch.Tensor]:
    def read(rows: OnDevice, consumer: Stream) -> torch.Tensor:
        if late == "consumer":
            transfers._up.synchronize()
        return gpu.read(rows, consumer)

    return read


@pytest.mark.parametrize("late", ["transfers", "consumer"])
@pytest.mark.parametrize("handoff", HANDOFFS)
def test_hits_are_correct_when_transfers_or_consumer_are_late(gpu: Gpu, handoff: str, late: str) -> None:
    transfers = CudaTransfers(GPU, handoff)
    assert all(hits_are_right(transfers, Stream(), read_in(gpu, transfers, late)))
    assert gpu.blocks <= 4  # as many as the consumer has still to read


@pytest.mark.parametrize(("handoff", "step"), UPLOAD_CONTROLS)
def test_control_hits_are_wrong_without_one_step(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, handoff: str, step: str
) -> None:
    transfers, consumer = CudaTransfers(GPU, handoff), Stream()
    leave_out_transfer_step(step, transfers, consumer, monkeypatch, OnDevice)
    late = "consumer" if step == "record_stream" else "transfers"
    assert not all(hits_are_right(transfers, consumer, read_in(gpu, transfers, late)))


def test_the_host_hand_off_completes_a_hit_and_the_stream_hand_off_makes_the_consumer_wait(gpu: Gpu) -> None:
    for handoff, done in (("host", 1), ("stream", 0)):
        transfers, consumer = CudaTransfers(GPU, handoff), Stream()
        side: Any = transfers._up
        with torch.inference_mode():
            rows, metadata = transfers.upload(result_of(random_inputs(0)[0]), consumer)
        assert side.done == done
        consumer.synchronize()
        assert side.done == 1
        assert (metadata.device, metadata.cache) == ("cuda:0", "memory")
        assert rows.block.readers == {consumer}  # type: ignore[attr-defined]


@pytest.mark.parametrize("left_out", ["", "wait_event", "record_stream"])
def test_a_follower_reads_correct_rows_on_another_stream(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    """Rows handed over to one stream are read on another; each left-out step is a control."""
    transfers, lane, first, second = CudaTransfers(GPU, "stream"), CudaLane(GPU, 0), Stream(), Stream()
    source, other = random_inputs(0)[:2]
    with lane.entered():
        rows: Any = gpu.tower(lane.upload(source))
        done = lane.make_consumer_wait(first)
        lane.record_stream(rows, first)
        with monkeypatch.context() as patch:
            if left_out == "wait_event":
                patch.setattr(second, "wait_event", lambda _: None)
            if left_out == "record_stream":
                patch.setattr(OnDevice, "record_stream", lambda *_: None)
            transfers.share(rows, done, second)
        seen = gpu.read(rows, second)
        if left_out == "wait_event":
            second.synchronize()  # without the wait, so that it reads too early
        first.synchronize()
        del rows
        gpu.tower(lane.upload(other))
        lane._stream.synchronize()
    second.synchronize()
    assert torch.equal(seen, ~source) == (not left_out)


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_transfers_wait_only_for_their_own_work(gpu: Gpu, handoff: str) -> None:
    transfers, lane, consumer, other = CudaTransfers(GPU, handoff), CudaLane(GPU, 0), Stream(), Stream(GPU)
    other.work.append(refuse)
    downloaded_for_the_cache(transfers, lane, consumer, handoff, gpu.tower)
    hits_are_right(transfers, consumer, gpu.read)
    assert other.done == gpu.default.done == 0
    assert gpu.current == [gpu.default]


def test_rows_of_the_host_hand_off_are_downloaded_without_waiting_for_their_consumer(gpu: Gpu) -> None:
    transfers, lane, busy = CudaTransfers(GPU, "host"), CudaLane(GPU, 0), Stream()
    source = random_inputs(0)[0]
    with lane.entered():
        rows: Any = gpu.tower(lane.upload(source))
        lane.wait()
        lane.record_stream(rows, busy)
    busy.work.append(refuse)
    assert torch.equal(transfers.download(rows, None), ~source)


@pytest.mark.parametrize("streams", [2, 1])
def test_a_hit_does_not_wait_for_another_callers_job(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    transfers, lane, consumer = CudaTransfers(GPU, "stream"), CudaLane(GPU, 0), Stream()
    if streams == 1:
        transfers._up = transfers._down  # the control
    with lane.entered():
        rows: Any = gpu.tower(lane.upload(random_inputs(0)[0]))
        late = gpu.stream
        late.work.append(refuse)
        done = lane.make_consumer_wait(Stream())
    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", lambda _: None)  # as if another thread were still waiting
        transfers.download(rows, done)
    transfers.upload(result_of(random_inputs(1)[0]), consumer)
    if streams == 1:
        with pytest.raises(AssertionError, match="this must not be waited for"):
            consumer.synchronize()
    else:
        consumer.synchronize()
        assert late.done == 0


@pytest.mark.parametrize("event", ["the job's", "one on the first stream"])
def test_followers_and_downloads_do_not_wait_for_what_the_first_caller_does_next(
    gpu: Gpu, event: str
) -> None:
    transfers, lane, first, second = CudaTransfers(GPU, "stream"), CudaLane(GPU, 0), Stream(), Stream()
    sources = random_inputs(0)[:2]
    with lane.entered():
        rows: Any = gpu.tower(lane.upload(sources[0]))
        done = lane.make_consumer_wait(first)
        # Nor for the next job, although the lane has events that it records again.
        gpu.tower(lane.upload(sources[1]))
        gpu.stream.work.append(refuse)
        lane.make_consumer_wait(first)
    first.work.append(refuse)
    if event != "the job's":
        first.record_event(done)  # the control
    transfers.share(rows, done, second)
    seen = gpu.read(rows, second)
    if event == "the job's":
        second.synchronize()
        assert torch.equal(seen, ~sources[0])
        assert torch.equal(transfers.download(rows, done), ~sources[0])
    else:
        for wait in (second.synchronize, lambda: transfers.download(rows, done)):
            with pytest.raises(AssertionError, match="this must not be waited for"):
                wait()


# --- while the host captures a graph -----------------------------------------------------------------


Use = Callable[[Gpu], object]


def a_job_of_a_lane(handoff: str) -> Use:
    return lambda gpu: rows_are_right(CudaLane(GPU, 0), Stream(), handoff, gpu.tower, gpu.read)


def a_download(handoff: str) -> Use:
    def use(gpu: Gpu) -> None:
        transfers, lane = CudaTransfers(GPU, handoff), CudaLane(GPU, 0)
        with lane.entered():
            rows: Any = gpu.tower(lane.upload(random_inputs(0)[0]))
            done = lane.make_consumer_wait(Stream())
        transfers.download(rows, done if handoff == "stream" else None)

    return use


def a_hit(handoff: str) -> Use:
    return lambda gpu: CudaTransfers(GPU, handoff).upload(result_of(random_inputs(0)[0]), Stream())


def opening_transfers(handoff: str) -> Use:
    return lambda gpu: CudaTransfers(GPU, handoff)


def a_lost_job(gpu: Gpu) -> None:
    lane = CudaLane(GPU, 0)
    with lane.entered():
        gpu.tower(lane.upload(random_inputs(0)[0]))
        assert lane.drain()


USES: dict[str, Use] = {
    **{f"a lane, {handoff}": a_job_of_a_lane(handoff) for handoff in HANDOFFS},
    **{f"a download, {handoff}": a_download(handoff) for handoff in HANDOFFS},
    **{f"a hit, {handoff}": a_hit(handoff) for handoff in HANDOFFS},
    "a failed job": a_lost_job,
    "opening a lane": lambda gpu: CudaLane(GPU, 0),
    **{f"opening transfers, {handoff}": opening_transfers(handoff) for handoff in HANDOFFS},
}


@pytest.mark.parametrize("use", USES)
def test_nothing_of_ours_breaks_a_capture_in_the_default_mode(gpu: Gpu, use: str) -> None:
    with gpu.captured(Stream()):
        USES[use](gpu)
    assert gpu.mode == GLOBAL  # as it was: the thread may be the host's


@pytest.mark.parametrize("use", USES)
def test_control_a_thread_in_the_default_mode_breaks_it(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    monkeypatch.setattr(device, "exchange_capture_mode", lambda mode: mode)
    with pytest.raises(AssertionError, match="the capture is invalid"), gpu.captured(Stream()):
        USES[use](gpu)


def test_a_results_callback_runs_in_the_hosts_mode(gpu: Gpu) -> None:
    """It is the host's code, though it runs in a thread of ours: nothing of ours is left set there."""
    lane, transfers = CudaLane(GPU, 0), CudaTransfers(GPU, "stream")
    with lane.entered():
        rows: Any = gpu.tower(lane.upload(random_inputs(0)[0]))
        done = lane.make_consumer_wait(Stream())
    transfers.share(rows, done, Stream())
    assert gpu.mode == GLOBAL


def test_the_mode_is_given_back_when_something_fails(gpu: Gpu) -> None:
    lane = CudaLane(GPU, 0)
    modes = []

    def fail() -> None:
        with lane.entered():
            modes.append(gpu.mode)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [*modes, gpu.mode] == [RELAXED, GLOBAL]


def test_without_cuda_the_mode_is_only_handed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver too old for the runtime the call fails, and changes nothing either."""
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(device, "_exchange_function", lambda: None)
        with device.relaxed_captures():
            assert device.exchange_capture_mode(RELAXED) == RELAXED


@pytest.mark.parametrize("held", [True, False])
def test_rows_that_a_graph_reads_must_be_held_as_long_as_it_is_replayed(gpu: Gpu, held: bool) -> None:
    """The graph has their address; dropped rows are the next job's memory, whoever recorded their stream."""
    lane, consumer = CudaLane(GPU, 0), Stream()
    source, other = random_inputs(0)[:2]
    with lane.entered():
        rows: Any = gpu.tower(lane.upload(source))
        lane.wait()
        lane.record_stream(rows, consumer)
    with gpu.captured(consumer) as graph:
        seen = gpu.read(rows, consumer)
    kept = rows if held else None
    del rows
    with lane.entered():
        gpu.tower(lane.upload(other))
        lane.wait()
    consumer.work += graph
    consumer.synchronize()
    assert torch.equal(seen, ~source) == held
    del kept


def test_a_graphs_memory_and_ours_are_apart(gpu: Gpu) -> None:
    """What is allocated in a capture comes from the graph's own pool, and goes back there."""
    lane, stream = CudaLane(GPU, 0), Stream()
    with gpu.captured(stream), gpu.entered(stream):
        intermediate = gpu.allocate(torch.Size([256, 588]))
        block = intermediate.block
        del intermediate
        with lane.entered():
            ours: Any = gpu.tower(lane.upload(random_inputs(0)[0]))
        assert ours.block is not block
        assert gpu.allocate(torch.Size([256, 588])).block is block
    with gpu.entered(stream):
        assert gpu.allocate(torch.Size([256, 588])).block is not block


# --- after a failed job ------------------------------------------------------------------------------


def test_drain_waits_for_all_work_of_a_failed_job(gpu: Gpu) -> None:
    lane = CudaLane(GPU, 0)
    with lane.entered():
        gpu.tower(lane.upload(random_inputs(0)[0]))
        assert lane.drain()
        assert gpu.stream.done == len(gpu.stream.work) == 2


@pytest.mark.parametrize("call", ["record", "synchronize"])
@pytest.mark.parametrize(("reports", "usable"), [(1, True), (10**6, False)])
def test_drain_survives_one_error_and_reports_a_lost_context(
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
        gpu.tower(lane.upload(random_inputs(0)[0]))
        monkeypatch.setattr(Event, call, reporting)
        assert lane.drain() is usable
        assert gpu.stream.done == (2 if usable else 0)
