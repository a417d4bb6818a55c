"""The order in which a replica calls its lane, seen by a lane that records its calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import BatchConfig, Encoder, ReplicaError
from mm_encoder.device import CpuLane
from mm_encoder.families.glm53 import GlmTower

from ..helpers.holding import hold_towers
from ..helpers.waiting import HANG, until

IMAGE = np.zeros((30, 30, 3), np.uint8)
PATCHES = 64


class RecordingLane(CpuLane):
    """Records every call, and checks that it is made in the replica's thread inside `entered`."""

    log: list[Any]

    def __init__(self, device: torch.device, log: list[Any]) -> None:
        super().__init__(device)
        self.log, self.priority = log, -7
        self.inside: int | None = None

    def note(self, *entry: Any) -> None:
        assert self.inside == threading.get_ident()
        self.log.append(entry)

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.inside = threading.get_ident()
        yield
        self.inside = None

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self.note("upload")
        return host

    def wait(self) -> None:
        self.note("wait")

    def make_consumer_wait(self, consumer: Any) -> Any:
        self.note("make wait", consumer)
        return "the job's event"

    def drain(self) -> bool:
        self.note("drain")
        return True

    def record_stream(self, result: torch.Tensor, consumer: Any) -> None:
        self.note("record_stream", consumer)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    entries: list[Any] = []

    def opened(device: torch.device, priority: int) -> RecordingLane:
        entries.append(("open", priority))
        return RecordingLane(device, entries)

    monkeypatch.setattr("mm_encoder.engine.replica.open_lane", opened)
    monkeypatch.setattr("mm_encoder.encoder.consumer_stream", lambda device: "the caller's stream")
    return entries


def test_the_host_hand_off_waits_before_the_result(
    glm53_checkpoint: Path, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = GlmTower.forward

    def noted(tower: GlmTower, *arguments: Any) -> torch.Tensor:
        log.append(("tower",))
        return forward(tower, *arguments)

    monkeypatch.setattr(GlmTower, "forward", noted)
    with Encoder(glm53_checkpoint, device="cpu", stream_priority=3) as encoder:
        assert encoder.stream_priority == -7
        assert log == [("open", 3), ("wait",)]  # the weights are uploaded before the encoder is ready
        log.clear()
        encoder.submit(IMAGE).add_done_callback(lambda _: log.append(("result",)))
    record_stream = ("record_stream", "the caller's stream")
    assert log == [("upload",), ("tower",), ("wait",), record_stream, ("result",), ("drain",)]


def test_the_stream_hand_off_does_not_wait(glm53_checkpoint: Path, log: list[Any]) -> None:
    with Encoder(glm53_checkpoint, device="cpu", handoff="stream") as encoder:
        log.clear()
        encoder.submit(IMAGE).add_done_callback(lambda _: log.append(("result",)))
    stream = "the caller's stream"
    handed_over = [("upload",), ("make wait", stream), ("record_stream", stream), ("result",)]
    assert log == [*handed_over, ("drain",)]  # the work that reads the weights is done before they are freed


def test_a_failed_job_is_drained_before_its_future_is_done(
    glm53_checkpoint: Path, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlmTower, "forward", lambda *_: 1 / 0)
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        log.clear()
        future = encoder.submit(IMAGE)
        future.add_done_callback(lambda _: log.append(("result",)))
        assert isinstance(future.exception(timeout=HANG), ReplicaError)
    assert log == [("upload",), ("drain",), ("result",), ("drain",)]


@pytest.mark.parametrize("handoff", ["host", "stream"])
def test_a_batch_is_uploaded_once_and_handed_to_each_callers_stream(
    glm53_checkpoint: Path, log: list[Any], monkeypatch: pytest.MonkeyPatch, handoff: Any
) -> None:
    streams, events = iter("abc"), iter(["a's event", "b's event", "c's event"])
    monkeypatch.setattr("mm_encoder.encoder.consumer_stream", lambda device: next(streams))
    make_wait = RecordingLane.make_consumer_wait
    monkeypatch.setattr(RecordingLane, "make_consumer_wait", lambda *call: make_wait(*call) and next(events))
    computed: list[Any] = []
    with hold_towers(monkeypatch) as hold:
        batching = BatchConfig(10**6, 9)
        with Encoder(
            glm53_checkpoint, device="cpu", handoff=handoff, batching=batching, stream_priority=0
        ) as encoder:
            first = encoder.submit(IMAGE)
            hold.wait()
            futures = [encoder.submit(IMAGE) for _ in range(2)]
            ready = encoder._engine.scheduler._ready
            until(lambda: len(ready) == 2)
            for job in ready:
                job.on_computed = lambda settings, done: computed.append(done)
            first.add_done_callback(lambda _: log.clear())
            for future in futures:
                future.add_done_callback(lambda _: log.append(("result",)))
            hold.release()
    handed = [[("make wait", s)] * (handoff == "stream") + [("record_stream", s)] for s in "bc"]
    waited = [("wait",)] * (handoff == "host")
    assert log == [("upload",), *waited, *handed[0], *handed[1], ("result",), ("result",), ("drain",)]
    assert computed == (["b's event", "c's event"] if handoff == "stream" else [None, None])


def test_a_batch_that_fails_is_drained_before_each_image_is_run_alone(
    glm53_checkpoint: Path, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batching = BatchConfig(10**6, 9)
    with (
        hold_towers(monkeypatch) as hold,
        Encoder(glm53_checkpoint, device="cpu", batching=batching) as encoder,
    ):
        first = encoder.submit(IMAGE)
        hold.wait()
        futures = [encoder.submit(IMAGE) for _ in range(2)]
        until(lambda: len(encoder._engine.scheduler._ready) == 2)
        run = GlmTower.run

        def failing(tower: GlmTower, patches: torch.Tensor, *rest: Any) -> torch.Tensor:
            assert len(patches) == PATCHES
            return run(tower, patches, *rest)

        monkeypatch.setattr(GlmTower, "run", failing)
        first.add_done_callback(lambda _: log.clear())
        for future in futures:
            future.add_done_callback(lambda _: log.append(("result",)))
        hold.release()
    alone = [("upload",), ("wait",), ("record_stream", "the caller's stream"), ("result",)]
    assert log == [("upload",), ("drain",), *alone, *alone, ("drain",)]
