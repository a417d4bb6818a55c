"""An exception at any place of the cache, in any thread that runs it, leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import CacheConfig, Encoder
from mm_encoder.coalescer import Coalescer

from ..helpers.interrupts import AVAILABLE, CALLER, Interrupts, Place, as_caller, in_thread
from ..helpers.threads import library_threads
from ..helpers.waiting import HANG, nothing_left, until

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="sys.monitoring came with Python 3.12")

ALL = bool(os.environ.get("STRESS"))
SAMPLE, THREAD_SAMPLE = 8, 2
"""Places per scenario, spread over all, unless STRESS is set; each in a thread of ours takes an encoder."""
PARTS = ("cached.py", "coalescer.py", "cache", "daemons.py")
IMAGES = [np.full((30, 30, 3), seed, np.uint8) for seed in range(3)]
MIB = 1024**2


def opened(checkpoint: Path, path: Path, replicas: int = 1) -> Encoder:
    config = CacheConfig(
        memory_bytes=2500, max_entry_bytes=MIB, disk_path=path / "cache", disk_bytes=64 * MIB
    )
    return Encoder(
        checkpoint, device="cpu", cache=config, queue_depth=8, preprocess_workers=1, replicas_per_gpu=replicas
    )


def far() -> float:
    return time.monotonic() + 1e6


def new(encoder: Encoder) -> None:
    """Misses, one of which joins another; all are evicted from memory by and by."""
    encoder.bump_weights()
    futures = [encoder.submit(image, deadline=far()) for image in (*IMAGES, IMAGES[0])]
    futures[1].cancel()
    assert not wait(futures, HANG).not_done


def known(encoder: Encoder) -> None:
    """Hits in memory and on disk."""
    encoder.generate(IMAGES)
    encoder.generate(IMAGES, deadline=far())


def on_a_loop(encoder: Encoder) -> None:
    async def main() -> None:
        await asyncio.gather(*(encoder.generate_async(image) for image in IMAGES * 2), return_exceptions=True)

    asyncio.run(main())


def places(interrupts: Interrupts, run: Callable[[], None], sample: int = SAMPLE) -> list[tuple[Place, int]]:
    """Return the places that `run` visits, each with its first and its last visit."""
    with interrupts.recording() as visited:
        run()
    found = [(place, visit) for place, count in sorted(visited.items()) for visit in sorted({1, count})]
    assert found
    return found if ALL else found[:: -(-len(found) // sample)]


def check_nothing_left(encoder: Encoder, place: Place, wanted: list[torch.Tensor]) -> None:
    nothing_left(encoder)
    assert isinstance(encoder._coalescer, Coalescer)
    cache = encoder._coalescer.cache
    until(lambda: len(cache._reads) == 0 and not cache._backlog)
    assert cache._backlog_bytes == 0, place
    for _ in range(2):
        got = [encoder.submit(image).result(HANG).tensor for image in IMAGES]
        assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True)), place
    memory = cache._memory
    held = [node.nbytes for node in memory._index.values()]
    assert (len(memory._small) + len(memory._main), memory._bytes) == (len(held), sum(held)), place
    assert memory._small_bytes == sum(node.nbytes for node in memory._small), place


# Of coroutines of asyncio's own that were interrupted before they began.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("scenario", [new, known, on_a_loop])
def test_an_interrupted_caller_leaves_nothing_behind(
    glm53_checkpoint: Path, tmp_path: Path, scenario: Callable[[Encoder], None], error: type[BaseException]
) -> None:
    interrupts = Interrupts(*PARTS, role=lambda: threading.current_thread().name == CALLER)
    struck = 0
    with opened(glm53_checkpoint, tmp_path) as encoder:
        wanted = [result.tensor.clone() for result in encoder.generate(IMAGES)]
        for place, visit in places(interrupts, lambda: as_caller(lambda: scenario(encoder))):
            with interrupts.striking(place, visit, error):
                as_caller(lambda: scenario(encoder))
            struck += interrupts.struck
            check_nothing_left(encoder, place, wanted)
    assert struck > SAMPLE / 3
    until(lambda: not library_threads())


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
@pytest.mark.parametrize("role", ["cache", "read", "lookup", "prep"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupted_thread_of_the_library_leaves_nothing_behind(
    glm53_checkpoint: Path, tmp_path: Path, role: str, error: type[BaseException]
) -> None:
    interrupts = Interrupts(*PARTS, role=in_thread(f"mm-encoder-{role}"))

    def life(encoder: Encoder) -> None:
        for scenario in (new, known, on_a_loop):
            as_caller(lambda scenario=scenario: scenario(encoder))  # type: ignore[misc]

    with opened(glm53_checkpoint, tmp_path) as encoder:
        wanted = [result.tensor.clone() for result in encoder.generate(IMAGES)]
        found = places(interrupts, lambda: life(encoder), THREAD_SAMPLE)
    # A pool's thread that is struck while it has no work yet ends, which only the start of a thread can do.
    for place, visit in (one for one in found if one[0][:2] != ("daemons.py", "_run")):
        with opened(glm53_checkpoint, tmp_path) as encoder:
            with interrupts.striking(place, visit, error):
                life(encoder)
            check_nothing_left(encoder, place, wanted)
        until(lambda: not library_threads())


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_replica_that_is_interrupted_in_the_cache_leaves_nothing_behind(
    glm53_checkpoint: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    """While it stores a result and gives it to the waiters. One that had just taken a job may be lost."""
    interrupts = Interrupts(*PARTS, role=in_thread("mm-encoder-replica"))
    struck = 0
    encoder = opened(glm53_checkpoint, tmp_path, replicas=2)
    wanted = [result.tensor.clone() for result in encoder.generate(IMAGES)]
    for place, visit in places(interrupts, lambda: new(encoder)):  # noqa: B023
        with interrupts.striking(place, visit, error):
            new(encoder)
        struck += interrupts.struck
        check_nothing_left(encoder, place, wanted)
        if not all(replica.alive for replica in encoder.health().replicas):
            encoder.close()
            encoder = opened(glm53_checkpoint, tmp_path, replicas=2)
    encoder.close()
    assert struck > SAMPLE / 3
    until(lambda: not library_threads())


def test_a_delivery_that_is_interrupted_before_its_first_line_is_repeated(
    glm53_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, strikes = Coalescer._on_job_done, [SystemExit]

    def interrupted(*arguments: Any) -> None:
        if strikes:
            raise strikes.pop()
        deliver(*arguments)

    monkeypatch.setattr(Coalescer, "_on_job_done", interrupted)
    with opened(glm53_checkpoint, tmp_path) as encoder:
        assert encoder.submit(IMAGES[0]).result(HANG).metadata.cache == "miss"
        assert not strikes


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_close_can_be_repeated(
    glm53_checkpoint: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    """Everything is written by then, and the directory and the threads are free."""
    interrupts = Interrupts(*PARTS, role=lambda: threading.current_thread().name == CALLER)

    def life(path: Path) -> None:
        encoder = opened(glm53_checkpoint, path)
        futures = [encoder.submit(image) for image in IMAGES]
        as_caller(encoder.close)
        encoder.close()
        assert all(future.result(timeout=0) for future in futures)
        until(lambda: not library_threads())

    for index, (place, visit) in enumerate(places(interrupts, lambda: life(tmp_path / "recorded"))):
        path = tmp_path / str(index)
        with interrupts.striking(place, visit, error):
            life(path)
        with opened(glm53_checkpoint, path) as encoder:
            found = [result.metadata.cache for result in encoder.generate(IMAGES)]
            assert found == ["disk"] * len(IMAGES), place
