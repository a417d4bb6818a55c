"""A lock that finalizers and signal handlers may ask for."""

from __future__ import annotations

import pytest

from mm_encoder.locks import AskableLock, guarded

from ..helpers.threads import held_elsewhere


class Guarded:
    def __init__(self) -> None:
        self._lock = AskableLock()
        self.done: list[str] = []

    @guarded
    def asks_inside(self) -> None:
        self._lock.ask(lambda: self.done.append("asked"))
        self._lock.after(lambda: self.done.append("after"))
        self.done.append("inside")


def test_what_is_asked_for_inside_is_done_when_the_lock_is_released() -> None:
    one = Guarded()
    one.asks_inside()
    assert one.done == ["inside", "asked", "after"]


def test_asking_does_not_wait_for_another_thread() -> None:
    one = Guarded()
    with held_elsewhere(one._lock):
        one._lock.ask(lambda: one.done.append("asked"))
        assert one.done == []
    assert one.done == ["asked"]


def test_interrupted_work_is_done_again() -> None:
    one = Guarded()
    errors = [KeyboardInterrupt()]

    def work() -> None:
        if errors:
            raise errors.pop()
        one.done.append("asked")

    with pytest.raises(KeyboardInterrupt):
        one._lock.ask(work)
    assert not one._lock.held()
    one._lock.settle()
    assert one.done == ["asked"]


def test_work_that_changes_something_under_the_lock_does_not_begin_anew_inside_itself() -> None:
    one, depth = Guarded(), [0]

    def after() -> None:
        depth[0] += 1
        one.asks_inside()

    with one._lock:
        one._lock.after(after)
    one._lock.settle()
    assert depth == [1]
    assert one.done == ["inside", "asked", "after"]
