"""What a family does to a job, as the one object that the engine and the cache call."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

import torch

from .cache.key import Keys
from .compiled.choice import TowerChoice
from .config import MediaLimits
from .device import Lane
from .engine.job import Job
from .engine.protocols import TowerFunction
from .errors import PlanMismatchError
from .families.family import Family
from .media.header import check_source_bytes
from .media.kinds import check_narrowed
from .media.source import encoded_hash
from .numerics import describe, settings_reader
from .runtime import versions


@dataclass(frozen=True, slots=True)
class ImagePipeline:
    """The steps from an image to a tower's input, and the tower, of one family for one model name."""

    family: Family
    limits: MediaLimits
    model: str
    dtype: torch.dtype
    tower: TowerChoice = field(default_factory=TowerChoice)
    """Whether the Python or the compiled tower runs."""
    packed: bool = False
    """Whether a tower's run may be of several packed images."""

    def open(self, job: Job) -> None:
        """Replace the job's `image` by a snapshot of it, `source`, and its `plan`. Reads a header only.

        Raises MediaError, and PlanMismatchError where the plan's rows are not the caller's `expected`.
        """
        image, job.image = job.image, None
        assert image is not None
        job.source = self.family.open(image, self.limits, job.options)
        job.plan = self.family.plan(job.source.size)
        if job.expected is not None and job.expected != job.plan.rows:
            raise PlanMismatchError(f"expected {job.expected} tokens, but this image makes {job.plan.rows}")

    def hash(self, job: Job) -> None:
        """Set the job's `mm_hash`, the identity of its snapshot under this model's name."""
        if not job.mm_hash:
            assert job.source is not None
            job.mm_hash = job.source.mm_hash(self.model)
        job.stage_done("hash")

    def decode(self, job: Job) -> None:
        """Replace the job's `source` by `patches`: decoded, resized, cut by its plan. Raises MediaError."""
        source, job.source = job.source, None
        assert source is not None
        assert job.plan is not None
        picture = source.decode(self.limits)
        job.stage_done("decode")
        job.patches = self.family.patches(picture, job.plan)
        job.stage_done("patches")

    def content_hash(self, job: Job) -> str:
        """Return the `mm_hash` of an image that has no place in the queue yet; its snapshot is not kept."""
        if type(job.image) is bytes:  # immutable; what is in it is checked when it is not found
            check_source_bytes(len(job.image), self.limits)
            check_narrowed(job.image, self.limits)
            return encoded_hash(self.model, job.image)
        assert job.image is not None
        return self.family.open(job.image, self.limits, job.options).mm_hash(self.model)

    def build_tower(self, lane: Lane) -> TowerFunction:
        """Build the tower on the lane's device; return once it is usable. Raises CheckpointError."""
        tower = self.tower.apply(self.family.build_tower(lane.device, self.dtype))
        lane.wait()
        return tower

    def cache_keys(self, device: torch.device, threads: int | None = None) -> Keys:
        """Return the maker of cache keys for results on `device`: once a tower is built, of its very weights.
        Before, it reads the vision tensors. `threads` is as in `settings_reader`.
        """
        return Keys(self.identity(device), settings_reader(device, threads))

    def identity(self, device: torch.device) -> dict[str, str]:
        """Return, by name, everything besides the image that results depend on; see `cache_keys`."""
        family, checkpoint = self.family, self.family.checkpoint
        together = "packed images" if self.packed else "one image at a time"
        return {
            "family": family.name,
            "preprocessing": json.dumps(family.preprocessing, sort_keys=True),
            "config": hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest(),
            "weights": checkpoint.digest(family.tensor_prefixes),
            "dtype": str(self.dtype),
            "tower": self.tower.kind,
            "attention": f"scaled_dot_product_attention, {together}",
            **{name: versions()[name] for name in ("numpy", "pillow", "simplejpeg", "pillow-heif")},
            **describe(device),
        }
