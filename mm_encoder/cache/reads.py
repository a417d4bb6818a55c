"""Reads of the disk tier: one at a time of each key, whose result all who ask for the key meanwhile share.

A file system may stall for any time. Who has no limit of time reads in its own thread; all others have a
thread of a pool read, and wait for it as long as they like.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count

from ..daemons import DaemonPool
from .entry import Entry

_MAX_THREADS = 64  # as many keys may stall before the others have to wait


class DiskRead:
    """One read of the disk. If it is interrupted, the next in line reads itself."""

    def __init__(self, load: Callable[[], Entry | None]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._done = False
        self._entry: Entry | None = None
        self._served = count()
        self.future: Future[DiskRead] | None = None
        """Of a thread of the pool, once one was asked to read."""

    def run(self) -> DiskRead:
        """Read, or wait for the thread that does; what is raised here does not concern the others."""
        with self._lock:
            if not self._done:
                self._entry = self._load()
                self._done = True
        return self

    @property
    def running(self) -> bool:
        """Whether a thread is reading."""
        return self._lock.locked()

    def serve(self) -> tuple[Entry | None, bool]:
        """Return the entry, and whether this call is the first to get it."""
        return self._entry, next(self._served) == 0


class DiskReads:
    """The reads under way, by key. `load` reads the disk and puts the entry where later callers find it."""

    def __init__(self, load: Callable[[bytes], Entry | None]) -> None:
        self._load = load
        self._reads: dict[bytes, DiskRead] = {}
        self._pool = DaemonPool(_MAX_THREADS, "mm-encoder-read")

    def wait(self, key: bytes, until: float | None) -> DiskRead | None:
        """Read, or wait for who does, until a moment on time.monotonic()'s clock; None if it comes first."""
        if until is None:
            try:
                return self._read(key).run()
            finally:
                self._forget_unless_running(key)
        future = self.start(key)
        if future is None:
            return None
        try:
            error = future.exception(max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX)))
        except TimeoutError:
            return None
        return future.result() if error is None else None  # an error of that thread is not this one's

    def start(self, key: bytes) -> Future[DiskRead] | None:
        """Have a thread of the pool read, unless one does already. None if there is no thread to be had."""
        try:
            read = self._read(key)
            if read.future is None:
                read.future = self._pool.submit(read.run)
                # Also if the thread was struck before it read.
                read.future.add_done_callback(lambda _: self._forget_unless_running(key))
            return read.future
        except RuntimeError:  # the system has no more threads, or the cache was closed
            self._forget_unless_running(key)
            return None
        except BaseException:
            self._forget_unless_running(key)
            raise

    def __len__(self) -> int:
        """Return the number of keys that are being read."""
        return len(self._reads)

    def close(self) -> None:
        """End the threads that do not read; nobody waits for those that do."""
        self._pool.close()

    # The table only saves reads. A mark that is left there by an interrupt blocks nobody: the next reader
    # that finds it reads as if it were its own.

    def _read(self, key: bytes) -> DiskRead:
        return self._reads.setdefault(key, DiskRead(partial(self._load_and_forget, key)))

    def _load_and_forget(self, key: bytes) -> Entry | None:
        try:
            return self._load(key)
        finally:
            self._reads.pop(key, None)

    def _forget_unless_running(self, key: bytes) -> None:
        read = self._reads.get(key)
        if read is not None and not read.running:
            self._reads.pop(key, None)
