"""Which jobs run together, and how the tower runs over the patches of several images."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import BatchConfig
from ..contract import Patches
from ..device import Lane
from ..errors import ReplicaError
from .job import Job
from .protocols import TowerFunction


def fitting(line: Sequence[Job], batching: BatchConfig | None) -> int:
    """Return how many jobs at the head of `line` make the next batch, none of which is overtaken. The first
    is taken whatever its size; those that are finished by now are taken along and count for nothing.
    """
    images = patches = 0
    for taken, job in enumerate(line):
        if job.finished:
            continue
        if images and batching is None:
            return taken
        assert job.plan is not None
        images, patches = images + 1, patches + job.plan.patch_count
        if images > 1 and batching and (images > batching.max_images or patches > batching.max_patches):
            return taken
    return len(line)


def run_tower(lane: Lane, tower: TowerFunction, batch: Sequence[Patches]) -> list[torch.Tensor]:
    """Run the tower once over packed images. Return the rows of each, alone in their storage."""
    host = [patches.data for patches in batch]
    counts = [patches.plan.rows for patches in batch]
    grids = [patches.plan.grid_thw for patches in batch]
    rows = tower(lane.upload(host[0] if len(host) == 1 else torch.cat(host)), grids)
    if rows.shape[0] != sum(counts):
        raise ReplicaError(f"the tower gave {rows.shape[0]} rows, the plan has {sum(counts)}; this is a bug")
    return [own_storage(part) for part in (torch.split(rows, counts) if len(counts) > 1 else [rows])]


def own_storage(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows`, contiguous and alone in their storage."""
    rows = rows.contiguous()
    alone = rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
    return rows if alone else rows.clone()
