"""The scheduler: admission by jobs and bytes, order, cancellation, deadlines, closing."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from concurrent.futures import Future, wait
from typing import Any

import pytest

from mm_encoder.engine.admission import admit
from mm_encoder.engine.job import Job, JobState
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.engine.worker import Worker
from mm_encoder.errors import (
    DeadlineExceededError,
    EncoderBusyError,
    EncoderClosedError,
    MediaDecodeError,
    ReplicaError,
)

from ..helpers.jobs import enter, job, opened, run_one, take
from ..helpers.threads import joined, started
from ..helpers.waiting import HANG, until

pytestmark = pytest.mark.threads


def blocked(scheduler: Scheduler, waiting: Job) -> threading.Thread:
    """Start a thread that blocks in the admission of a job."""
    thread = started(lambda: enter(scheduler, waiting))
    until(lambda: scheduler.slots.waiting + scheduler.bytes.waiting > 0)
    thread.join(0.02)
    assert thread.is_alive()
    return thread


def held(scheduler: Scheduler) -> tuple[int, int]:
    return scheduler.slots.used, scheduler.bytes.used


def test_a_job_holds_its_slot_until_it_runs() -> None:
    scheduler = Scheduler(2, 100, replicas=1)
    jobs = [job() for _ in range(3)]
    enter(scheduler, jobs[0])
    enter(scheduler, jobs[1])
    thread = blocked(scheduler, jobs[2])
    assert held(scheduler) == (2, 6)
    assert run_one(scheduler) is jobs[0]
    thread.join(HANG)
    assert not thread.is_alive()
    assert held(scheduler) == (2, 6)


def test_bytes_are_bounded_and_an_oversized_job_enters_alone() -> None:
    scheduler = Scheduler(10, 100, replicas=1)
    enter(scheduler, job(60))
    thread = blocked(scheduler, job(60))
    run_one(scheduler)
    thread.join(HANG)
    assert held(scheduler) == (1, 60)
    run_one(scheduler)
    enter(scheduler, job(1000))
    assert held(scheduler) == (1, 1000)
    blocked(scheduler, job())


@pytest.mark.parametrize("interrupted", [JobState.QUEUED, JobState.READY])
def test_a_job_that_was_interrupted_on_its_way_takes_no_other_jobs_turn(
    monkeypatch: pytest.MonkeyPatch, interrupted: JobState
) -> None:
    """Threads are woken once a job: one that came without waking would be taken in place of the next."""
    scheduler, first, second = Scheduler(10, 100, replicas=1), job(), job()
    workers = [Worker(f"w{number}", scheduler) for number in range(2)]
    move_to = Job.move_to

    def struck_once(one: Job, state: JobState) -> None:
        if one is first and state is interrupted:
            monkeypatch.setattr(Job, "move_to", move_to)
            raise MemoryError
        move_to(one, state)

    monkeypatch.setattr(Job, "move_to", struck_once)
    if interrupted is JobState.QUEUED:
        scheduler.register(first)
        scheduler.slots.acquire(first, 1)
        with pytest.raises(MemoryError):
            scheduler.enqueue(first)
        enter(scheduler, second)
        taken = started(lambda: [scheduler.next_to_prepare(worker) for worker in workers])
    else:
        for one, worker in zip((first, second), workers, strict=True):
            enter(scheduler, one)
            assert scheduler.next_to_prepare(worker) is one
        with pytest.raises(MemoryError):
            scheduler.finish_preparing(workers[0])
        scheduler.finish_preparing(workers[1])
        replicas = [Worker(f"r{number}", scheduler) for number in range(2)]
        taken = started(lambda: [scheduler.next_to_run(replica) for replica in replicas])
    taken.join(HANG)
    assert not taken.is_alive()


def test_both_queues_are_fifo() -> None:
    scheduler = Scheduler(10, 100, replicas=1)
    jobs = [enter(scheduler, job()) for _ in range(5)]
    workers = [take(scheduler) for _ in jobs]
    assert [worker.job for worker in workers] == jobs
    for worker in reversed(workers):  # the first job is prepared last
        scheduler.finish_preparing(worker)
    assert [scheduler.next_to_run(worker) for worker in workers] == [(one,) for one in jobs]


def test_cancelling_frees_the_slot_at_once_unless_a_thread_has_the_job() -> None:
    scheduler = Scheduler(3, 100, replicas=1)
    ready, preparing, queued = (enter(scheduler, job()) for _ in range(3))
    scheduler.finish_preparing(take(scheduler))
    worker = take(scheduler)
    assert worker.job is preparing
    assert ready.future.cancel()
    assert held(scheduler) == (2, 6)
    assert queued.future.cancel()
    assert held(scheduler) == (1, 3)
    assert preparing.future.cancel()
    assert held(scheduler) == (1, 3)
    scheduler.finish_preparing(worker)
    assert held(scheduler) == (0, 0)
    assert {one.state for one in (ready, preparing, queued)} == {JobState.DONE}
    assert [one.image or one.source or one.patches for one in (ready, preparing, queued)] == [None] * 3


@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_a_job_that_its_caller_drops_in_preparation_keeps_its_slot_until_it_is_put_down(end: str) -> None:
    """The caller's thread, or its task, was slow to see that the slot was granted."""
    scheduler = Scheduler(1, 100, replicas=1)
    dropped = enter(scheduler, job(10))
    worker = take(scheduler)
    if end == "late":
        dropped.fail_if_pending(DeadlineExceededError("late"))
    scheduler.drop(dropped)
    assert dropped.future.done()
    assert held(scheduler) == (1, 10)
    assert dropped.source is not None
    scheduler.finish_preparing(worker)
    assert held(scheduler) == (0, 0)
    assert dropped.source is None


def test_whether_a_job_is_finished_is_seen_while_its_future_is_locked() -> None:
    """The scheduler asks under its own lock, where it waits for no other."""
    scheduler = Scheduler(1, 100, replicas=1)
    waiting, seen = enter(scheduler, job(10)), list[bool]()
    with waiting.future._condition:
        joined([started(lambda: seen.extend((waiting.finished, waiting.future.done())))])
    waiting.future.cancel()
    with waiting.future._condition:
        joined([started(lambda: seen.extend((waiting.finished, waiting.future.done())))])
    assert seen == [False, False, True, True]


def test_a_running_job_cannot_be_cancelled() -> None:
    scheduler = Scheduler(3, 100, replicas=1)
    enter(scheduler, job())
    assert not run_one(scheduler).future.cancel()


def test_closing_refuses_waiting_callers_and_drains_accepted_jobs() -> None:
    scheduler = Scheduler(1, 100, replicas=1)
    accepted = enter(scheduler, job())
    refused: list[BaseException] = []

    def late() -> None:
        try:
            enter(scheduler, job())
        except EncoderClosedError as error:
            refused.append(error)

    callers = [started(late) for _ in range(3)]
    until(lambda: scheduler.slots.waiting == 3)
    scheduler.close()
    for caller in callers:
        caller.join(HANG)
    assert len(set(map(id, refused))) == 3  # each has a separate exception
    assert run_one(scheduler) is accepted
    worker = Worker("test", scheduler)
    assert scheduler.next_to_prepare(worker) is None
    assert scheduler.next_to_run(worker) == ()
    with pytest.raises(EncoderClosedError):
        enter(scheduler, job())
    assert scheduler.tally.snapshot().refused == 4


@pytest.mark.parametrize("stage", ["opening", "bytes", "preparing"])
def test_a_closed_scheduler_waits_for_accepted_jobs(stage: str) -> None:
    scheduler = Scheduler(2, 100, replicas=1)
    gate = threading.Event()

    def slow(one: Job) -> None:
        assert gate.wait(HANG)
        opened(one)

    worker = None
    if stage == "bytes":
        enter(scheduler, job(90))
        blocked(scheduler, accepted := job(90))
    else:
        accepted = job()
        started(lambda: admit(scheduler, accepted, slow))
        until(lambda: accepted.state is JobState.OPENING)
    if stage == "preparing":
        gate.set()
        worker = take(scheduler)
    scheduler.close()
    got: list[tuple[Job, ...]] = []
    replica = started(lambda: got.extend(iter(lambda: scheduler.next_to_run(Worker("test", scheduler)), ())))
    replica.join(0.05)
    assert replica.is_alive()
    gate.set()
    if worker is not None:
        scheduler.finish_preparing(worker)
    else:
        started(lambda: prepare_all(scheduler))
    replica.join(HANG)
    assert not replica.is_alive()
    assert got[-1] == (accepted,)


def prepare_all(scheduler: Scheduler) -> None:
    worker = Worker("test", scheduler)
    while scheduler.next_to_prepare(worker) is not None:
        scheduler.finish_preparing(worker)


def test_cancelling_the_last_job_of_a_closed_scheduler_ends_its_replicas() -> None:
    scheduler = Scheduler(2, 100, replicas=1)
    waiting = enter(scheduler, job())
    scheduler.close()
    replica = started(lambda: scheduler.next_to_run(Worker("test", scheduler)))
    replica.join(0.05)
    assert replica.is_alive()
    waiting.future.cancel()
    replica.join(HANG)
    assert not replica.is_alive()


def test_a_future_does_not_keep_its_job_alive() -> None:
    scheduler = Scheduler(1, 100, replicas=1)
    enter(scheduler, job())
    done = run_one(scheduler)
    future, watch = done.future, weakref.ref(done)
    gc.disable()
    try:
        del done
        assert watch() is None
        assert not future.done()
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", ["queued", "preparing", "ready"])
def test_cancelling_wakes_every_waiter_of_the_future(stage: str) -> None:
    scheduler = Scheduler(2, 100, replicas=1)
    waiting = enter(scheduler, job())
    if stage != "queued":
        worker = take(scheduler)
    if stage == "ready":
        scheduler.finish_preparing(worker)
    waiting.future.cancel()
    assert wait([waiting.future], timeout=HANG).not_done == set()
    assert not waiting.start()
    waiting.fail_if_pending(ValueError())
    assert waiting.future.cancelled()


def test_exactly_one_of_cancel_deadline_and_start_wins() -> None:
    for _ in range(300):
        scheduler = Scheduler(1, 100, replicas=1)
        racing = enter(scheduler, job())
        barrier = threading.Barrier(3)
        outcome: list[bool] = []

        def cancel(racing: Job = racing, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            racing.future.cancel()

        def drop(racing: Job = racing, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            racing.fail_if_pending(DeadlineExceededError())

        def start(
            racing: Job = racing, barrier: threading.Barrier = barrier, outcome: list[bool] = outcome
        ) -> None:
            barrier.wait()
            outcome.append(racing.start())

        for thread in [started(work) for work in (cancel, drop, start)]:
            thread.join(HANG)
        late = not outcome[0] and not racing.future.cancelled()
        if not outcome[0]:
            assert wait([racing.future], timeout=HANG).not_done == set()
            assert racing.future.cancelled() or isinstance(racing.future.exception(), DeadlineExceededError)
            assert held(scheduler) == (0, 0)
        stats = scheduler.tally.snapshot()
        assert (stats.in_flight, stats.cancelled, stats.late) == (
            outcome[0],
            racing.future.cancelled(),
            late,
        )


def test_a_large_job_is_not_overtaken_by_small_ones() -> None:
    scheduler = Scheduler(10, 100, replicas=1)
    enter(scheduler, job(50))
    large, small = job(80), job(10)
    first = blocked(scheduler, large)
    second = started(lambda: enter(scheduler, small))  # would fit, but waits behind the large job
    until(lambda: scheduler.bytes.waiting == 2)
    run_one(scheduler)
    first.join(HANG)
    second.join(HANG)
    assert held(scheduler) == (2, 90)
    assert [run_one(scheduler), run_one(scheduler)] == [large, small]


def test_preparation_idle_waits_for_jobs_in_preparation() -> None:
    scheduler = Scheduler(3, 100, replicas=1)
    first, second = enter(scheduler, job()), enter(scheduler, job())
    assert scheduler.preparation_idle([first.future, second.future]) is None
    worker = take(scheduler)
    idle = scheduler.preparation_idle([second.future, first.future])
    assert idle is not None
    first.future.cancel()
    assert not idle.done()
    scheduler.finish_preparing(worker)
    assert idle.done()


# --- timeouts and deadlines --------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.02])
@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (1, "no slot within timeout={} s; 1 of queue_depth=1 slots .* raise timeout= or queue_depth=$"),
        (9, "no room for .* 80 bytes within timeout={} s; 90 of queue_bytes=100 bytes .* or queue_bytes=$"),
    ],
)
def test_a_full_queue_refuses_in_time(timeout: float, depth: int, message: str) -> None:
    scheduler = Scheduler(depth, 100, replicas=1)
    enter(scheduler, job(90))
    refused = job(80)
    with pytest.raises(EncoderBusyError, match="the queue is full: " + message.format(timeout)):
        enter(scheduler, refused, timeout)
    assert held(scheduler) == (1, 90)
    assert scheduler.slots.waiting == scheduler.bytes.waiting == 0
    assert isinstance(refused.future.exception(timeout=0), EncoderBusyError)
    stats = scheduler.tally.snapshot()
    assert (stats.requests, stats.refused, stats.in_flight) == (2, 1, 1)
    run_one(scheduler)
    enter(scheduler, job(90), 0)


def test_the_timeout_is_for_both_waits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(1, 100, replicas=1)
    enter(scheduler, job(90))
    clock = [1000.0]
    monkeypatch.setattr("mm_encoder.engine.admission.time.monotonic", lambda: clock[0])

    def slow(one: Job) -> None:
        clock[0] += 60  # more than the whole timeout, spent on opening
        opened(one)
        scheduler.bytes.acquire(job(90), 90)

    run_one(scheduler)
    with pytest.raises(EncoderBusyError):
        admit(scheduler, job(90, timeout=50), slow)


@pytest.mark.parametrize("far", [1e9, float("inf")])
def test_very_long_timeouts_and_deadlines_wait(far: float) -> None:
    scheduler = Scheduler(1, 100, replicas=1)
    deadlines = started(scheduler.deadlines.run)
    enter(scheduler, job(deadline=far))
    caller = started(lambda: enter(scheduler, job(deadline=far), far))
    until(lambda: scheduler.slots.waiting == 1)
    run_one(scheduler)
    caller.join(HANG)
    assert not caller.is_alive()
    assert deadlines.is_alive()
    scheduler.deadlines.end()
    deadlines.join(HANG)


def test_a_deadline_that_was_never_to_be_met_is_told_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(1, 100, replicas=1)
    monkeypatch.setattr("mm_encoder.engine.deadlines.time.monotonic", lambda: 1000.0)
    error = enter(scheduler, job(deadline=2.5)).future.exception(timeout=0)
    assert re.match(
        r"the deadline was 997\.500 s in the past .* pass time\.monotonic\(\) \+ seconds", str(error)
    )


def test_a_deadline_that_was_in_time_at_first_is_not_said_to_be_in_the_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Scheduler(1, 100, replicas=1)  # no thread runs the deadlines
    clock = [1000.0]
    monkeypatch.setattr("mm_encoder.engine.deadlines.time.monotonic", lambda: clock[0])
    late = job(deadline=1001.0)
    for clock[0] in (1000.0, 1002.0):  # as after a lookup in the cache
        scheduler.deadlines.watch(late)
    assert str(late.future.exception(timeout=0)).startswith("the deadline passed before")


@pytest.mark.parametrize("stage", ["waiting", "bytes", "queued", "preparing", "ready"])
def test_a_late_job_is_dropped_at_every_stage(stage: str) -> None:
    scheduler = Scheduler(1 if stage == "waiting" else 9, 100, replicas=1)
    deadlines = started(scheduler.deadlines.run)
    worker = None
    if stage in ("waiting", "bytes"):
        enter(scheduler, job(90))
    late = job(90, deadline=time.monotonic() + 0.1)
    caller = started(lambda: enter(scheduler, late))
    if stage in ("preparing", "ready"):
        until(lambda: late.state is JobState.QUEUED)
        worker = take(scheduler)
    if worker and stage == "ready":
        scheduler.finish_preparing(worker)
    assert isinstance(late.future.exception(timeout=HANG), DeadlineExceededError)
    caller.join(HANG)
    assert not caller.is_alive()
    if worker and stage == "preparing":
        assert held(scheduler) == (1, 90)
        scheduler.finish_preparing(worker)
    others = stage in ("waiting", "bytes")
    assert held(scheduler) == (others, 90 * others)
    stats = scheduler.tally.snapshot()
    assert (stats.late, stats.in_flight) == (1, others)
    scheduler.deadlines.end()
    deadlines.join(HANG)
    assert not deadlines.is_alive()


def test_a_passed_deadline_fails_at_once_and_a_running_job_finishes() -> None:
    scheduler = Scheduler(1, 100, replicas=1)  # no thread runs the deadlines
    late = enter(scheduler, job(deadline=1e-9))
    assert isinstance(late.future.exception(timeout=0), DeadlineExceededError)
    assert held(scheduler) == (0, 0)
    running_at = time.monotonic() + 0.05
    enter(scheduler, job(deadline=running_at))
    running = run_one(scheduler)
    deadlines = started(scheduler.deadlines.run)
    until(lambda: time.monotonic() > running_at + 0.05)
    assert not running.future.done()
    scheduler.deadlines.end()
    deadlines.join(HANG)


def test_an_earlier_deadline_added_later_is_met() -> None:
    scheduler = Scheduler(9, 100, replicas=1)
    deadlines = started(scheduler.deadlines.run)
    now = time.monotonic()
    far = enter(scheduler, job(deadline=now + 3600))
    until(lambda: scheduler.deadlines._next is not None)
    near = enter(scheduler, job(deadline=now + 0.05))
    assert isinstance(near.future.exception(timeout=HANG), DeadlineExceededError)
    assert not far.future.done()
    far.future.cancel()
    assert scheduler.deadlines._watched == {}
    scheduler.deadlines.end()
    deadlines.join(HANG)


# --- failures ----------------------------------------------------------------------------------------


def test_an_error_in_opening_releases_the_slot() -> None:
    scheduler = Scheduler(1, 100, replicas=1)

    def broken(one: Job) -> None:
        raise MediaDecodeError("the image is empty")

    bad = job()
    admit(scheduler, bad, broken)
    assert isinstance(bad.future.exception(timeout=0), MediaDecodeError)
    assert held(scheduler) == (0, 0)
    assert bad.image is None


def test_a_job_that_is_late_after_opening_does_not_wait_for_bytes() -> None:
    scheduler = Scheduler(9, 100, replicas=1)
    enter(scheduler, job(90))
    late = job(90)

    def slow(one: Job) -> None:
        opened(one)
        one.fail_if_pending(DeadlineExceededError())

    caller = started(lambda: admit(scheduler, late, slow))
    caller.join(HANG)
    assert not caller.is_alive()
    assert held(scheduler) == (1, 90)
    assert scheduler.bytes.waiting == 0
    assert late.source is None


@pytest.mark.parametrize("at", ["waiting", "opening", "bytes"])
def test_an_interrupted_caller_leaves_nothing_behind(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(1 if at == "waiting" else 9, 100, replicas=1)
    first = enter(scheduler, job(90))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    if at != "opening":
        monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        admit(scheduler, job(90), interrupted if at == "opening" else opened)
    assert held(scheduler) == (1, 90)
    assert scheduler.slots.waiting == scheduler.bytes.waiting == 0
    first.future.cancel()
    stats = scheduler.tally.snapshot()
    assert (held(scheduler), stats.in_flight, stats.cancelled) == ((0, 0), 0, 2)


def test_a_thread_that_is_interrupted_twice_loses_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time it fails its job; the second time comes between counting that and the outcome."""
    scheduler = Scheduler(9, 100, replicas=1)
    one = enter(scheduler, job(90))
    worker = take(scheduler)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_resolve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.fail_if_pending(MediaDecodeError("cut"))
    assert one.finished
    assert not one.future.done()
    scheduler.finish_preparing(worker)
    assert isinstance(one.future.exception(0), MediaDecodeError)
    assert (held(scheduler), scheduler.tally.snapshot().failed) == ((0, 0), 1)


def test_an_outcome_that_two_threads_give_at_once_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = job()
    set_exception = Future.set_exception

    def second(future: Future[Any], error: BaseException) -> None:
        set_exception(future, error)  # the other thread's
        set_exception(future, error)

    monkeypatch.setattr(Future, "set_exception", second)
    one.fail_if_pending(MediaDecodeError("cut"))
    assert isinstance(one.future.exception(0), MediaDecodeError)
    assert not caplog.records


def test_a_lost_replica_is_accounted_for_before_its_caller_knows() -> None:
    scheduler = Scheduler(3, 100, replicas=1)
    worker = Worker("replica", scheduler)
    enter(scheduler, job())
    scheduler.finish_preparing(take(scheduler))
    (running,) = scheduler.next_to_run(worker)
    seen: list[tuple[int, bool, str | None]] = []

    def look(_: object) -> None:
        seen.append((scheduler.replicas_left, worker.lost, scheduler.tally.last_error))
        with pytest.raises(ReplicaError):
            scheduler.require_open()

    running.future.add_done_callback(look)
    scheduler.on_replica_lost(worker, ValueError("gone"))
    assert seen == [(0, True, "ReplicaError: replica is lost: ValueError: gone")]


def test_losing_the_last_replica_fails_every_job() -> None:
    scheduler = Scheduler(3, 100, replicas=2)
    worker = Worker("replica", scheduler)
    enter(scheduler, job())
    scheduler.finish_preparing(take(scheduler))
    (running,) = scheduler.next_to_run(worker)
    accepted = [enter(scheduler, job()) for _ in range(3)]
    scheduler.finish_preparing(take(scheduler))
    take(scheduler)
    refused: list[BaseException] = []

    def late() -> None:
        try:
            enter(scheduler, job())
        except ReplicaError as error:
            refused.append(error)

    callers = [started(late) for _ in range(3)]
    until(lambda: scheduler.slots.waiting == 3)
    cause = ValueError("the device is gone")
    scheduler.on_replica_lost(worker, cause)
    assert running.future.exception(timeout=0) is not None
    assert not any(one.future.done() for one in accepted)
    scheduler.require_open()
    scheduler.on_replica_lost(Worker("other", scheduler), cause)
    for caller in callers:
        caller.join(HANG)
    with pytest.raises(ReplicaError) as raised:
        scheduler.require_open()
    received = [running.future.exception(timeout=0), *(one.future.exception(timeout=0) for one in accepted)]
    for error in (*received, *refused, raised.value):
        assert isinstance(error, ReplicaError)
        assert error.__cause__ is cause
        assert "is lost: ValueError: the device is gone" in str(error)
    assert len(refused) == 3
    assert "the device is gone" in str(scheduler.tally.last_error)


def test_a_call_that_waits_for_preparation_to_stop_finds_everything_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Scheduler(2, 100, replicas=1)
    one = enter(scheduler, job())
    worker = take(scheduler)
    idle = scheduler.preparation_idle([one.future])
    assert idle is not None
    seen: list[bool] = []
    retire = Scheduler.retire

    def watched(self: Scheduler, job: Job) -> None:
        seen.append(idle.done())
        retire(self, job)

    monkeypatch.setattr(Scheduler, "retire", watched)
    one.future.cancel()
    scheduler.finish_preparing(worker)
    assert seen == [False]
    assert idle.done()
    assert held(scheduler) == (0, 0)
