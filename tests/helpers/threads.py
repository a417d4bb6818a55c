"""Threads of a test, and those that the library has started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mm_encoder.locks import AskableLock

from .waiting import HANG


def started(work: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(threads: Iterable[threading.Thread]) -> None:
    """Join threads and check that they have ended."""
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()


@contextmanager
def held_elsewhere(lock: AskableLock) -> Iterator[None]:
    """Have another thread hold the lock inside the block; it settles when it has left."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            inside.set()
            assert leave.wait(HANG)
        lock.settle()

    holder = started(hold)
    assert inside.wait(HANG)
    try:
        yield
    finally:
        leave.set()
        joined([holder])


def library_threads() -> list[threading.Thread]:
    """Return the live threads that an encoder has started."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("mm-encoder")]
