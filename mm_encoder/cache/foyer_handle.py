"""foyer's open handle and its lifetime: calls in flight, close, and panics as exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from filelock import FileLock

logger = logging.getLogger("mm_encoder")

_CLOSE_TIMEOUT_S = 5.0


class HandleClosed(Exception):
    """It is closed, or belongs to the parent process."""


class FoyerPanic(Exception):
    """foyer panicked."""


class OpenHandle:
    """foyer's handle and the directory's lock. It knows no tier, so that it can close when that is gone."""

    def __init__(self, cache: Any, lock: FileLock) -> None:
        self._cache = cache
        self._lock = lock
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._active_calls = 0
        self.closing = False

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The handle, which stays open meanwhile. Raises HandleClosed."""
        # In a forked child every call on the parent's handle hangs, and the lock here may never be free.
        if os.getpid() != self._pid:
            raise HandleClosed
        with self._condition:
            if self.closing:
                raise HandleClosed
            self._active_calls += 1
        try:
            with translate_panics():
                yield self._cache
        finally:
            with self._condition:
                self._active_calls -= 1
                self._condition.notify_all()

    def close(self) -> None:
        """Wait for the calls in flight, close foyer and release the lock; give up after a timeout."""
        if os.getpid() != self._pid:
            # Even the handle's destructor hangs in a forked child: one reference too many, and it never runs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        with self._condition:
            self.closing = True
            idle = self._condition.wait_for(lambda: not self._active_calls, _CLOSE_TIMEOUT_S)
        thread = threading.Thread(target=self._close_cache, name="mm-encoder-foyer-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is exiting and starts no thread. All entries are on disk; the process's end
            # closes the rest, if only no destructor is run that may hang.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        thread.join(_CLOSE_TIMEOUT_S)
        if not idle or thread.is_alive():
            log(logging.ERROR, "it does not close; its directory stays locked until it does")

    def _close_cache(self) -> None:
        # The last reference is this one, so that a destructor that hangs is out of everybody's way too.
        cache, self._cache = self._cache, None
        try:
            with translate_panics():
                cache.close()
        except Exception as error:
            log(logging.WARNING, f"close failed: {error}", error)
        del cache
        self._lock.release()


@contextlib.contextmanager
def translate_panics() -> Iterator[None]:
    """foyer's panics are no Exception, and their class can be had by its name only."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise FoyerPanic(f"foyer panicked: {error}") from error


def log(level: int, message: str, error: Exception | None = None) -> None:
    """Log a cache error of this backend."""
    fields = {"mm_event": "cache_error"} | ({"mm_error": type(error).__name__} if error else {})
    logger.log(level, "cache, foyer: %s", message, extra=fields)
