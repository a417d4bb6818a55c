"""The steps of a job that are a family's: what the engine's threads call without knowing one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial

import torch

from .cache.key import Keys
from .cached import Identify
from .config import MediaLimits
from .device import Lane, describe, settings
from .engine.admission import OpenImage
from .engine.job import Job
from .engine.preprocess import Prepare
from .engine.replica import BuildTower, TowerFunction
from .errors import PlanMismatchError
from .families.family import Family
from .media.header import check_source_bytes
from .media.source import encoded_hash
from .runtime import versions


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


def identify(family: Family, limits: MediaLimits, model: str) -> Identify:
    """How the cache knows an image before it has a place in the queue: by a snapshot that is not kept."""

    def run(job: Job) -> str:
        if type(job.image) is bytes:  # its own snapshot; what is in it is seen when it is not found
            check_source_bytes(len(job.image), limits)
            return encoded_hash(model, job.image)
        assert job.image is not None
        return family.open(job.image, limits, job.options).mm_hash(model)

    return run


def prepare(family: Family, limits: MediaLimits, model: str, before_decode: Prepare | None = None) -> Prepare:
    """What a preprocessing thread does with an opened job. `before_decode` is asked, once its `mm_hash` is
    known, whether there is something to be done instead.
    """

    def run(job: Job) -> Callable[[], None] | None:
        source, job.source = job.source, None
        assert source is not None
        assert job.plan is not None
        job.mm_hash = job.mm_hash or source.mm_hash(model)
        job.stage_done("hash")
        instead = None if before_decode is None else before_decode(job)
        if instead is not None:
            return instead
        picture = source.decode(limits)
        job.stage_done("decode")
        job.patches = family.patches(picture, job.plan)
        job.stage_done("patches")
        return None

    return run


def keys(family: Family, device: torch.device, dtype: torch.dtype) -> Keys:
    """What makes the keys of an encoder's results. Reads the vision tensors."""
    return Keys(identity(family, device, dtype), partial(settings, device))


def identity(family: Family, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Everything that an encoder's results depend on besides the image, by name. Reads the vision tensors."""
    checkpoint = family.checkpoint
    return {
        "family": family.name,
        "preprocessing": json.dumps(family.preprocessing, sort_keys=True),
        "config": hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest(),
        "weights": checkpoint.digest(family.scopes),
        "dtype": str(dtype),
        "attention": "scaled_dot_product_attention, one image at a time",
        **{name: versions()[name] for name in ("numpy", "pillow", "simplejpeg")},
        **describe(device),
    }


def build_tower(family: Family, dtype: torch.dtype) -> BuildTower:
    """How a replica gets its tower."""

    def run(lane: Lane) -> TowerFunction:
        tower = family.build_tower(lane.device, dtype)
        lane.wait()
        return tower

    return run
