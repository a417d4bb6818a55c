"""Single-flight: one computation per key, whose result all concurrent callers of that key share.

Each caller holds a waiter; a flight is the computation that its waiters share. It goes on while any of them
is left, whichever caller started it, and is abandoned when the last one leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """A waiter: `mark_running` is called when its computation runs and can no longer be cancelled."""

    def mark_running(self) -> None: ...  # noqa: D102


A = TypeVar("A", bound=Waits)
Abandon = Callable[[BaseException | None], object]


class Flight(Generic[A]):
    """One computation and its waiters. `abandon` is called with the reason when the last waiter leaves."""

    def __init__(self, first: A, abandon: Abandon) -> None:
        self.key = b""
        self._waiters: list[A] | None = [first]
        self._running = False
        self._abandon: Abandon | None = abandon
        self._lock = threading.Lock()

    def join(self, *waiters: A) -> bool:
        """Add waiters; False if the flight has closed or was abandoned."""
        with self._lock:
            if self._waiters is None:
                return False
            self._waiters += waiters
            if self._running:
                for waiter in waiters:
                    waiter.mark_running()
            return True

    def mark_running(self) -> None:
        """Record that the computation runs, for the waiters of now and those to come."""
        with self._lock:
            self._running = True
            for waiter in self._waiters or ():
                waiter.mark_running()

    def leave(self, waiter: A, why: BaseException | None = None) -> None:
        """Remove a waiter, because of `why` (None: it was cancelled). The last one abandons the flight."""
        abandon = None
        with self._lock:
            if self._waiters is None or not any(other is waiter for other in self._waiters):
                return
            self._waiters = [other for other in self._waiters if other is not waiter] or None
            if self._waiters is None:
                abandon, self._abandon = self._abandon, None
        if abandon is not None:
            abandon(why)

    def waiters(self) -> list[A]:
        """Return the waiters of this moment."""
        with self._lock:
            return list(self._waiters or ())

    def close(self) -> list[A]:
        """Close the flight, which cannot be joined any more, and return its waiters."""
        with self._lock:
            waiters, self._waiters = self._waiters, None
            self._abandon = None  # a method of the computation, which refers to the flight
            return waiters or []


class Flights(Generic[A]):
    """The flights that can be joined, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[bytes, Flight[A]] = {}

    def join(self, key: bytes, *waiters: A) -> Flight[A] | None:
        """Join the flight of `key`, if there is one, and return it."""
        with self._lock:
            flight = self._flights.get(key)
        return flight if flight is not None and flight.join(*waiters) else None

    def claim_key(self, key: bytes, flight: Flight[A]) -> bool:
        """Make `flight` the one of `key`; False if there is another that can be joined. A flight that was
        closed or abandoned meanwhile may be finished once more.
        """
        with self._lock:
            other = self._flights.get(key)
            if other is not None and other.join():
                return False
            flight.key = key
            self._flights[key] = flight
            return True

    def finish(self, flight: Flight[A]) -> list[A]:
        """Remove a flight, close it, and return its waiters."""
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
        return flight.close()

    def __len__(self) -> int:
        """Return the number of flights."""
        with self._lock:
            return len(self._flights)
