"""Batching with a stub tower whose run costs the same whatever is in it: images a second by number of
callers, and how long an image takes that comes alone. It has 256 patches, as in the released checkpoint.
"""

from __future__ import annotations

import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mm_encoder import BatchConfig, Encoder
from mm_encoder.demo import make_checkpoint
from mm_encoder.families.glm53 import GlmTower

from .samples import photo, temporary_folder
from .timing import table

RUN_S = 0.005
"""What a run of the stub costs, without the GIL: a launch."""
CALLERS = (1, 4, 16, 64)
IMAGES = 512
ROUNDS = 3
BATCHINGS = {
    "none": None,
    "packed": BatchConfig(max_patches=4096, max_images=16),
    "deterministic": BatchConfig(max_patches=4096, max_images=16, deterministic=True),
}


def main() -> None:
    checkpoint = make_checkpoint(temporary_folder() / "checkpoint", image_tokens=(16, 8000))
    forward = GlmTower.forward
    try:
        GlmTower.forward = _fixed_cost  # type: ignore[method-assign,assignment]
        speeds = {(name, callers): list[float]() for name in BATCHINGS for callers in CALLERS}
        alone: dict[str, list[float]] = {name: [] for name in BATCHINGS}
        for _ in range(ROUNDS):  # interleaved: the machine may slow down meanwhile
            for name in BATCHINGS:
                alone[name] += _alone(checkpoint, name)
                for callers in CALLERS:
                    speeds[name, callers].append(_speed(checkpoint, name, callers))
    finally:
        GlmTower.forward = forward  # type: ignore[method-assign]
    rows: list[list[object]] = [
        [callers, *(statistics.median(speeds[name, callers]) for name in BATCHINGS)] for callers in CALLERS
    ]
    table(
        f"224x224 JPEGs a second, a run of the tower costs {RUN_S * 1e3:.0f} ms (median of {ROUNDS})",
        ["callers", *BATCHINGS],
        rows,
    )
    table(
        "generate() of one image by a lone caller, ms",
        ["batching", "median", "p99"],
        [[name, statistics.median(times), _p99(times)] for name, times in alone.items()],
    )


def _opened(checkpoint: Path, batching: str) -> Encoder:
    return Encoder(checkpoint, device="cpu", batching=BATCHINGS[batching], queue_depth=64)


def _alone(checkpoint: Path, batching: str) -> list[float]:
    times, data = [], photo(224, 224)
    with _opened(checkpoint, batching) as encoder:
        for turn in range(110):
            start = time.perf_counter()
            encoder.generate(data)
            if turn >= 10:
                times.append((time.perf_counter() - start) * 1e3)
    return times


def _speed(checkpoint: Path, batching: str, callers: int) -> float:
    """Return the images a second of callers who each wait for one image before they send the next."""
    data, each = photo(224, 224), IMAGES // callers

    def call(encoder: Encoder) -> None:
        for _ in range(each):
            encoder.generate(data)

    with _opened(checkpoint, batching) as encoder:
        threads = [threading.Thread(target=partial(call, encoder)) for _ in range(callers)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return each * callers / (time.perf_counter() - start)


def _fixed_cost(tower: GlmTower, patches: torch.Tensor, grids: Any) -> torch.Tensor:
    time.sleep(RUN_S)
    return torch.empty(sum(t * h * w for t, h, w in grids) // 4, 512)


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]
