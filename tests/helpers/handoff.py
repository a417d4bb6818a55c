"""Checks of the hand-off of rows between streams, and of their copies to the host and back.

Each step of a hand-off can be left out as a control. test_device.py runs the checks on a model of CUDA
streams, test_cuda.py on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from mm_encoder.contract import ImageMetadata, ImageResult
from mm_encoder.device import CudaLane, CudaTransfers

HANDOFFS = ("host", "stream")
# Pairs of a hand-off and the step that is left out.
CONTROLS = (
    ("stream", "staging"),
    ("host", "wait"),
    ("stream", "wait_event"),
    ("host", "record_stream"),
    ("stream", "record_stream"),
)
DOWNLOAD_CONTROLS = (("stream", "wait_stream"), ("host", "synchronize"), ("stream", "synchronize"))
UPLOAD_CONTROLS = (
    ("host", "synchronize"),
    ("stream", "wait_event"),
    ("host", "record_stream"),
    ("stream", "record_stream"),
)


def random_inputs(seed: int) -> list[torch.Tensor]:
    """Return 12 random inputs of one size."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (256, 588), dtype=torch.uint8, generator=generator) for _ in range(12)]


def leave_out(step: str, lane: CudaLane, consumer: Any) -> None:
    owner, name = {
        "staging": (lane._copied, "synchronize"),
        "wait": (lane, "wait"),
        "wait_event": (consumer, "wait_event"),
        "record_stream": (lane, "record_stream"),
    }[step]
    setattr(owner, name, lambda *_: None)


def rows_are_right(
    lane: CudaLane,
    consumer: Any,
    handoff: str,
    tower: Callable[[Any], Any],
    read: Callable[[Any, Any], torch.Tensor],
    seed: int = 0,
) -> list[bool]:
    """Take the lane through jobs as a replica does, with a `tower` that inverts bits.

    Return for each job whether `consumer` reads the right rows, although the caller has dropped both input
    and rows.
    """
    seen, wanted = [], []
    for number, source in enumerate(random_inputs(seed)):
        wanted.append(~source)
        with lane.entered():
            rows = tower(lane.upload(source))
            source.zero_()
            if handoff == "host":
                lane.wait()
            else:
                lane.make_consumer_wait(consumer)
            lane.record_stream(rows, consumer)
        seen.append(read(rows, consumer))
        del rows
        if number % 4 == 3:
            consumer.synchronize()  # it catches up, and the memory that it has read can be allocated again
    return [torch.equal(a.cpu(), b) for a, b in zip(seen, wanted, strict=True)]


def result_of(rows: torch.Tensor) -> ImageResult:
    length, width = rows.shape
    metadata = ImageMetadata(
        model="",
        mm_hash="",
        length=length,
        shape=(length, width),
        dtype=str(rows.dtype),
        device="cpu",
        strides=(width, 1),
        embedding_offsets=(0, length),
        grid_thws=((1, length, 1),),
        original_size=(1, 1),
        cache="memory",
    )
    return ImageResult(rows, metadata)


def leave_out_transfer_step(
    step: str,
    transfers: CudaTransfers,
    consumer: Any,
    monkeypatch: pytest.MonkeyPatch,
    tensor: type = torch.Tensor,
) -> None:
    """Leave a step out; `tensor` is the class of the rows on the device."""

    def unwaited(record_event: Callable[[Any], object], event: Any) -> None:
        record_event(event)
        event.synchronize = lambda: None

    match step:
        case "synchronize":
            for stream in (transfers._down, transfers._up):
                monkeypatch.setattr(stream, "record_event", partial(unwaited, stream.record_event))
        case "wait_stream":
            monkeypatch.setattr(transfers._down, "wait_event", lambda _: None)
        case "wait_event":
            monkeypatch.setattr(consumer, "wait_event", lambda _: None)
        case "record_stream":
            monkeypatch.setattr(tensor, "record_stream", lambda *_: None)
        case _:
            raise ValueError(step)


Checks = tuple[list[bool], list[bool]]
"""Whether rows are right as soon as they are returned, and whether they are right in the end."""


def checked(seen: list[tuple[torch.Tensor, bool, torch.Tensor]]) -> Checks:
    return [at_once for _, at_once, _ in seen], [torch.equal(host, wanted) for host, _, wanted in seen]


def downloaded_by_the_lane(lane: CudaLane, tower: Callable[[Any], Any], seed: int = 0) -> Checks:
    """Take the lane through jobs whose results are CPU tensors."""
    seen = []
    for source in random_inputs(seed):
        wanted = ~source
        with lane.entered():
            host = lane.download(tower(lane.upload(source)))
            seen.append((host, torch.equal(host, wanted), wanted))
    lane._stream.synchronize()
    return checked(seen)


def downloaded_for_the_cache(
    transfers: CudaTransfers,
    lane: CudaLane,
    consumer: Any,
    handoff: str,
    tower: Callable[[Any], Any],
    seed: int = 0,
) -> Checks:
    """Copy results to the host as the writer of a cache does, while the caller keeps none of them."""
    seen = []
    for source in random_inputs(seed):
        wanted = ~source
        with lane.entered():
            made = [tower(lane.upload(source))]
            done = None
            if handoff == "host":
                lane.wait()
            else:
                done = lane.make_consumer_wait(consumer)
            lane.record_stream(made[0], consumer)
        host = transfers.download(made.pop(), done)
        seen.append((host, torch.equal(host, wanted), wanted))
        consumer.synchronize()  # so that the consumer does not keep the memory from being allocated again
    transfers._down.synchronize()
    return checked(seen)


def hits_are_right(
    transfers: CudaTransfers,
    consumer: Any,
    read: Callable[[Any, Any], torch.Tensor],
    seed: int = 0,
) -> list[bool]:
    """Return for each hit whether `consumer` reads the right rows.

    The caller has dropped the rows, and the cache the entry that they were copied from.
    """
    seen, wanted = [], random_inputs(seed)
    for number, source in enumerate(wanted):
        rows = transfers.upload(result_of(source.pin_memory()), consumer).tensor
        seen.append(read(rows, consumer))
        del rows
        if number % 4 == 3:
            consumer.synchronize()
    return [torch.equal(a.cpu(), b) for a, b in zip(seen, wanted, strict=True)]
