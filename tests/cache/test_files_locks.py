"""The files tier's locks when files are removed or many encoders start, and the memory for many entries."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_encoder.cache import directory, ledger, regions
from mm_encoder.cache.directory import LEDGER, LOCK, EntryFile, scan
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.ledger import LEDGER_BYTES, Ledger
from mm_encoder.cache.order import EvictionOrder
from mm_encoder.cache.upkeep import clear
from mm_encoder.errors import CacheError, CacheLockedError

from ..helpers.threads import joined, started
from ..helpers.waiting import HANG, until
from .conftest import BUDGET, bytes_in, entry, file_of, key, put, same

pytestmark = pytest.mark.threads

# --- signal handlers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["_evict_to_fit", "_is_stored"])
def test_a_signal_handler_may_close_the_tier_inside_a_put(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    tier, call = FileTier(path, BUDGET), getattr(FileTier, step)
    closed: list[object] = []

    def interrupted(self: FileTier, *arguments: Any) -> Any:
        self.close()
        closed.append(self.stats())
        return call(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FileTier, step, interrupted)
        joined([started(lambda: put(tier, 0))])
    assert closed
    assert not tier._ledger._close.alive  # its descriptor is closed once the put has left
    again = FileTier(path, BUDGET)
    assert again.stats()[:2] == (1, bytes_in(path) - LEDGER_BYTES)
    again.close()


def test_a_signal_handler_may_read_counts_while_they_change(path: Path) -> None:
    tier = FileTier(path, BUDGET)

    def inside() -> None:
        with tier._stats_lock:
            tier.stats()

    joined([started(inside)])
    tier.close()


# --- files that a cleaner removes (case D45) ---------------------------------------------------------


@pytest.mark.parametrize("removed", [(LOCK,), (LEDGER,), (LOCK, LEDGER)])
@pytest.mark.parametrize("shared", [False, True])
def test_a_lock_survives_the_removal_of_its_file(path: Path, removed: tuple[str, ...], shared: bool) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    for name in removed:
        (path / name).unlink()
    for use in (lambda: FileTier(path, BUDGET, shared=shared), lambda: clear(path)):
        with pytest.raises(CacheLockedError, match=f"{path} is in use by another encoder"):
            use()
    put(tier, 1)
    tier.close()
    again = FileTier(path, BUDGET, shared=shared)
    assert same(again.get(key(0)), entry(key(0)))
    assert again.stats()[:2] == (2, bytes_in(path) - LEDGER_BYTES)
    again.close()


def test_foyers_lock_survives_the_removal_of_its_file(path: Path) -> None:
    lock = regions.acquire_lock(path)
    (path / regions.LOCK).unlink()
    for use in (lambda: regions.acquire_lock(path), lambda: regions.clear(path)):
        with pytest.raises(CacheLockedError, match=f"{path} is in use by another encoder"):
            use()
    lock.release()
    regions.acquire_lock(path).release()


def no_locks_on_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as a file system that locks files only, as some network file systems."""
    flock = fcntl.flock

    def files_only(descriptor: int, kind: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", files_only)


def test_where_directories_cannot_be_locked_the_file_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control of the tests above: there a removed file lets a second owner in."""
    no_locks_on_directories(monkeypatch)
    tier = FileTier(path, BUDGET)
    with pytest.raises(CacheLockedError):
        FileTier(path, BUDGET)
    (path / LOCK).unlink()
    FileTier(path, BUDGET).close()
    tier.close()


def test_a_release_that_was_interrupted_can_be_repeated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, strikes = fcntl.flock, [KeyboardInterrupt]

    def interrupted(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_UN and strikes:
            raise strikes.pop()
        flock(descriptor, kind)

    tier = FileTier(path, BUDGET)
    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tier._lock.release()
    tier.close()
    FileTier(path, BUDGET).close()


@pytest.mark.parametrize("follows", [True, False])
def test_tiers_that_share_keep_one_ledger_after_its_removal(
    path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    if not follows:  # the control: each keeps the file that it has opened
        monkeypatch.setattr(Ledger, "_has_its_name", lambda _: True)
    budget = 4 * file_bytes + LEDGER_BYTES
    one, other = FileTier(path, budget, shared=True), FileTier(path, budget, shared=True)
    put(one, 0, 1)
    (path / LEDGER).unlink()
    late = FileTier(path, budget, shared=True)
    most = 0
    for number, tier in enumerate([one, other, late] * 4, start=2):
        put(tier, number)
        most = max(most, bytes_in(path))
    assert (most <= budget) == follows
    if follows:
        assert one.stats()[:2] == other.stats()[:2] == late.stats()[:2] == (4, 4 * file_bytes)
    for tier in (one, other, late):
        tier.close()


def test_foreign_files_beside_entries_without_a_lock_are_still_refused(path: Path) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    tier.close()
    (path / LOCK).unlink()
    (path / LEDGER).unlink()
    (path / "thesis.tex").touch()
    with pytest.raises(CacheError, match="is not an mm-encoder cache"):
        FileTier(path, BUDGET)
    assert not (path / LOCK).exists()


# --- encoders that start together --------------------------------------------------------------------


def test_one_scans_for_all_that_start_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FileTier(path, BUDGET, shared=True)
    put(first, *range(5))
    first.close()
    scanning, opened = threading.Semaphore(0), threading.Event()
    ledgers: list[Ledger] = []
    scans: list[str] = []
    walk, create = directory.walk, Ledger.__init__

    def held(of: str, *rest: Any) -> Any:
        scans.append(of)
        scanning.release()
        assert opened.wait(HANG)
        return walk(of, *rest)

    def created(one: Ledger, of: str) -> None:
        create(one, of)
        ledgers.append(one)

    monkeypatch.setattr(directory, "walk", held)
    monkeypatch.setattr(Ledger, "__init__", created)
    monkeypatch.setattr("mm_encoder.cache.files._LOCK_TIMEOUT_S", HANG)
    tiers: list[FileTier] = []
    threads = [started(lambda: tiers.append(FileTier(path, BUDGET, shared=True))) for _ in range(8)]
    assert scanning.acquire(timeout=HANG)
    until(lambda: sum(one.waited for one in ledgers) == 7)
    opened.set()
    joined(threads)
    assert len(scans) == 1
    assert [tier.stats().entries for tier in tiers] == [5] * 8
    for tier in tiers:
        tier.close()
    assert len(FileTier(path, BUDGET, shared=True)._eviction_order) == 5  # alone, it scans


class Clock:
    """Stands for the module `time`: whoever sleeps lets `seconds` pass, and `meanwhile` is called."""

    def __init__(self, seconds: float, meanwhile: Callable[[], object]) -> None:
        self.now, self.seconds, self.meanwhile = time.monotonic(), seconds, meanwhile
        self.slept = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.slept += 1
        self.now += self.seconds
        self.meanwhile()


@pytest.mark.parametrize(
    ("patient", "beats", "gets"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_holder_that_goes_on_is_waited_for_however_long_it_takes(
    path: Path, monkeypatch: pytest.MonkeyPatch, patient: bool, beats: bool, gets: bool
) -> None:
    path.mkdir()
    holder, other = Ledger(str(path)), Ledger(str(path))
    holding = holder.locked(0)

    def go_on() -> None:
        if clock.slept == 100:
            holding.__exit__(None, None, None)
        elif beats:
            holder.beat()

    clock = Clock(0.5, go_on)
    monkeypatch.setattr(ledger, "time", clock)
    assert holding.__enter__()
    with other.locked(1.0, patient=patient) as locked:
        assert locked == gets
    assert clock.slept == (100 if gets else 2)
    if not gets:
        holding.__exit__(None, None, None)


def test_scanning_and_evicting_show_that_they_go_on(
    path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, *range(9))
    tier.close()
    beats: list[int] = []
    monkeypatch.setattr("mm_encoder.cache.files._BEAT_EVERY", 3)
    monkeypatch.setattr(Ledger, "beat", lambda one: beats.append(one._descriptor))
    FileTier(path, 4 * file_bytes + LEDGER_BYTES).close()
    assert len(beats) == 3 + 5


# --- many entries ------------------------------------------------------------------------------------


def test_the_order_of_eviction_is_that_of_use() -> None:
    files = [(used, key(number)) for number, used in enumerate([5, -7, 2**62, 0, 5, 1_700_000_000 * 10**9])]
    order = EvictionOrder()
    for used, name in files:
        order.add(used, name)
    taken = []
    while order:
        taken.append(order.first())
        order.remove_first()
    assert taken == sorted(files)
    assert len(order) == 0


def test_keys_that_end_in_zeros_are_kept_whole() -> None:
    order = EvictionOrder()
    names = [bytes(32), b"\1" + bytes(31), bytes(31) + b"\1"]
    for name in names:
        order.add(0, name)
    taken = set()
    while order:
        taken.add(order.first())
        order.remove_first()
    assert taken == {(0, name) for name in names}


@pytest.mark.parametrize("kind", ["EvictionOrder", "list of EntryFile"])
def test_an_entry_takes_less_than_100_bytes_of_memory(path: Path, kind: str) -> None:
    """A million of them then takes less than 100 MB; the control is what a scan lists."""
    FileTier(path, BUDGET).close()
    count = 10_000
    for number in range(count):
        file_of(path, number).touch()
    tracemalloc.start()
    try:
        if kind == "EvictionOrder":
            tier = FileTier(path, BUDGET)
            assert len(tier._eviction_order) == count
            assert tier._eviction_order.first()  # sorted
            tier.close()
        else:
            listed: list[EntryFile] = scan(str(path)).entries
            assert len(listed) == count
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (peak < 100 * count) == (kind == "EvictionOrder"), peak / count
