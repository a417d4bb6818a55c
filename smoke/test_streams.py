"""Streams, memory and their ordering on a GPU; skipped on the CPU. Not yet run on a GPU: written from the
documentation of `torch.cuda`.

`torch.cuda._sleep`, a kernel that spins, delays a stream, so that work enqueued behind it reliably happens
late. Each check of an ordering has a control: without the call that ensures the order, it must read wrong
rows; otherwise the check would prove nothing.
"""

# Torch has no types for the constructors of streams and events, and for `_sleep`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import DeviceOutOfMemoryError, Encoder
from mm_encoder.device import CudaLane

ROUNDS = 5
Upload = Callable[[CudaLane, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _needs_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU (--device cuda)")


@pytest.fixture
def noise() -> list[np.ndarray[Any, Any]]:
    """Ten different images of one size: the result of each fits the memory that another's has freed."""
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (224, 224, 3), np.uint8) for _ in range(10)]


def cycles(seconds: float, device: torch.device) -> int:
    """Return the argument of `_sleep` that delays a stream of `device` for about `seconds`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sample = 10_000_000
    with torch.cuda.device(device):
        torch.cuda._sleep(sample)  # loads the kernel
        start.record()
        torch.cuda._sleep(sample)
        end.record()
        end.synchronize()
    return int(sample * seconds * 1000 / start.elapsed_time(end))


def watch_uploads(monkeypatch: pytest.MonkeyPatch, first: Callable[[], object]) -> None:
    """Call `first` before every upload, in the replica's thread, where the lane's stream is current."""
    upload: Upload = CudaLane.upload

    def watched(lane: CudaLane, host: torch.Tensor) -> torch.Tensor:
        first()
        return upload(lane, host)

    monkeypatch.setattr(CudaLane, "upload", watched)


@pytest.mark.parametrize("requested", [1, 0, -1])
def test_rows_are_computed_on_a_stream_of_the_priority_reported(
    checkpoint: Path,
    device: torch.device,
    images: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    requested: int,
) -> None:
    streams: list[torch.cuda.Stream] = []
    watch_uploads(monkeypatch, lambda: streams.append(torch.cuda.current_stream(device)))
    with Encoder(checkpoint, device=device, stream_priority=requested) as encoder:
        encoder.generate(images[0])
    record_property("granted", encoder.stream_priority)
    hosts = {torch.cuda.current_stream(device).cuda_stream, torch.cuda.default_stream(device).cuda_stream}
    assert streams
    assert streams[0].cuda_stream not in hosts
    assert streams[0].priority == encoder.stream_priority
    assert encoder.stream_priority == min(requested, 0)  # 0 is CUDA's lowest


def read_late(
    encoder: Encoder, pictures: list[np.ndarray[Any, Any]], consumer: torch.cuda.Stream, hold: int
) -> tuple[torch.Tensor, bool]:
    """Return what `consumer` reads of the first image's rows if it reads them only after the caller has
    dropped them and encoded the other images; and whether it really read as late as that.
    """
    with torch.cuda.device(encoder.device), torch.cuda.stream(consumer):
        rows = encoder.generate(pictures[0])[0].tensor
        read = torch.empty_like(rows)
        torch.cuda._sleep(hold)
        read.copy_(rows)  # enqueued now, executed after the delay
    del rows
    for picture in pictures[1:]:
        encoder.generate(picture)
    late = not consumer.query()
    consumer.synchronize()
    return read.cpu(), late


def rounds_read_late(
    checkpoint: Path, device: torch.device, pictures: list[np.ndarray[Any, Any]]
) -> list[bool]:
    """Return, for each round in which the consumer read late, whether it read the right rows."""
    with Encoder(checkpoint, device=device) as encoder:
        # Several results at once, so that later rounds find cached memory: an allocation by the driver may
        # wait for the device.
        wanted = encoder.generate(pictures)[0].tensor.cpu()
        begin = time.perf_counter()
        for picture in pictures[1:]:
            encoder.generate(picture)
        hold = cycles(3 * (time.perf_counter() - begin) + 0.2, device)
        # One stream for all rounds: Torch cycles through 32 streams, and the lane has one of them.
        consumer = torch.cuda.Stream(device)
        outcomes = []
        for _ in range(ROUNDS):
            read, late = read_late(encoder, pictures, consumer, hold)
            if late:
                outcomes.append(torch.equal(read, wanted))
            else:
                hold *= 2
    assert outcomes, (
        "the consumer's stream was never delayed long enough: streams do not run concurrently here "
        "(is CUDA_LAUNCH_BLOCKING or CUDA_DEVICE_MAX_CONNECTIONS=1 set?)"
    )
    return outcomes


def test_a_late_consumer_reads_the_right_rows(
    checkpoint: Path, device: torch.device, noise: list[np.ndarray[Any, Any]]
) -> None:
    assert all(rounds_read_late(checkpoint, device, noise))


def test_control_a_late_consumer_reads_wrong_rows_without_hand_over(
    checkpoint: Path,
    device: torch.device,
    noise: list[np.ndarray[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaLane, "record_stream", lambda *_: None)
    assert not all(rounds_read_late(checkpoint, device, noise))


def read_at_once(
    checkpoint: Path,
    device: torch.device,
    pictures: list[np.ndarray[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[bool], list[bool]]:
    """Encode with handoff="stream" and a lane that is delayed before every image. Return two lists, per
    image: whether a consumer that reads without waiting gets the right rows, and whether `generate` returned
    before the rows were computed.
    """
    with Encoder(checkpoint, device=device) as encoder:
        wanted = [result.tensor.cpu() for result in encoder.generate(pictures)]
    hold = cycles(0.2, device)
    watch_uploads(monkeypatch, lambda: torch.cuda._sleep(hold))
    consumer = torch.cuda.Stream(device)
    reads, ahead = [], []
    with Encoder(checkpoint, device=device, handoff="stream") as encoder:
        with torch.cuda.device(device), torch.cuda.stream(consumer):
            for picture in pictures:
                rows = encoder.generate(picture)[0].tensor
                ahead.append(not consumer.query())
                reads.append(rows.clone())
                del rows
        consumer.synchronize()
    return [torch.equal(read.cpu(), rows) for read, rows in zip(reads, wanted, strict=True)], ahead


def test_handoff_stream_gives_the_same_bits_on_the_consumers_stream(
    checkpoint: Path,
    device: torch.device,
    noise: list[np.ndarray[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, ahead = read_at_once(checkpoint, device, noise, monkeypatch)
    assert all(right)
    assert any(ahead), "the host waited for every result"


def test_control_handoff_stream_gives_wrong_bits_without_the_wait(
    checkpoint: Path,
    device: torch.device,
    noise: list[np.ndarray[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaLane, "make_consumer_wait", lambda *_: None)
    right, _ = read_at_once(checkpoint, device, noise, monkeypatch)
    assert not all(right)


def test_an_image_that_does_not_fit_fails_alone(
    encoder: Encoder,
    device: torch.device,
    images: list[bytes],
    expected: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        # More memory than any GPU has: the allocator itself raises, in a replica's thread.
        watch_uploads(patch, lambda: torch.empty(1 << 50, dtype=torch.uint8, device=device))
        with pytest.raises(DeviceOutOfMemoryError):
            encoder.generate(images[0])
    assert torch.equal(encoder.generate(images[0])[0].tensor.cpu(), expected[0])
