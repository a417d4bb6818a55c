"""Jobs without an image, and steps that take them through a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mm_encoder.contract import ImageSize, Plan
from mm_encoder.engine.admission import admit
from mm_encoder.engine.job import Job
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.engine.worker import Worker

SIZE = ImageSize(1, 1)
PLAN = Plan(source=SIZE, content=SIZE, canvas=SIZE, offset=(0, 0), grid_thw=(1, 2, 2), rows=1)


@dataclass
class Weight:
    """Stands for an opened image, of which only the number of bytes matters here."""

    nbytes: int


def job(nbytes: int = 3, **given: Any) -> Job:
    return Job(nbytes, **given)  # type: ignore[arg-type]


def opened(one: Job) -> None:
    """Do what opening does: set the source and the plan."""
    canvas = 3 * SIZE.width * SIZE.height
    assert isinstance(one.image, int)
    one.source, one.plan = Weight(one.image - canvas), PLAN


def enter(scheduler: Scheduler, one: Job, timeout: float | None = None) -> Job:
    """Admit a job in this thread."""
    one.timeout = timeout
    admit(scheduler, one, opened)
    return one


def take(scheduler: Scheduler) -> Worker:
    """Return a worker that has taken the next queued job."""
    worker = Worker("test", scheduler)
    assert scheduler.next_to_prepare(worker) is worker.job
    return worker


def run_one(scheduler: Scheduler) -> Job:
    """Take the next job through preparation and out to a replica."""
    worker = take(scheduler)
    prepared = worker.job
    scheduler.finish_preparing(worker)
    running = scheduler.next_to_run(worker)
    assert running is prepared
    assert running is not None
    worker.take(None)
    return running
