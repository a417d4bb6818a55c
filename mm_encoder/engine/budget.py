"""A weighted FIFO semaphore for threads and event loops alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from ..locks import AskableLock, guarded
from .future import Grant

T = TypeVar("T")


class Budget(Generic[T]):
    """At most `limit` is held at a time, but an amount above the limit is granted when nothing is held.

    What is in use is the sum of what is held, and nothing else is counted. Grants are resolved after the
    lock is released, so no callback runs under it.
    """

    def __init__(self, limit: int, lock: AskableLock | None = None) -> None:
        self.limit = limit
        self._lock = AskableLock() if lock is None else lock
        self._held: dict[T, int] = {}
        self._waiters: OrderedDict[T, tuple[int, Grant]] = OrderedDict()
        self._refusal: Callable[[], BaseException] | None = None

    @guarded
    def acquire(self, holder: T, amount: int) -> Grant | None:
        """Acquire `amount`: None if it was granted at once, otherwise the grant to wait for. Raises what
        `close` was given.
        """
        if self._refusal is not None:
            raise self._refusal()
        if not self._waiters and self._fits(amount):
            self._held[holder] = amount
            return None
        grant = Grant()
        self._waiters[holder] = amount, grant
        return grant

    @guarded
    def cancel_wait(self, holder: T) -> int:
        """Stop waiting, and return the amount that was waited for; 0 if it was granted by then."""
        amount, _ = self._waiters.pop(holder, (0, None))
        self._advance()
        return 0 if holder in self._held else amount

    @guarded
    def release(self, holder: T) -> None:
        """Give back what is held, or stop waiting; does nothing for a holder that does neither."""
        self._held.pop(holder, None)
        if holder in self._waiters:
            self._lock.after(self._waiters[holder][1].resolve)
            self._waiters.pop(holder, None)
        self._advance()

    @guarded
    def close(self, refusal: Callable[[], BaseException]) -> None:
        """Refuse all who wait and all who come later; what is held stays held."""
        self._refusal = refusal
        for _, grant in self._waiters.values():
            self._lock.after(partial(grant.resolve, refusal()))
        self._waiters.clear()

    @property
    @guarded
    def used(self) -> int:
        """The amount that is held."""
        return sum(self._held.values())

    @property
    @guarded
    def waiting(self) -> int:
        """The number of waiters."""
        return len(self._waiters)

    @guarded
    def holders(self) -> list[T]:
        """Return the holders, the earliest first."""
        return list(self._held)

    def _advance(self) -> None:
        while self._waiters:
            holder, (amount, grant) = next(iter(self._waiters.items()))
            if holder not in self._held:  # else it has it, and was about to be told
                if not self._fits(amount):
                    break
                self._held[holder] = amount
            self._lock.after(grant.resolve)
            self._waiters.pop(holder, None)

    def _fits(self, amount: int) -> bool:
        return not self._held or sum(self._held.values()) + amount <= self.limit
