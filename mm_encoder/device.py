"""The only module that speaks CUDA: devices, streams, events, staging.

A replica thread enters one `Lane` and does all its device work inside it. The CUDA half is written from the
documentation and has not run on a GPU yet: it is unverified.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch

from .contract import ImageResult
from .errors import DeviceOutOfMemoryError
from .runtime import loaded_libraries


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device of `cpu`, `cuda` (cuda:0) or `cuda:N`. Raises ValueError for anything else."""
    text = str(device)
    if text == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::([0-9]+))?", text)
    if match is None:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {text!r}")
    index = int(match[1] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        hint = "" if count else "; device='cpu' works everywhere"
        raise ValueError(f"no device {text!r}: this process sees {count} CUDA devices{hint}")
    return torch.device("cuda", index)


class Lane(Protocol):
    """A CUDA stream with its staging buffer and events; a no-op on the CPU. One per replica's thread."""

    device: torch.device
    priority: int
    """The stream priority that was granted."""

    def entered(self) -> Any:
        """Return a context in which the device and the lane's stream are current for this thread."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a contiguous CPU tensor to the device, for work that is enqueued on the lane later."""

    def download(self, rows: torch.Tensor) -> torch.Tensor:
        """Wait for everything enqueued so far and return the rows on the CPU, alone in their storage."""

    def wait(self) -> None:
        """Wait until everything enqueued on this lane so far is done, and for nothing else."""

    def make_consumer_wait(self, consumer: Any) -> Any:
        """Make the stream `consumer`, and not the host, wait for everything enqueued on this lane so far.

        Return the event that it waits for, which is of this job alone.
        """

    def drain(self) -> bool:
        """Wait until nothing of a failed job runs any more, so that it cannot fail the next one. False if the
        lane is unusable from now on.
        """

    def record_stream(self, result: torch.Tensor, consumer: Any) -> None:
        """Register `result` with the stream that will read it (Torch's `record_stream`)."""


class CpuLane:
    """The CPU: everything is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.priority = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def download(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def wait(self) -> None:
        pass

    def make_consumer_wait(self, consumer: Any) -> Any:
        return None

    def drain(self) -> bool:
        return True

    def record_stream(self, result: torch.Tensor, consumer: Any) -> None:
        pass


class CudaLane:
    """One stream on one GPU, with its own pinned staging buffer."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        with relaxed_captures():  # the first stream of a process may begin CUDA, and allocates
            # Torch clamps positive requests to 0; older releases refused them.
            self._stream = torch.cuda.Stream(device=device, priority=min(priority, 0))
        self.priority = self._stream.priority
        # Blocking: the waiting thread sleeps rather than spins on a core the host needs.
        self._done = torch.cuda.Event(blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._staging: torch.Tensor | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        # All three are of this thread, so the host's other threads see nothing of this.
        with relaxed_captures(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self._copied.synchronize()  # until then the previous upload reads the buffer
        size = host.numel() * host.element_size()
        held = 0 if self._staging is None else self._staging.numel()
        if self._staging is None or held < size:
            # Pinning may wait for the device, so it is made rare: at least double each time.
            size_now = max(size, 2 * held)
            self._staging = torch.empty(size_now, dtype=torch.uint8, device="cpu", pin_memory=True)
        staged = self._staging[:size].view(host.dtype).view(host.shape)
        staged.copy_(host)
        arrived = staged.to(self.device, non_blocking=True)
        self._copied.record(self._stream)
        return arrived

    def download(self, rows: torch.Tensor) -> torch.Tensor:
        host = _pinned_like(rows)
        host.copy_(rows, non_blocking=True)
        self.wait()
        return host

    def wait(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()

    def make_consumer_wait(self, consumer: Any) -> Any:
        done = torch.cuda.Event(blocking=True)  # others may wait for it long after the lane's next job
        done.record(self._stream)
        consumer.wait_event(done)
        return done

    def drain(self) -> bool:
        # An error of one job's work is reported once. One that spoilt the context (an illegal address, a
        # failed assertion, the device gone) is reported by every call from then on.
        for _ in range(2):
            try:
                self.wait()
            except Exception:
                continue
            return True
        return False

    def record_stream(self, result: torch.Tensor, consumer: Any) -> None:
        # The memory belongs to the lane's stream: without this it could be given to the next job while the
        # consumer's kernels still read it.
        result.record_stream(consumer)


class Transfers(Protocol):
    """Copies rows between the device and a cache on the CPU, beside the lanes; from any thread."""

    def download(self, rows: torch.Tensor, done: Any) -> torch.Tensor:
        """Wait for a result's rows and return them on the CPU, alone in their storage. `done` is the job's
        event; None if the host has waited for the rows.
        """

    def share(self, rows: torch.Tensor, done: Any, consumer: Any) -> None:
        """Hand rows to another stream, `consumer`, as well; `done` as for `download`."""

    def upload(self, result: ImageResult, consumer: Any) -> ImageResult:
        """Return the result on the device, handed to the stream `consumer` as an encoder's results are."""


class CpuTransfers:
    """The CPU: nothing is copied."""

    def download(self, rows: torch.Tensor, done: Any) -> torch.Tensor:
        return rows

    def share(self, rows: torch.Tensor, done: Any, consumer: Any) -> None:
        pass

    def upload(self, result: ImageResult, consumer: Any) -> ImageResult:
        return result


class CudaTransfers:
    """One GPU, on two streams that neither the lanes nor the host use."""

    def __init__(self, device: torch.device, handoff: str) -> None:
        self._device, self._handoff = device, handoff
        # Two: a download may wait for a job that still runs, and no other caller's hit should wait with it.
        with relaxed_captures():
            self._down, self._up = (torch.cuda.Stream(device=device) for _ in range(2))

    def share(self, rows: torch.Tensor, done: Any, consumer: Any) -> None:
        # Not for the stream that had the rows first: its caller may have enqueued other work meanwhile.
        if done is not None:
            consumer.wait_event(done)
        rows.record_stream(consumer)

    def download(self, rows: torch.Tensor, done: Any) -> torch.Tensor:
        with relaxed_captures():
            with torch.cuda.device(self._device), torch.cuda.stream(self._down):
                if done is not None:
                    self._down.wait_event(done)
                host = _pinned_like(rows)
                host.copy_(rows, non_blocking=True)
                self._down.record_event(copied := torch.cuda.Event(blocking=True))
            # No record_stream: `rows` lives here until it has been read.
            copied.synchronize()
        return host

    def upload(self, result: ImageResult, consumer: Any) -> ImageResult:
        # Rows are ordinary tensors whatever mode the caller is in.
        with relaxed_captures(), torch.inference_mode(False):
            with torch.cuda.device(self._device), torch.cuda.stream(self._up):
                rows = result.tensor.to(self._device, non_blocking=True)
                self._up.record_event(done := torch.cuda.Event(blocking=True))
            if self._handoff == "host":
                done.synchronize()
            else:
                consumer.wait_event(done)
            rows.record_stream(consumer)
        return ImageResult(rows, replace(result.metadata, device=str(rows.device)))


def open_transfers(device: torch.device, handoff: str) -> Transfers:
    """Return the copier of cached rows to and from `device`."""
    return CudaTransfers(device, handoff) if device.type == "cuda" else CpuTransfers()


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Let the calling thread wait and allocate while another thread captures a CUDA graph.

    In CUDA's and Torch's default mode ("global") such a call of any thread whose own mode is not relaxed
    invalidates the capture. The mode is the thread's own, and is given back afterwards: hits are uploaded in
    threads of the host's, and results' callbacks, which are the host's code, run in ours.
    """
    before = exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        exchange_capture_mode(before)


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def exchange_capture_mode(mode: int) -> int:
    """Set the calling thread's stream capture mode, and return the one it had."""
    value = ctypes.c_int(mode)
    exchange = _exchange_function()
    if exchange is not None:
        exchange(ctypes.byref(value))  # an error leaves all as it was
    return value.value


@cache
def _exchange_function() -> Any:
    """Return cudaThreadExchangeStreamCaptureMode of the runtime that Torch has loaded, else the driver's.

    Torch has no name for it in Python.
    """
    with suppress(OSError, AttributeError, IndexError):
        return ctypes.CDLL(loaded_libraries("cudart")[0]).cudaThreadExchangeStreamCaptureMode
    with suppress(OSError, AttributeError):
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None


def _pinned_like(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)


def open_lane(device: torch.device, priority: int) -> Lane:
    """Open a lane to `device`; the requested priority is clamped to what the device grants."""
    return CudaLane(device, priority) if device.type == "cuda" else CpuLane(device)


def consumer_stream(device: torch.device) -> Any:
    """Return the calling thread's current stream on `device`; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for CUDA, float32 for the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# Texts of ordinary RuntimeErrors of Torch: the CPU's allocator, pinning, cuBLAS.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException, what: str) -> DeviceOutOfMemoryError | None:
    """Return the library's error, chained, if `error` means too little memory for `what`; else None."""
    plain = isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)
    if not plain and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return None
    ours = DeviceOutOfMemoryError(f"not enough memory for {what}")
    ours.__cause__ = error
    return ours
