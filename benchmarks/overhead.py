"""The engine's overhead beside preprocessing and tower; the time of a refusal, of counting and of a health
probe; and preprocessing throughput by number of threads.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from mm_encoder import Encoder, EncoderBusyError
from mm_encoder.demo import make_checkpoint
from mm_encoder.engine.job import Job
from mm_encoder.engine.tally import Tally
from mm_encoder.families.glm53 import GlmTower
from mm_encoder.locks import AskableLock

from .samples import photo, temporary_folder
from .timing import table

ROUNDS = 200


def main() -> None:
    checkpoint = make_checkpoint(temporary_folder() / "checkpoint")
    forward = GlmTower.forward
    try:
        # A stub: a real tower's noise would hide the engine's own time.
        GlmTower.forward = _rows_only  # type: ignore[method-assign,assignment]
        overheads = _overheads(checkpoint, photo(224, 224))
        speeds = _speeds(checkpoint, photo(1024, 1024))
        gate = threading.Event()

        def held(tower: GlmTower, patches: torch.Tensor, grids: Any) -> torch.Tensor:
            gate.wait()
            return _rows_only(tower, patches, grids)

        GlmTower.forward = held  # type: ignore[method-assign,assignment]
        probes = _probes(checkpoint, photo(224, 224), gate)
    finally:
        GlmTower.forward = forward  # type: ignore[method-assign]
    table(
        f"generate() of a 224x224 JPEG less preprocessing and tower, ms ({ROUNDS} calls)",
        ["median", "p99"],
        [[statistics.median(overheads), _p99(overheads)]],
    )
    table("single calls, ms", ["what", "median", "p99"], probes)
    table(
        "64 JPEGs of 1024x1024, preprocessing only, by preprocess_workers (median of 5)",
        ["threads", "images/s"],
        speeds,
    )


def _overheads(checkpoint: Path, data: bytes) -> list[float]:
    overheads = []
    with Encoder(checkpoint, device="cpu") as encoder:
        for turn in range(ROUNDS + 20):
            start = time.perf_counter()
            _, metadata = encoder.generate(data)[0]
            total = (time.perf_counter() - start) * 1e3
            stages = dict(metadata.timings)
            if turn >= 20:
                work = stages["hash"] + stages["decode"] + stages["patches"] + stages["tower"]
                overheads.append(total - work)
    return overheads


def _probes(checkpoint: Path, data: bytes, gate: threading.Event) -> list[list[object]]:
    """Time a refusal by a full queue, probes of a full encoder, and the counting of a job."""

    def refuse() -> None:
        try:
            encoder.submit(data, timeout=0)
        except EncoderBusyError:
            return
        raise AssertionError("the queue was not full")

    tally, result = Tally(AskableLock()), Job(data)
    result.timings = dict.fromkeys(
        ("admission_wait", "open", "queue_wait", "hash", "decode", "patches", "replica_wait", "tower"), 1.0
    )

    def count() -> None:
        result.number, result.counted = result.number + 1, False
        tally.begun(result)
        tally.ended(result, None)

    with Encoder(checkpoint, device="cpu", queue_depth=8) as encoder:
        waiting: list[Future[object]] = [encoder.submit(data) for _ in range(9)]  # type: ignore[misc]
        while encoder.health().queue_length < 8:
            time.sleep(0.01)
        calls: dict[str, Callable[[], object]] = {
            "refusal: submit(timeout=0) at a full queue": refuse,
            "health()": encoder.health,
            "stats()": encoder.stats,
            "counting one image": count,
        }
        rows: list[list[object]] = []
        for name, call in calls.items():
            times = []
            for _ in range(2000):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e3)
            rows.append([name, statistics.median(times), _p99(times)])
        gate.set()
        for future in waiting:
            future.result()
    return rows


def _speeds(checkpoint: Path, data: bytes) -> list[list[object]]:
    rounds: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
    for _ in range(5):
        for workers, speeds in rounds.items():
            with Encoder(checkpoint, device="cpu", preprocess_workers=workers, queue_depth=16) as encoder:
                start = time.perf_counter()
                encoder.generate([data] * 64)
                speeds.append(64 / (time.perf_counter() - start))
    return [[workers, statistics.median(speeds)] for workers, speeds in rounds.items()]


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def _rows_only(tower: GlmTower, patches: torch.Tensor, grids: Any) -> torch.Tensor:
    return torch.empty(sum(t * h * w for t, h, w in grids) // 4, 512)
