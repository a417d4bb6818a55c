"""One flight a key: whoever asks for what is already under way gets what comes of that.

An `Ask` is what a caller holds, a flight the work that several of them may wait for. The work goes on while
anyone is interested, whoever began it, and is cancelled when the last has gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


class Waits(Protocol):
    """An ask: `begin` is called when its work runs, so that it can be cancelled no more."""

    def begin(self) -> None: ...  # noqa: D102


A = TypeVar("A", bound=Waits)
Abandon = Callable[[BaseException | None], object]


class Flight(Generic[A]):
    """The asks that wait for one piece of work. `abandon` is called when the last has gone, with its reason;
    `tag` is for whoever lands it.
    """

    def __init__(self, first: A, abandon: Abandon) -> None:
        self.key = b""
        self.tag: Any = None
        self._asks: list[A] | None = [first]
        self._running = False
        self._abandon: Abandon | None = abandon
        self._lock = threading.Lock()

    def join(self, *asks: A) -> bool:
        """Wait for it too; False if it has landed or was given up."""
        with self._lock:
            if self._asks is None:
                return False
            self._asks += asks
            if self._running:
                for ask in asks:
                    ask.begin()
            return True

    def begin(self) -> None:
        """The work runs."""
        with self._lock:
            self._running = True
            for ask in self._asks or ():
                ask.begin()

    def leave(self, ask: A, why: BaseException | None = None) -> None:
        """Wait no more, because of `why`; None: it was cancelled."""
        abandon = None
        with self._lock:
            if self._asks is None or not any(other is ask for other in self._asks):
                return
            self._asks = [other for other in self._asks if other is not ask] or None
            if self._asks is None:
                abandon, self._abandon = self._abandon, None
        if abandon is not None:
            abandon(why)

    def asks(self) -> list[A]:
        """Those who wait at this moment."""
        with self._lock:
            return list(self._asks or ())

    def land(self) -> list[A]:
        """End it; returns those who waited. Nobody can join any more."""
        with self._lock:
            asks, self._asks = self._asks, None
            self._abandon = None  # it belongs to the work, which knows the flight
            return asks or []


class Flights(Generic[A]):
    """The flights that have taken off, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[bytes, Flight[A]] = {}

    def join(self, key: bytes, *asks: A) -> Flight[A] | None:
        """Join the flight under `key`, if there is one, and return it."""
        with self._lock:
            flight = self._flights.get(key)
        return flight if flight is not None and flight.join(*asks) else None

    def take_off(self, key: bytes, flight: Flight[A]) -> bool:
        """Be the flight under `key`; False if there is another that can be joined. One that has landed or was
        given up meanwhile may be ended once more.
        """
        with self._lock:
            other = self._flights.get(key)
            if other is not None and other.join():
                return False
            flight.key = key
            self._flights[key] = flight
            return True

    def end(self, flight: Flight[A]) -> list[A]:
        """Land a flight, and return those who waited for it."""
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
        return flight.land()

    def __len__(self) -> int:
        """How many flights there are."""
        with self._lock:
            return len(self._flights)
