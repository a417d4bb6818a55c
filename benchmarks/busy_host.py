"""An image's time beside a busy Python thread of the host, with the Python and the compiled tower; and how
late a thread wakes that sleeps 1 ms. The two towers are compiled first, for a minute each, once.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mm_encoder import Encoder
from mm_encoder.demo import make_checkpoint

from .samples import photo, temporary_folder
from .timing import table

ROUNDS = 15
DEPTHS = (2, 24)


def main() -> None:
    data = photo(224, 224)
    rows: list[list[object]] = []
    for depth in DEPTHS:
        checkpoint = make_checkpoint(
            temporary_folder() / f"checkpoint-{depth}", image_tokens=(16, 64), depth=depth
        )
        for mode in ("eager", "compiled"):
            with Encoder(checkpoint, device="cpu", tower=mode) as encoder:

                def encode(encoder: Encoder = encoder) -> float:
                    return dict(encoder.generate(data)[0].metadata.timings)["tower"]

                for host, share in (("idle", 0.0), ("half busy", 0.5), ("busy", 1.0)):
                    with busy(share):
                        rows.append([depth, mode, host, *measure(encode)])
    table(
        f"A 224x224 JPEG beside a Python thread of the host, ms (median of {ROUNDS})",
        ["layers (toy width)", "tower", "host", "the tower", "submit to result", "sleeper late, p99"],
        rows,
    )


def measure(encode: Callable[[], float]) -> list[float]:
    """Return the medians of tower and whole call, and the p99 lateness of a thread that sleeps 1 ms."""
    late: list[float] = []
    done = threading.Event()

    def sleep() -> None:
        while not done.is_set():
            begun = time.perf_counter()
            time.sleep(0.001)
            late.append((time.perf_counter() - begun - 0.001) * 1e3)

    encode()
    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    towers, totals = [], []
    try:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            towers.append(encode())
            totals.append((time.perf_counter() - begun) * 1e3)
    finally:
        done.set()
        sleeper.join()
    return [statistics.median(towers), statistics.median(totals), sorted(late)[int(len(late) * 0.99)]]


@contextmanager
def busy(share: float) -> Iterator[None]:
    """Run a Python thread that computes for this share of its time."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            begun = time.perf_counter()
            while time.perf_counter() - begun < 0.010 * share:
                pass
            if share < 1:
                time.sleep(0.010 * (1 - share))

    if not share:
        yield
        return
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
