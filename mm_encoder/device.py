"""The only module that speaks CUDA: which device, which stream, which fence.

A replica thread enters one `Lane` and does all its device work inside it. The CPU's lane has the same
shape and does nothing. The CUDA half is written from the documentation and has not run on a GPU yet.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from .contract import ImageResult
from .errors import DeviceOutOfMemoryError


def parse_device(device: str | torch.device) -> torch.device:
    """`cpu`, `cuda` or `cuda:N`; anything else raises ValueError. `cuda` is cuda:0."""
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
    """One replica's way to its device; everything is called in the replica's thread."""

    device: torch.device
    priority: int
    """The stream priority that was granted."""

    def entered(self) -> Any:
        """Context in which the device and the lane's stream are current for this thread."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A contiguous CPU tensor on the device, ready for work enqueued later on the lane."""

    def download(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows on the CPU, in a storage of their own, once everything enqueued so far is done."""

    def wait(self) -> None:
        """Wait until everything enqueued on this lane so far is done; for nothing else."""

    def make_consumer_wait(self, consumer: Any) -> None:
        """Have the stream `consumer` wait for everything enqueued on this lane so far; the host does not."""

    def drain(self) -> bool:
        """After a failed job: let nothing of it run on, so that what it left cannot fail the next. False if
        the lane cannot be used any more.
        """

    def record_stream(self, result: torch.Tensor, consumer: Any) -> None:
        """Register `result` with the stream that will read it."""


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

    def make_consumer_wait(self, consumer: Any) -> None:
        pass

    def drain(self) -> bool:
        return True

    def record_stream(self, result: torch.Tensor, consumer: Any) -> None:
        pass


class CudaLane:
    """One stream on one GPU, with its own pinned staging buffer."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        # Torch clamps positive requests to 0; older releases refused them.
        self._stream = torch.cuda.Stream(device=device, priority=min(priority, 0))
        self.priority = self._stream.priority
        # Blocking: the waiting thread sleeps rather than spins on a core the host needs.
        self._done = torch.cuda.Event(blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._staging: torch.Tensor | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        # Device and stream are current per thread, so the host's other threads see nothing of this.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self._copied.synchronize()  # until then the buffer is the previous upload's
        size = host.numel() * host.element_size()
        held = 0 if self._staging is None else self._staging.numel()
        if self._staging is None or held < size:
            # Pinning may wait for the device, so it happens rarely: at least twice as much each time.
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

    def make_consumer_wait(self, consumer: Any) -> None:
        self._done.record(self._stream)
        consumer.wait_event(self._done)

    def drain(self) -> bool:
        # An error of one job's work is reported once and gone. One that spoilt the context (an illegal
        # address, a failed assertion, the device gone) is reported by every call from then on.
        for _ in range(2):
            try:
                self.wait()
            except Exception:
                continue
            return True
        return False

    def record_stream(self, result: torch.Tensor, consumer: Any) -> None:
        # The memory belongs to the lane's stream: without this it could be given to the next job
        # while the consumer's kernels still read it.
        result.record_stream(consumer)


class Transfers(Protocol):
    """Rows between the device and a cache on the CPU, beside the lanes; from any thread."""

    def mark(self, consumer: Any) -> Any:
        """For `download`: the moment, on the stream `consumer`, from which a result that was just handed over
        to it is there.
        """

    def download(self, rows: torch.Tensor, since: Any) -> torch.Tensor:
        """A result's rows on the CPU, in a storage of their own. Waits for them."""

    def share(self, rows: torch.Tensor, first: Any, consumer: Any) -> None:
        """Hand rows that were handed over to the stream `first` over to another as well."""

    def upload(self, result: ImageResult, consumer: Any) -> ImageResult:
        """A result on the device, handed over to the stream `consumer` as an encoder's results are."""


class CpuTransfers:
    """The CPU: everything is there."""

    def mark(self, consumer: Any) -> Any:
        return None

    def download(self, rows: torch.Tensor, since: Any) -> torch.Tensor:
        return rows

    def share(self, rows: torch.Tensor, first: Any, consumer: Any) -> None:
        pass

    def upload(self, result: ImageResult, consumer: Any) -> ImageResult:
        return result


class CudaTransfers:
    """One GPU, on streams that neither the lanes nor the host use."""

    def __init__(self, device: torch.device, handoff: str) -> None:
        self._device, self._handoff = device, handoff
        # Two: a download may wait for somebody's stream, and no hit of anybody else should wait with it.
        self._down, self._up = (torch.cuda.Stream(device=device) for _ in range(2))

    def mark(self, consumer: Any) -> Any:
        # The rows are right on the consumer's stream, and maybe nowhere else yet. Where the host has waited
        # for them the consumer is left alone: it may have work for long, or be captured.
        if self._handoff == "host":
            return None
        consumer.record_event(there := torch.cuda.Event(blocking=True))
        return there

    def share(self, rows: torch.Tensor, first: Any, consumer: Any) -> None:
        if self._handoff == "stream" and consumer != first:
            consumer.wait_event(self.mark(first))
        rows.record_stream(consumer)

    def download(self, rows: torch.Tensor, since: Any) -> torch.Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self._down):
            if since is not None:
                self._down.wait_event(since)
            host = _pinned_like(rows)
            host.copy_(rows, non_blocking=True)
            self._down.record_event(done := torch.cuda.Event(blocking=True))
        # No record_stream: `rows` lives here until it has been read.
        done.synchronize()
        return host

    def upload(self, result: ImageResult, consumer: Any) -> ImageResult:
        # An encoder's own rows are ordinary tensors whatever mode the caller is in; so are these.
        with torch.inference_mode(False), torch.cuda.device(self._device), torch.cuda.stream(self._up):
            rows = result.tensor.to(self._device, non_blocking=True)
            self._up.record_event(done := torch.cuda.Event(blocking=True))
        if self._handoff == "host":
            done.synchronize()
        else:
            consumer.wait_event(done)
        rows.record_stream(consumer)
        return ImageResult(rows, replace(result.metadata, device=str(rows.device)))


def open_transfers(device: torch.device, handoff: str) -> Transfers:
    """The way of cached rows to and from `device`."""
    return CudaTransfers(device, handoff) if device.type == "cuda" else CpuTransfers()


def _pinned_like(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)


def open_lane(device: torch.device, priority: int) -> Lane:
    """A lane to `device`; the requested priority is clamped to what the device grants."""
    return CudaLane(device, priority) if device.type == "cuda" else CpuLane(device)


def consumer_stream(device: torch.device) -> Any:
    """The calling thread's current stream on `device`; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def describe(device: torch.device) -> dict[str, str]:
    """What of a device and of Torch may change the bits of a result, and stays as it is."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind = {"device": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    else:
        kind = {"device": f"cpu {platform.machine()}", "capability": torch.backends.cpu.get_cpu_capability()}
    return {**kind, "torch": str(torch.__version__), "cuda": str(torch.version.cuda or "none")}


def settings(device: torch.device) -> dict[str, str]:
    """The settings of Torch's that may change the bits of a result, as the host has them now."""
    # Not torch.get_float32_matmul_precision(), which raises once the host has set one of these instead.
    if device.type == "cpu":
        return {"matmul precision": torch.backends.mkldnn.matmul.fp32_precision}  # type: ignore[attr-defined]
    matmul = torch.backends.cuda.matmul
    return {
        "matmul precision": matmul.fp32_precision,
        "bf16 reductions": str(matmul.allow_bf16_reduced_precision_reduction),
    }


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA, float32 on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# How Torch says it in an ordinary RuntimeError: the CPU's allocator, pinning, cuBLAS.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException, what: str) -> DeviceOutOfMemoryError | None:
    """The library's error if `error` says that memory did not suffice for `what`, chained to it."""
    plain = isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)
    if not plain and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return None
    ours = DeviceOutOfMemoryError(f"not enough memory for {what}")
    ours.__cause__ = error
    return ours
