"""docs/engine.md: its diagrams are the states and the steps that the code has."""

from __future__ import annotations

import re
import time
from enum import StrEnum
from pathlib import Path

import pytest

from mm_encoder import EncoderState
from mm_encoder.engine.admission import admit
from mm_encoder.engine.job import Job, JobState
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.engine.worker import Worker
from mm_encoder.errors import DeadlineExceededError

from .helpers.jobs import enter, job, opened, run_one, take
from .helpers.threads import started
from .helpers.waiting import until

Steps = set[tuple[str, str]]


def diagram(of: type[StrEnum]) -> Steps:
    """The arrows of the diagram whose states are those of an enum."""
    text = (Path(__file__).parent.parent / "docs" / "engine.md").read_text()
    for block in re.findall(r"stateDiagram-v2\n(.*?)```", text, re.DOTALL):
        arrows = set(re.findall(r"^ *(\S+) --> (\S+)", block, re.MULTILINE))
        if {state for arrow in arrows for state in arrow} - {"[*]"} == {s.name.lower() for s in of}:
            return arrows
    raise AssertionError(f"no diagram has the states {', '.join(of)}")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Every step that a job takes while the test runs."""
    steps: Steps = set()
    moved, end = Job.move_to, Job.mark_done

    def ended(one: Job) -> JobState | None:
        before = end(one)
        if before is not None:
            steps.add((before.name.lower(), "done"))
        return before

    def noted(one: Job, state: JobState) -> None:
        before = one.state
        moved(one, state)
        if one.state is not before:
            steps.add((before.name.lower(), one.state.name.lower()))

    monkeypatch.setattr(Job, "move_to", noted)
    monkeypatch.setattr(Job, "mark_done", ended)
    return steps


def test_a_job_takes_the_steps_that_are_drawn_and_no_other(seen: Steps) -> None:
    for stage in ("waiting", "opening", "bytes", "queued", "preparing", "ready", "running", "loop"):
        go_and_end(stage, Scheduler(1 if stage == "waiting" else 9, 100, replicas=1), job(90))
    assert seen == {step for step in diagram(JobState) if "[*]" not in step}


def go_and_end(stage: str, scheduler: Scheduler, one: Job) -> None:
    """Take a job as far as a stage, or past one, and end it there."""

    def late_when_opened(one: Job) -> None:
        opened(one)
        one.fail_if_pending(DeadlineExceededError())

    first = enter(scheduler, job(90)) if stage in ("waiting", "bytes", "loop") else None
    if stage == "loop":
        from_a_loop(scheduler, one)
    elif stage == "opening":
        admit(scheduler, one, late_when_opened)
    else:
        started(lambda: enter(scheduler, one))
        until(lambda: scheduler.slots.waiting + scheduler.bytes.waiting + len(scheduler._queued) > 0)
    if stage == "bytes":
        assert first is not None
        first.future.cancel()
        until(lambda: one.state is JobState.QUEUED)
    if stage == "running":
        run_one(scheduler).fail(ValueError())
    elif stage in ("preparing", "ready"):
        worker = take(scheduler)
        if stage == "ready":
            scheduler.finish_preparing(worker)
    one.fail_if_pending(DeadlineExceededError())
    until(lambda: one.state is JobState.DONE)


def from_a_loop(scheduler: Scheduler, one: Job) -> None:
    """What admit_async and a preprocessing thread do where the bytes do not fit yet."""
    scheduler.register(one)
    assert scheduler.slots.acquire(one, 1) is None
    scheduler.enqueue(one)
    workers = [take(scheduler), take(scheduler)]
    opened(one)
    grant = scheduler.bytes.acquire(one, one.nbytes)
    assert grant is not None
    scheduler.finish_preparing(workers[1], grant)
    scheduler.finish_preparing(workers[0])
    scheduler.next_to_run(Worker("test", scheduler))
    assert one.state is JobState.QUEUED


def test_every_state_of_an_encoder_is_drawn_and_can_be_left() -> None:
    arrows = diagram(EncoderState)
    for state in EncoderState:
        assert any(start == state.value for start, _ in arrows)
        assert any(end == state.value for _, end in arrows)


def test_waiting_for_a_diagram_that_is_not_there_fails() -> None:
    class Other(StrEnum):
        NEW = "new"

    with pytest.raises(AssertionError, match="no diagram has the states new"):
        diagram(Other)


def test_the_clock_of_deadlines_is_the_one_that_is_documented() -> None:
    """`deadline` is a moment of time.monotonic(): one of the past is late whatever the wall clock says."""
    scheduler = Scheduler(1, 100, replicas=1)
    late = enter(scheduler, job(deadline=time.monotonic() - 0.001))
    assert isinstance(late.future.exception(timeout=0), DeadlineExceededError)
