"""Both tiers and the writer thread, with a disk tier that the tests control."""

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
    """A disk tier in a dictionary; calls wait at gates, and `keep` makes a put fail or be refused."""

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
        caches.append(Cache(CacheConfig(**({"memory_bytes": MIB} | config))))
        return caches[-1]

    yield make
    for cache in caches:
        if isinstance(cache._disk, Disk):
            cache._disk.read_gate.set()
            cache._disk.write_gate.set()
        cache.close()


def test_a_memory_hit_shares_the_storage_and_reports_memory(opened: Callable[..., Cache]) -> None:
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


def test_a_disk_hit_is_promoted_to_memory(opened: Callable[..., Cache], disk: Disk) -> None:
    cache, stored = opened(), rows(2)
    disk.entries[key(2)] = Entry(stored, metadata(stored))
    first, second = cache.get(key(2)), cache.get(key(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first.rows, stored)
    assert (first.metadata.cache, second.metadata.cache) == ("disk", "memory")
    assert first.rows is second.rows
    assert disk.reads == [key(2)]


def test_concurrent_gets_of_a_key_read_the_disk_once(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened(memory_bytes=0)  # so that a late thread cannot find it there
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


def test_an_interrupted_reader_does_not_block_later_gets(
    opened: Callable[..., Cache], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened()

    def broken(key: bytes) -> Entry | None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk, "get", broken)
        with pytest.raises(KeyboardInterrupt):
            cache.get(key(4))
    assert cache.get(key(4)) is None  # does not wait for the interrupted reader


def test_the_backlog_serves_hits_until_it_is_written(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened(memory_bytes=0)
    disk.write_gate.clear()
    stored = rows(5)
    cache.put(key(5), stored, metadata(stored))  # returns although the writer is blocked
    found = cache.get(key(5))
    assert found is not None
    assert found.rows is stored
    assert disk.reads == []
    disk.write_gate.set()
    until(lambda: key(5) in disk.entries)
    assert disk.entries[key(5)].metadata == metadata(stored, cache="memory")


def test_a_full_backlog_drops_writes_instead_of_blocking(
    opened: Callable[..., Cache], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered, "_MAX_BACKLOG_BYTES", 1000)
    cache = opened(max_entry_bytes=1000)
    disk.write_gate.clear()
    for number in range(20):
        cache.put(key(number), rows(number), metadata(rows(number)))  # 128 bytes each
    assert cache.stats().dropped == 20 - 1000 // 128
    assert cache.stats().memory_entries == 20
    disk.write_gate.set()
    cache.close()
    assert disk.writes == [key(number) for number in range(1000 // 128)]


def test_a_put_refused_by_the_disk_counts_as_dropped(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened()
    disk.keep = lambda key: False
    cache.put(key(6), rows(6), metadata(rows(6)))
    until(lambda: cache.stats().dropped == 1)
    assert cache.get(key(6)) is not None


def test_the_writer_continues_after_an_unexpected_error(
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
    assert "a result could not be cached" in caplog.text


def test_a_result_over_max_entry_bytes_bypasses_the_cache(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened(max_entry_bytes=100)
    cache.put(key(9), rows(9), metadata(rows(9)))
    cache.put_behind(key(9), lambda: rows(9), metadata(rows(9)), 128)
    assert cache.get(key(9)) is None
    assert cache.stats().bypasses == 2
    cache.close()
    assert disk.writes == []


def test_rows_on_a_device_are_fetched_by_the_writer(opened: Callable[..., Cache], disk: Disk) -> None:
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


def test_rows_that_fail_to_fetch_are_a_miss(
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


def test_a_pending_write_counts_as_in_memory(opened: Callable[..., Cache], disk: Disk) -> None:
    cache = opened(memory_bytes=0)
    disk.write_gate.clear()
    cache.put(key(1), rows(1), metadata(rows(1)))
    found = cache.memory(key(1))
    assert found is not None
    assert torch.equal(found.rows, rows(1))


def test_close_writes_the_backlog_and_empties_memory(opened: Callable[..., Cache], disk: Disk) -> None:
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
def test_invalid_settings_raise(config: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        CacheConfig(**config)


def test_a_file_in_place_of_the_directory_raises_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    before = threading.active_count()
    with pytest.raises(CacheError, match="file"):
        Cache(CacheConfig(disk_path=path, disk_bytes=2**31))
    assert threading.active_count() == before
