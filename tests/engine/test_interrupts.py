"""An exception at any place of the engine, in any of its threads, leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_encoder import BatchConfig, Encoder, ImageResult, MediaLimits, MMEncoderError
from mm_encoder.device import Lane
from mm_encoder.engine.future import Future
from mm_encoder.engine.protocols import TowerFunction
from mm_encoder.engine.replica import Replica
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.settings import EncoderSettings

from ..helpers.images import png
from ..helpers.interrupts import AVAILABLE, CALLER, Interrupts, Place, as_caller, in_thread
from ..helpers.jobs import ready
from ..helpers.threads import joined, library_threads
from ..helpers.waiting import HANG, nothing_left, until

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="sys.monitoring came with Python 3.12")

ALL = bool(os.environ.get("STRESS"))
SAMPLE = 10
"""Places per scenario, spread over all, unless STRESS is set."""
PARTS = ("engine", "locks.py", "encoder.py")
IMAGE, PNG = np.zeros((30, 30, 3), np.uint8), png(30, 30)


def is_caller() -> bool:
    return threading.current_thread().name == CALLER


def submit(encoder: Encoder) -> None:
    encoder.submit(IMAGE).result(HANG)


def submit_and_cancel(encoder: Encoder) -> None:
    futures = [encoder.submit(IMAGE, deadline=time.monotonic() + 1e6) for _ in range(3)]
    for future in reversed(futures):
        future.cancel()


def generate(encoder: Encoder) -> None:
    encoder.generate([IMAGE, IMAGE])


def on_a_loop(encoder: Encoder) -> None:
    """More images than slots, some of which another thread opens."""

    async def main() -> None:
        pairs: list[list[Any]] = [[IMAGE, Image.open(io.BytesIO(PNG))] for _ in range(3)]
        deadline = time.monotonic() + 1e6
        calls = (encoder.generate_async(pair, deadline=deadline) for pair in pairs)
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(main())


def refused(encoder: Encoder) -> None:
    for _ in range(6):
        encoder.submit(IMAGE, timeout=0)


def places(interrupts: Interrupts, run: Callable[[], None]) -> list[tuple[Place, int]]:
    """Return the places that `run` visits, each with its first and its last visit."""
    with interrupts.recording() as visited:
        run()
    # There is nothing in _Condition.wait between waiting and taking the lock again but line events.
    # A thread that is interrupted before its first line could as well not have been started.
    beginning = "owned_thread.<locals>.run"
    visited = {
        place: count
        for place, count in visited.items()
        if place[1::2] != ("_Condition.wait", "line") and place[1] != beginning
    }
    found = [(place, visit) for place, count in sorted(visited.items()) for visit in sorted({1, count})]
    return found if ALL else found[:: -(-len(found) // SAMPLE)]


# Of coroutines of asyncio's own that were interrupted before they began.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("scenario", [submit, submit_and_cancel, generate, refused, on_a_loop])
def test_an_interrupted_caller_leaves_nothing_behind(
    glm53_checkpoint: Path, scenario: Callable[[Encoder], None], error: type[BaseException]
) -> None:
    interrupts = Interrupts(*PARTS, role=is_caller)
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=2, preprocess_workers=1) as encoder:
        wanted = encoder.generate(IMAGE)[0].tensor
        struck = 0
        for place, visit in places(interrupts, lambda: as_caller(lambda: scenario(encoder))):
            with interrupts.striking(place, visit, error):
                as_caller(lambda: scenario(encoder))
            struck += interrupts.struck
            nothing_left(encoder)
            assert torch.equal(encoder.generate(IMAGE)[0].tensor, wanted), place
        assert struck > SAMPLE / 3


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
@pytest.mark.parametrize("role", ["mm-encoder-prep", "mm-encoder-replica", "mm-encoder-deadlines"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupted_thread_of_the_engine_leaves_nothing_behind(
    glm53_checkpoint: Path, role: str, error: type[BaseException]
) -> None:
    """A replica may be lost, the other one goes on; every image has an outcome, and close() ends."""
    interrupts = Interrupts("engine", "locks.py", role=in_thread(role))

    def run(encoder: Encoder) -> None:
        futures = [encoder.submit(IMAGE, deadline=time.monotonic() + 1e6) for _ in range(2)]
        late = encoder.submit(IMAGE, deadline=1.0)
        futures[1].cancel()
        assert len(wait([*futures, late], HANG).done) == 3

    def life() -> None:
        with opened_encoder(glm53_checkpoint) as encoder:
            run(encoder)

    for place, visit in places(interrupts, life):
        with interrupts.striking(place, visit, error):
            try:
                with opened_encoder(glm53_checkpoint) as encoder:
                    run(encoder)
                    nothing_left(encoder)
                    outcome = encoder.submit(IMAGE)
                    assert outcome.exception(HANG) is None or interrupts.struck
                    assert encoder.submit(IMAGE).result(HANG), place
            except (error, MMEncoderError):
                assert interrupts.struck  # while it was constructed
        until(lambda: not library_threads())


def opened_encoder(checkpoint: Path) -> Encoder:
    return Encoder(checkpoint, device="cpu", queue_depth=4, preprocess_workers=1, replicas_per_gpu=2)


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
@pytest.mark.parametrize("role", ["mm-encoder-prep", "mm-encoder-open"])
def test_an_interrupted_thread_that_opens_for_a_loop_leaves_nothing_behind(
    glm53_checkpoint: Path, role: str, error: type[BaseException]
) -> None:
    interrupts = Interrupts("engine", "locks.py", "daemons.py", role=in_thread(role))

    def call(encoder: Encoder) -> None:
        as_caller(lambda: on_a_loop(encoder))
        nothing_left(encoder)

    with opened_encoder(glm53_checkpoint) as encoder:
        found = places(interrupts, lambda: call(encoder))
    # A pool's thread that is struck while it has no work yet ends, which only the start of a thread can do.
    for place, visit in (one for one in found if one[0][:2] != ("daemons.py", "_run")):
        with opened_encoder(glm53_checkpoint) as encoder:
            with interrupts.striking(place, visit, error):
                call(encoder)
            assert encoder.generate(IMAGE), place
        until(lambda: not library_threads())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_close_can_be_repeated(glm53_checkpoint: Path, error: type[BaseException]) -> None:
    interrupts = Interrupts(*PARTS, role=is_caller)

    def life() -> None:
        encoder = opened_encoder(glm53_checkpoint)
        future = encoder.submit(IMAGE)
        as_caller(encoder.close)
        encoder.close()
        assert future.done()

    for place, visit in places(interrupts, life):
        with interrupts.striking(place, visit, error):
            life()
        assert not library_threads()


@pytest.mark.parametrize("scenario", [submit, submit_and_cancel, generate])
def test_close_in_a_signal_handler_anywhere_in_a_call_ends(
    glm53_checkpoint: Path, scenario: Callable[[Encoder], None]
) -> None:
    """The thread may hold locks and a slot where the handler comes, which other threads wait for."""
    interrupts = Interrupts(*PARTS, role=is_caller)

    def life(strike: Callable[[Encoder], object]) -> None:
        encoder = opened_encoder(glm53_checkpoint)
        strike(encoder)
        encoder.close()
        nothing_left(encoder)
        assert not library_threads()

    for place, visit in places(interrupts, lambda: life(lambda it: as_caller(lambda: scenario(it)))):

        def closed_at(encoder: Encoder, place: Place = place, visit: int = visit) -> None:
            with interrupts.calling(place, visit, lambda _: encoder.close()):
                as_caller(lambda: scenario(encoder))
            until(lambda: not library_threads() or not interrupts.struck)

        life(closed_at)


# --- batches ---------------------------------------------------------------------------------------

BATCHED = EncoderSettings(
    device=torch.device("cpu"),
    dtype=torch.float32,
    cache=None,
    limits=MediaLimits(),
    stream_priority=0,
    replicas_per_gpu=2,
    share_weights=False,
    tower="eager",
    batching=BatchConfig(100, 3),
    handoff="stream",
    queue_depth=9,
    queue_bytes=100,
    preprocess_workers=1,
    wedged_after=1.0,
)


def fine(patches: torch.Tensor, grids: object) -> torch.Tensor:
    """A tower that gives a row for each patch."""
    return patches.float()


def alone_only(patches: torch.Tensor, grids: Sequence[object]) -> torch.Tensor:
    """A tower that fails for several images, and for one of two patches."""
    if len(grids) > 1 or len(patches) == 2:
        raise RuntimeError("can't allocate memory")
    return patches.float()


def batched_life(tower: TowerFunction) -> tuple[Scheduler, list[Future[ImageResult]]]:
    """Have two replicas, one after the other, run five jobs, of which one is cancelled."""
    scheduler = Scheduler(9, 100, replicas=2, batching=BATCHED.batching)
    futures = [one.future for one in ready(scheduler, 1, 2, 3, 4, 5)]
    futures[3].cancel()
    scheduler.close()

    def build(lane: Lane) -> TowerFunction:
        return tower

    for index in range(2):
        replica = Replica(index, BATCHED, "a model", build, scheduler)
        replica.thread.start()
        joined([replica.thread])
        assert replica.jobs == ()
    return scheduler, futures


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
@pytest.mark.parametrize("tower", [fine, alone_only])
def test_an_interrupted_batch_leaves_nothing_behind(tower: TowerFunction, error: type[BaseException]) -> None:
    interrupts = Interrupts("engine", "locks.py", role=in_thread("mm-encoder-replica"))

    def check(interrupted: bool) -> None:
        scheduler, futures = batched_life(tower)
        stats = scheduler.tally.snapshot()
        assert [future.done() for future in futures] == [True] * 5
        assert (stats.requests, stats.in_flight, stats.cancelled) == (5, 0, 1)
        assert (scheduler.slots.used, scheduler.bytes.used) == (0, 0)
        for count, future in enumerate(futures, 1):
            failed = not future.cancelled() and future.exception(0) is not None
            if not future.cancelled() and not failed:
                assert torch.equal(future.result(0).tensor, torch.full((count, 3), float(count)))
            assert failed == (count == 2 and tower is alone_only) or (failed and interrupted)

    for place, visit in places(interrupts, lambda: check(interrupted=False)):
        with interrupts.striking(place, visit, error):
            check(interrupted=True)
        assert interrupts.struck, place
