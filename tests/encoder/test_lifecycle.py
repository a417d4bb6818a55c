"""Encoders that are dropped and collected, and encoders that cannot be constructed."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import CacheConfig, CheckpointError, DeviceOutOfMemoryError, Encoder
from mm_encoder.engine.budget import Budget
from mm_encoder.engine.job import Job
from mm_encoder.families.glm53 import Glm53, GlmTower

from ..helpers.holding import hold_towers, watch_towers
from ..helpers.images import png
from ..helpers.threads import library_threads
from ..helpers.waiting import HANG

pytestmark = pytest.mark.usefixtures("one_compute_thread")
threads = pytest.mark.threads
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

IMAGE = np.zeros((50, 50, 3), np.uint8)
CLEAN = (0, "", "")


# --- garbage collection ------------------------------------------------------------------------------


@threads
def test_a_dropped_encoder_finishes_accepted_jobs(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_towers(monkeypatch) as towers:
        encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=9)
        futures = [encoder.submit(IMAGE) for _ in range(6)]
        towers.wait()
        running = library_threads()
        del encoder
        gc.collect()
        assert not any(future.done() for future in futures)
        towers.release()
        assert all(future.result(timeout=HANG) for future in futures)
        for thread in running:
            thread.join(HANG)
            assert not thread.is_alive()


@linux
@threads
def test_many_encoders_leave_no_threads_and_no_files(glm53_checkpoint: Path) -> None:
    def life() -> None:
        with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2) as encoder:
            encoder.generate([IMAGE] * 3)

    life()
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        life()
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_dropped_encoder_ends_its_threads(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    encoder.generate(png(20, 20))
    watch = weakref.ref(encoder)
    threads = library_threads()
    del encoder
    gc.collect()
    assert watch() is None
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()


@pytest.mark.parametrize("lock", ["scheduler", "budget"])
def test_an_encoder_collected_while_its_lock_is_held_stops(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    if lock == "scheduler":

        def number(job: Job) -> int:
            gc.collect()
            return job.number

        monkeypatch.setattr("mm_encoder.engine.scheduler._by_number", number)
    else:
        advance = Budget._advance

        def collecting(budget: Budget[Job]) -> Any:
            gc.collect()
            return advance(budget)

        monkeypatch.setattr(Budget, "_advance", collecting)
    encoder = Encoder(glm53_checkpoint, device="cpu")
    encoder.itself = encoder  # type: ignore[attr-defined]
    gc.disable()
    try:
        encoder.submit(png(100, 100))
        threads = library_threads()
        del encoder
        for thread in threads:
            thread.join(HANG)
            assert not thread.is_alive()
    finally:
        gc.enable()


# --- construction fails ------------------------------------------------------------------------------


@linux
@threads
def test_failed_constructions_leave_no_threads_and_no_files(
    glm53_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "checkpoint"
    shutil.copytree(glm53_checkpoint, bad)
    for file in bad.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    build = Glm53.build_tower

    def fail_at_the_second(family: Glm53, *arguments: object) -> object:
        if threading.current_thread().name.endswith("replica-1"):
            raise RuntimeError("no second tower")
        return build(family, *arguments)  # type: ignore[arg-type]

    def fail() -> None:
        with pytest.raises(CheckpointError):
            Encoder(bad, device="cpu", replicas_per_gpu=2)
        with monkeypatch.context() as patch:
            patch.setattr(Glm53, "build_tower", fail_at_the_second)
            with pytest.raises(RuntimeError, match="no second tower"):
                Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2)

    fail()
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        fail()
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert library_threads() == []


def test_a_thread_that_cannot_start_stops_the_others(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    for refused in ("replica-1", "prep-1"):

        def failing(thread: threading.Thread, refused: str = refused) -> None:
            if thread.name.endswith(refused):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2, preprocess_workers=2)
        assert library_threads() == []


STEPS = [
    "coalescer.open_transfers",
    "coalescer.Cache",
    "cache.tiered.MemoryTier",
    "cache.tiered._open_disk",
    "coalescer.DaemonPool",
    "engine.engine.Scheduler",
    "engine.engine.Replica",
    "engine.engine.Preprocessor",
    "engine.engine.ThreadGroup",
    "engine.engine.owned_thread",
    "engine.replica.open_lane",
    "families.weights._read",
    "pipeline.ImagePipeline.build_tower",
    "pipeline.describe",
    "pipeline.settings_reader",
    "encoder.admission_of",
    "encoder.native_summary",
    *(f"thread {name}" for name in ("cache", "deadlines", "replica-0", "replica-1", "prep-0", "prep-1")),
]


@linux
@pytest.mark.parametrize("step", STEPS)
def test_a_constructor_that_fails_at_any_step_leaves_nothing(
    glm53_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """No thread, no open file, no lock on the cache's directory, no call at the interpreter's exit."""
    config = CacheConfig(disk_path=tmp_path / "cache", disk_bytes=2**24, max_entry_bytes=2**20)
    settings: dict[str, Any] = {"cache": config, "replicas_per_gpu": 2, "preprocess_workers": 2}
    at_exit: list[Any] = []
    Encoder(glm53_checkpoint, device="cpu", **settings).close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    start = threading.Thread.start

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("this step fails")

    def refused(thread: threading.Thread) -> None:
        if thread.name == f"mm-encoder-{step.removeprefix('thread ')}":
            raise MemoryError("this step fails")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr("mm_encoder.engine.lifecycle.atexit.register", at_exit.append)
        patch.setattr("mm_encoder.engine.lifecycle.atexit.unregister", at_exit.remove)
        if step.startswith("thread "):
            patch.setattr(threading.Thread, "start", refused)
        else:
            patch.setattr(f"mm_encoder.{step}", failing)
        with pytest.raises((MemoryError, DeviceOutOfMemoryError)):
            Encoder(glm53_checkpoint, device="cpu", **settings)
    assert library_threads() == []
    assert at_exit == []
    assert len(os.listdir("/proc/self/fd")) == before
    with Encoder(glm53_checkpoint, device="cpu", **settings) as encoder:
        assert encoder.generate(IMAGE)


@pytest.mark.parametrize("share_weights", [False, True])
@pytest.mark.parametrize("cache", [None, CacheConfig()])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("ending", ["used", "failed", "lost"])
def test_close_frees_the_weights_whatever_is_still_held(
    glm53_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    share_weights: bool,
    cache: CacheConfig | None,
    replicas: int,
    ending: str,
) -> None:
    built = watch_towers(monkeypatch)
    settings: dict[str, Any] = {"share_weights": share_weights, "cache": cache, "replicas_per_gpu": replicas}
    encoder = Encoder(glm53_checkpoint, device="cpu", **settings)
    held: list[Any] = [*encoder.generate([IMAGE, png()])]
    if ending != "used":
        monkeypatch.setattr(GlmTower, "forward", lambda *_: 1 / 0)
        if ending == "lost":
            monkeypatch.setattr("mm_encoder.device.CpuLane.drain", lambda _: False)
        failing = encoder.submit(png(seed=9))
        held += [failing, failing.exception(HANG)]
    encoder.close()
    gc.collect()
    assert [watch() for watch in built] == [None] * (1 if share_weights else replicas)
    assert held
    assert encoder.health().state == "closed"


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (RuntimeError("no memory for a second tower"), RuntimeError),
        (torch.OutOfMemoryError("no memory for a second tower"), DeviceOutOfMemoryError),
    ],
)
def test_a_replica_that_fails_to_load_stops_the_others(
    glm53_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: Exception,
    raised: type[Exception],
) -> None:
    built: list[weakref.ref[Any]] = []
    build, turn = Glm53.build_tower, threading.Semaphore(1)

    def all_but_one_fail(*arguments: Any) -> Any:
        if not turn.acquire(blocking=False):
            raise cause
        tower = build(*arguments)
        built.append(weakref.ref(tower))
        return tower

    monkeypatch.setattr(Glm53, "build_tower", all_but_one_fail)
    with pytest.raises(raised, match="no memory for a second tower|weights of a replica"):
        Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=3)
    assert library_threads() == []
    gc.collect()
    assert built[0]() is None
