"""Jobs without an image, and steps that take them through a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mm_encoder.contract import ImageSize, Patches, Plan
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
    (running,) = scheduler.next_to_run(worker)
    assert running is prepared
    worker.take()
    return running


def plan_of(patches: int) -> Plan:
    return replace(PLAN, grid_thw=(1, patches, 1), rows=patches)


def ready(scheduler: Scheduler, *patches: int) -> list[Job]:
    """Admit jobs of these numbers of patches and prepare them, the last one first."""
    jobs = [enter(scheduler, job()) for _ in patches]
    workers = [take(scheduler) for _ in jobs]
    for one, count in zip(jobs, patches, strict=True):
        data = torch.full((count, 3), count, dtype=torch.uint8)
        one.plan, one.patches = plan_of(count), Patches(data, plan_of(count))
    for worker in reversed(workers):
        scheduler.finish_preparing(worker)
    return jobs
