"""An exception at any place of the engine, in any of its threads, leaves nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
import torch

from mm_encoder import Encoder, MMEncoderError

from ..helpers.interrupts import AVAILABLE, Interrupts, Place
from ..helpers.threads import joined
from ..helpers.waiting import HANG, nothing_left

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="sys.monitoring came with Python 3.12"),
    # What is injected into a thread's first or last line is reported as any thread's error.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

ALL = bool(os.environ.get("STRESS"))
SAMPLE = 60
"""Places per scenario, spread over all, unless STRESS is set."""
PARTS = ("engine", "locks.py", "encoder.py")
IMAGE = np.zeros((30, 30, 3), np.uint8)
CALLER = "the caller"


def is_caller() -> bool:
    return threading.current_thread().name == CALLER


def submit(encoder: Encoder) -> None:
    encoder.submit(IMAGE).result(HANG)


def submit_and_cancel(encoder: Encoder) -> None:
    futures = [encoder.submit(IMAGE, deadline=1e9) for _ in range(3)]
    for future in reversed(futures):
        future.cancel()


def generate(encoder: Encoder) -> None:
    encoder.generate([IMAGE, IMAGE])


def refused(encoder: Encoder) -> None:
    for _ in range(6):
        encoder.submit(IMAGE, timeout=0)


def as_caller(work: Callable[[], object]) -> None:
    """Do `work` in a thread of the caller's name; what it raises is what the caller would see."""

    def quiet() -> None:
        try:
            work()
        except (KeyboardInterrupt, MemoryError, RecursionError, MMEncoderError, CancelledError):
            pass

    thread = threading.Thread(target=quiet, name=CALLER, daemon=True)
    thread.start()
    joined([thread])


def places(interrupts: Interrupts, run: Callable[[], None]) -> list[tuple[Place, int]]:
    """Return the places that `run` visits, each with its first and its last visit."""
    with interrupts.recording() as visited:
        run()
    found = [(place, visit) for place, count in sorted(visited.items()) for visit in sorted({1, count})]
    assert len(found) > SAMPLE
    return found if ALL else found[:: -(-len(found) // SAMPLE)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("scenario", [submit, submit_and_cancel, generate, refused])
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
