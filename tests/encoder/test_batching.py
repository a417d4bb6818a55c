"""Images of several callers in one run of the tower: what runs together, what comes out, and what fails."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder import (
    BatchConfig,
    CacheConfig,
    DeadlineExceededError,
    DeviceOutOfMemoryError,
    Encoder,
    ImageResult,
    MediaPlanner,
    ReplicaError,
)
from mm_encoder.coalescer import Coalescer
from mm_encoder.config import MediaLimits
from mm_encoder.contract import Patches
from mm_encoder.device import CpuLane
from mm_encoder.engine.batch import run_tower
from mm_encoder.families import trunk
from mm_encoder.families.layers import Grid, attention
from mm_encoder.families.registry import load_family
from mm_encoder.families.trunk import VisionTower
from mm_encoder.media.source import open_source

from ..conftest import GOLDEN
from ..helpers.images import png
from ..helpers.threads import joined, started
from ..helpers.waiting import HANG, nothing_left, until

pytestmark = pytest.mark.usefixtures("one_compute_thread")
FAMILIES = ("glm53", "kimi_k3", "deepseek41")
CPU = torch.device("cpu")
MANY = BatchConfig(max_patches=10**6, max_images=64)
ALONE = BatchConfig(max_patches=10**6, max_images=64, deterministic=True)
Fail = Callable[[Sequence[Grid]], BaseException | None]


class Towers:
    """Every run of a tower: its grids are noted, it is held while `opened` is cleared, and may `fail`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[list[Grid]] = []
        self.opened = threading.Event()
        self.opened.set()
        self.fail: Fail = lambda grids: None
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self.inputs_alive: list[int] = []
        forward = VisionTower.forward

        def noted(tower: VisionTower, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
            self.inputs_alive.append(sum(ref() is not None for ref in self.inputs))
            self.inputs.append(weakref.ref(patches))
            self.runs.append(list(grids))
            assert self.opened.wait(HANG)
            error = self.fail(grids)
            if error is not None:
                raise error
            return forward(tower, patches, grids)

        monkeypatch.setattr(VisionTower, "forward", noted)

    def together(self, encoder: Encoder, images: Sequence[bytes]) -> list[Future[ImageResult]]:
        """Submit images while the tower is held at another one, until all are ready; the tower stays held.
        The run that is held is not noted.
        """
        self.opened.clear()
        self.runs.clear()
        for held in range(1, encoder.replicas_per_gpu + 1):
            encoder.submit(png(30, 30))
            until(lambda held=held: len(self.runs) == held)  # type: ignore[misc]
        self.runs.clear()
        futures = [encoder.submit(image) for image in images]
        until(lambda: len(encoder._engine.scheduler._ready) == len(images))
        return futures


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Towers]:
    towers = Towers(monkeypatch)
    yield towers
    towers.opened.set()


def opened(batching: BatchConfig | None, family: str = "glm53", **settings: Any) -> Encoder:
    return Encoder(
        GOLDEN / family / "checkpoint", device="cpu", batching=batching, **{"queue_depth": 99} | settings
    )


def sizes(count: int) -> list[bytes]:
    """Images of different grids."""
    return [png(140 + 40 * i, 110 + 30 * i, seed=i) for i in range(count)]


def grids_of(images: Sequence[bytes], family: str = "glm53") -> list[Grid]:
    planner = MediaPlanner(GOLDEN / family / "checkpoint")
    return [planner.plan(image).grid_thws[0] for image in images]


def patches_of(grids: Sequence[Grid]) -> int:
    return sum(t * h * w for t, h, w in grids)


def near(rows: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within 1e-6, relative to the largest."""
    return rows.shape == wanted.shape and bool((rows - wanted).abs().max() <= 1e-6 * wanted.abs().max())


def alone(images: Sequence[bytes], family: str = "glm53") -> list[ImageResult]:
    with opened(None, family) as encoder:
        return encoder.generate(images)


# --- what runs together ------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["images", "patches", "none", "no batching"])
def test_images_that_wait_run_together_in_order_and_within_the_limits(towers: Towers, limit: str) -> None:
    images = sizes(4)
    a, b, c, d = grids = grids_of(images)
    batching, runs = {
        "images": (BatchConfig(10**6, 3), [[a, b, c], [d]]),
        "patches": (BatchConfig(patches_of([a, b]), 64), [[a, b], [c], [d]]),
        "none": (MANY, [grids]),
        "no batching": (None, [[a], [b], [c], [d]]),
    }[limit]
    assert patches_of([c, d]) > patches_of([a, b])
    with opened(batching) as encoder:
        futures = towers.together(encoder, images)
        towers.opened.set()
        results = [future.result(HANG) for future in futures]
        nothing_left(encoder)
    assert towers.runs == runs
    for result, wanted in zip(results, alone(images), strict=True):
        assert near(result.tensor, wanted.tensor)
        assert result.metadata == wanted.metadata
        assert [stage for stage, _ in result.metadata.timings] == [s for s, _ in wanted.metadata.timings]


def test_a_lone_image_runs_at_once_and_alone(towers: Towers) -> None:
    with opened(MANY) as encoder:
        wanted = alone([png()])[0].tensor
        towers.runs.clear()
        for _ in range(3):
            assert torch.equal(encoder.submit(png()).result(HANG).tensor, wanted)  # though none follows it
    assert towers.runs == [grids_of([png()])] * 3


def test_by_default_the_queue_holds_two_batches_of_each_replica(glm53_checkpoint: Path) -> None:
    sevens = BatchConfig(100, 7)
    for batching, replicas, depth in ((None, 2, 4), (sevens, 1, 14), (sevens, 2, 28)):
        settings: dict[str, Any] = {"batching": batching, "replicas_per_gpu": replicas}
        with Encoder(glm53_checkpoint, device="cpu", **settings) as encoder:
            assert encoder._engine.scheduler.slots.limit == depth


def test_cancelled_and_late_images_are_not_packed(towers: Towers) -> None:
    images = sizes(4)
    grids = grids_of(images)
    with opened(MANY) as encoder:
        futures = towers.together(encoder, images)
        late = encoder.submit(png(20, 200), deadline=time.monotonic() + 0.05)
        assert isinstance(late.exception(HANG), DeadlineExceededError)
        assert futures[1].cancel()
        towers.opened.set()
        for index in (0, 2, 3):
            assert len(futures[index].result(HANG).tensor)
        nothing_left(encoder)
        stats = encoder.stats()
    assert towers.runs == [[grids[0], grids[2], grids[3]]]
    assert (stats.succeeded, stats.cancelled, stats.late) == (4, 1, 1)


@pytest.mark.threads
def test_two_replicas_share_the_work_of_many_callers(towers: Towers) -> None:
    images = sizes(6)
    wanted = [result.tensor for result in alone(images)]
    towers.runs.clear()
    wrong: list[int] = []

    def call(seed: int) -> None:
        chosen = random.Random(seed).choices(range(6), k=8)
        for index, (rows, _) in zip(chosen, encoder.generate([images[i] for i in chosen]), strict=True):
            if not near(rows, wanted[index]):
                wrong.append(index)

    with opened(BatchConfig(10**6, 3), replicas_per_gpu=2) as encoder:
        joined([started(partial(call, seed)) for seed in range(6)])
        nothing_left(encoder)
        assert encoder.stats().succeeded == 48
    assert wrong == []
    assert sum(map(len, towers.runs)) == 48
    assert 1 < max(map(len, towers.runs)) <= 3


# --- what comes out ----------------------------------------------------------------------------------


def prepared(family: str) -> tuple[VisionTower, list[Patches]]:
    """Return the tower of a family's fixture, and its images as patches."""
    _, rules = load_family(GOLDEN / family / "checkpoint", None)
    found = []
    for path in sorted((GOLDEN / family / "images").iterdir()):
        source = open_source(path, MediaLimits(), None)
        found.append(rules.patches(source.decode(MediaLimits()), rules.plan(source.size)))
    tower = rules.build_tower(CPU, torch.float32)
    assert isinstance(tower, VisionTower)
    return tower, found


def packings(family: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the rows of images in random packings, and of the same images alone."""
    tower, images = prepared(family)
    chance = random.Random(family)
    with torch.no_grad():
        wanted = [run_tower(CpuLane(CPU), tower, [image])[0] for image in images]
        for _ in range(count):
            chosen = chance.choices(range(len(images)), k=chance.randint(2, 5))
            packed = run_tower(CpuLane(CPU), tower, [images[i] for i in chosen])
            yield from zip(packed, [wanted[i] for i in chosen], strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_200_random_packings_equal_the_images_alone(family: str) -> None:
    for rows, wanted in packings(family, 200):
        assert near(rows, wanted)
        assert rows.untyped_storage().nbytes() == rows.nbytes == wanted.nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_control_attention_between_packed_images_is_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        return attention(q, k, v, [sum(lengths)])

    monkeypatch.setattr(trunk, "attention", across)
    assert not any(near(rows, wanted) for rows, wanted in packings(family, 3))


@pytest.mark.parametrize("batching", [MANY, ALONE])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_through_the_encoder(towers: Towers, family: str, batching: BatchConfig) -> None:
    images = [path.read_bytes() for path in sorted((GOLDEN / family / "images").iterdir())]
    grids = grids_of(images, family)
    wanted = alone(images, family)
    with opened(batching, family) as encoder:
        futures = towers.together(encoder, images)
        towers.opened.set()
        results = [future.result(HANG) for future in futures]
    equal = torch.equal if batching.deterministic else near
    for (rows, metadata), other in zip(results, wanted, strict=True):
        assert equal(rows, other.tensor)
        assert metadata == other.metadata
        assert rows.untyped_storage().nbytes() == rows.nbytes
        assert rows.is_contiguous()
        assert rows._base is None
    assert towers.runs == ([[grid] for grid in grids] if batching.deterministic else [grids])


def test_control_rows_that_are_views_keep_their_batch(
    towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mm_encoder.engine.batch.own_storage", lambda rows: rows)
    with opened(MANY) as encoder:
        futures = towers.together(encoder, sizes(2))
        towers.opened.set()
        rows = futures[0].result(HANG).tensor
    assert rows.untyped_storage().nbytes() > rows.nbytes


# --- what fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", [MANY, ALONE])
@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (RuntimeError("a kernel failed"), ReplicaError),
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceOutOfMemoryError),
        (MemoryError(), DeviceOutOfMemoryError),
        (SystemExit(), ReplicaError),
    ],
)
def test_the_culprit_of_a_batch_alone_fails(
    towers: Towers, batching: BatchConfig, cause: BaseException, error: type[Exception]
) -> None:
    images = sizes(4)
    grids, wanted = grids_of(images), alone(images)
    culprit = grids[2]
    with opened(batching) as encoder:
        futures = towers.together(encoder, images)
        towers.fail = lambda grids: cause if culprit in grids else None
        towers.opened.set()
        for index in (0, 1, 3):  # each run alone: to the bit
            assert torch.equal(futures[index].result(HANG).tensor, wanted[index].tensor)
        assert isinstance(futures[2].exception(HANG), error)
        nothing_left(encoder)
        stats, health = encoder.stats(), encoder.health()
        assert torch.equal(encoder.generate(images[0])[0].tensor, wanted[0].tensor)
    assert (stats.succeeded, stats.failed) == (4, 1)
    assert health.state == "ready"
    assert str(error.__name__) in str(health.last_error)
    assert towers.runs[-5:-1] == [[grid] for grid in grids]


def test_a_batch_that_is_too_large_for_the_memory_runs_one_by_one(
    towers: Towers, caplog: pytest.LogCaptureFixture
) -> None:
    images = sizes(4)
    grids, wanted = grids_of(images), alone(images)
    with opened(MANY) as encoder:
        futures = towers.together(encoder, images)
        towers.inputs.clear()
        towers.inputs_alive.clear()
        towers.fail = lambda grids: torch.OutOfMemoryError("CUDA out of memory") if len(grids) > 1 else None
        towers.opened.set()
        for future, alone_result in zip(futures, wanted, strict=True):
            assert torch.equal(future.result(HANG).tensor, alone_result.tensor)
        stats, health = encoder.stats(), encoder.health()
    assert towers.runs == [grids, *([grid] for grid in grids)]
    assert (stats.succeeded, stats.failed, health.last_error) == (5, 0, None)
    assert towers.inputs_alive[:2] == [0, 0]  # the packed patches are gone when the first runs alone
    fields = [vars(record) for record in caplog.records if "mm_error" in vars(record)]
    assert [(one["mm_event"], one["mm_error"]) for one in fields] == [("batch_failed", "OutOfMemoryError")]


@pytest.mark.parametrize("when", ["in the batch", "one by one"])
def test_a_replica_that_is_lost_in_a_batch_fails_the_rest_of_it(
    towers: Towers, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    images, usable = sizes(3), [when == "one by one"]
    grids = grids_of(images)
    monkeypatch.setattr(CpuLane, "drain", lambda lane: usable.pop() if usable else False)
    with opened(MANY, replicas_per_gpu=2) as encoder:
        futures = towers.together(encoder, images)
        towers.fail = lambda run: ValueError("gone") if grids[1] in run else None
        towers.opened.set()
        errors = [future.exception(HANG) for future in futures]
        nothing_left(encoder)
        health = encoder.health()
        assert [replica.alive for replica in health.replicas].count(True) == 1
        assert len(encoder.generate(images[0])[0].tensor)
    fine = [True, False, False] if when == "one by one" else [False] * 3
    assert [error is None for error in errors] == fine
    assert all("is lost: ValueError: gone" in str(error) for error in errors if error is not None)
    assert health.state == "degraded"


def test_a_thread_at_a_batch_is_busy_with_it(towers: Towers) -> None:
    with opened(MANY, wedged_after=0.05) as encoder:
        futures = towers.together(encoder, sizes(3))
        towers.opened.set()
        towers.opened.clear()
        until(lambda: encoder.health().replicas[0].wedged)
        towers.opened.set()
        assert all(future.exception(HANG) is None for future in futures)
        until(lambda: encoder.health().replicas[0].busy_s is None)
        assert encoder.health().state == "ready"


# --- with a cache ------------------------------------------------------------------------------------


def attention_field(batching: BatchConfig | None) -> str:
    with opened(batching, cache=CacheConfig()) as encoder:
        assert isinstance(encoder._coalescer, Coalescer)
        return encoder._coalescer.keys.identity["attention"]


def test_the_key_tells_packed_from_alone() -> None:
    assert attention_field(None) == attention_field(ALONE) != attention_field(MANY)


@pytest.mark.threads
def test_64_callers_of_one_image_beside_others_are_one_miss(towers: Towers) -> None:
    images = sizes(3)
    wanted = [result.tensor for result in alone(images)]
    with opened(MANY, cache=CacheConfig()) as encoder:
        others = towers.together(encoder, images[1:])
        got: list[ImageResult] = []
        callers = [started(lambda: got.append(encoder.submit(images[0]).result(HANG))) for _ in range(64)]
        until(lambda: encoder.cache_stats().misses == 4 and encoder.cache_stats().joined == 63)
        until(lambda: len(encoder._engine.scheduler._ready) == 3)
        towers.opened.set()
        joined(callers)
        rows = [future.result(HANG).tensor for future in others]
        nothing_left(encoder)
        hits = [result.tensor for result in encoder.generate(images)]
        stats = encoder.cache_stats()
    assert len(towers.runs) == 1
    assert len({result.tensor.data_ptr() for result in got}) == 1
    assert [hit.data_ptr() for hit in hits] == [one.data_ptr() for one in (got[0].tensor, *rows)]
    assert all(near(hit, right) for hit, right in zip(hits, wanted, strict=True))
    assert (stats.memory_hits, stats.misses) == (3, 4)


@pytest.mark.parametrize("batching", [MANY, ALONE])
def test_a_batch_during_which_a_setting_is_switched_is_not_stored(
    towers: Towers, batching: BatchConfig
) -> None:
    images = sizes(2)
    last = grids_of(images)[1]
    flash = torch.backends.cuda.enable_flash_sdp

    def switch(grids: Sequence[Grid]) -> None:
        flash(last not in grids)  # off, and for ALONE only in the second run

    with opened(batching, cache=CacheConfig()) as encoder:
        futures = towers.together(encoder, images)
        towers.fail = switch
        try:
            towers.opened.set()
            for future in futures:
                assert future.result(HANG).metadata.cache == "miss"
        finally:
            flash(True)
        towers.fail = lambda grids: None
        again = encoder.generate(images)
        hits = encoder.generate(images)
    assert [metadata.cache for _, metadata in again] == ["miss"] * 2
    assert [metadata.cache for _, metadata in hits] == ["memory"] * 2


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_patches": 0}, ValueError, "max_patches must be at least 1, got 0"),
        ({"max_patches": 1.5}, TypeError, "max_patches must be an int, got float"),
        ({"max_images": 0}, ValueError, "max_images must be at least 1, got 0"),
        ({"max_images": True}, TypeError, "max_images must be an int, got bool"),
        ({"deterministic": 1}, TypeError, "deterministic must be a bool, got int"),
    ],
)
def test_impossible_limits_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchConfig(**{"max_patches": 1, "max_images": 1} | arguments)
