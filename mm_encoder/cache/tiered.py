"""The cache of one encoder: memory before disk, and one writer behind both."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from ..config import CacheConfig
from ..contract import CacheStats, ImageMetadata
from .entry import DiskStats, DiskTier, Entry
from .key import Keys
from .memory import MemoryTier, live_cpu_bytes_process

logger = logging.getLogger("mm_encoder")

Rows = Callable[[], torch.Tensor]
"""Gives a result's rows on the CPU, in a storage of their own; may wait for a device."""

_BACKLOG = 128 * 1024**2


class _Waiting(NamedTuple):
    """A result on its way to the tiers."""

    rows: Rows
    metadata: ImageMetadata
    nbytes: int
    in_memory: bool


class Cache:
    """Two tiers and a writer thread; from any thread.

    `keys` is called once the directory is open, since it reads all the weights. Raises CacheError where the
    cache cannot be opened.
    """

    def __init__(self, config: CacheConfig, keys: Callable[[], Keys]) -> None:
        self._max_entry = config.max_entry_bytes
        self._max_backlog = max(_BACKLOG, config.max_entry_bytes)
        self._memory = MemoryTier(config.memory_bytes)
        self._disk = _open_disk(config)
        try:
            self.keys = keys()
        except BaseException:
            if self._disk is not None:
                self._disk.close()
            raise
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._reading: dict[bytes, Future[Entry | None]] = {}
        # What is to be stored; the first of it is being written.
        self._backlog: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._backlog_bytes = 0
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._writer = threading.Thread(target=self._write, name="mm-encoder-cache", daemon=True)
        self._writer.start()

    def memory(self, key: bytes) -> Entry | None:
        """The entry, if it is in memory, or on its way from there to disk. Not counted."""
        entry = self._memory.get(key)
        if entry is not None:
            return entry
        with self._lock:
            waiting = self._backlog.get(key)
        return None if waiting is None or not waiting.in_memory else Entry(waiting.rows(), waiting.metadata)

    def get(self, key: bytes) -> Entry | None:
        """The entry, from memory or disk; its metadata's `cache` says which. Counts hits, not misses. Of
        those who ask for one key at a time, one reads the disk.
        """
        entry = self._memory.get(key)
        if entry is not None:
            self.count("memory_hits")
            return entry
        return self._read(key)

    def put(self, key: bytes, rows: torch.Tensor, metadata: ImageMetadata) -> None:
        """Keep CPU rows, which must not change any more: in memory at once, on disk soon."""
        kept = _kept(metadata)
        nbytes = rows.untyped_storage().nbytes()
        if nbytes > self._max_entry:
            self.count("bypasses")
            return
        self._memory.put(key, Entry(rows, kept))
        if self._disk is not None:
            self._add(key, _Waiting(lambda: rows, kept, nbytes, in_memory=True))

    def put_behind(self, key: bytes, rows: Rows, metadata: ImageMetadata, nbytes: int) -> None:
        """Keep rows that are on the CPU only once the writer has asked for them."""
        if nbytes > self._max_entry:
            self.count("bypasses")
        else:
            self._add(key, _Waiting(rows, _kept(metadata), nbytes, in_memory=False))

    def count(self, name: str) -> None:
        """Add one to a count of CacheStats."""
        with self._lock:
            self._counts[name] += 1

    def stats(self) -> CacheStats:
        """Counts at this moment."""
        memory = self._memory.stats()
        disk = DiskStats(0, 0, 0, 0) if self._disk is None else self._disk.stats()
        with self._lock:
            counts = Counter(self._counts)
        return CacheStats(
            memory_hits=counts["memory_hits"],
            disk_hits=counts["disk_hits"],
            misses=counts["misses"],
            joined=counts["joined"],
            bypasses=counts["bypasses"],
            dropped=counts["dropped"],
            errors=counts["errors"] + disk.errors,
            memory_entries=memory.entries,
            memory_bytes=memory.bytes,
            memory_evictions=memory.evictions,
            disk_entries=disk.entries,
            disk_bytes=disk.bytes,
            disk_evictions=disk.evictions,
            live_cpu_bytes_process=live_cpu_bytes_process(),
        )

    def close(self) -> None:
        """Write what is still to be written, and give the directory free. Twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join()
        if self._disk is not None:
            self._disk.close()
        self._memory.close()

    def _read(self, key: bytes) -> Entry | None:
        """What is on its way to the tiers, or on disk."""
        with self._lock:
            waiting = self._backlog.get(key)
            reading = self._reading.get(key)
            first = waiting is None and reading is None and self._disk is not None
            if first:
                self._reading[key] = Future()
        if waiting is not None:  # it may have left memory already
            try:
                entry = Entry(waiting.rows(), waiting.metadata)
            except Exception:  # from a device; the writer will meet it too, and log it
                return None
            self.count("memory_hits")
            return entry
        if first:
            return self._read_disk(key)
        found = None if reading is None else reading.result()
        if found is not None:
            self.count("memory_hits")
        return found

    def _read_disk(self, key: bytes) -> Entry | None:
        entry = None
        try:
            assert self._disk is not None
            entry = self._disk.get(key)
            if entry is not None:
                entry = Entry(entry.rows, _kept(entry.metadata))
                self._memory.put(key, entry)
        finally:
            with self._lock:
                reading = self._reading.pop(key)
            reading.set_result(entry)
        if entry is None:
            return None
        self.count("disk_hits")
        return Entry(entry.rows, replace(entry.metadata, cache="disk"))

    def _add(self, key: bytes, waiting: _Waiting) -> None:
        with self._changed:
            if key in self._backlog or self._closed:
                return
            if self._backlog and self._backlog_bytes + waiting.nbytes > self._max_backlog:
                self._counts["dropped"] += 1  # rather than hold anybody up
                return
            self._backlog[key] = waiting
            self._backlog_bytes += waiting.nbytes
            self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._backlog and not self._closed:
                    self._changed.wait()
                if not self._backlog:
                    return
                key, waiting = next(iter(self._backlog.items()))
            try:
                self._store(key, waiting)
            except Exception:
                self.count("errors")
                logger.exception("a result was not stored", extra={"mm_event": "cache_error"})
            with self._lock:
                del self._backlog[key]
                self._backlog_bytes -= waiting.nbytes
            del waiting  # an idle writer keeps nothing alive

    def _store(self, key: bytes, waiting: _Waiting) -> None:
        entry = Entry(waiting.rows(), waiting.metadata)
        if not waiting.in_memory:
            self._memory.put(key, entry)
        if self._disk is not None and not self._disk.put(key, entry):
            self.count("dropped")


def _kept(metadata: ImageMetadata) -> ImageMetadata:
    """As the next who asks is told."""
    return replace(metadata, cache="memory", timings=(), device="cpu")


def _open_disk(config: CacheConfig) -> DiskTier | None:
    if config.disk_path is None:
        return None
    path = Path(config.disk_path).expanduser()
    if config.disk_backend == "foyer":
        from .foyer import FoyerTier  # needs an extra

        return FoyerTier(path, config.disk_bytes)
    from .files import FileTier

    return FileTier(path, config.disk_bytes, shared=config.shared)
