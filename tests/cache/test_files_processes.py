"""The files tier with several processes: killed while they write, forked, sharing a directory.

Each test runs a function of this module in a new process, which may fork safely, as it has no other threads.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder.cache import directory
from mm_encoder.cache.directory import scan
from mm_encoder.cache.entry import Entry
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.ledger import Ledger
from mm_encoder.cache.upkeep import clear
from mm_encoder.errors import CacheLockedError

from ..helpers.forks import run_source
from ..helpers.waiting import HANG, until
from .conftest import BUDGET, MIB, bytes_in, entry, key, put, same

ROUNDS = 200 if os.environ.get("FUZZ") else 20


def run_in_own_process(function: Callable[..., None], *arguments: Any) -> Any:
    """Run `function` in a process of its own and return the JSON that it prints."""
    program = f"""
import faulthandler, sys, torch
faulthandler.dump_traceback_later({HANG}, exit=True)
torch.set_num_threads(1)
from tests.cache import test_files_processes
test_files_processes.{function.__name__}(*{arguments!r})
"""
    code, output, errors = run_source(program, limit=2 * HANG)
    assert code == 0, errors
    return json.loads(output)


def forked(work: Callable[[], None]) -> int:
    """Fork a child that runs `work`, and return its id; its exit code is 0 on success."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_directory_is_consistent_after_a_kill_at_any_moment(path: Path) -> None:
    found = run_in_own_process(kill_writers, str(path), ROUNDS)
    assert found["wrong"] == []
    assert found["hits"] > ROUNDS
    assert found["most bytes"] <= KILL_BUDGET
    assert found["swept"] > 0  # some kills came during writes


KILL_BUDGET = 24 * MIB


def kill_writers(path: str, rounds: int) -> None:
    """Kill writers of entries up to 4 MiB at random moments, and check the directory after each kill."""
    chance = random.Random(time.time_ns())
    found: dict[str, Any] = {"wrong": [], "hits": 0, "most bytes": 0, "swept": 0}

    def of(number: int) -> Entry:
        return Entry(torch.full((1 + number % 64, 2**14), float(number)), entry(key(number)).metadata)

    def write() -> None:
        tier = FileTier(path, KILL_BUDGET)
        while True:
            number = chance.randrange(1000)
            tier.put(key(number), of(number))

    for _ in range(rounds):
        chance.seed(chance.random())
        child = forked(write)
        time.sleep(chance.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        found["most bytes"] = max(found["most bytes"], bytes_in(path))
        found["swept"] += len(scan(path).temporaries) if os.path.exists(path) else 0
        tier = FileTier(path, KILL_BUDGET)
        listing = scan(path)
        if listing.temporaries or tier.stats()[:2] != (
            len(listing.entries),
            sum(file.bytes for file in listing.entries),
        ):
            found["wrong"].append("counts")
        for number in range(1000):
            got = tier.get(key(number))
            if got is not None:
                found["hits"] += 1
                if not same(got, of(number)):
                    found["wrong"].append(number)
        if tier.stats().errors:
            found["wrong"].append("damaged entries")
        tier.close()
    print(json.dumps(found))


def test_a_forked_child_neither_reads_nor_writes(path: Path) -> None:
    assert run_in_own_process(fork_with_a_tier, str(path)) == "fine"


def fork_with_a_tier(path: str) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0)

    def use() -> None:
        assert tier.get(key(0)) is None
        assert not tier.put(key(1), entry(key(1)))
        assert tier.stats().errors == 0
        tier.close()
        tier.close()
        with pytest.raises(CacheLockedError):
            FileTier(path, BUDGET)

    def drop() -> None:
        nonlocal tier
        del tier
        gc.collect()

    def locked_at_the_fork() -> None:
        tier.close()

    assert exit_code(forked(use)) == 0
    assert exit_code(forked(drop)) == 0
    with tier._ledger.locked(1):
        assert exit_code(forked(locked_at_the_fork)) == 0
        with open(os.path.join(path, directory.LEDGER), "rb") as ledger, pytest.raises(BlockingIOError):
            fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(CacheLockedError):
        FileTier(path, BUDGET)
    put(tier, 1)
    assert same(tier.get(key(0)), entry(key(0)))
    lives_on = forked(lambda: time.sleep(100))
    tier.close()
    FileTier(path, BUDGET).close()
    os.kill(lives_on, signal.SIGKILL)
    exit_code(lives_on)
    print(json.dumps("fine"))


def test_a_killed_process_releases_the_lock_despite_a_forked_child(path: Path) -> None:
    assert run_in_own_process(hold_and_be_killed, str(path)) == "fine"


def hold_and_be_killed(path: str) -> None:
    opened, tell = os.pipe()

    def hold() -> None:
        tier = FileTier(path, BUDGET)
        with tier._ledger.locked(1):
            survivor = forked(lambda: time.sleep(100))
            os.write(tell, survivor.to_bytes(8, "big"))
            time.sleep(100)

    child = forked(hold)
    survivor = int.from_bytes(os.read(opened, 8), "big")
    for shared in (False, True):
        with pytest.raises(CacheLockedError, match=path):
            FileTier(path, BUDGET, shared=shared)
    with pytest.raises(CacheLockedError, match=path):
        clear(path)
    os.kill(child, signal.SIGKILL)
    exit_code(child)
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    tier.close()
    os.kill(survivor, signal.SIGKILL)  # it was alive all the time
    print(json.dumps("fine"))


def test_a_writer_killed_at_the_rename_is_followed_by_another(path: Path) -> None:
    assert run_in_own_process(kill_at_the_rename, str(path)) == "fine"


def kill_at_the_rename(path: str) -> None:
    arrived, tell = os.pipe()
    tier = FileTier(path, BUDGET, shared=True)
    put(tier, 0)

    def stop_at_the_rename() -> None:
        def stop(*_: object) -> None:
            os.write(tell, b"!")
            time.sleep(100)

        os.replace = stop  # type: ignore[assignment]
        FileTier(path, BUDGET, shared=True).put(key(1), entry(key(1)))

    child = forked(stop_at_the_rename)
    os.read(arrived, 1)
    assert len(scan(path).temporaries) == 1
    assert same(tier.get(key(0)), entry(key(0)))
    os.kill(child, signal.SIGKILL)
    exit_code(child)
    put(tier, 2)
    assert scan(path).temporaries == []
    assert tier.stats()[:2] == (2, sum(file.bytes for file in scan(path).entries))
    assert tier.get(key(1)) is None
    print(json.dumps("fine"))


@pytest.mark.parametrize("seed", range(2))
def test_four_processes_share_a_directory_within_the_budget(path: Path, tmp_path: Path, seed: int) -> None:
    found = run_in_own_process(share, str(path), str(tmp_path), seed, True)
    assert found["exit codes"] == [-signal.SIGKILL, 0, 0, 0]
    for one in found["workers"]:
        assert one["wrong"] == []
        assert one["beside another"] == 0
        assert one["hits"] > 0
        assert one["evictions"] > 0
        assert one["errors"] == 0
        assert one["most bytes"] <= SHARED_BUDGET
    assert found["counts"] == found["files"]


def test_without_the_ledgers_lock_four_processes_disturb_each_other(path: Path, tmp_path: Path) -> None:
    """The control of the test above."""
    found = run_in_own_process(share, str(path), str(tmp_path), 0, False)
    assert sum(one["beside another"] + len(one["wrong"]) + one["errors"] for one in found["workers"]) > 0


SHARED_BUDGET = 4 * MIB


def share(path: str, aside: str, seed: int, locking: bool) -> None:
    """Four processes read and write, and the first is killed meanwhile. Prints what each saw."""
    if not locking:
        Ledger._acquire_flock = lambda *_: True  # type: ignore[method-assign]
    results = [os.path.join(aside, f"worker{number}") for number in range(4)]
    workers = [
        forked(lambda number=number: share_as(path, aside, results[number], 10 * seed + number, number == 0))  # type: ignore[misc]
        for number in range(4)
    ]
    until(lambda: os.path.exists(results[0]))
    time.sleep(random.Random().uniform(0.0, 0.2))
    os.kill(workers[0], signal.SIGKILL)
    codes = [exit_code(worker) for worker in workers]
    tier = FileTier(path, SHARED_BUDGET, shared=True) if locking else None
    entries = scan(path).entries
    print(
        json.dumps(
            {
                "exit codes": codes,
                "workers": [json.loads(Path(result).read_text()) for result in results[1:]],
                "counts": tier and tier.stats()[:2],
                "files": [len(entries), sum(file.bytes for file in entries)],
            }
        )
    )


def share_as(path: str, aside: str, result: str, seed: int, for_ever: bool) -> None:
    """One of the four. After each of its writes it measures the directory, which no other may change then."""
    chance = random.Random(seed)
    found: dict[str, Any] = {"wrong": [], "hits": 0, "beside another": 0, "most bytes": 0}
    write, evict_to_fit = os.write, FileTier._evict_to_fit
    alone = os.open(os.path.join(aside, "alone"), os.O_RDWR | os.O_CREAT)

    def watched(descriptor: int, data: memoryview) -> int:
        count = write(descriptor, data[:100_000])
        found["most bytes"] = max(found["most bytes"], bytes_in(path))
        return count

    def watched_eviction(tier: FileTier, size: int) -> None:
        try:
            fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found["beside another"] += 1
        evict_to_fit(tier, size)
        fcntl.flock(alone, fcntl.LOCK_UN)

    os.write = watched  # type: ignore[assignment]
    FileTier._evict_to_fit = watched_eviction  # type: ignore[method-assign, assignment]
    tier = FileTier(path, SHARED_BUDGET, shared=True)
    rounds = 0
    while for_ever or rounds < 200:
        rounds += 1
        number = chance.randrange(40)
        wanted = Entry(
            torch.full((1 + number % 16, 2**13), float(number)), entry(key(number)).metadata
        )  # to 512 KiB
        got = tier.get(key(number))
        if got is None:
            tier.put(key(number), wanted)
        elif same(got, wanted):
            found["hits"] += 1
        else:
            found["wrong"].append(number)
        if for_ever and rounds == 50:
            Path(result).touch()
    found |= tier.stats()._asdict()
    Path(result).write_text(json.dumps(found))
