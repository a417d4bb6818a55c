"""Failures of the engine itself, and how health(), stats() and the log report them."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import (
    DeadlineExceededError,
    DeviceOutOfMemoryError,
    Encoder,
    EncoderBusyError,
    EncoderClosedError,
    EncoderState,
    Health,
    ImageResult,
    MediaDecodeError,
    ReplicaError,
)
from mm_encoder.device import CpuLane
from mm_encoder.engine.engine import Engine
from mm_encoder.engine.preprocess import Preprocessor
from mm_encoder.engine.tally import nearest_rank
from mm_encoder.families.glm53 import Glm53, GlmTower
from mm_encoder.runtime import native_summary

from ..helpers.holding import Hold
from ..helpers.images import png
from ..helpers.waiting import HANG, until

pytestmark = pytest.mark.threads


class BrokenLane(CpuLane):
    """A lane whose device is lost once `gone` is set: drain() then fails."""

    gone: threading.Event

    def drain(self) -> bool:
        return not self.gone.is_set()


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event: while it is set, a failed job loses its replica, as an unusable CUDA context does."""
    event = threading.Event()

    def broken_lane(device: torch.device, priority: int) -> BrokenLane:
        lane = BrokenLane(device)
        lane.gone = event
        return lane

    monkeypatch.setattr("mm_encoder.engine.replica.open_lane", broken_lane)
    return event


def submitted(encoder: Encoder, count: int) -> list[Future[ImageResult]]:
    return [encoder.submit(png(seed=seed)) for seed in range(count)]


# --- lost replicas -----------------------------------------------------------------------------------


def test_a_lost_replica_fails_its_job_and_the_others_go_on(
    glm53_checkpoint: Path, towers: Hold, gone: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    cause = RuntimeError("CUDA error: an illegal memory access was encountered")
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2, queue_depth=8) as encoder:
        futures = submitted(encoder, 6)
        towers.wait(2)
        gone.set()
        towers.fail_with(cause)
        towers.release()
        errors = [error for future in futures if (error := future.exception(timeout=HANG))]
        assert [type(error) for error in errors] == [ReplicaError]
        assert errors[0].__cause__ is cause
        assert "in held" in errors[0].__notes__[0]  # the stack, as text
        health = encoder.health()
        assert health.state == "degraded"
        assert health.serving
        assert sorted(replica.alive for replica in health.replicas) == [False, True]
        assert health.last_error is not None
        assert "illegal memory access" in health.last_error
        assert len(encoder.generate([png()] * 4)) == 4
    lost = [record for record in caplog.records if getattr(record, "mm_event", "") == "replica_lost"]
    assert [record.levelname for record in lost] == ["ERROR"]
    assert encoder.health().state == EncoderState.CLOSED


def test_losing_the_last_replica_fails_every_call_at_once(
    glm53_checkpoint: Path, towers: Hold, gone: threading.Event
) -> None:
    cause = RuntimeError("CUDA error: device-side assert triggered")
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=3)
    running, *waiting = submitted(encoder, 4)
    towers.wait()
    refused: list[BaseException] = []

    def late(call: Callable[[], object]) -> None:
        try:
            call()
        except ReplicaError as error:
            refused.append(error)

    calls: list[Callable[[], object]] = [
        lambda: encoder.submit(png()),
        lambda: encoder.generate([png(), png()]),
        lambda: asyncio.run(encoder.generate_async(png())),
    ]
    callers = [threading.Thread(target=late, args=(call,)) for call in calls]
    for caller in callers:
        caller.start()
    until(lambda: encoder.health().waiting == 3)
    gone.set()
    towers.fail_with(cause)
    towers.release()
    for caller in callers:
        caller.join(HANG)
    received = [
        running.exception(timeout=HANG),
        *(future.exception(timeout=HANG) for future in waiting),
        *refused,
    ]
    assert len(received) == 7
    for error in received:
        assert isinstance(error, ReplicaError)
        assert "is lost: RuntimeError: CUDA error: device-side assert" in str(error)
    health = encoder.health()
    assert health.state == "failed"
    assert not health.serving
    assert "device-side assert" in str(health.last_error)
    assert (health.queue_length, health.queue_bytes, health.waiting) == (0, 0, 0)
    for call in calls:
        with pytest.raises(ReplicaError, match="device-side assert"):
            call()
    assert encoder.stats().in_flight == 0
    encoder.close()
    assert encoder.health().state == "closed"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_thread_that_dies_between_jobs_is_detected(glm53_checkpoint: Path, replicas: int) -> None:
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=replicas) as encoder:
        kill(encoder._engine._replicas[0].thread)
        # It is detected when the thread next wakes; the job that woke it must not be lost.
        outcomes: list[object] = []
        for _ in range(8):
            try:
                outcomes += encoder.generate(png())
            except ReplicaError as error:
                outcomes.append(error)
        until(lambda: encoder.health().state == ("failed" if replicas == 1 else "degraded"))
        if replicas == 1:
            assert all(isinstance(outcome, ReplicaError) for outcome in outcomes)
        else:
            assert all(isinstance(outcome, ImageResult) for outcome in outcomes)


def test_losing_the_last_replica_during_close_still_closes(
    glm53_checkpoint: Path, towers: Hold, gone: threading.Event
) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    running = encoder.submit(png())
    towers.wait()
    closer = threading.Thread(target=encoder.close)
    closer.start()
    until(lambda: encoder.health().state == "draining")
    gone.set()
    towers.fail_with(RuntimeError("CUDA error: gone"))
    towers.release()
    closer.join(HANG)
    assert isinstance(running.exception(timeout=HANG), ReplicaError)
    with pytest.raises(EncoderClosedError):
        encoder.submit(png())


@pytest.mark.parametrize("way", ["with", "async with"])
def test_a_callback_that_exits_does_not_stop_the_closing(
    glm53_checkpoint: Path, towers: Hold, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=9)
    running = encoder.submit(png())
    towers.wait()
    waiting = submitted(encoder, 3)
    for future in waiting:
        future.add_done_callback(lambda _: sys.exit(3))
    threading.Timer(0.1, towers.release).start()

    async def leave() -> None:
        async with encoder:
            raise KeyError

    def leave_by_with() -> None:
        with encoder:
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(asyncio.wait_for(leave(), HANG)) if way == "async with" else leave_by_with()
    assert running.result(timeout=0)
    assert all(future.cancelled() for future in waiting)
    assert encoder.health().state == "closed"
    assert "a callback on a result failed" in caplog.text


def kill(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread, wherever it next runs Python code."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def test_a_preprocessing_thread_survives_an_interruption(
    glm53_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Encoder(glm53_checkpoint, device="cpu", preprocess_workers=2) as encoder:
        for _ in range(5):
            for preprocessor in encoder._engine._preprocessors:
                kill(preprocessor.thread)
            for _ in range(4):
                assert encoder.generate(png())
        assert encoder.health().state == "ready"
    assert "was interrupted and goes on" in caplog.text


def test_a_preprocessing_thread_interrupted_with_a_job_fails_that_job(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Preprocessor._prepare

    def interrupted(self: Preprocessor, job: Any) -> Any:
        monkeypatch.setattr(Preprocessor, "_prepare", work)
        raise SystemExit

    monkeypatch.setattr(Preprocessor, "_prepare", interrupted)
    with pytest.raises(ReplicaError, match="SystemExit"):
        encoder.generate(png())
    assert encoder.generate(png())


def test_out_of_memory_does_not_lose_the_replica(
    encoder: Encoder, towers: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers.release()
    towers.fail_with(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(DeviceOutOfMemoryError):
        encoder.generate(png())
    assert encoder.health().state == "ready"
    assert "DeviceOutOfMemoryError" in str(encoder.health().last_error)
    assert encoder.generate(png())


# --- health ------------------------------------------------------------------------------------------


def test_health_of_an_idle_encoder(encoder: Encoder) -> None:
    encoder.generate(png())
    until(lambda: all(worker.busy_s is None for worker in encoder.health().replicas))
    health = encoder.health()
    assert health.state is EncoderState.READY
    assert [worker.name for worker in health.replicas] == ["mm-encoder-replica-0"]
    assert all(worker.alive and not worker.wedged for worker in (*health.replicas, *health.preprocessing))
    assert (health.queue_length, health.queue_bytes, health.waiting) == (0, 0, 0)
    assert health.oldest_s is None
    assert health.last_error is None


def test_health_reports_waiting_queued_and_running_work(glm53_checkpoint: Path, towers: Hold) -> None:
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=2) as encoder:
        submitted(encoder, 3)
        towers.wait()
        caller = threading.Thread(target=encoder.submit, args=(png(),))
        caller.start()
        until(lambda: encoder.health().waiting == 1)
        health = encoder.health()
        assert health.state == "ready"
        assert health.queue_length == 2
        assert health.queue_bytes > 0
        assert health.oldest_s is not None
        assert health.replicas[0].busy_s is not None
        later = encoder.health()
        assert later.oldest_s is not None
        assert later.oldest_s >= health.oldest_s > 0
        assert encoder.stats().in_flight == 4
        towers.release()
        caller.join(HANG)


@pytest.mark.parametrize("where", ["tower", "decoder"])
def test_a_stuck_thread_is_reported_as_wedged_and_recovers(
    glm53_checkpoint: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    cls, method = (GlmTower, "forward") if where == "tower" else (Glm53, "patches")
    original = getattr(cls, method)

    def stuck(*arguments: Any) -> Any:
        assert opened.wait(HANG)
        return original(*arguments)

    monkeypatch.setattr(cls, method, stuck)
    with Encoder(glm53_checkpoint, device="cpu", wedged_after=0.05) as encoder:
        future = encoder.submit(png())

        def wedged(health: Health) -> list[bool]:
            return [w.wedged for w in (health.replicas if where == "tower" else health.preprocessing)]

        until(lambda: any(wedged(encoder.health())))
        assert encoder.health().state == "degraded"
        assert encoder.health().serving
        opened.set()
        assert future.result(timeout=HANG)
        until(lambda: encoder.health().state == "ready")


def test_health_reports_starting_and_draining(
    glm53_checkpoint: Path, towers: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Engine] = []
    seen: list[str] = []
    begin, build = Engine.__init__, Glm53.build_tower

    def noted(engine: Engine, *arguments: Any, **options: Any) -> None:
        engines.append(engine)
        begin(engine, *arguments, **options)

    def watched(*arguments: Any) -> Any:
        seen.append(engines[0].health().state)
        return build(*arguments)

    monkeypatch.setattr(Engine, "__init__", noted)
    monkeypatch.setattr(Glm53, "build_tower", watched)
    encoder = Encoder(glm53_checkpoint, device="cpu")
    engines.clear()
    assert seen == ["starting"]
    future = encoder.submit(png())
    towers.wait()
    closer = threading.Thread(target=encoder.close)
    closer.start()
    until(lambda: encoder.health().state == "draining")
    towers.release()
    closer.join(HANG)
    assert encoder.health().state == "closed"
    assert future.result(timeout=0)


def test_health_and_stats_work_inside_a_callback(encoder: Encoder) -> None:
    answers: list[Any] = []
    done = threading.Event()

    def probe(_: Future[ImageResult]) -> None:
        answers.append((encoder.health().state, encoder.stats().succeeded))
        done.set()

    encoder.submit(png()).add_done_callback(probe)
    assert done.wait(HANG)
    assert answers == [("ready", 1)]


# --- stats -------------------------------------------------------------------------------------------


def test_every_image_is_counted_once(glm53_checkpoint: Path, towers: Hold) -> None:
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=3) as encoder:
        running = encoder.submit(png())
        towers.wait()
        cancelled = encoder.submit(png())
        late = encoder.submit(png(), deadline=time.monotonic() + 0.05)
        assert cancelled.cancel()
        assert isinstance(late.exception(timeout=HANG), DeadlineExceededError)
        bad = encoder.submit(b"nothing")
        assert isinstance(bad.exception(timeout=HANG), MediaDecodeError)
        waiting = submitted(encoder, 3)
        with pytest.raises(EncoderBusyError):
            encoder.submit(png(), timeout=0)
        stats = encoder.stats()
        assert (stats.requests, stats.in_flight) == (8, 4)
        towers.release()
        for future in (running, *waiting):
            assert future.result(timeout=HANG)
    stats = encoder.stats()
    assert (stats.requests, stats.in_flight, stats.succeeded, stats.failed) == (8, 0, 4, 1)
    assert (stats.cancelled, stats.late, stats.refused) == (1, 1, 1)
    assert stats.errors == (("MediaDecodeError", 1),)
    assert encoder.health().last_error is None  # bad media is not an engine error


def test_stage_times_match_the_timings_of_the_results(encoder: Encoder) -> None:
    assert encoder.stats().stages == ()
    results = [encoder.generate(png(seed=seed))[0] for seed in range(20)]
    stages = {stage.stage: stage for stage in encoder.stats().stages}
    names = [stage for stage, _ in results[0].metadata.timings]
    assert list(stages) == [*names, "total"]
    for name in names:
        times = sorted(dict(result.metadata.timings)[name] for result in results)
        assert (stages[name].p50, stages[name].p95, stages[name].p99) == (times[9], times[18], times[19])


def test_percentiles_are_nearest_rank() -> None:
    assert nearest_rank([3.0, 1.0, 2.0], 50, 95, 99) == [2.0, 3.0, 3.0]
    hundred = [float(value) for value in range(1, 101)]
    assert nearest_rank(hundred, 1, 50, 95, 99, 100) == [1.0, 50.0, 95.0, 99.0, 100.0]
    assert nearest_rank([7.0], 50, 99) == [7.0, 7.0]


# --- the log -----------------------------------------------------------------------------------------


def test_log_records_have_fields_and_bad_media_is_not_logged(
    glm53_checkpoint: Path, towers: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    towers.release()
    with caplog.at_level(logging.INFO, "mm_encoder"), Encoder(glm53_checkpoint, device="cpu") as encoder:
        encoder.submit(b"nothing").exception()
        towers.fail_with(ValueError("odd"))
        encoder.submit(png()).exception(timeout=HANG)
    events = [(getattr(r, "mm_event", None), r.levelname) for r in caplog.records]
    assert events == [("ready", "INFO"), ("job_failed", "WARNING"), ("closed", "INFO")]
    assert native_summary() in caplog.records[0].getMessage()
    failed = caplog.records[1]
    assert (failed.mm_error, failed.mm_state) == ("ReplicaError", "running")  # type: ignore[attr-defined]
    assert "ValueError: odd" in failed.getMessage()
    assert {record.name for record in caplog.records} == {"mm_encoder"}


# --- futures changed by callers, and unusual arguments -----------------------------------------------


@pytest.mark.parametrize("change", ["set_result", "set_exception", "set_running_or_notify_cancel"])
def test_changing_a_future_from_outside_affects_only_its_caller(
    glm53_checkpoint: Path, towers: Hold, change: str
) -> None:
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=8) as encoder:
        running = encoder.submit(png())
        towers.wait()
        future = encoder.submit(png(seed=1))
        given: dict[str, list[Any]] = {"set_result": [None], "set_exception": [KeyError()]}
        getattr(future, change)(*given.get(change, []))
        towers.release()
        assert running.result(timeout=HANG)
        assert encoder.generate(png(seed=2))
        assert future.done()
        assert encoder.health().state == "ready"
        until(lambda: encoder.stats().in_flight == 0)
        assert encoder.health().queue_length == 0


def test_a_pipe_or_device_file_is_refused_without_blocking(encoder: Encoder, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert isinstance(encoder.submit(pipe).exception(timeout=0), MediaDecodeError)
    with pytest.raises(MediaDecodeError, match="it is not a regular file"):
        asyncio.run(encoder.generate_async(pipe))
    with pytest.raises(MediaDecodeError, match="it is not a regular file"):
        encoder.generate(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"timeout": -1}, ValueError, "timeout must be at least 0 seconds, got -1"),
        ({"timeout": float("nan")}, ValueError, "timeout must be at least 0 seconds, got nan"),
        ({"timeout": "1"}, TypeError, "timeout must be a number of seconds, got str"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds, got bool"),
        ({"deadline": time.time() + 5}, ValueError, r"that is years ahead \(was it time.time\(\)\?\)"),
        (
            {"deadline": float("nan")},
            ValueError,
            r"on time.monotonic\(\)'s clock, got nan; None is no deadline$",
        ),
        ({"timeout": np.True_}, TypeError, "timeout must be a number of seconds, got bool"),
        ({"deadline": None, "timeout": []}, TypeError, "got list"),
        ({"deadline": "soon"}, TypeError, "deadline must be a moment on time.monotonic.* got str"),
    ],
)
def test_invalid_timeouts_and_deadlines_raise(
    encoder: Encoder, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        encoder.submit(png(), **given)
    with pytest.raises(error, match=message):
        asyncio.run(encoder.generate_async(png(), **given))


@pytest.mark.parametrize("past", [0, -1, -1e300, float("-inf")])
def test_a_deadline_in_the_past_is_late(encoder: Encoder, past: float) -> None:
    assert isinstance(encoder.submit(png(), deadline=past).exception(timeout=0), DeadlineExceededError)


def test_timeouts_and_deadlines_may_be_numpys_numbers(encoder: Encoder) -> None:
    submit: Any = encoder.submit
    for kind in (np.float32, np.float64, np.int64):
        soon = kind(time.monotonic() + HANG)
        assert submit(png(), timeout=kind(HANG), deadline=soon).result(timeout=HANG)
    late = submit(png(), deadline=np.float32(-1)).exception(timeout=0)
    assert isinstance(late, DeadlineExceededError)


def test_infinite_timeouts_and_deadlines_are_accepted(encoder: Encoder) -> None:
    assert encoder.submit(png(), timeout=10**400, deadline=float("inf")).result(timeout=HANG)


def test_close_async_in_a_callback_does_not_deadlock(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    closed = threading.Event()

    def on_result(_: Future[ImageResult]) -> None:
        asyncio.run(encoder.close_async())
        closed.set()

    encoder.submit(png()).add_done_callback(on_result)
    assert closed.wait(HANG)
    encoder.close()
    assert encoder.health().state == "closed"


def test_a_dropped_encoder_leaves_no_python_thread_object(glm53_checkpoint: Path) -> None:
    before = set(threading.enumerate())
    encoder = Encoder(glm53_checkpoint, device="cpu")
    encoder.generate(png())
    del encoder
    gc.collect()
    until(lambda: set(threading.enumerate()) <= before)
