"""A lock that finalizers and signal handlers can ask for: they never wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from operator import attrgetter
from typing import Any, TypeVar, cast

Work = Callable[[], object]
F = TypeVar("F", bound=Callable[..., Any])


class AskableLock:
    """A reentrant lock with two lists of work: what was asked for under it, and what follows it.

    A finalizer or a signal handler may interrupt a thread that holds the lock, so what they change is not
    done by waiting but by `ask`. The holder of the lock calls `settle` afterwards; `guarded` does both.
    Work stays in its list until it was done, and is done again if it was interrupted: doing it twice must
    change nothing.

    Entering and leaving runs no Python code, in which an interrupt could come between the lock and the block.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked: deque[Work] = deque()
        self._attempt = _Attempt(self._lock)
        self._afterwards: deque[Work] = deque()
        self._following = threading.RLock()
        """Held by the thread that does what follows, so that it does not begin anew inside itself."""
        self._attempt_following = _Attempt(self._following)

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def held(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def ask(self, work: Work) -> None:
        """Do `work` under the lock: now if it is free, otherwise its holder does. Never waits."""
        self._asked.append(work)
        self.settle()

    def after(self, work: Work) -> None:
        """Have `work`, which may take other locks, done when this one is released next."""
        self._afterwards.append(work)

    def settle(self) -> None:
        """Do what was asked for, unless the lock is held: then its holder does it later."""
        while self._asked and not self.held():
            if not _do_all(self._asked, self._attempt):
                break
        while self._afterwards and not (self.held() or self._following._is_owned()):  # type: ignore[attr-defined]
            if not _do_all(self._afterwards, self._attempt_following):
                break


class _Attempt:
    """Acquires an RLock if it is free. Leaving raises RuntimeError if it was not."""

    def __init__(self, lock: Any) -> None:
        self._acquire, self._exit = partial(lock.acquire, blocking=False), lock.__exit__

    __enter__ = property(attrgetter("_acquire"))
    __exit__ = property(attrgetter("_exit"))


def _do_all(works: deque[Work], attempt: _Attempt) -> bool:
    """Do all work under a lock that this thread does not hold; False if another thread holds it, which looks
    at the work once more after it has left.
    """
    got = False
    try:
        with attempt as got:
            while got and works:
                _do_first(works)
    except RuntimeError:
        if got:
            raise
    return got


def _do_first(works: deque[Work]) -> None:
    with suppress(IndexError):  # another thread did the last one
        work = works[0]
        work()
        with suppress(ValueError):
            works.remove(work)


def guarded(method: F) -> F:
    """Run a method of an object with an AskableLock `_lock` under it, and settle afterwards."""

    @wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        lock = self._lock
        if lock.held():
            return method(self, *arguments)
        try:
            with lock:
                while lock._asked:  # before this call, so that what was cancelled makes room for it
                    _do_first(lock._asked)
                return method(self, *arguments)
        finally:
            if lock._asked or lock._afterwards:
                lock.settle()

    return cast(F, call)
