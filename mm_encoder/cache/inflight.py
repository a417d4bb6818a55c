"""Single-flight: one computation per key, whose result all concurrent callers of that key share.

Each caller holds a waiter; a flight is the computation that its waiters share. It goes on while any of them
is left, whichever caller started it, and is abandoned when the last one leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, Protocol, TypeVar

from ..locks import AskableLock, guarded


class Waits(Protocol):
    """A waiter: `mark_running` is called when its computation runs and can no longer be cancelled."""

    def mark_running(self) -> None: ...  # noqa: D102


A = TypeVar("A", bound=Waits)
Abandon = Callable[[BaseException | None], object]


class Flight(Generic[A]):
    """One computation and its waiters. `abandon` is called with the reason when the last waiter leaves; more
    than once if it is interrupted.

    A waiter may leave anywhere, also where its own thread holds the lock: in a signal handler, or in a
    finalizer that the garbage collector runs.
    """

    def __init__(self, first: A, abandon: Abandon) -> None:
        self.key = b""
        self._waiters: list[A] | None = [first]
        self._landed: list[A] = []
        self._running = False
        self._abandon: Abandon | None = abandon
        self._lock = AskableLock()

    @property
    def is_open(self) -> bool:
        """Whether it can be joined at this moment."""
        return self._waiters is not None

    def join(self, *waiters: A) -> bool:
        """Add waiters; False if the flight has closed or was abandoned."""
        if not self._add(waiters):
            return False
        if self._running:
            _mark_running(waiters)
        return True

    def mark_running(self) -> None:
        """Record that the computation runs, for the waiters of now and those to come."""
        self._running = True
        _mark_running(self.waiters())

    def leave(self, waiter: A, why: BaseException | None = None) -> None:
        """Remove a waiter, because of `why` (None: it was cancelled). The last one abandons the flight."""
        self._lock.ask(partial(self._remove, waiter, why))

    def waiters(self) -> list[A]:
        """Return the waiters of this moment."""
        return self._waiters or []  # the list is never changed, but replaced

    @guarded
    def close(self) -> list[A]:
        """Close the flight, which cannot be joined any more, and return its waiters; the same ones if it is
        called again, until `forget`.
        """
        if self._waiters is not None:
            self._landed = self._waiters
            self._waiters = None
        self._abandon = None  # a method of the computation, which refers to the flight
        return self._landed

    def forget(self) -> None:
        """Let go of the waiters that `close` returned."""
        self._landed = []

    @guarded
    def _add(self, waiters: tuple[A, ...]) -> bool:
        if self._waiters is None:
            return False
        self._waiters = [*self._waiters, *waiters]
        return True

    def _remove(self, waiter: A, why: BaseException | None) -> None:
        left = [other for other in self.waiters() if other is not waiter]
        if len(left) == len(self.waiters()):
            return  # it has left, or landed
        if not left:
            self._lock.after(partial(self._give_up, why))
        self._waiters = left or None

    def _give_up(self, why: BaseException | None) -> None:
        abandon = self._abandon
        if abandon is not None and self._waiters is None:
            abandon(why)
            self._abandon = None


def _mark_running(waiters: Iterable[Waits]) -> None:
    for waiter in waiters:
        waiter.mark_running()


class Flights(Generic[A]):
    """The flights that can be joined, by key."""

    def __init__(self) -> None:
        self._lock = AskableLock()
        self._flights: dict[bytes, Flight[A]] = {}

    def find(self, key: bytes) -> Flight[A] | None:
        """Return the flight of `key`, if there is one; it may be closed."""
        return self._flights.get(key)

    def join(self, key: bytes, *waiters: A) -> Flight[A] | None:
        """Join the flight of `key`, if there is one, and return it."""
        flight = self.find(key)
        return flight if flight is not None and flight.join(*waiters) else None

    @guarded
    def claim_key(self, key: bytes, flight: Flight[A]) -> bool:
        """Make `flight` the one of `key`; False if there is another that can be joined. A flight that was
        closed or abandoned meanwhile may be finished once more.
        """
        other = self._flights.get(key)
        if other is not None and other.is_open:
            return False
        flight.key = key
        self._flights[key] = flight
        return True

    def finish(self, flight: Flight[A]) -> list[A]:
        """Close a flight, remove it, and return its waiters. Never waits, as cancelling comes here: where a
        thread is inside, it removes the flight when it leaves.
        """
        waiters = flight.close()  # first: the next flight to claim its key sees that it is closed
        self._lock.ask(partial(self._remove, flight))
        return waiters

    def _remove(self, flight: Flight[A]) -> None:
        if self._flights.get(flight.key) is flight:
            self._flights.pop(flight.key, None)

    def __len__(self) -> int:
        """Return the number of flights."""
        return len(self._flights)
