"""Waiting for other threads, with a limit that only ends a test that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

from mm_encoder import Encoder
from mm_encoder.coalescer import Coalescer

HANG = 300
"""Seconds after which a wait fails. It only ends a test that hangs, however busy the machine is."""


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition that another thread brings about is true."""
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, f"the condition was still false after {HANG} s"
        time.sleep(0.001)


def in_flight(encoder: Encoder) -> tuple[int, int, int, int]:
    """Return the images with no outcome yet, waiting callers, slots in use and bytes in use."""
    health = encoder.health()
    return encoder.stats().in_flight, health.waiting, health.queue_length, health.queue_bytes


def nothing_left(encoder: Encoder) -> None:
    """Wait until nothing is in flight, then check that every image had exactly one outcome."""
    until(lambda: in_flight(encoder) == (0, 0, 0, 0))
    until(lambda: all(worker.busy_s is None for worker in encoder.health().preprocessing))
    coalescer = encoder._coalescer
    if isinstance(coalescer, Coalescer):
        until(lambda: len(coalescer._flights) == 0)  # they land after their jobs were counted
    stats = encoder.stats()
    outcomes = (stats.succeeded, stats.failed, stats.cancelled, stats.late, stats.refused, stats.joined)
    assert sum(outcomes) == stats.requests
