"""What the engine adds to preprocessing and the tower: generate() less both, per image."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mm_encoder import Encoder
from mm_encoder.demo import make_checkpoint
from mm_encoder.families.glm53 import GlmTower

from .samples import photo
from .timing import table

ROUNDS = 200


def main() -> None:
    checkpoint = make_checkpoint(Path(tempfile.mkdtemp(prefix="mm-encoder-bench-")) / "checkpoint")
    data = photo(224, 224)
    overheads = []
    forward = GlmTower.forward
    try:
        # A stub: only the engine's own time is wanted, and a real tower's noise would drown it.
        GlmTower.forward = _rows_only  # type: ignore[method-assign,assignment]
        with Encoder(checkpoint, device="cpu") as encoder:
            for turn in range(ROUNDS + 20):
                start = time.perf_counter()
                _, metadata = encoder.generate(data)[0]
                total = (time.perf_counter() - start) * 1e3
                stages = dict(metadata.timings)
                if turn >= 20:
                    work = stages["hash"] + stages["decode"] + stages["patches"] + stages["tower"]
                    overheads.append(total - work)
    finally:
        GlmTower.forward = forward  # type: ignore[method-assign]
    overheads.sort()
    table(
        f"generate() less preprocessing and tower, ms ({ROUNDS} calls)",
        ["median", "p99"],
        [[statistics.median(overheads), overheads[int(len(overheads) * 0.99)]]],
    )


def _rows_only(tower: GlmTower, patches: torch.Tensor, grids: Any) -> torch.Tensor:
    return torch.empty(sum(t * h * w for t, h, w in grids) // 4, 512)
