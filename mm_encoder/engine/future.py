"""Futures and grants that may be resolved, cancelled and waited for anywhere."""

from __future__ import annotations

import _thread
import concurrent.futures
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


class _Condition(threading.Condition):
    """A condition that is notified once, for all. Entering runs no Python code, in which an interrupt could
    leave it locked, and a notification by a signal handler, just before the wait, is not missed.
    """

    def __init__(self) -> None:
        # As the base class does, but without looking for what the lock has: that would be most of the cost.
        lock: Any = threading.RLock()
        self._lock, self._is_owned = lock, lock._is_owned
        self.acquire, self.release = lock.acquire, lock.release  # type: ignore[method-assign]
        self._waiters: deque[Any] = deque()
        self._over = False

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def notify_all(self) -> None:
        self._over = True
        super().notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        sleeper = _thread.allocate_lock()
        sleeper.acquire()
        self._waiters.append(sleeper)
        held = None
        try:
            held = self._lock._release_save()
            # A notification after this check releases the sleeper, which is in the list.
            return self._over or sleeper.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            if held is not None:
                self._lock._acquire_restore(held)
            elif not self._lock._is_owned():
                self.acquire()  # interrupted right after it was released
            with suppress(ValueError):
                self._waiters.remove(sleeper)


class Future(concurrent.futures.Future[T]):
    """A future whose cancellation is noticed even if its callbacks are interrupted."""

    def __init__(self) -> None:
        # As the base class does, but for the condition: making two would be half the cost of a cache hit.
        self._condition = _Condition()
        self._state = "PENDING"
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self.on_cancel: Callable[[Future[T]], object] = _nothing
        """Called whenever it is found cancelled by `cancel`; must hold no job."""

    # Without the condition, which another thread may hold: one read of the state is as good.

    def cancelled(self) -> bool:
        """As in `concurrent.futures`; takes no lock."""
        return self._state.startswith("CANCELLED")

    def done(self) -> bool:
        """As in `concurrent.futures`; takes no lock."""
        return self._state not in ("PENDING", "RUNNING")

    def cancel(self) -> bool:
        """As in `concurrent.futures`. Repeating an interrupted call completes it."""
        try:
            return super().cancel()
        finally:
            if self._state.startswith("CANCELLED"):
                self.on_cancel(self)

    def begin(self) -> bool:
        """Leave the pending state, and rule out cancelling. False if it is cancelled or done."""
        with self._condition:
            if self._state == "PENDING":
                self._state = "RUNNING"
            return self._state == "RUNNING"  # the caller may have done it, whose future it is

    def notify_cancelled(self) -> None:
        """Wake those who wait for the cancelled future, in another thread: this one may hold their locks."""
        if self._waiters:
            run_in_new_thread(self._notify_cancelled)
        else:
            self._notify_cancelled()

    def _notify_cancelled(self) -> None:
        with self._condition:
            if self._state == "CANCELLED":
                self.set_running_or_notify_cancel()


class Grant(Future[None]):
    """The moment at which one holder gets what it waits for, or is refused it."""

    _done_callbacks: list[Callable[[Grant], object]]

    def resolve(self, refusal: BaseException | None = None) -> None:
        """Grant, or refuse, and call the callbacks; does again what an interrupted call may not have done."""
        with suppress(concurrent.futures.InvalidStateError):
            self.set_exception(refusal) if refusal is not None else self.set_result(None)
        self._invoke_callbacks()

    def _invoke_callbacks(self) -> None:
        # Each may be called more than once: when it, or the call of it, was interrupted.
        while self._done_callbacks:
            with suppress(IndexError):
                callback = self._done_callbacks[0]
                callback(self)
                with suppress(ValueError):
                    self._done_callbacks.remove(callback)


def run_in_new_thread(work: Callable[[], object]) -> None:
    """Do `work` in a new thread. May be called anywhere, even by a finalizer that interrupted a thread which
    holds locks, of `threading` too: so a bare thread starts the real one.
    """
    thread = threading.Thread(target=work, name="mm-encoder-end", daemon=True)
    try:
        _thread.start_new_thread(_begin, (thread,))
    except RuntimeError as error:
        # The interpreter's exit ends everything anyway. While atexit's functions run only the text tells.
        if not (sys.is_finalizing() or "interpreter shutdown" in str(error)):
            raise


def _begin(thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # as above
        thread.start()


def _nothing(future: object) -> None:
    """Do nothing."""
