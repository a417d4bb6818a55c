"""The cache of one encoder: a memory tier in front of a disk tier, and a write-behind thread."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import torch

from ..config import CacheConfig, expand_home
from ..contract import CacheStats, ImageMetadata
from ..logs import logger
from .entry import DiskStats, DiskTier, Entry
from .memory import MemoryTier, live_cpu_bytes_process
from .reads import DiskRead, DiskReads

Rows = Callable[[], torch.Tensor]
"""Returns a result's rows on the CPU, in storage that nothing else shares; may wait for a device."""

_MAX_BACKLOG_BYTES = 128 * 1024**2


class _PendingWrite(NamedTuple):
    """A result in the write backlog."""

    rows: Rows
    metadata: ImageMetadata
    nbytes: int
    in_memory: bool


class Cache:
    """Memory tier, optional disk tier and writer thread. Thread-safe.

    Raises CacheError if it cannot be opened.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._max_entry_bytes = config.max_entry_bytes
        self._max_backlog_bytes = max(_MAX_BACKLOG_BYTES, config.max_entry_bytes)
        self._memory = MemoryTier(config.memory_bytes)
        self._disk = _open_disk(config)
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()  # a signal handler may come in between, and count or close
        self._reads = DiskReads(self._read_disk)
        # Pending writes, oldest first; the writer is at the first one.
        self._backlog: OrderedDict[bytes, _PendingWrite] = OrderedDict()
        self._backlog_bytes = 0
        self._changed = threading.Condition(self._lock)
        self._closed = False
        try:
            self._writer = self._start_writer()
        except BaseException:
            if self._disk is not None:
                self._disk.close()
            raise

    def memory(self, key: bytes) -> Entry | None:
        """Return the entry if it is in the memory tier or in the backlog after it. Does not count."""
        entry = self._memory.get(key)
        if entry is not None:
            return entry
        pending = self._backlog.get(key)
        return None if pending is None or not pending.in_memory else Entry(pending.rows(), pending.metadata)

    def get(self, key: bytes, until: float | None = None) -> Entry | None:
        """Return the entry from memory or disk; its metadata's `cache` tells which. Counts hits, not misses.
        When several threads ask for one key, a single reader reads the disk; `until` bounds the wait for it,
        on time.monotonic()'s clock.
        """
        entry = self.get_memory(key)
        return self.get_disk(key, until) if entry is None else entry

    def get_memory(self, key: bytes) -> Entry | None:
        """`get` without a read of the disk: from the memory tier, or the backlog after it."""
        entry = self._memory.get(key)
        if entry is None:
            pending = self._backlog.get(key)
            if pending is None:
                return None
            try:
                entry = Entry(pending.rows(), pending.metadata)
            except Exception:  # a device error; the writer meets it too, and logs it
                return None
        self.count("memory_hits")
        return entry

    def get_disk(self, key: bytes, until: float | None = None) -> Entry | None:
        """`get` after `get_memory`."""
        return self.served(self._reads.wait(key, until)) if self.has_disk else None

    def start_read(self, key: bytes) -> Future[DiskRead] | None:
        """Begin `get_disk` in another thread, and return what to give to `served` once it is done. None if
        there is no thread to be had.
        """
        return self._reads.start(key)

    def served(self, read: DiskRead | None) -> Entry | None:
        """Return what was read, and count it; None is a read that was not waited for."""
        if read is None:
            self.count("stalled")
            return None
        entry, first = read.serve()
        if entry is None:
            return None
        self.count("disk_hits" if first else "memory_hits")
        return Entry(entry.rows, replace(entry.metadata, cache="disk")) if first else entry

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk tier."""
        return self._disk is not None

    def put(self, key: bytes, rows: torch.Tensor, metadata: ImageMetadata) -> None:
        """Store CPU rows, which must not change any more: in memory at once, on disk behind it."""
        cached = _as_cached(metadata)
        nbytes = rows.untyped_storage().nbytes()
        if nbytes > self._max_entry_bytes:
            self.count("bypasses")
            return
        self._memory.put(key, Entry(rows, cached))
        if self._disk is not None:
            self._enqueue_write(key, _PendingWrite(lambda: rows, cached, nbytes, in_memory=True))

    def put_behind(self, key: bytes, rows: Rows, metadata: ImageMetadata, nbytes: int) -> None:
        """Store rows that the writer thread must fetch first: calling `rows` copies them to the CPU."""
        if nbytes > self._max_entry_bytes:
            self.count("bypasses")
        else:
            self._enqueue_write(key, _PendingWrite(rows, _as_cached(metadata), nbytes, in_memory=False))

    def count(self, name: str) -> None:
        """Increment a counter of CacheStats."""
        with self._lock:
            self._counts[name] += 1

    def stats(self) -> CacheStats:
        """Return the counters at this moment."""
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
            stalled=counts["stalled"],
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
        """Write the whole backlog, then close both tiers and release the directory. Idempotent."""
        self._reads.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join()
        if self._disk is not None:
            self._disk.close()
        self._memory.close()

    def _read_disk(self, key: bytes) -> Entry | None:
        assert self._disk is not None
        try:
            entry = self._disk.get(key)
        except Exception:
            self.log_error("a result could not be read")
            return None
        if entry is not None:
            entry = Entry(entry.rows, _as_cached(entry.metadata))
            self._memory.put(key, entry)
        return entry

    def log_error(self, what: str) -> None:
        """Count the exception that is being handled as an error, and log it."""
        self.count("errors")
        logger.exception(what, extra={"mm_event": "cache_error"})

    def _enqueue_write(self, key: bytes, pending: _PendingWrite) -> None:
        with self._changed:
            if key in self._backlog or self._closed:
                return
            if self._backlog and self._backlog_bytes + pending.nbytes > self._max_backlog_bytes:
                self._counts["dropped"] += 1  # rather than block the caller
                return
            if not self._writer.is_alive():
                self._writer = self._start_writer()
            self._changed.notify_all()
            # One line without a call, between whose parts no interrupt can come.
            self._backlog_bytes, self._backlog[key] = self._backlog_bytes + pending.nbytes, pending

    def _start_writer(self) -> threading.Thread:
        writer = threading.Thread(target=self._run_writer, name="mm-encoder-cache", daemon=True)
        writer.start()
        return writer

    def _run_writer(self) -> None:
        while True:
            try:
                self._write_backlog()
                return
            except BaseException:  # between two results; what was not removed is written again
                logger.exception("the cache's writer was interrupted and goes on")

    def _write_backlog(self) -> None:
        """Write until closed."""
        while True:
            with self._changed:
                while not self._backlog and not self._closed:
                    self._changed.wait()
                if not self._backlog:
                    return
                key, pending = next(iter(self._backlog.items()))
            try:
                self._store(key, pending)
            except BaseException:  # no result's fault may end the thread
                self.log_error("a result could not be cached")
            finally:
                self._remove_pending(key)
            del pending  # an idle writer keeps nothing alive

    def _remove_pending(self, key: bytes) -> None:
        with self._lock:
            pending = self._backlog.pop(key, None)
            if pending is not None:
                self._backlog_bytes = self._backlog_bytes - pending.nbytes if self._backlog else 0

    def _store(self, key: bytes, pending: _PendingWrite) -> None:
        entry = Entry(pending.rows(), pending.metadata)
        if not pending.in_memory:
            self._memory.put(key, entry)
        if self._disk is not None and not self._disk.put(key, entry):
            self.count("dropped")


def _as_cached(metadata: ImageMetadata) -> ImageMetadata:
    """Return `metadata` as later hits report it."""
    return replace(metadata, cache="memory", timings=(), device="cpu")


def _open_disk(config: CacheConfig) -> DiskTier | None:
    if config.disk_path is None:
        return None
    path = expand_home("disk_path", config.disk_path)
    if config.disk_backend == "foyer":
        from .foyer import FoyerTier  # needs an extra

        return FoyerTier(path, config.disk_bytes)
    from .files import FileTier

    return FileTier(path, config.disk_bytes, shared=config.shared)
