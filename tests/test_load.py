"""Many callers at once, with many kinds of images, some of them bad and some of them cancelled."""

from __future__ import annotations

import asyncio
import base64
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import Encoder, ImageResult, MediaError

from .helpers.images import noise, saved
from .helpers.waiting import HANG, until

IMAGES, CALLERS, REPLICAS = 2000, 16, 4


@dataclass
class Item:
    """An image, and its outcome in a sequential run: rows or an error."""

    image: Any
    result: ImageResult | None = None
    error: MediaError | None = None


def kinds(seed: int, folder: Path) -> list[Any]:
    """Return one image in each of ten kinds; the size depends on the seed."""
    width, height = 20 + 7 * seed, 90 - 9 * seed
    image = noise(width, height, seed=seed)
    path = folder / f"{seed}.jpg"
    path.write_bytes(saved(image, "JPEG", quality=80))
    return [
        saved(image, "JPEG"),
        saved(image.convert("L"), "JPEG"),
        saved(image, "JPEG", progressive=True),
        saved(image, "PNG"),
        saved(noise(width, height, "RGBA", seed), "PNG"),
        saved(image.quantize(), "GIF"),
        saved(image, "WEBP", lossless=True),
        "data:image/bmp;base64," + base64.b64encode(saved(image, "BMP")).decode(),
        path,
        np.asarray(image),
    ]


def damaged(image: Any, chance: random.Random) -> bytes:
    """Damage an image as a bad connection does: truncated, zeros at its start, empty, or an error page."""
    data = image if isinstance(image, bytes) else saved(noise(40, 40), "PNG")
    return chance.choice([data[: len(data) // 2], bytes(20) + data[20:], b"", b"<html>503</html>"])


def sequential(checkpoint: Path, folder: Path, chance: random.Random) -> list[Item]:
    """Return distinct items, a tenth of them bad, each encoded alone."""
    items = [Item(image) for seed in range(9) for image in kinds(seed, folder)]
    items += [Item(damaged(item.image, chance)) for item in items[:: len(items) // 10]]
    with Encoder(checkpoint, device="cpu") as encoder:
        for item in items:
            try:
                item.result = encoder.generate(item.image)[0]
            except MediaError as error:
                item.error = error
    assert sum(item.error is not None for item in items) >= len(items) // 10
    return items


class Caller:
    """The share of one thread, and its wrong outcomes."""

    def __init__(self, encoder: Encoder, share: list[Item], seed: int) -> None:
        self.encoder, self.share, self.chance = encoder, share, random.Random(seed)
        self.wrong: list[str] = []
        self.results = self.errors = self.cancelled = 0

    def check(self, item: Item, outcome: ImageResult | BaseException, index: int | None = None) -> None:
        if isinstance(outcome, ImageResult):
            self.results += 1
            right = (
                item.result is not None
                and outcome.metadata == item.result.metadata
                and torch.equal(outcome.tensor, item.result.tensor)
            )
        else:
            self.errors += 1
            named = "" if index is None else f"images[{index}]: "
            right = type(outcome) is type(item.error) and str(outcome) == f"{named}{item.error}"
        if not right:
            self.wrong.append(f"wanted {item.error or item.result}, got {outcome!r}")

    def generate(self) -> None:
        """Encode in calls of one to six images; a call with a bad image raises its error."""
        while self.share:
            taken = [self.share.pop() for _ in range(min(len(self.share), self.chance.randint(1, 6)))]
            bad = [index for index, item in enumerate(taken) if item.error]
            try:
                results = self.encoder.generate([item.image for item in taken])
            except MediaError as error:
                index = int(str(error)[len("images[")])
                assert index in bad
                self.check(taken[index], error, index)
            else:
                for item, result in zip(taken, results, strict=True):
                    self.check(item, result)

    def submit(self) -> None:
        """Encode with up to ten images in flight, one in ten of them cancelled at a random time."""
        waiting: list[tuple[Item, Future[ImageResult]]] = []
        while self.share or waiting:
            if self.share and len(waiting) < 10:
                item = self.share.pop()
                waiting.append((item, self.encoder.submit(item.image)))
                continue
            item, future = waiting.pop(self.chance.randrange(len(waiting)))
            if self.chance.random() < 0.1 and future.cancel():
                self.cancelled += 1
                continue
            self.check(item, future.exception(timeout=HANG) or future.result(timeout=0))

    def tasks(self) -> None:
        """Encode in twenty tasks on an event loop; one image in ten has a very short timeout."""

        async def task() -> None:
            while self.share:
                item = self.share.pop()
                limit = self.chance.random() * 0.01 if self.chance.random() < 0.1 else 60
                try:
                    async with asyncio.timeout(limit):
                        self.check(item, (await self.encoder.generate_async(item.image))[0])
                except MediaError as error:
                    self.check(item, error)
                except TimeoutError:
                    self.cancelled += 1

        async def main() -> None:
            await asyncio.gather(*(task() for _ in range(20)))

        asyncio.run(main())


def test_concurrent_callers_get_their_own_rows_and_nothing_is_left(
    glm53_checkpoint: Path, tmp_path: Path
) -> None:
    chance = random.Random(5)
    items = sequential(glm53_checkpoint, tmp_path, chance)
    work = [chance.choice(items) for _ in range(IMAGES)]
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=REPLICAS) as encoder:
        callers = [Caller(encoder, work[index::CALLERS], index) for index in range(CALLERS)]
        ways: list[Callable[[Caller], None]] = [Caller.generate, Caller.submit, Caller.tasks]
        faults: list[BaseException] = []

        def run(way: Callable[[Caller], None], caller: Caller) -> None:
            try:
                way(caller)
            except BaseException as error:
                faults.append(error)

        threads = [
            threading.Thread(target=run, args=(ways[index % 3], caller))
            for index, caller in enumerate(callers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
            assert not thread.is_alive()
        assert faults == []
        assert [wrong for caller in callers for wrong in caller.wrong] == []
        until(lambda: all(worker.busy_s is None for worker in encoder.health().replicas))
        health, stats = encoder.health(), encoder.stats()
        assert (health.queue_length, health.queue_bytes, health.waiting, stats.in_flight) == (0, 0, 0, 0)
        assert health.state == "ready"
        assert health.last_error is None
    assert sum(caller.results for caller in callers) > IMAGES * 0.6
    assert sum(caller.errors for caller in callers) > IMAGES * 0.05
    assert sum(caller.cancelled for caller in callers) > IMAGES * 0.02
    ended = stats.succeeded + stats.failed + stats.cancelled + stats.late + stats.refused
    assert stats.requests == ended
    assert (stats.late, stats.refused) == (0, 0)


# --- memory under overload ---------------------------------------------------------------------------

DEPTH, WORKERS, SIDE = 8, 2, 2048
IMAGE_BYTES = 3 * SIDE * SIDE

OVERLOAD = """
    import io, sys, threading
    import numpy, torch
    from PIL import Image
    from mm_encoder import Encoder

    checkpoint, depth, side, ways = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (9, 99, 199)).save(buffer, "PNG")
    data = buffer.getvalue()

    def memory(field):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

    with Encoder(checkpoint, device="cpu", queue_depth=depth, preprocess_workers=2) as encoder:
        encoder.generate(Image.new("RGB", (64, 64)))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        before = memory("VmRSS")
        threads = [threading.Thread(target=encoder.submit, args=(data,)) for _ in range(10 * depth)]
        if ways == "control":  # each caller decodes, without any bound
            def decode():
                kept.append(numpy.array(Image.open(io.BytesIO(data))))
            kept = []
            threads = [threading.Thread(target=decode) for _ in range(3 * depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert encoder.stats().succeeded == (1 if ways == "control" else 1 + 10 * depth)
    print(memory("VmHWM") - before)
"""


def peak(checkpoint: Path, way: str) -> int:
    """Return by how many bytes the peak memory of a new process rises under ten times the load that fits."""
    program = textwrap.dedent(OVERLOAD)
    run = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint), str(DEPTH), str(SIDE), way],
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return int(run.stdout)


@pytest.mark.parametrize("way", ["submit", "control"])
def test_peak_memory_follows_the_bounds_and_not_the_number_of_callers(
    glm53_checkpoint: Path, way: str
) -> None:
    within = peak(glm53_checkpoint, way) < (DEPTH + WORKERS) * IMAGE_BYTES + 64 * 1024**2
    assert within == (way == "submit")
