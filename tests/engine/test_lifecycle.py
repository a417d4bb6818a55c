"""The threads of one engine: how they start and stop."""

from __future__ import annotations

import threading

import pytest

from mm_encoder.engine.lifecycle import ThreadGroup
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.engine.worker import owned_thread
from mm_encoder.errors import EncoderClosedError

from ..helpers.waiting import HANG


def test_no_thread_starts_once_the_group_is_stopped() -> None:
    group = ThreadGroup(Scheduler(1, 1, replicas=1), lambda: None)
    group.stop(drain=True)
    late = threading.Thread(target=lambda: None)
    with pytest.raises(EncoderClosedError, match="while it was being constructed"):
        group.start(late)
    assert late.ident is None


def test_a_stopped_group_has_no_entry_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[object] = []
    monkeypatch.setattr("mm_encoder.engine.lifecycle.atexit.register", entries.append)
    monkeypatch.setattr("mm_encoder.engine.lifecycle.atexit.unregister", entries.remove)
    group = ThreadGroup(Scheduler(1, 1, replicas=1), lambda: None)
    assert len(entries) == 1
    group.stop(drain=True)
    assert entries == []


@pytest.mark.threads
def test_threads_of_the_group_that_stop_it_at_once_are_joined_by_one_other() -> None:
    """Two joiners would wait for each other. A caller outside waits for the joiner, too."""
    scheduler, stopped = Scheduler(1, 1, replicas=1), threading.Event()
    group = ThreadGroup(scheduler, stopped.set)
    together, done = threading.Barrier(4), threading.Event()

    def stop() -> None:
        together.wait(HANG)
        group.stop(drain=True)
        done.wait(HANG)

    own = [owned_thread(scheduler, stop, f"own {index}") for index in range(4)]
    for thread in own:
        group.start(thread)
    while len(group.threads()) < 5:
        assert any(thread.is_alive() for thread in own)
    assert not stopped.is_set()
    done.set()
    group.stop(drain=True)
    assert stopped.is_set()
    assert len(group.threads()) == 5
    assert not any(thread.is_alive() for thread in group.threads())
