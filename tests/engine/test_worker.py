"""Whose thread it is."""

from __future__ import annotations

import threading

import pytest

from mm_encoder.engine.engine import ThreadGroup
from mm_encoder.engine.worker import is_owned_by, owned_thread
from mm_encoder.errors import EncoderClosedError


@pytest.mark.threads
def test_a_thread_with_a_dead_ones_number_belongs_to_nobody() -> None:
    owner, told = object(), list[tuple[int, bool]]()

    def tell() -> None:
        told.append((threading.get_ident(), is_owned_by(owner)))

    own = owned_thread(owner, tell, "own")
    own.start()
    own.join()
    number, belongs = told.pop()
    assert belongs
    assert own.ident == number
    for _ in range(1000):  # the system gives a number again, usually at once
        other = threading.Thread(target=tell)
        other.start()
        other.join()
        if told[-1][0] == number:
            break
    assert told[-1] == (number, False)


def test_no_thread_starts_after_the_last() -> None:
    started, done = ThreadGroup(), threading.Event()
    started.start(threading.Thread(target=done.wait))
    started.seal()
    late = threading.Thread(target=done.wait)
    with pytest.raises(EncoderClosedError, match="while it was being made"):
        started.start(late)
    ending = threading.Thread(target=done.wait)
    started.start_joiner(ending)  # whoever ends them too waits for the one that does
    assert len(started.all()) == 2
    done.set()
    for thread in started.all():
        thread.join()
    assert late.ident is None
