"""Flights: who waits for what."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mm_encoder.cache.inflight import Flight, Flights

from ..helpers.threads import held_elsewhere, joined, started

pytestmark = pytest.mark.threads


class Waiting:
    def __init__(self) -> None:
        self.begun = 0

    def mark_running(self) -> None:
        self.begun += 1


def flight(*waiters: Waiting) -> tuple[Flight[Waiting], list[str]]:
    cancelled: list[str] = []
    made = Flight(waiters[0], lambda why: cancelled.append(str(why)))
    for waiter in waiters[1:]:
        assert made.join(waiter)
    return made, cancelled


def test_work_is_cancelled_when_the_last_has_gone() -> None:
    first, second = Waiting(), Waiting()
    made, cancelled = flight(first, second)
    made.leave(first)
    made.leave(first)
    assert cancelled == []
    made.leave(second)
    assert cancelled == ["None"]
    assert not made.join(Waiting())
    assert made.close() == []


def test_the_work_is_told_why_the_last_has_gone() -> None:
    first, second = Waiting(), Waiting()
    made, given_up = flight(first, second)
    made.leave(first, ValueError("first"))
    made.leave(second, ValueError("second"))
    assert given_up == ["second"]


def test_landing_gives_those_who_are_left() -> None:
    first, second = Waiting(), Waiting()
    made, cancelled = flight(first, second)
    made.leave(first)
    assert made.close() == [second]
    made.leave(second)
    assert cancelled == []
    assert not made.join(first)


def test_who_joins_work_that_runs_is_told_so() -> None:
    first, late = Waiting(), Waiting()
    made, _ = flight(first)
    made.mark_running()
    made.join(late)
    assert (first.begun, late.begun) == (1, 1)


def test_a_waiter_may_leave_where_its_own_thread_holds_the_lock() -> None:
    """As a finalizer does that the collector runs inside it, or a signal handler."""
    first = Waiting()
    made, given_up = flight(first)
    with made._lock:
        made.leave(first)
        assert given_up == []
    assert not made.join(Waiting())  # whoever has the lock next does what was asked
    assert given_up == ["None"]


def test_leaving_does_not_wait_for_a_thread_that_holds_the_lock() -> None:
    first = Waiting()
    made, given_up = flight(first)
    with held_elsewhere(made._lock):
        made.leave(first)
        assert given_up == []
    assert given_up == ["None"]


@pytest.mark.parametrize("visit", [0, 1])
def test_an_interrupted_leaving_is_completed_by_whoever_comes_next(visit: int) -> None:
    first, calls = Waiting(), list[object]()

    def abandon(why: object) -> None:
        calls.append(why)
        if len(calls) == 1 and visit == 1:
            raise KeyboardInterrupt

    made = Flight(first, abandon)
    remove, interrupts = made._remove, [KeyboardInterrupt]

    def interrupted(*arguments: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        remove(*arguments)

    if visit == 0:
        made._remove = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        made.leave(first)
    made.leave(first)
    made._lock.settle()
    assert calls == [None] * (visit + 1)
    assert not made.is_open


def test_a_flight_gives_its_waiters_again_until_they_are_forgotten() -> None:
    first, second = Waiting(), Waiting()
    made, _ = flight(first, second)
    assert made.close() == made.close() == [first, second]
    made.forget()
    assert made.close() == []


def test_one_flight_a_key() -> None:
    flights: Flights[Waiting] = Flights()
    first, second, third = Waiting(), Waiting(), Waiting()
    made, other = flight(first)[0], flight(second)[0]
    assert flights.join(b"key", third) is None
    assert flights.claim_key(b"key", made)
    assert not flights.claim_key(b"key", other)
    assert flights.claim_key(b"another", other)
    assert flights.join(b"key", third) is made
    assert flights.finish(made) == [first, third]
    assert flights.join(b"key", third) is None
    assert len(flights) == 1


def test_a_flight_that_was_given_up_is_replaced_and_does_not_end_its_successor() -> None:
    flights: Flights[Waiting] = Flights()
    first, second = Waiting(), Waiting()
    given_up, fresh = flight(first)[0], flight(second)[0]
    flights.claim_key(b"key", given_up)
    given_up.leave(first)
    assert flights.join(b"key", Waiting()) is None
    assert flights.claim_key(b"key", fresh)
    assert flights.finish(given_up) == []
    assert flights.finish(fresh) == [second]
    assert len(flights) == 0


@pytest.mark.parametrize("own", [True, False])
def test_finishing_does_not_wait_for_who_is_inside(own: bool) -> None:
    """Cancelling finishes a flight: in a signal handler, or where another thread waits for this one."""
    flights: Flights[Waiting] = Flights()
    first = Waiting()
    made = flight(first)[0]
    flights.claim_key(b"key", made)
    if own:
        with flights._lock:
            assert flights.finish(made) == [first]
        flights._lock.settle()
    else:
        with held_elsewhere(flights._lock):
            joined([started(lambda: flights.finish(made))])
    assert len(flights) == 0
    assert flights.claim_key(b"key", flight(Waiting())[0])


def test_whoever_joins_is_given_the_result_or_told_that_it_is_too_late() -> None:
    for _ in range(300):
        flights: Flights[Waiting] = Flights()
        made = flight(Waiting())[0]
        flights.claim_key(b"key", made)
        waiters = [Waiting() for _ in range(4)]
        barrier = threading.Barrier(5)
        joined: list[Waiting] = []
        landed: list[Waiting] = []

        def join(
            waiter: Waiting,
            flights: Flights[Waiting] = flights,
            barrier: threading.Barrier = barrier,
            joined: list[Waiting] = joined,
        ) -> None:
            barrier.wait()
            if flights.join(b"key", waiter):
                joined.append(waiter)

        threads = [threading.Thread(target=join, args=(waiter,)) for waiter in waiters]
        for thread in threads:
            thread.start()
        barrier.wait()
        landed += flights.finish(made)
        for thread in threads:
            thread.join()
        assert set(map(id, joined)) == set(map(id, landed[1:]))
