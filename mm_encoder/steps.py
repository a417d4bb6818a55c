"""The steps of a job that are a family's: what the engine's threads call without knowing one."""

from __future__ import annotations

import torch

from .config import MediaLimits
from .device import Lane
from .engine.admission import OpenImage
from .engine.job import Job
from .engine.preprocess import Prepare
from .engine.replica import BuildTower, TowerFunction
from .errors import PlanMismatchError
from .families.family import Family


def open_image(family: Family, limits: MediaLimits) -> OpenImage:
    """How a job gets its snapshot and its plan."""

    def run(job: Job) -> None:
        image, job.image = job.image, None
        assert image is not None
        job.source = family.open(image, limits, job.options)
        job.plan = family.plan(job.source.size)
        if job.expected is not None and job.expected != job.plan.rows:
            raise PlanMismatchError(f"expected {job.expected} tokens, but this image makes {job.plan.rows}")

    return run


def prepare(family: Family, limits: MediaLimits, model: str) -> Prepare:
    """What a preprocessing thread does with an opened job."""

    def run(job: Job) -> None:
        source, job.source = job.source, None
        assert source is not None
        assert job.plan is not None
        job.mm_hash = source.mm_hash(model)
        job.stage_done("hash")
        picture = source.decode(limits)
        job.stage_done("decode")
        job.patches = family.patches(picture, job.plan)
        job.stage_done("patches")

    return run


def build_tower(family: Family, dtype: torch.dtype) -> BuildTower:
    """How a replica gets its tower."""

    def run(lane: Lane) -> TowerFunction:
        tower = family.build_tower(lane.device, dtype)
        lane.wait()
        return tower

    return run
