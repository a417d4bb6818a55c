"""A bounded amount that is given out first come, first served, to threads and event loops alike."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
Turn = Future[None]
"""Resolves when its holder's turn has come; raises when it never will."""


class Budget(Generic[T]):
    """At most `limit` is held at a time, except that a holder of more is let in alone.

    What it does under its lock calls nobody; futures are resolved after that.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._used = 0
        self._held: dict[T, int] = {}
        self._line: OrderedDict[T, tuple[int, Turn]] = OrderedDict()
        self._refusal: Callable[[], BaseException] | None = None

    def enter(self, holder: T, amount: int) -> Turn | None:
        """Ask for `amount`: None if it was given at once, otherwise a place in the line.

        Raises what `close` was told to.
        """
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if not self._line and self._fits(amount):
                self._give(holder, amount)
                return None
            turn = Turn()
            self._line[holder] = amount, turn
            return turn

    def withdraw(self, holder: T) -> bool:
        """Leave the line; False if the turn had come by then."""
        with self._lock:
            if self._line.pop(holder, None) is None:
                return False
            come = self._advance()
        _tell(come)
        return True

    def leave(self, holder: T) -> None:
        """Give back what is held, or leave the line; nothing for one who does neither."""
        with self._lock:
            self._used -= self._held.pop(holder, 0)
            _, turn = self._line.pop(holder, (0, None))
            come = self._advance()
        _tell(come if turn is None else [*come, turn])

    def close(self, refusal: Callable[[], BaseException]) -> None:
        """Refuse everyone in line and all who come; what is held stays so."""
        with self._lock:
            self._refusal = refusal
            refused = [turn for _, turn in self._line.values()]
            self._line.clear()
        for turn in refused:
            turn.set_exception(refusal())

    @property
    def used(self) -> int:
        """The amount that is held."""
        with self._lock:
            return self._used

    @property
    def waiting(self) -> int:
        """How many are in line."""
        with self._lock:
            return len(self._line)

    def holders(self) -> list[T]:
        """Those who hold something, longest first."""
        with self._lock:
            return list(self._held)

    def _advance(self) -> list[Turn]:
        come = []
        while self._line:
            holder, (amount, turn) = next(iter(self._line.items()))
            if not self._fits(amount):
                break
            del self._line[holder]
            self._give(holder, amount)
            come.append(turn)
        return come

    def _fits(self, amount: int) -> bool:
        return not self._held or self._used + amount <= self._limit

    def _give(self, holder: T, amount: int) -> None:
        self._held[holder] = amount
        self._used += amount


def _tell(turns: list[Turn]) -> None:
    for turn in turns:
        turn.set_result(None)
