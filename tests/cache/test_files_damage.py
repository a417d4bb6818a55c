"""Damaged entries of the files tier are misses, never wrong rows; verify, describe and clear."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder.cache import codec, directory
from mm_encoder.cache.codec import FORMAT, HEAD_BYTES
from mm_encoder.cache.directory import temporary_path
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.ledger import LEDGER_BYTES, Ledger, lock
from mm_encoder.cache.upkeep import clear, describe, verify
from mm_encoder.errors import CacheError, CacheLockedError

from .conftest import BUDGET, entry, failing_with, file_of, key, put, same


def cut(to: Callable[[int], int]) -> Callable[[Path, Path], None]:
    return lambda file, _: os.truncate(file, to(file.stat().st_size))


def flip(at: Callable[[int], int]) -> Callable[[Path, Path], None]:
    def damage(file: Path, _: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at(len(data))] ^= 4
        file.write_bytes(data)

    return damage


def header_bytes(file: Path) -> int:
    return HEAD_BYTES + int(struct.unpack_from("<I", file.read_bytes(), 12)[0])


def header_only(file: Path, _: Path) -> None:
    os.truncate(file, header_bytes(file))


def another_entry(file: Path, other: Path) -> None:
    shutil.copy(other, file)


def appended(file: Path, _: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def format_to_come(file: Path, _: Path) -> None:
    data = bytearray(file.read_bytes())
    struct.pack_into("<I", data, 8, FORMAT + 1)
    file.write_bytes(data)


def claims_to_be_huge(file: Path, _: Path) -> None:
    data = bytearray(file.read_bytes())
    struct.pack_into("<Q", data, 16, 2**45)
    file.write_bytes(data)


def foreign_text(file: Path, _: Path) -> None:
    file.write_text("not an entry\n" * 1000)


def sparse(file: Path, _: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)


def folder(file: Path, _: Path) -> None:
    file.unlink()
    file.mkdir()


def link(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def link_to_itself(file: Path, _: Path) -> None:
    kept_aside = file.with_name("aside")
    file.rename(kept_aside)
    file.symlink_to(kept_aside)


def pipe(file: Path, _: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def listening(file: Path, _: Path) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(file.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/{file.name}")  # a short name for a long path
        os.close(here)


CONTENT = {
    "cut to nothing": cut(lambda _: 0),
    "cut in the head": cut(lambda _: HEAD_BYTES - 1),
    "header only": header_only,
    "half": cut(lambda size: size // 2),
    "a byte short": cut(lambda size: size - 1),
    "bit in the magic": flip(lambda _: 0),
    "bit in the header": flip(lambda _: HEAD_BYTES + 20),
    "first bit of the rows": flip(lambda size: size - entry(key(0)).nbytes),
    "last bit of the rows": flip(lambda size: size - 1),
    "another's entry": another_entry,
    "appended": appended,
    "format to come": format_to_come,
    "claims to be huge": claims_to_be_huge,
    "text": foreign_text,
    "zeros": sparse,
}
NO_FILE = {
    "folder": folder,
    "link": link,
    "link to the entry": link_to_itself,
    "pipe": pipe,
    "socket": listening,
}


@pytest.mark.parametrize("name", [*CONTENT, *NO_FILE])
def test_a_damaged_entry_is_a_counted_miss_and_is_removed(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0, 1)
    (CONTENT | NO_FILE)[name](file_of(path, 0), file_of(path, 1))
    allocated = 0

    def counted(header: codec.Header) -> torch.Tensor:
        nonlocal allocated
        allocated += header.payload_bytes
        return codec.empty_rows(header)

    monkeypatch.setattr(directory, "empty_rows", counted)
    assert tier.get(key(0)) is None
    assert allocated <= entry(key(0)).nbytes
    assert tier.stats().errors == 1
    assert not os.path.lexists(file_of(path, 0))
    assert tier.get(key(0)) is None  # now a plain miss
    assert tier.stats().errors == 1
    put(tier, 0)
    assert same(tier.get(key(0)), entry(key(0)))
    assert same(tier.get(key(1)), entry(key(1)))
    sizes = file_of(path, 0).stat().st_size + file_of(path, 1).stat().st_size
    assert tier.stats() == (2, sizes, 0, 1)
    tier.close()


@pytest.mark.parametrize("file", [directory.LEDGER, directory.LOCK])
@pytest.mark.parametrize("replace", NO_FILE.values(), ids=NO_FILE)
def test_a_ledger_or_lock_that_is_no_file_is_named(
    path: Path, file: str, replace: Callable[[Path, Path], None]
) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    tier.close()
    replace(path / file, file_of(path, 0))
    with pytest.raises(CacheError, match=f"{path / file} is not a regular file; remove it"):
        FileTier(path, BUDGET)
    shutil.rmtree(path / file) if (path / file).is_dir() else (path / file).unlink()
    tier = FileTier(path, BUDGET)
    assert same(tier.get(key(0)), entry(key(0)))
    tier.close()


def endless(ledger: Path, _: Path) -> None:
    with ledger.open("ab") as file:
        file.truncate(1 << 40)  # a hole, which would be read into memory


@pytest.mark.parametrize("replace", [endless, *NO_FILE.values()], ids=["endless", *NO_FILE])
def test_counts_ask_no_more_of_the_ledger_than_its_record(
    path: Path, replace: Callable[[Path, Path], None]
) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    counts = tier.stats()[:2]
    replace(path / directory.LEDGER, file_of(path, 0))
    assert tier.stats()[:2] == (counts if replace is endless else (0, 0))
    tier.close()


@pytest.mark.parametrize("name", [*CONTENT, *NO_FILE])
def test_damage_done_while_closed_is_found_after_a_reopen(path: Path, name: str) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0, 1)
    tier.close()
    (CONTENT | NO_FILE)[name](file_of(path, 0), file_of(path, 1))
    tier = FileTier(path, BUDGET)
    assert tier.get(key(0)) is None
    assert tier.stats().errors == (name in CONTENT)  # an irregular name is swept at the open
    assert not os.path.lexists(file_of(path, 0))
    put(tier, 0)
    assert same(tier.get(key(0)), entry(key(0)))
    assert same(tier.get(key(1)), entry(key(1)))
    tier.close()


def test_without_the_checksum_a_wrong_row_would_be_served(
    tier: FileTier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above."""
    put(tier, 0)
    CONTENT["last bit of the rows"](file_of(path, 0), file_of(path, 0))
    monkeypatch.setattr(directory, "check", lambda *_: None)
    got = tier.get(key(0))
    assert got is not None
    assert not same(got, entry(key(0)))


def test_two_swapped_files_are_misses(tier: FileTier, path: Path) -> None:
    put(tier, 0, 1)
    file_of(path, 0).rename(path / "aside")
    file_of(path, 1).rename(file_of(path, 0))
    (path / "aside").rename(file_of(path, 1))
    assert tier.get(key(0)) is tier.get(key(1)) is None
    assert tier.stats() == (0, 0, 0, 2)


def test_a_put_replaces_an_entry_of_the_wrong_size(tier: FileTier, path: Path) -> None:
    """The size shows that one is damaged; other damage is found by the next read."""
    put(tier, 0, 1)
    header_only(file_of(path, 0), file_of(path, 1))
    put(tier, 0)
    assert same(tier.get(key(0)), entry(key(0)))
    assert tier.stats() == (2, 2 * file_of(path, 0).stat().st_size, 0, 0)


def test_a_folder_with_contents_is_never_removed(tier: FileTier, path: Path) -> None:
    put(tier, 0)
    folder(file_of(path, 0), file_of(path, 0))
    (file_of(path, 0) / "mine").write_text("mine")
    assert tier.get(key(0)) is None
    assert not tier.put(key(0), entry(key(0)))
    put(tier, 1)
    assert (file_of(path, 0) / "mine").read_text() == "mine"
    tier.close()
    tier = FileTier(path, BUDGET)
    assert tier.stats().entries == 1
    tier.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("function", ["open", "pread", "preadv"])
def test_an_unreadable_file_is_removed_unless_the_error_is_transient(
    tier: FileTier, path: Path, monkeypatch: pytest.MonkeyPatch, code: int, function: str
) -> None:
    """An error of the process, such as too many open files, keeps the file."""
    put(tier, 0)
    real = getattr(os, function)

    def failing(*arguments: Any) -> Any:
        if function != "open" or arguments[0] == str(file_of(path, 0)):
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    locked = Ledger.locked

    def no_longer_failing(*call: Any) -> Any:  # as removal reads the ledger
        monkeypatch.undo()
        return locked(*call)

    monkeypatch.setattr(os, function, failing)
    monkeypatch.setattr(Ledger, "locked", no_longer_failing)
    assert tier.get(key(0)) is None
    monkeypatch.undo()
    assert tier.stats().errors == 1
    passing = code in (errno.EMFILE, errno.ENOMEM)
    assert file_of(path, 0).exists() == passing
    assert same(tier.get(key(0)), entry(key(0))) == passing
    put(tier, 0)
    assert same(tier.get(key(0)), entry(key(0)))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_is_a_miss_and_keeps_the_file(
    tier: FileTier, path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    put(tier, 0)

    def failing(_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(directory, "empty_rows", failing)
    assert tier.get(key(0)) is None
    monkeypatch.undo()
    assert tier.stats().errors == 1
    assert same(tier.get(key(0)), entry(key(0)))


def test_a_file_replaced_during_the_read_is_not_removed(
    tier: FileTier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process replaces a damaged entry while this one reads it."""
    put(tier, 0)
    good = file_of(path, 0).read_bytes()
    CONTENT["last bit of the rows"](file_of(path, 0), file_of(path, 0))

    def replaced_meanwhile(*call: Any) -> None:
        (path / "aside").write_bytes(good)
        (path / "aside").rename(file_of(path, 0))
        codec.check(*call)

    monkeypatch.setattr(directory, "check", replaced_meanwhile)
    assert tier.get(key(0)) is None
    monkeypatch.undo()
    assert tier.stats().errors == 1
    assert same(tier.get(key(0)), entry(key(0)))


def test_a_damaged_entry_is_removed_during_a_write(
    tier: FileTier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader does not wait for the writer, and the counts are right after the next write."""
    put(tier, 0, 1)
    flip(lambda size: size - 1)(file_of(path, 0), file_of(path, 1))
    writing, go_on = threading.Event(), threading.Event()
    replace = os.replace

    def held(*call: Any) -> None:
        writing.set()
        assert go_on.wait(30)
        replace(*call)

    monkeypatch.setattr(os, "replace", held)
    writer = threading.Thread(target=put, args=(tier, 2))
    writer.start()
    assert writing.wait(30)
    try:
        assert tier.get(key(0)) is None
        assert not file_of(path, 0).exists()
    finally:
        go_on.set()
        writer.join()
    put(tier, 3)
    assert tier.stats() == (3, 3 * file_of(path, 1).stat().st_size, 0, 1)


def test_each_kind_of_error_is_logged_once_a_minute(
    tier: FileTier, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "mm_encoder")
    put(tier, *range(10))
    for number in range(10):
        os.truncate(file_of(path, number), 0)
        assert tier.get(key(number)) is None
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing_with(errno.EIO))
        assert not any(tier.put(key(number), entry(key(number))) for number in range(5))
    assert tier.stats().errors == 15
    first, second = caplog.records
    assert {record.__dict__["mm_event"] for record in (first, second)} == {"cache_error"}
    assert first.__dict__["mm_error"] == "EntryError"
    assert first.getMessage().startswith(f"cache: damaged entry, {file_of(path, 0)}: 0 bytes, but a head has")
    assert second.__dict__["mm_error"] == "OSError"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    put(tier, 0)
    os.truncate(file_of(path, 0), 0)
    assert tier.get(key(0)) is None
    assert len(caplog.records) == 3


# --- upkeep ------------------------------------------------------------------------------------------


def test_verify_reports_every_damage_and_changes_nothing(path: Path) -> None:
    tier = FileTier(path, BUDGET)
    names = list(CONTENT | NO_FILE)
    put(tier, *range(len(names) + 5))
    for number, name in enumerate(names):
        (CONTENT | NO_FILE)[name](file_of(path, number), file_of(path, len(names)))
    Path(temporary_path(str(path), key(3))).write_bytes(b"half")
    before = {file.name: (file.lstat().st_ino, file.lstat().st_mtime_ns) for file in path.iterdir()}
    found = verify(path)  # with the tier open
    assert {file.name: (file.lstat().st_ino, file.lstat().st_mtime_ns) for file in path.iterdir()} == before
    assert found.intact == 5
    assert found.bytes == 5 * file_of(path, len(names)).stat().st_size
    assert found.temporaries == 1
    assert found.foreign == 1  # the file that is linked to
    reasons = dict(found.damaged)
    assert reasons.keys() == {file_of(path, number).name for number in range(len(names))}
    for name, reason in {
        "cut to nothing": f"0 bytes, but a head has {HEAD_BYTES}",
        "last bit of the rows": "the rows' checksum differs",
        "bit in the header": "the header's checksum differs",
        "format to come": f"format {FORMAT + 1}, but this version reads format {FORMAT}",
        "pipe": "it is not a regular file",
    }.items():
        assert reasons[file_of(path, names.index(name)).name] == reason
    tier.close()


def test_verify_skips_entries_evicted_meanwhile(
    path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(path, 3 * file_bytes + LEDGER_BYTES)
    put(tier, 0, 1, 2)
    evicted = False

    def evict_all(*call: Any) -> None:
        nonlocal evicted
        if not evicted:
            evicted = True
            put(tier, 3, 4, 5)
        codec.check(*call)

    monkeypatch.setattr(directory, "check", evict_all)
    found = verify(path)
    assert found.intact == 1  # the one that was open
    assert found.damaged == ()
    tier.close()


def test_describe_counts_entries_and_foreign_files(path: Path, file_bytes: int) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0, 1)
    (path / "mine").write_text("mine")
    assert describe(path) == (2, 2 * file_bytes, 0, 1)
    tier.close()
    assert describe(str(path)) == (2, 2 * file_bytes, 0, 1)


def test_clear_removes_entries_and_leaves_foreign_files(path: Path, file_bytes: int) -> None:
    tier = FileTier(path, BUDGET)
    put(tier, 0, 1)
    with pytest.raises(CacheLockedError, match=str(path)):
        clear(path)
    tier.close()
    file_of(path, 2).mkdir()
    (file_of(path, 2) / "mine").write_text("mine")
    (path / "mine").write_text("mine")
    Path(temporary_path(str(path), key(3))).write_bytes(b"half")
    assert clear(path) == (2, 2 * file_bytes, 1, 1)
    assert describe(path) == (0, 0, 0, 1)
    assert (file_of(path, 2) / "mine").read_text() == (path / "mine").read_text() == "mine"
    tier = FileTier(path, BUDGET)
    assert tier.stats() == (0, 0, 0, 0)
    put(tier, 0)
    tier.close()


def test_upkeep_of_a_missing_directory_raises(path: Path) -> None:
    for use in (clear, verify, describe):
        with pytest.raises(CacheError, match=f"{path} is not an mm-encoder cache: No such file"):
            use(path)
    assert not path.exists()


def test_a_second_release_does_not_unlock_the_next_holder(path: Path) -> None:
    first = lock(str(path), shared=False)
    first.release()
    other = lock(str(path), shared=False)
    first.release()
    with pytest.raises(CacheLockedError):
        lock(str(path), shared=False)
    other.release()
