"""The limit on preprocessing threads over all encoders of a process."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import Encoder, ImageResult
from mm_encoder.engine import preprocess
from mm_encoder.families.glm53 import Glm53
from mm_encoder.runtime import usable_cpus

from ..helpers.waiting import HANG

pytestmark = pytest.mark.threads

IMAGE = np.zeros((30, 30, 3), np.uint8)


class Concurrency:
    """Counts how many images are prepared at once. Each waits for `enough` others; with one more than may be
    prepared at once it waits in vain, and a missing limit is seen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, enough: int, limit: float) -> None:
        self.now = self.most = 0
        self._lock, self._enough = threading.Lock(), enough
        self._full = threading.Event()
        patches = Glm53.patches

        def counted(*arguments: Any) -> Any:
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
                if self.now >= self._enough:
                    self._full.set()
            self._full.wait(limit)
            try:
                return patches(*arguments)
            finally:
                with self._lock:
                    self.now -= 1

        monkeypatch.setattr(Glm53, "patches", counted)


@pytest.mark.parametrize("cap", [1, 2, 100])
def test_encoders_share_one_limit_on_preprocessing(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cap: int
) -> None:
    """100 is the control: a limit that does not bind lets all six threads work at once."""
    monkeypatch.setattr(preprocess, "_CPUS", threading.BoundedSemaphore(cap))
    seen = Concurrency(monkeypatch, enough=min(cap + 1, 6), limit=0.05 if cap < 6 else HANG)
    with ExitStack() as stack:
        encoders = [
            stack.enter_context(Encoder(glm53_checkpoint, device="cpu", preprocess_workers=2, queue_depth=8))
            for _ in range(3)
        ]
        futures: list[Future[ImageResult]] = [encoder.submit(IMAGE) for _ in range(6) for encoder in encoders]
        assert all(future.result(timeout=HANG) for future in futures)
    assert seen.most == min(cap, 6)


def test_the_limit_is_the_number_of_usable_cpus() -> None:
    taken = 0
    fresh = preprocess._CPUS
    while fresh.acquire(blocking=False):
        taken += 1
    for _ in range(taken):
        fresh.release()
    assert taken == usable_cpus() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("parallel", [False, True], ids=["as it is", "control: a parallel function"])
def test_preprocessing_starts_no_torch_threads(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    patches = Glm53.patches

    def spreading(*arguments: Any) -> Any:
        torch.ones(2000, 2000).add_(1)
        return patches(*arguments)

    if parallel:
        monkeypatch.setattr(Glm53, "patches", spreading)
    picture = np.random.default_rng(0).integers(0, 256, (1500, 2000, 3), np.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(8)  # so that new Torch threads would be seen
    try:
        with Encoder(glm53_checkpoint, device="cpu", preprocess_workers=3, queue_depth=9) as encoder:
            encoder.generate(IMAGE)  # running the tower makes Torch start its threads, once
            had = len(os.listdir("/proc/self/task"))
            seen: list[int] = []
            over = threading.Event()

            def watch() -> None:
                while not over.is_set():
                    seen.append(len(os.listdir("/proc/self/task")))

            watcher = threading.Thread(target=watch)
            watcher.start()
            encoder.generate([picture] * 9)
            over.set()
            watcher.join()
        assert torch.get_num_threads() == 8
        more = max(seen) - had - 1  # less the watcher
        assert more > 0 if parallel else more <= 0
    finally:
        torch.set_num_threads(before)
