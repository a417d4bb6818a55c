"""A compiled tower: tables and checks in Python, the computation in one native call."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import RuntimeMismatchError
from ..families.layers import Grid
from ..families.trunk import VisionTower
from .container import Container, Library
from .signature import Signature

_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference (L2) from the Python tower in the self-check. Real ones are a tenth of it."""


class CompiledTower:
    """Computes what `eager` does, on its weights. Threads may share it: each has a container of its own."""

    def __init__(self, eager: VisionTower, library: Library) -> None:
        self.eager = eager
        self._signature = Signature(eager)
        self._here = _OfThread(library, {**dict(eager.named_parameters()), **dict(eager.named_buffers())})

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See `VisionTower.forward`."""
        arguments = self._signature.arguments(patches, self.eager.tables(grids, len(patches)))
        torch.get_num_threads()  # has this thread's OpenMP follow Torch's setting
        return self._here.container.run(arguments)

    def check(self) -> None:
        """Compare a small and an odd grid, alone and packed, with the Python tower.

        Raises RuntimeMismatchError if they differ by more than rounding.
        """
        merge = self.eager.merge
        small, odd = (1, merge, merge), (1, 3 * merge, 5 * merge)
        generator = torch.Generator().manual_seed(0)
        for grids in ([small], [odd], [odd, small]):
            tokens = sum(t * h * w for t, h, w in grids)
            patches = torch.randint(
                256, (tokens, self._signature.bytes), dtype=torch.uint8, device="cpu", generator=generator
            )
            wanted, got = self.eager(patches, grids), self(patches, grids)
            if wanted.shape != got.shape or wanted.dtype != got.dtype:
                raise RuntimeMismatchError(
                    f"the compiled tower gives {list(got.shape)} {got.dtype} for grids {grids}, the Python "
                    f"tower {list(wanted.shape)} {wanted.dtype}"
                )
            difference, size = (got.double() - wanted.double()).norm(), wanted.double().norm()
            if not difference <= _ALLOWED[wanted.dtype] * size:  # nor NaN
                raise RuntimeMismatchError(
                    f"the compiled tower differs from the Python tower by {difference / size:.2g} (relative "
                    f"L2) for grids {grids}; at most {_ALLOWED[wanted.dtype]:g} is rounding"
                )


class _OfThread(threading.local):
    """A container for each thread, made when it first needs one."""

    def __init__(self, library: Library, weights: dict[str, Tensor]) -> None:
        self.container = Container(library, weights)
