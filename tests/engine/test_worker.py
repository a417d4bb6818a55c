"""Which object a thread belongs to."""

from __future__ import annotations

import threading

import pytest

from mm_encoder.engine.worker import is_owned_by, owned_thread


@pytest.mark.threads
def test_a_thread_with_the_ident_of_a_dead_owned_thread_is_not_owned() -> None:
    owner, received = object(), list[tuple[int, bool]]()

    def tell() -> None:
        received.append((threading.get_ident(), is_owned_by(owner)))

    own = owned_thread(owner, tell, "own")
    own.start()
    own.join()
    number, belongs = received.pop()
    assert belongs
    assert own.ident == number
    for _ in range(1000):  # the system reuses an ident, usually at once
        other = threading.Thread(target=tell)
        other.start()
        other.join()
        if received[-1][0] == number:
            break
    assert received[-1] == (number, False)
