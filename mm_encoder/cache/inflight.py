"""Single-flight: one computation per key, whose result all concurrent callers of that key share.

Each caller holds a waiter; a flight is the computation that its waiters share. It goes on while any of them
is left, whichever caller started it, and is abandoned when the last one leaves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """A waiter: `mark_running` is called when its computation runs and can no longer be cancelled."""

    def mark_running(self) -> None: ...  # noqa: D102


A = TypeVar("A", bound=Waits)
Abandon = Callable[[BaseException | None], object]


class Flight(Generic[A]):
    """One computation and its waiters. `abandon` is called with the reason when the last waiter leaves.

    A waiter may leave anywhere, also where its own thread holds the lock: in a signal handler, or in a
    finalizer that the garbage collector runs. So leaving only notes the wish, and whoever has the lock, or
    can take it at once, fulfils it.
    """

    def __init__(self, first: A, abandon: Abandon) -> None:
        self.key = b""
        self._waiters: list[A] | None = [first]
        self._landed: list[A] = []
        self._running = False
        self._abandon: Abandon | None = abandon
        self._leaving: deque[tuple[A, BaseException | None]] = deque()
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether it can be joined at this moment."""
        return self._waiters is not None

    def join(self, *waiters: A) -> bool:
        """Add waiters; False if the flight has closed or was abandoned."""
        with self._locked():
            if self._waiters is None:
                return False
            self._waiters = [*self._waiters, *waiters]
            running = self._running
        if running:
            _mark_running(waiters)
        return True

    def mark_running(self) -> None:
        """Record that the computation runs, for the waiters of now and those to come."""
        with self._locked():
            self._running = True
            waiters = self._waiters or ()
        _mark_running(waiters)

    def leave(self, waiter: A, why: BaseException | None = None) -> None:
        """Remove a waiter, because of `why` (None: it was cancelled). The last one abandons the flight."""
        self._leaving.append((waiter, why))
        self._fulfil_wishes()

    def waiters(self) -> list[A]:
        """Return the waiters of this moment."""
        return list(self._waiters or ())

    def close(self) -> list[A]:
        """Close the flight, which cannot be joined any more, and return its waiters; the same ones if it is
        called again, until `forget`.
        """
        with self._locked():
            if self._waiters is not None:
                self._landed = self._waiters
                self._waiters = None
            self._abandon = None  # a method of the computation, which refers to the flight
            return list(self._landed)

    def forget(self) -> None:
        """Let go of the waiters that `close` returned."""
        self._landed = []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._fulfil_wishes()

    def _fulfil_wishes(self) -> None:
        while self._leaving and self._lock.acquire(blocking=False):
            abandoned = False
            why: BaseException | None = None
            try:
                while self._leaving and not abandoned:
                    waiter, why = self._leaving[0]  # removed when fulfilled: an interrupt loses no wish
                    if self._waiters is not None and any(other is waiter for other in self._waiters):
                        self._waiters = [other for other in self._waiters if other is not waiter] or None
                        abandoned = self._waiters is None
                    self._leaving.popleft()
            finally:
                self._lock.release()
            abandon = self._abandon
            if abandoned and abandon is not None:
                abandon(why)
                self._abandon = None


def _mark_running(waiters: Iterable[Waits]) -> None:
    for waiter in waiters:
        waiter.mark_running()


class Flights(Generic[A]):
    """The flights that can be joined, by key."""

    def __init__(self) -> None:
        # Reentrant, as a flight may be finished by the collector inside it; nothing is waited for in it.
        self._lock = threading.RLock()
        self._flights: dict[bytes, Flight[A]] = {}

    def find(self, key: bytes) -> Flight[A] | None:
        """Return the flight of `key`, if there is one; it may be closed."""
        return self._flights.get(key)

    def join(self, key: bytes, *waiters: A) -> Flight[A] | None:
        """Join the flight of `key`, if there is one, and return it."""
        flight = self.find(key)
        return flight if flight is not None and flight.join(*waiters) else None

    def claim_key(self, key: bytes, flight: Flight[A]) -> bool:
        """Make `flight` the one of `key`; False if there is another that can be joined. A flight that was
        closed or abandoned meanwhile may be finished once more.
        """
        with self._lock:
            other = self._flights.get(key)
            if other is not None and other.is_open:
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
        return len(self._flights)
