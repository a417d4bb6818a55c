"""Which jobs a replica takes at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mm_encoder import BatchConfig, DeadlineExceededError, ReplicaError
from mm_encoder.engine.batch import fitting
from mm_encoder.engine.job import Job, JobState
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.engine.worker import Worker

from ..helpers.jobs import enter, job, ready, take


def taken(scheduler: Scheduler) -> list[list[int]]:
    """Close the scheduler, and return the patches of each batch that a replica then takes."""
    scheduler.close()
    worker, batches = Worker("test", scheduler), []
    while jobs := scheduler.next_to_run(worker):
        batches.append([one.plan.patch_count for one in jobs if one.plan])
        assert worker.jobs == jobs
        assert {one.state for one in jobs} == {JobState.RUNNING}
        worker.take()
    return batches


@pytest.mark.parametrize(
    ("batching", "patches", "batches"),
    [
        (None, [1, 1, 1], [[1], [1], [1]]),
        (BatchConfig(100, 2), [1, 2, 3, 4, 5], [[1, 2], [3, 4], [5]]),
        (BatchConfig(100, 1), [1, 2], [[1], [2]]),
        (BatchConfig(6, 9), [1, 2, 3, 4, 5], [[1, 2, 3], [4], [5]]),  # exactly max_patches fits
        (BatchConfig(5, 9), [1, 2, 3, 4, 5], [[1, 2], [3], [4], [5]]),
        (BatchConfig(4, 9), [3, 2, 1, 1], [[3], [2, 1, 1]]),  # 1 would fit beside 3, and overtake 2
        (BatchConfig(4, 9), [9, 1, 1, 9], [[9], [1, 1], [9]]),  # larger than max_patches: alone
        (BatchConfig(100, 9), [], []),
    ],
)
def test_a_batch_is_the_head_of_the_line_as_far_as_it_fits(
    batching: BatchConfig | None, patches: Sequence[int], batches: list[list[int]]
) -> None:
    scheduler = Scheduler(9, 100, replicas=1, batching=batching)
    ready(scheduler, *patches)
    assert taken(scheduler) == batches
    assert (scheduler.slots.used, scheduler.bytes.used) == (0, 0)


def test_what_becomes_ready_later_is_not_waited_for() -> None:
    scheduler = Scheduler(9, 100, replicas=1, batching=BatchConfig(100, 9))
    first, second = enter(scheduler, job()), enter(scheduler, job())
    workers = [take(scheduler), take(scheduler)]
    scheduler.finish_preparing(workers[0])
    replica = Worker("test", scheduler)
    assert scheduler.next_to_run(replica) == (first,)  # does not block, although `second` is on its way
    replica.take()
    scheduler.finish_preparing(workers[1])
    assert scheduler.next_to_run(replica) == (second,)


def test_a_batch_gives_back_its_slots_and_bytes_once() -> None:
    scheduler = Scheduler(4, 100, replicas=1, batching=BatchConfig(100, 3))
    ready(scheduler, 1, 1, 1, 1)
    assert (scheduler.slots.used, scheduler.bytes.used) == (4, 12)
    running = scheduler.next_to_run(Worker("test", scheduler))
    assert len(running) == 3
    assert (scheduler.slots.used, scheduler.bytes.used) == (1, 3)
    again = ready(scheduler, 1, 1, 1)  # there is room for exactly as many
    for one in running:
        one.fail(ValueError())
    assert (scheduler.slots.used, scheduler.bytes.used) == (4, 12)
    assert not any(one.future.done() for one in again)


def test_those_whose_callers_left_take_no_room_in_a_batch() -> None:
    scheduler = Scheduler(9, 100, replicas=1, batching=BatchConfig(4, 3))
    first, cancelled, late, fourth, fifth = ready(scheduler, 1, 2, 3, 1, 1)
    cancelled.future.cancel()
    late.fail_if_pending(DeadlineExceededError())
    worker = Worker("test", scheduler)
    assert scheduler.next_to_run(worker) == (first, fourth, fifth) == worker.jobs


def test_one_that_is_finished_and_not_yet_out_of_the_line_takes_no_room() -> None:
    line = ready(Scheduler(9, 100, replicas=1), 1, 9, 1, 1)
    assert fitting(line, BatchConfig(2, 2)) == 1
    line[1].mark_done()
    assert fitting(line, BatchConfig(2, 2)) == 3


def test_one_that_is_cancelled_while_its_batch_is_taken_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(9, 100, replicas=1, batching=BatchConfig(100, 9))
    first, cancelled, third = ready(scheduler, 1, 1, 1)
    start = Job.start

    def cancel_first(one: Job, verdict: BaseException | None = None) -> bool:
        cancelled.future.cancel()
        return start(one, verdict)

    monkeypatch.setattr(Job, "start", cancel_first)
    worker = Worker("test", scheduler)
    assert scheduler.next_to_run(worker) == (first, third) == worker.jobs
    assert cancelled.state is JobState.DONE
    assert cancelled.patches is None
    stats = scheduler.tally.snapshot()
    assert (stats.cancelled, stats.in_flight, scheduler.slots.used) == (1, 2, 0)


def test_a_batch_of_which_all_callers_left_is_none() -> None:
    scheduler = Scheduler(9, 100, replicas=1, batching=BatchConfig(100, 2))
    for one in ready(scheduler, 1, 1):
        one.start()  # as the thread of deadlines does right before it fails them
    (left,) = ready(scheduler, 5)
    assert scheduler.next_to_run(Worker("test", scheduler)) == (left,)


def test_on_start_is_called_for_every_job_of_a_batch() -> None:
    scheduler = Scheduler(9, 100, replicas=1, batching=BatchConfig(100, 9))
    begun: list[int] = []
    for one in ready(scheduler, 1, 2, 3):
        one.on_start = lambda one=one: begun.append(one.number)  # type: ignore[misc]
    scheduler.next_to_run(Worker("test", scheduler))
    assert begun == [0, 1, 2]


def test_a_lost_replica_fails_its_whole_batch_and_nothing_else() -> None:
    scheduler = Scheduler(9, 100, replicas=2, batching=BatchConfig(100, 2))
    first, second, third = ready(scheduler, 1, 1, 1)
    worker = Worker("test", scheduler)
    scheduler.next_to_run(worker)
    for _ in range(2):  # as after an interrupt
        scheduler.on_replica_lost(worker, ValueError("gone"))
    errors = [one.future.exception(timeout=0) for one in (first, second)]
    assert [type(error) for error in errors] == [ReplicaError, ReplicaError]
    assert errors[0] is not errors[1]
    assert worker.jobs == ()
    assert scheduler.tally.snapshot().failed == 2
    assert scheduler.next_to_run(Worker("other", scheduler)) == (third,)
