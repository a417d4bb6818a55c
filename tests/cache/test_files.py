"""The files tier: eviction order, the budget at every moment, ownership of the directory, errors of the file
system.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import subprocess
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder.cache import directory
from mm_encoder.cache.directory import scan, temporary_path
from mm_encoder.cache.entry import Entry
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.ledger import LEDGER_BYTES, Ledger
from mm_encoder.cache.upkeep import clear, verify
from mm_encoder.errors import CacheError, CacheLockedError

from .conftest import BUDGET, MIB, bytes_in, entry, failing_with, file_of, key, put, same, stored_keys

# --- order and budget --------------------------------------------------------------------------------


def test_an_entry_is_one_file_barely_larger_than_its_rows(tier: FileTier, path: Path) -> None:
    batch = entry(key(0), 24, 4096)
    assert tier.put(key(0), Entry(batch.rows[3:6], batch.metadata))
    assert file_of(path, 0).stat().st_size <= 1.1 * 3 * 4096 * 2 + 4096
    assert tier.stats() == (1, file_of(path, 0).stat().st_size, 0, 0)
    assert bytes_in(path) == tier.stats().bytes + LEDGER_BYTES


def test_the_least_recently_used_entry_is_evicted_first(path: Path, file_bytes: int) -> None:
    tier = FileTier(path, 4 * file_bytes + LEDGER_BYTES)
    put(tier, 0, 1, 2, 3)
    assert tier.stats() == (4, 4 * file_bytes, 0, 0)
    assert tier.get(key(0)) is not None
    put(tier, 1)  # counts as a use, too
    put(tier, 4)
    assert stored_keys(path) == {key(number).hex() for number in (0, 1, 3, 4)}
    put(tier, 5)
    assert stored_keys(path) == {key(number).hex() for number in (0, 1, 4, 5)}
    assert tier.stats() == (4, 4 * file_bytes, 2, 0)
    tier.close()


def test_the_eviction_order_survives_a_reopen(path: Path, file_bytes: int) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, *range(6))
    for number in (2, 0, 4):
        assert tier.get(key(number)) is not None
    tier.close()
    tier = FileTier(path, 3 * file_bytes + LEDGER_BYTES)  # evicts down to the smaller budget
    assert stored_keys(path) == {key(number).hex() for number in (2, 0, 4)}
    assert tier.stats() == (3, 3 * file_bytes, 3, 0)
    put(tier, 7)
    assert stored_keys(path) == {key(number).hex() for number in (0, 4, 7)}
    tier.close()


@pytest.mark.parametrize("seed", range(5))
def test_eviction_equals_an_exact_lru_model(path: Path, seed: int) -> None:
    """Compared with a model, for entries of all sizes, with reopening now and then."""
    chance = random.Random(seed)
    budget, model = 40_000, OrderedDict[int, int]()
    tier = FileTier(path, budget)
    for _ in range(400):
        number, action = chance.randrange(30), chance.random()
        if action < 0.02:
            tier.close()
            tier = FileTier(path, budget)
        elif action < 0.5:
            assert (tier.get(key(number)) is not None) == (number in model)
            if number in model:
                model.move_to_end(number)
        else:
            what = entry(key(number), 1 + number, 64)
            assert tier.put(key(number), what)
            if number in model:
                model.move_to_end(number)
                continue
            size = file_of(path, number).stat().st_size
            while sum(model.values()) + size > budget - LEDGER_BYTES:
                model.popitem(last=False)
            model[number] = size
            assert stored_keys(path) == {key(number).hex() for number in model}
            assert tier.stats()[:2] == (len(model), sum(model.values()))
    tier.close()


def test_the_files_never_exceed_the_budget(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured after every write, of which an entry takes several."""
    budget, most = 400_000, 0
    write = os.write

    def watched(descriptor: int, data: memoryview) -> int:
        nonlocal most
        count = write(descriptor, data[:20_000])
        most = max(most, bytes_in(path))
        return count

    monkeypatch.setattr(os, "write", watched)
    chance = random.Random(0)
    tier = FileTier(path, budget)
    for number in range(300):
        assert tier.put(key(number), entry(key(number), chance.randrange(1, 500), 64))
        tier.get(key(chance.randrange(number + 1)))
    assert budget * 0.95 < most <= budget
    assert tier.stats().evictions > 100
    assert tier.stats().bytes + LEDGER_BYTES == bytes_in(path)
    tier.close()


def test_an_entry_of_exactly_the_budget_fits(path: Path, file_bytes: int) -> None:
    tier = FileTier(path, file_bytes + LEDGER_BYTES)
    put(tier, 0, 1)
    assert stored_keys(path) == {key(1).hex()}
    tier.close()
    for budget in (file_bytes + LEDGER_BYTES - 1, 1):
        tier = FileTier(path, budget)
        assert not tier.put(key(2), entry(key(2)))
        assert tier.stats()[:2] == (0, 0)
        assert tier.stats().errors == 0
        tier.close()


def test_readers_that_use_every_entry_do_not_block_eviction(
    path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry is used between the scan and the eviction, every time."""
    tier = FileTier(path, 3 * file_bytes + LEDGER_BYTES)
    put(tier, 0, 1, 2)
    lstat = os.lstat

    def used_now(file: str) -> os.stat_result:
        if file.endswith(".rows") and os.path.exists(file):
            directory.touch(file)
        return lstat(file)

    monkeypatch.setattr(os, "lstat", used_now)
    put(tier, 3)
    monkeypatch.undo()
    assert len(stored_keys(path)) == 3
    assert same(tier.get(key(3)), entry(key(3)))
    tier.close()


def test_a_stored_entry_is_not_written_again(tier: FileTier, path: Path) -> None:
    put(tier, 0)
    before = file_of(path, 0).stat().st_ino
    put(tier, 0)
    assert file_of(path, 0).stat().st_ino == before
    file_of(path, 0).unlink()
    put(tier, 0)
    assert same(tier.get(key(0)), entry(key(0)))


def test_no_file_stays_open_and_memory_keeps_no_key(tier: FileTier) -> None:
    before = len(os.listdir("/proc/self/fd"))
    put(tier, *range(20))
    for number in range(40):
        tier.get(key(number))
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(tier._eviction_order) == 0  # as of the last scan


def test_many_entries_are_found_after_a_reopen(path: Path) -> None:
    FileTier(path, BUDGET).close()
    number, size = 2000, 0
    for count in range(number):
        file_of(path, count).write_bytes(bytes(count % 50))
        size += count % 50
    tier = FileTier(path, BUDGET)
    assert tier.stats() == (number, size, 0, 0)
    tier.close()


# --- the directory -----------------------------------------------------------------------------------


def test_the_directory_is_created_with_parents_for_the_owner_only(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "a" / "b" / "c", BUDGET)
    put(tier, 0)
    assert (tmp_path / "a" / "b" / "c").stat().st_mode & 0o077 == 0
    tier.close()


def test_a_directory_of_foreign_files_is_refused_and_unchanged(path: Path) -> None:
    path.mkdir()
    for name in ("thesis.tex", "photo.jpg", "mail", "zebra"):
        (path / name).write_text("mine")
    wanted = "is not an mm-encoder cache: it contains mail, photo.jpg, thesis.tex and 1 more; give a cache's"
    for use in (lambda: FileTier(path, BUDGET), lambda: clear(path), lambda: verify(path)):
        with pytest.raises(CacheError, match=wanted):
            use()
    assert len(list(path.iterdir())) == 4


def test_foreign_files_in_a_cache_directory_stay(path: Path, file_bytes: int) -> None:
    tier = FileTier(path, 3 * file_bytes + LEDGER_BYTES)
    names = ["README", "core.1234", key(9).hex(), "x.rows", key(9).hex().upper() + ".rows", "A.tmp", ".rows"]
    for name in names:
        (path / name).write_text("mine")
    (path / "folder").mkdir()
    put(tier, *range(6))
    tier.close()
    tier = FileTier(path, file_bytes + LEDGER_BYTES)
    assert tier.stats()[:2] == (1, file_bytes)
    tier.close()
    clear(path)
    assert all((path / name).read_text() == "mine" for name in names)
    assert (path / "folder").is_dir()


def test_temporary_files_of_killed_writers_are_removed(path: Path) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    tier.close()
    for number in range(3):
        Path(temporary_path(str(path), key(number))).write_bytes(bytes(10_000))
    tier = FileTier(path, BUDGET)
    assert scan(str(path)).temporaries == []
    assert tier.stats().entries == 1
    assert same(tier.get(key(0)), entry(key(0)))
    tier.close()


@pytest.mark.parametrize(
    "where", ["it is a file", "its parent is a file", "its lock is a folder", "no space"]
)
def test_unusable_paths_raise_cache_error(path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = path
    if where == "it is a file":
        path.write_text("mine")
    elif where == "its parent is a file":
        path.write_text("mine")
        used = path / "below"
    elif where == "its lock is a folder":
        (path / directory.LOCK).mkdir(parents=True)
    else:
        monkeypatch.setattr(os, "pwrite", failing_with(errno.ENOSPC))
    with pytest.raises(CacheError, match=str(used)):
        FileTier(used, BUDGET)
    monkeypatch.undo()
    if where == "no space":  # the failed open released the lock
        FileTier(used, BUDGET).close()


def test_a_directory_that_is_not_writable_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may write everywhere
    with pytest.raises(CacheError, match=f"{path} is not writable"):
        FileTier(path, BUDGET)


@pytest.mark.parametrize("max_bytes", [0, -1, True, 1.5, None])
def test_invalid_budgets_are_refused(path: Path, max_bytes: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_bytes must be"):
        FileTier(path, max_bytes)
    assert not path.exists()


# --- errors of the file system -----------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("function", ["write", "replace", "unlink", "open", "scandir", "pwrite"])
def test_a_failed_put_leaves_no_file(
    path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch, code: int, function: str
) -> None:
    """Although it evicted before it failed; the next put succeeds."""
    tier = FileTier(path, 2 * file_bytes + LEDGER_BYTES)
    put(tier, 0, 1)
    written = 0
    write = os.write

    def full_after_half(descriptor: int, data: memoryview) -> int:
        nonlocal written
        if written > file_bytes // 2:
            raise OSError(code, os.strerror(code))
        count = write(descriptor, data[: file_bytes // 2 - 100])
        written += count
        return count

    failing = full_after_half if function == "write" else failing_with(code)
    monkeypatch.setattr(os, function, failing)
    assert not tier.put(key(2), entry(key(2)))
    monkeypatch.undo()
    assert scan(str(path)).temporaries == []
    assert not file_of(path, 2).exists()
    assert tier.stats().errors == 1
    assert tier.stats()[:2] == (len(stored_keys(path)), bytes_in(path) - LEDGER_BYTES)
    put(tier, 2)
    assert same(tier.get(key(2)), entry(key(2)))
    assert same(tier.get(key(1)), entry(key(1)))
    assert tier.stats()[:2] == (2, 2 * file_bytes)
    tier.close()


def test_a_put_with_an_unreadable_ledger_fails_and_changes_nothing(
    path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = FileTier(path, BUDGET, shared=True), FileTier(path, BUDGET, shared=True)
    put(other, 0, 1)
    monkeypatch.setattr(os, "pread", failing_with(errno.EIO))
    assert not one.put(key(2), entry(key(2)))
    monkeypatch.undo()
    assert other.stats() == (2, 2 * file_bytes, 0, 0)
    assert one.stats().errors == 1
    one.close()
    other.close()


def test_an_entry_that_cannot_be_encoded_is_counted_as_error(tier: FileTier) -> None:
    assert not tier.put(key(0), entry(key(0))._replace(rows=torch.ones(3, 3, dtype=torch.float64)))
    assert tier.stats() == (0, 0, 0, 1)


def test_a_failing_utime_does_not_fail_the_get(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 0)
    monkeypatch.setattr(os, "utime", failing_with(errno.EPERM))
    assert same(tier.get(key(0)), entry(key(0)))
    put(tier, 0, 1)
    assert tier.stats().errors == 0


@contextmanager
def mounted(path: Path, size: int) -> Iterator[None]:
    """Mount a tmpfs of `size` bytes; skips the test where mounting is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "mm-encoder-test", str(path)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip(f"mounting is not possible here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_a_failed_put(path: Path, tmp_path: Path) -> None:
    with mounted(path, 4 * MIB):
        tier = FileTier(path, BUDGET)
        put(tier, 0)
        filler = path / "not-ours"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            file.writelines(repeat(bytes(4096)))
        large = Entry(torch.ones(64, 1024), entry(key(1)).metadata)
        for _ in range(3):
            assert not tier.put(key(1), large)
        assert tier.stats() == (1, file_of(path, 0).stat().st_size, 0, 3)
        assert scan(str(path)).temporaries == []
        assert same(tier.get(key(0)), entry(key(0)))
        filler.unlink()
        assert tier.put(key(1), large)
        assert same(tier.get(key(1)), large)
        tier.close()


def test_a_read_only_disk_can_be_verified_but_not_opened_or_cleared(path: Path) -> None:
    with mounted(path, 4 * MIB):
        tier = FileTier(path, BUDGET)
        put(tier, 0, 1)
        os.truncate(file_of(path, 1), 100)
        tier.close()
        subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
        with pytest.raises(CacheError, match=f"{path} is not writable"):
            FileTier(path, BUDGET)
        assert verify(path).intact == 1
        with pytest.raises(CacheError):
            clear(path)
        assert file_of(path, 0).exists()


# --- locks and sharing -------------------------------------------------------------------------------


def test_shared_and_exclusive_exclude_each_other(path: Path) -> None:
    one = FileTier(path, BUDGET, shared=True)
    two = FileTier(path, BUDGET, shared=True)
    with pytest.raises(CacheLockedError, match="or open it with shared=True in all of them"):
        FileTier(path, BUDGET)
    two.close()
    with pytest.raises(CacheLockedError):
        FileTier(path, BUDGET)
    one.close()
    exclusive = FileTier(path, BUDGET)
    for shared in (False, True):
        with pytest.raises(CacheLockedError, match=f"{path} is in use by another encoder"):
            FileTier(path, BUDGET, shared=shared)
    exclusive.close()
    FileTier(path, BUDGET, shared=True).close()


def test_a_collected_tier_releases_the_directory(path: Path) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    del tier
    gc.collect()
    FileTier(path, BUDGET).close()


def test_a_failed_open_releases_the_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "scandir", failing_with(errno.EIO))
    with pytest.raises(CacheError, match="cannot be used as a cache directory: Input/output error") as caught:
        FileTier(path, BUDGET)
    monkeypatch.undo()
    FileTier(path, BUDGET).close()
    assert caught.tb is not None  # its traceback kept the failed tier alive until here


def test_a_closed_ledger_cannot_be_locked(path: Path) -> None:
    """A put may wait while the tier closes; by then the descriptor may belong to another file."""
    path.mkdir()
    ledger = Ledger(str(path))
    with ledger.locked(0) as locked:
        assert locked
    ledger.close()
    with (path / "another").open("w"), ledger.locked(0) as locked:
        assert not locked


def test_two_tiers_share_a_directory(path: Path, file_bytes: int) -> None:
    budget = 3 * file_bytes + LEDGER_BYTES
    one, other = FileTier(path, budget, shared=True), FileTier(path, budget, shared=True)
    put(one, 0)
    put(other, 1)
    assert same(other.get(key(0)), entry(key(0)))
    assert same(one.get(key(1)), entry(key(1)))
    assert one.stats() == other.stats() == (2, 2 * file_bytes, 0, 0)
    put(one, 2)
    assert other.get(key(0)) is not None
    put(other, 3)  # evicts the least recently used of both tiers
    put(one, 4)
    assert stored_keys(path) == {key(number).hex() for number in (0, 3, 4)}
    assert one.stats() == (3, 3 * file_bytes, 1, 0)
    assert other.stats() == (3, 3 * file_bytes, 1, 0)
    one.close()
    put(other, 5)
    late = FileTier(path, budget, shared=True)
    assert late.stats() == (3, 3 * file_bytes, 0, 0)
    late.close()
    other.close()


def test_a_hanging_writer_costs_the_others_a_timeout_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(path, BUDGET, shared=True)
    put(tier, 0)
    monkeypatch.setattr("mm_encoder.cache.files._LOCK_TIMEOUT_S", 0.05)
    with (path / directory.LEDGER).open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        assert not tier.put(key(1), entry(key(1)))
        assert same(tier.get(key(0)), entry(key(0)))
        assert tier.stats().errors == 1
        with pytest.raises(CacheLockedError, match=f"another process is writing to {path}"):
            FileTier(path, BUDGET, shared=True)
    put(tier, 1)
    tier.close()
    FileTier(path, BUDGET).close()
