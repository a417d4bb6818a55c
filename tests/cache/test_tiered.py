"""Both tiers and the writer behind them, with a disk tier that does as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder import CacheConfig, CacheError, ImageMetadata
from mm_encoder.cache import tiered
from mm_encoder.cache.entry import DiskStats, Entry
from mm_encoder.cache.key import Keys
from mm_encoder.cache.tiered import Cache

from ..helpers.waiting import until

pytestmark = pytest.mark.threads

MIB = 1024**2


def rows(value: float, count: int = 4) -> torch.Tensor:
    return torch.full((count, 8), value, dtype=torch.float32)


def metadata(of: torch.Tensor, **changed: Any) -> ImageMetadata:
    values: dict[str, Any] = {
        "model": "m",
        "mm_hash": "ab" * 32,
        "length": of.shape[0],
        "shape": tuple(of.shape),
        "dtype": str(of.dtype),
        "device": "cpu",
        "strides": of.stride(),
        "embedding_offsets": (0, of.shape[0]),
        "grid_thws": ((1, 2, 2 * of.shape[0]),),
        "original_size": (3, 4),
        "cache": "miss",
        "timings": (("tower", 1.0),),
    }
    return ImageMetadata(**(values | changed))


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Disk:
    """A disk tier in a dictionary; each call waits at its gate, and fails or refuses when told to."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.reads: list[bytes] = []
        self.writes: list[bytes] = []
        self.read_gate, self.write_gate = threading.Event(), threading.Event()
        self.read_gate.set()
        self.write_gate.set()
        self.keep: Callable[[bytes], bool] = lambda key: True
        self.closed = 0

    def get(self, key: bytes) -> Entry | None:
        self.reads.append(key)
        assert self.read_gate.wait(30)
        found = self.entries.get(key)
        return found and Entry(found.rows.clone(), found.metadata)

    def put(self, key: bytes, entry: Entry) -> bool:
        assert self.write_gate.wait(30)
        self.writes.append(key)
        if self.keep(key):
            self.entries[key] = entry
            return True
        return False

    def stats(self) -> DiskStats:
        return DiskStats(len(self.entries), 0, 0, 0)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(tiered, "_open_disk", lambda config: made)
    return made


@pytest.fixture
def opened() -> Iterator[Callable[..., Cache]]:
    caches: list[Cache] = []

    def make(**config: Any) -> Cache:
        caches.append(Cache(CacheConfig(**({"memory_bytes": MIB} | config)), lambda: Keys({})))
        return caches[-1]

    yield make
    for cache in caches:
        if isinstance(cache._disk, Disk):
            cache._disk.read_gate.set()
            cache._disk.write_gate.set()
        cache.close()


def test_a_hit_in_memory_is_the_same_storage_and_says_so(opened: Callable[..., Cache]) -> None:
    cache, stored = opened(), rows(1)
    assert cache.get(key(1)) is None
    cache.put(key(1), stored, metadata(stored))
    first, second = cache.get(key(1)), cache.get(key(1))
    assert first is not None
    assert second is not None
    assert first.rows is second.rows is stored
    assert first.metadata == metadata(stored, cache="memory")
    assert first.metadata.timings == ()
    stats = cache.stats()
    assert (stats.memory_hits, stats.disk_hits, stats.memory_entries) == (2, 0, 1)
    assert stats.memory_bytes == stored.nbytes


def test_what_is_on_disk_comes_to_memory(opened: Callable[..., Cache], disk: Disk) -> None:
    cache, stored = opened(), rows(2)
    disk.entries[key(2)] = Entry(stored, metadata(stored))
    first, second = cache.get(key(2)), cache.get(key(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first.rows, stored)
    assert (first.metadata.cache, second.metadata.cache) == ("disk", "memory")
    assert first.rows is second.rows
    assert disk.reads == [key(2)]


def test_of_many_who_ask_for_one_key_one_reads_the_disk(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened(memory_bytes=0)  # so that whoever comes late cannot find it there
    disk.entries[key(3)] = Entry(rows(3), metadata(rows(3)))
    disk.read_gate.clear()
    found: list[Entry | None] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get(key(3)))) for _ in range(64)]
    for thread in threads:
        thread.start()
    until(lambda: len(disk.reads) == 1)
    for thread in threads[1:]:
        thread.join(0.001)
    disk.read_gate.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 64
    assert all(entry is not None and torch.equal(entry.rows, rows(3)) for entry in found)
    stats = cache.stats()
    assert stats.disk_hits == len(disk.reads)
    assert stats.memory_hits + stats.disk_hits == 64


def test_a_reader_that_fails_lets_the_others_go(
    opened: Callable[..., Cache], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened()

    def broken(key: bytes) -> Entry | None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk, "get", broken)
        with pytest.raises(KeyboardInterrupt):
            cache.get(key(4))
    assert cache.get(key(4)) is None  # and nobody waits for the one who was interrupted


def test_writes_are_behind_and_the_backlog_serves_meanwhile(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened(memory_bytes=0)
    disk.write_gate.clear()
    stored = rows(5)
    cache.put(key(5), stored, metadata(stored))  # returns, though nothing can be written
    found = cache.get(key(5))
    assert found is not None
    assert found.rows is stored
    assert disk.reads == []
    disk.write_gate.set()
    until(lambda: key(5) in disk.entries)
    assert disk.entries[key(5)].metadata == metadata(stored, cache="memory")


def test_a_full_backlog_drops_and_holds_nobody_up(
    opened: Callable[..., Cache], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered, "_BACKLOG", 1000)
    cache = opened(max_entry_bytes=1000)
    disk.write_gate.clear()
    for number in range(20):
        cache.put(key(number), rows(number), metadata(rows(number)))  # 128 bytes each
    assert cache.stats().dropped == 20 - 1000 // 128
    assert cache.stats().memory_entries == 20
    disk.write_gate.set()
    cache.close()
    assert disk.writes == [key(number) for number in range(1000 // 128)]


def test_what_the_disk_does_not_take_is_counted(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened()
    disk.keep = lambda key: False
    cache.put(key(6), rows(6), metadata(rows(6)))
    until(lambda: cache.stats().dropped == 1)
    assert cache.get(key(6)) is not None


def test_a_writer_that_meets_a_bug_goes_on(
    opened: Callable[..., Cache], disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened()

    def buggy(key: bytes) -> bool:
        disk.keep = lambda key: True
        raise ValueError("a bug")

    disk.keep = buggy
    for number in (7, 8):
        cache.put(key(number), rows(number), metadata(rows(number)))
    until(lambda: key(8) in disk.entries)
    assert cache.stats().errors == 1
    assert "a result was not stored" in caplog.text


def test_too_large_a_result_bypasses(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened(max_entry_bytes=100)
    cache.put(key(9), rows(9), metadata(rows(9)))
    cache.put_behind(key(9), lambda: rows(9), metadata(rows(9)), 128)
    assert cache.get(key(9)) is None
    assert cache.stats().bypasses == 2
    cache.close()
    assert disk.writes == []


def test_rows_that_are_still_on_a_device_are_fetched_behind(opened: Callable[..., Cache], disk: Disk) -> None:
    cache, stored = opened(), rows(10)
    fetched: list[str] = []

    def fetch() -> torch.Tensor:
        fetched.append(threading.current_thread().name)
        return stored

    cache.put_behind(key(10), fetch, metadata(stored, device="cuda:0"), stored.nbytes)
    until(lambda: key(10) in disk.entries)
    assert fetched == ["mm-encoder-cache"]
    found = cache.get(key(10))
    assert found is not None
    assert found.rows is stored
    assert found.metadata.device == "cpu"


def test_rows_that_cannot_be_fetched_are_a_miss(
    opened: Callable[..., Cache], disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened()
    disk.write_gate.clear()
    cache.put(key(1), rows(1), metadata(rows(1)))  # keeps the writer busy

    def broken() -> torch.Tensor:
        raise RuntimeError("CUDA error")

    cache.put_behind(key(2), broken, metadata(rows(2)), 128)
    assert cache.get(key(2)) is None
    disk.write_gate.set()
    until(lambda: cache.stats().errors == 1)
    assert cache.get(key(2)) is None


def test_what_is_on_its_way_to_disk_is_in_memory_as_far_as_anyone_can_tell(
    opened: Callable[..., Cache], disk: Disk
) -> None:
    cache = opened(memory_bytes=0)
    disk.write_gate.clear()
    cache.put(key(1), rows(1), metadata(rows(1)))
    found = cache.memory(key(1))
    assert found is not None
    assert torch.equal(found.rows, rows(1))


def test_closing_writes_what_is_waiting_and_lets_memory_go(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened()
    disk.write_gate.clear()
    for number in range(5):
        cache.put(key(number), rows(number), metadata(rows(number)))
    closer = threading.Thread(target=cache.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    disk.write_gate.set()
    closer.join(30)
    assert len(disk.entries) == 5
    assert disk.closed == 1
    cache.close()
    assert cache.stats().memory_bytes == 0
    cache.put(key(99), rows(1), metadata(rows(1)))
    assert cache.memory(key(99)) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes must be at least 0"),
        ({"memory_bytes": 1.5}, "memory_bytes must be an int"),
        ({"max_entry_bytes": 2**30 + 1}, "max_entry_bytes must be from 1 to"),
        ({"results": "gpu"}, "results must be 'cpu' or 'device', got 'gpu'"),
        ({"disk_backend": "redis"}, "disk_backend must be 'files' or 'foyer', got 'redis'"),
        ({"disk_path": "x"}, "disk_path and disk_bytes go together"),
        ({"disk_bytes": 5}, "disk_path and disk_bytes go together"),
        ({"disk_path": "x", "disk_bytes": 100}, r"got 100, needs 1073741824"),
        ({"disk_path": 5, "disk_bytes": 2**31}, "disk_path must be a str, a Path or None"),
        ({"shared": True}, "shared=True needs a disk_path"),
        ({"shared": 1}, "shared must be a bool"),
        (
            {"shared": True, "disk_backend": "foyer", "disk_path": "x", "disk_bytes": 2**31},
            "shared=True needs a disk_path and disk_backend='files'",
        ),
    ],
)
def test_impossible_settings_raise(config: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        CacheConfig(**config)


def test_an_identity_that_cannot_be_made_frees_the_directory(disk: Disk) -> None:
    with pytest.raises(ZeroDivisionError):
        Cache(CacheConfig(), lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert disk.closed == 1


def test_a_path_that_is_a_file_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    before = threading.active_count()
    with pytest.raises(CacheError, match="file"):
        Cache(CacheConfig(disk_path=path, disk_bytes=2**31), lambda: Keys({}))
    assert threading.active_count() == before
