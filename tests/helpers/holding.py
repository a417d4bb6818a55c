"""Calls that block until released, so that a test can act while an image is at a known stage."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder import Encoder, ImageResult, MediaPlanner
from mm_encoder.families.glm53 import Glm53, GlmTower
from mm_encoder.media.source import Source

from .images import noise, saved
from .waiting import HANG, nothing_left, until


def watch_towers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return a list that gets a weak reference to every tower that is built from now on."""
    towers: list[weakref.ref[Any]] = []
    build = Glm53.build_tower

    def watched(*arguments: Any) -> Any:
        tower = build(*arguments)
        towers.append(weakref.ref(tower))
        return tower

    monkeypatch.setattr(Glm53, "build_tower", watched)
    return towers


class Hold:
    """Blocks the calls of `owner.name` for which `when` is true, until `release`; `wait` waits for them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        when: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self._arrived, self._opened = threading.Semaphore(0), threading.Event()
        self._errors: deque[BaseException] = deque()
        call = getattr(owner, name)

        def held(*arguments: Any) -> Any:
            if when(*arguments):
                self._arrived.release()
                assert self._opened.wait(HANG), f"{name} was never released"
                with suppress(IndexError):
                    raise self._errors.popleft()
            return call(*arguments)

        monkeypatch.setattr(owner, name, held)

    def wait(self, calls: int = 1) -> None:
        """Wait until this many more calls are blocked."""
        for _ in range(calls):
            assert self._arrived.acquire(timeout=HANG)

    def release(self) -> None:
        """Release the blocked calls and block no more."""
        self._opened.set()

    def fail_with(self, error: BaseException) -> None:
        """Make one of the blocked calls raise `error` when it is released."""
        self._errors.append(error)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold_towers(monkeypatch: pytest.MonkeyPatch) -> Hold:
    return Hold(monkeypatch, GlmTower, "forward")


STAGES = ("waiting", "queued", "opening", "decoding", "patches", "ready", "running")
FIRST_SIZE, VICTIM_SIZE = (120, 60), (60, 180)


class Scene:
    """An encoder in which the image `victim` stops at one stage, with other images before and behind it.

    The context manager blocks that stage. Inside, the test submits `victim` and calls `reached`; at the end
    `check_others` releases the stage and checks the results of the other images.
    """

    def __init__(self, stage: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage, self.victim = stage, saved(noise(*VICTIM_SIZE), "PNG")
        depth = 2 if stage == "waiting" else 9
        self.encoder = Encoder(checkpoint, device="cpu", queue_depth=depth, preprocess_workers=1)
        first = saved(noise(*FIRST_SIZE), "PNG")
        self._images = [first, *(saved(noise(40 + 30 * i, 50, seed=i), "PNG") for i in range(4))]
        self._wanted = self.encoder.generate(self._images)
        self._others: list[Future[ImageResult]] = []
        size = FIRST_SIZE if stage in ("waiting", "queued", "ready") else VICTIM_SIZE
        grid = MediaPlanner(checkpoint).plan(size).grid_thws[0]
        self._hold = {
            "queued": lambda: Hold(monkeypatch, Source, "decode", lambda source, _: source.size == size),
            "opening": lambda: Hold(monkeypatch, Glm53, "open", lambda _, data, *__: data is self.victim),
            "decoding": lambda: Hold(monkeypatch, Source, "decode", lambda source, _: source.size == size),
            "patches": lambda: Hold(monkeypatch, Glm53, "patches", lambda *call: call[2].source == size),
        }.get(stage, lambda: Hold(monkeypatch, GlmTower, "forward", lambda *call: call[2] == [grid]))()

    def __enter__(self) -> Scene:
        self._submit(1)
        if self.stage in ("waiting", "queued", "ready"):
            self._hold.wait()  # the first image is held
        if self.stage == "waiting":
            self._submit(2)  # the queue is full
        return self

    def __exit__(self, *_: object) -> None:
        self._hold.release()
        self.encoder.close()

    def reached(self) -> None:
        """Wait until the victim is at its stage, then submit the images behind it."""
        scheduler = self.encoder._engine.scheduler
        if self.stage == "waiting":
            until(lambda: scheduler.slots.waiting == 1)
            return
        if self.stage == "queued":
            until(lambda: len(scheduler._queued) == 1)
        elif self.stage == "ready":
            until(lambda: len(scheduler._ready) == 1)
        else:
            self._hold.wait()
        self._submit(2)

    def release(self) -> None:
        self._hold.release()

    def check_others(self) -> None:
        """Check that the other images have their undisturbed results and that nothing is left in flight."""
        self.release()
        for future, wanted in zip(self._others, self._wanted, strict=False):
            rows, metadata = future.result(timeout=HANG)
            assert torch.equal(rows, wanted.tensor)
            assert metadata == wanted.metadata
        nothing_left(self.encoder)

    def _submit(self, count: int) -> None:
        for image in self._images[len(self._others) :][:count]:
            self._others.append(self.encoder.submit(image))
