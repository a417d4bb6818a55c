"""The open foyer handle: calls in flight, close with a timeout, and translation of panics."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from ..logs import logger
from .locks import Lock

_CLOSE_TIMEOUT_S = 5.0


class HandleClosed(Exception):
    """The handle is closed, or belongs to the parent process."""


class FoyerPanic(Exception):
    """foyer panicked."""


class OpenHandle:
    """foyer's handle and the directory's lock. It refers to no tier, whose finalizer closes it."""

    def __init__(self, cache: Any, lock: Lock) -> None:
        self._cache = cache
        self._lock = lock
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._active_calls = 0
        self.closing = False

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Hold the handle open for a call. Raises HandleClosed."""
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
            # Even the handle's destructor hangs in a forked child; with an extra reference it never runs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        with self._condition:
            self.closing = True
            idle = self._condition.wait_for(lambda: not self._active_calls, _CLOSE_TIMEOUT_S)
        thread = threading.Thread(target=self._close_cache, name="mm-encoder-foyer-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is exiting and starts no thread. All entries are on disk, and the kernel closes
            # the files; only the destructor must not run, as it may hang.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        thread.join(_CLOSE_TIMEOUT_S)
        if not idle or thread.is_alive():
            log(logging.ERROR, "close() hangs; the directory stays locked until it returns")

    def _close_cache(self) -> None:
        # Drop the last reference in this thread, so that a destructor that hangs blocks nothing else.
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
    """Raise a panic of foyer as FoyerPanic: its class is no Exception, and is known only by name."""
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
