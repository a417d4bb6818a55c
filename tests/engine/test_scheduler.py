"""Admission by jobs and bytes, order, cancellation, closing."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import wait

import pytest

from mm_encoder.contract import ImageSize, Plan
from mm_encoder.engine.job import Job
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.errors import EncoderClosedError

SIZE = ImageSize(28, 28)
PLAN = Plan(source=SIZE, content=SIZE, canvas=SIZE, offset=(0, 0), grid_thw=(1, 2, 2), rows=1)


def job(nbytes: int = 1) -> Job:
    return Job(source=None, plan=PLAN, consumer=None, nbytes=nbytes)


def blocked(scheduler: Scheduler, waiting: Job) -> threading.Thread:
    """A thread that is waiting to admit a job."""
    thread = threading.Thread(target=scheduler.admit, args=(waiting,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread


def run_one(scheduler: Scheduler) -> Job:
    """Take the next job through preparation and out to a replica."""
    prepared = scheduler.next_to_prepare()
    assert prepared is not None
    scheduler.prepared(prepared)
    running = scheduler.next_to_run()
    assert running is prepared
    return running


def test_depth_counts_until_a_job_runs() -> None:
    scheduler = Scheduler(depth=2, max_bytes=100)
    jobs = [job() for _ in range(3)]
    scheduler.admit(jobs[0])
    scheduler.admit(jobs[1])
    thread = blocked(scheduler, jobs[2])
    assert scheduler.held == (2, 2)
    assert run_one(scheduler) is jobs[0]
    thread.join(5)
    assert not thread.is_alive()
    assert scheduler.held == (2, 2)


def test_bytes_are_bounded_and_a_giant_enters_alone() -> None:
    scheduler = Scheduler(depth=10, max_bytes=100)
    scheduler.admit(job(60))
    thread = blocked(scheduler, job(60))
    run_one(scheduler)
    thread.join(5)
    assert scheduler.held == (1, 60)
    run_one(scheduler)
    scheduler.admit(job(1000))
    assert scheduler.held == (1, 1000)
    blocked(scheduler, job(1))


def test_first_come_first_served() -> None:
    scheduler = Scheduler(depth=10, max_bytes=100)
    jobs = [job() for _ in range(5)]
    for waiting in jobs:
        scheduler.admit(waiting)
    assert [run_one(scheduler) for _ in jobs] == jobs


def test_cancelling_frees_the_slot_at_once_wherever_the_job_is() -> None:
    scheduler = Scheduler(depth=3, max_bytes=100)
    queued, ready, preparing = job(), job(), job()
    scheduler.admit(ready)
    scheduler.admit(preparing)
    scheduler.admit(queued)
    assert scheduler.next_to_prepare() is ready
    scheduler.prepared(ready)
    assert scheduler.next_to_prepare() is preparing
    assert ready.future.cancel()
    assert scheduler.held == (2, 2)
    assert queued.future.cancel()
    assert scheduler.held == (1, 1)
    assert preparing.future.cancel()
    scheduler.prepared(preparing)
    assert scheduler.held == (0, 0)


def test_a_running_job_cannot_be_cancelled() -> None:
    scheduler = Scheduler(depth=3, max_bytes=100)
    scheduler.admit(job())
    running = run_one(scheduler)
    assert running.start()
    assert not running.future.cancel()


def test_closing_wakes_everyone_and_drains_what_was_accepted() -> None:
    scheduler = Scheduler(depth=1, max_bytes=100)
    scheduler.admit(accepted := job())
    refused: list[BaseException] = []

    def late() -> None:
        try:
            scheduler.admit(job())
        except EncoderClosedError as error:
            refused.append(error)

    callers = [threading.Thread(target=late) for _ in range(3)]
    for caller in callers:
        caller.start()
    scheduler.close()
    for caller in callers:
        caller.join(5)
    assert len(refused) == 3
    assert run_one(scheduler) is accepted
    assert scheduler.next_to_prepare() is None
    assert scheduler.next_to_run() is None
    with pytest.raises(EncoderClosedError):
        scheduler.admit(job())


def test_a_closed_scheduler_waits_for_a_job_still_in_preparation() -> None:
    scheduler = Scheduler(depth=1, max_bytes=100)
    scheduler.admit(job())
    preparing = scheduler.next_to_prepare()
    assert preparing is not None
    scheduler.close()
    got: list[Job | None] = []
    replica = threading.Thread(target=lambda: got.append(scheduler.next_to_run()), daemon=True)
    replica.start()
    replica.join(0.05)
    assert replica.is_alive()
    scheduler.prepared(preparing)
    replica.join(5)
    assert got == [preparing]


def test_cancelling_the_last_job_of_a_closed_scheduler_lets_replicas_go() -> None:
    scheduler = Scheduler(depth=2, max_bytes=100)
    scheduler.admit(waiting := job())
    scheduler.close()
    replica = threading.Thread(target=scheduler.next_to_run, daemon=True)
    replica.start()
    replica.join(0.05)
    assert replica.is_alive()
    waiting.future.cancel()
    replica.join(5)
    assert not replica.is_alive()


def test_a_future_does_not_keep_its_job_alive() -> None:
    scheduler = Scheduler(depth=1, max_bytes=100)
    scheduler.admit(job())
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
def test_whoever_waits_for_a_cancelled_job_is_released(stage: str) -> None:
    scheduler = Scheduler(depth=2, max_bytes=100)
    scheduler.admit(waiting := job())
    if stage != "queued":
        scheduler.next_to_prepare()
    if stage == "ready":
        scheduler.prepared(waiting)
    waiting.future.cancel()
    assert wait([waiting.future], timeout=5).not_done == set()
    assert not waiting.start()
    waiting.fail(ValueError())
    assert waiting.future.cancelled()


def test_cancelling_races_with_starting_and_one_of_them_wins() -> None:
    for _ in range(200):
        scheduler = Scheduler(depth=1, max_bytes=100)
        scheduler.admit(racing := job())
        barrier = threading.Barrier(2)
        outcome: list[bool] = []

        def cancel(racing: Job = racing, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            racing.future.cancel()

        def start(
            racing: Job = racing, barrier: threading.Barrier = barrier, outcome: list[bool] = outcome
        ) -> None:
            barrier.wait()
            outcome.append(racing.start())

        threads = [threading.Thread(target=cancel), threading.Thread(target=start)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert outcome == [not racing.future.cancelled()]
        if racing.future.cancelled():
            assert wait([racing.future], timeout=5).not_done == set()


def test_a_large_job_is_not_overtaken_by_small_ones() -> None:
    scheduler = Scheduler(depth=10, max_bytes=100)
    scheduler.admit(job(50))
    large, small = job(80), job(10)
    first = blocked(scheduler, large)
    second = blocked(scheduler, small)  # there is room for it, and it waits its turn
    run_one(scheduler)
    first.join(5)
    second.join(5)
    assert scheduler.held == (2, 90)
    assert [run_one(scheduler), run_one(scheduler)] == [large, small]


def test_waiting_for_what_is_being_prepared() -> None:
    scheduler = Scheduler(depth=3, max_bytes=100)
    first, second = job(), job()
    scheduler.admit(first)
    scheduler.admit(second)
    scheduler.wait_prepared([first, second])
    assert scheduler.next_to_prepare() is first
    waiting = threading.Thread(target=scheduler.wait_prepared, args=([second, first],), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    first.future.cancel()
    scheduler.prepared(first)
    waiting.join(5)
    assert not waiting.is_alive()
