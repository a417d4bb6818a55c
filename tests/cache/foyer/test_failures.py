"""foyer failing, panicking or hanging: counted as misses, then the tier is closed."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mm_encoder.cache import foyer, foyer_handle
from mm_encoder.cache.entry import DiskStats
from mm_encoder.errors import CacheError, CacheLockedError

from ...helpers.waiting import until
from .conftest import CHUNK, SMALLEST, Fake, Open, PanicException, entry, key, needs_foyer, same


def never(cache: Fake, name: bytes) -> bool:
    return False


def test_three_unconfirmed_puts_in_a_row_disable_the_tier(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_TIMEOUT_S", 0.01)
    fake(contains=never)
    tier = opened()
    for count in (1, 2, 3):
        assert not tier.put(key(count), entry(100))
        assert tier.stats() == DiskStats(0, SMALLEST, 0, count)
    dead = Fake.made
    assert dead.closes == 1
    inserts = dead.inserts
    assert not tier.put(key("a"), entry(100))
    assert tier.get(key("a")) is None
    assert dead.inserts == inserts
    tier.close()
    assert dead.closes == 1
    # Logged: the first failure of a kind, not each, and the shutdown.
    assert [(record.levelno, vars(record)["mm_event"]) for record in caplog.records] == [
        (logging.WARNING, "cache_error"),
        (logging.ERROR, "cache_error"),
    ]
    assert "3 puts in a row" in caplog.messages[-1]
    fake()
    assert opened().put(key("a"), entry(100))  # the directory was released


def test_failures_between_successes_do_not_disable_the_tier(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_TIMEOUT_S", 0.01)
    fails = True
    fake(contains=lambda cache, name: not fails and name in cache.records)
    tier = opened()
    for number in range(4):
        for fails in (True, True, False):
            assert tier.put(key(number), entry(100)) is not fails
    assert tier.stats().errors == 8


def test_an_unconfirmed_chunk_leaves_no_manifest(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_TIMEOUT_S", 0.01)
    fake(insert=lambda cache, name, value: Fake.insert(cache, name, value) if len(value) < CHUNK else None)
    tier = opened()
    assert not tier.put(key("a"), entry(CHUNK + 100))
    assert Fake.made.entry_records() == []


def test_a_hanging_close_is_abandoned_and_keeps_the_lock(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foyer_handle, "_CLOSE_TIMEOUT_S", 0.01)
    opens = threading.Event()
    fake(close=lambda cache: opens.wait())
    tier = opened()
    assert tier.put(key("a"), entry(100))
    tier.close()
    assert "close() hangs" in caplog.messages[-1]
    tier.close()
    assert tier.get(key("a")) is None
    assert not tier.put(key("b"), entry(100))
    # foyer's threads may still write, so the directory stays locked.
    with pytest.raises(CacheLockedError):
        opened()
    opens.set()
    until(lambda: not any(thread.name == "mm-encoder-foyer-close" for thread in threading.enumerate()))
    opened()


def test_close_ends_a_put_that_waits_for_confirmation(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_TIMEOUT_S", 1000.0)
    waits = threading.Event()

    def contains(cache: Fake, name: bytes) -> bool:
        if cache.entry_records():
            waits.set()
        return False

    fake(contains=contains)
    tier = opened()
    results = []
    writer = threading.Thread(target=lambda: results.append(tier.put(key("a"), entry(100))), daemon=True)
    writer.start()
    assert waits.wait(10)
    tier.close()
    writer.join(10)
    assert results == [False]
    assert tier.stats() == DiskStats(0, SMALLEST, 0, 0)
    opened()  # close did not time out, so the lock is free


def test_a_hanging_get_does_not_block_close(opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foyer_handle, "_CLOSE_TIMEOUT_S", 0.01)
    hangs, opens = threading.Event(), threading.Event()

    def get(cache: Fake, name: bytes) -> bytes | None:
        hangs.set()
        opens.wait()
        return Fake.get(cache, name)

    fake(get=get)
    tier = opened()
    assert tier.put(key("a"), entry(100))
    reader = threading.Thread(target=tier.get, args=[key("a")])
    reader.start()
    assert hangs.wait(10)
    tier.close()
    assert Fake.made.closes == 1
    opens.set()
    reader.join()


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


ERRORS = [
    PanicException("index out of bounds"),
    RuntimeError("checksum mismatch"),
    OverflowError("too large"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_foyer_are_misses(opened: Open, fake: Any, error: BaseException) -> None:
    fake(__init__=failing(error))
    with pytest.raises(CacheError, match=str(error)):
        opened()
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(100))
    for name, call in (
        ("get", lambda: tier.get(key("a")) is None),
        ("contains", lambda: tier.get(key("b")) is None),
        ("insert", lambda: not tier.put(key("c"), entry(100))),
    ):
        errors = tier.stats().errors
        setattr(Fake.made, name, failing(error))
        assert call()
        assert tier.stats().errors == errors + 1
        delattr(Fake.made, name)
    assert tier.put(key("d"), entry(100))
    assert same(tier.get(key("d")), entry(100))
    Fake.made.__dict__["close"] = failing(error)
    tier.close()
    opened()  # the directory is released although close failed


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_are_raised_and_not_counted(opened: Open, fake: Any, kind: type[BaseException]) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(100))
    for name in ("get", "contains"):
        setattr(Fake.made, name, failing(kind()))
        with pytest.raises(kind):
            tier.get(key("a"))
        delattr(Fake.made, name)
    Fake.made.__dict__["insert"] = failing(kind())
    with pytest.raises(kind):
        tier.put(key("b"), entry(100))
    del Fake.made.__dict__["insert"]
    assert tier.stats().errors == 0
    assert tier.put(key("b"), entry(100))
    assert same(tier.get(key("a")), entry(100))


@needs_foyer
def test_every_get_after_close_is_a_miss(opened: Open) -> None:
    tier = opened()
    assert tier.put(key("a"), entry(100))
    tier.close()
    tier.close()
    assert tier.get(key("a")) is None
    assert not tier.put(key("b"), entry(100))
    assert tier.stats() == DiskStats(1, SMALLEST, 0, 0)
    assert opened().get(key("b")) is None


@needs_foyer
@pytest.mark.threads
def test_readers_get_right_rows_during_puts_and_close(opened: Open) -> None:
    tier = opened(2 * SMALLEST)
    entries = [entry(CHUNK // 2 * (number % 5), number) for number in range(10)]
    wrong: list[int] = []
    found: set[int] = set()
    done = threading.Event()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        while not done.is_set():
            number = chance.randrange(10)
            got = tier.get(key(number))
            if got is not None:
                found.add(number)
                if not same(got, entries[number]):
                    wrong.append(number)

    readers = [threading.Thread(target=read, args=[seed]) for seed in range(3)]
    for reader in readers:
        reader.start()
    try:
        for number, each in enumerate(entries):
            assert tier.put(key(number), each)
        until(lambda: len(found) == 10)
        tier.close()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert tier.stats().errors == 0
    tier = opened(2 * SMALLEST)
    assert all(same(tier.get(key(number)), each) for number, each in enumerate(entries))
