"""A weighted FIFO semaphore for threads and event loops alike."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
Grant = Future[None]
"""Resolves when the holder has got its amount; raises when it never will."""


class Budget(Generic[T]):
    """At most `limit` is held at a time, but an amount above the limit is granted when nothing is held.

    Grants are resolved after the lock is released, so no callback runs under it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._used = 0
        self._held: dict[T, int] = {}
        self._waiters: OrderedDict[T, tuple[int, Grant]] = OrderedDict()
        self._refusal: Callable[[], BaseException] | None = None

    def acquire(self, holder: T, amount: int) -> Grant | None:
        """Acquire `amount`: None if it was granted at once, otherwise the grant to wait for. Raises what
        `close` was given.
        """
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if not self._waiters and self._fits(amount):
                self._grant(holder, amount)
                return None
            grant = Grant()
            self._waiters[holder] = amount, grant
            return grant

    def cancel_wait(self, holder: T) -> bool:
        """Stop waiting; False if the amount was granted by then."""
        with self._lock:
            if self._waiters.pop(holder, None) is None:
                return False
            granted = self._advance()
        _notify(granted)
        return True

    def release(self, holder: T) -> None:
        """Give back what is held, or stop waiting; does nothing for a holder that does neither."""
        with self._lock:
            self._used -= self._held.pop(holder, 0)
            _, grant = self._waiters.pop(holder, (0, None))
            granted = self._advance()
        _notify(granted if grant is None else [*granted, grant])

    def close(self, refusal: Callable[[], BaseException]) -> None:
        """Refuse all who wait and all who come later; what is held stays held."""
        with self._lock:
            self._refusal = refusal
            refused = [grant for _, grant in self._waiters.values()]
            self._waiters.clear()
        for grant in refused:
            grant.set_exception(refusal())

    @property
    def used(self) -> int:
        """The amount that is held."""
        with self._lock:
            return self._used

    @property
    def waiting(self) -> int:
        """The number of waiters."""
        with self._lock:
            return len(self._waiters)

    def holders(self) -> list[T]:
        """Return the holders, the earliest first."""
        with self._lock:
            return list(self._held)

    def _advance(self) -> list[Grant]:
        granted = []
        while self._waiters:
            holder, (amount, grant) = next(iter(self._waiters.items()))
            if not self._fits(amount):
                break
            del self._waiters[holder]
            self._grant(holder, amount)
            granted.append(grant)
        return granted

    def _fits(self, amount: int) -> bool:
        return not self._held or self._used + amount <= self._limit

    def _grant(self, holder: T, amount: int) -> None:
        self._held[holder] = amount
        self._used += amount


def _notify(grants: list[Grant]) -> None:
    for grant in grants:
        grant.set_result(None)
