"""What the engine calls without knowing it: a family's pipeline, and the cache in front of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..device import Lane
from .job import Job

TowerFunction = Callable[[torch.Tensor, Sequence[tuple[int, int, int]]], torch.Tensor]
"""uint8 patches [sum(t·h·w), bytes] on the device and a grid (t, h, w) per image -> rows [rows, width]."""

BuildTower = Callable[[Lane], TowerFunction]


class Pipeline(Protocol):
    """The steps of a job before its tower, each of which may raise, and the tower."""

    @property
    def model(self) -> str:
        """The model's name in metadata."""

    def open(self, job: Job) -> None:
        """Replace `image` by `source` and `plan`; in the caller's thread, or in a preprocessing thread."""

    def hash(self, job: Job) -> None:
        """Set `mm_hash`; in a preprocessing thread."""

    def decode(self, job: Job) -> None:
        """Replace `source` by `patches`; in a preprocessing thread."""

    def build_tower(self, lane: Lane) -> TowerFunction:
        """Build the tower; in a replica's thread, inside its lane. Returns once the tower is usable."""


class Coalescing(Protocol):
    """The cache in front of the engine."""

    def before_decode(self, job: Job) -> Callable[[], None] | None:
        """Return None if `job`, whose `mm_hash` is set, must be decoded; otherwise a callable that does
        instead what its waiters need, to be called without a CPU permit.
        """

    def close(self) -> None:
        """Called when all threads of the engine have ended, maybe more than once."""
