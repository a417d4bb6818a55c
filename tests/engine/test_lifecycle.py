"""The threads of one engine: how they start and stop."""

from __future__ import annotations

import threading

import pytest

from mm_encoder.engine.lifecycle import ThreadGroup
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.errors import EncoderClosedError


def test_no_thread_starts_after_the_group_is_sealed() -> None:
    group, done = ThreadGroup(Scheduler(1, 1, replicas=1), lambda: None), threading.Event()
    group.start(threading.Thread(target=done.wait))
    group.seal()
    late = threading.Thread(target=done.wait)
    with pytest.raises(EncoderClosedError, match="while it was being constructed"):
        group.start(late)
    joiner = threading.Thread(target=done.wait)
    group.start_joiner(joiner)  # every other stop() of the group waits for it
    assert len(group.threads()) == 2
    done.set()
    group.stop(drain=True)
    assert not joiner.is_alive()
    assert late.ident is None
