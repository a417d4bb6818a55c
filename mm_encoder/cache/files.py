"""The disk tier of plain files: one file per entry, written to a temporary name and renamed.

A read takes no lock: it opens, reads and verifies an immutable file, and updates its modification time. These
times are the LRU order, so it survives the process and is common to all processes that share a directory; in
memory there is only the eviction order of the last scan. A write holds the ledger lock from eviction to
rename, so all files together, a partly written one included, never exceed the budget; one process writes at a
time. There is no fsync: the checksums detect whatever a crash of the machine damages.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path

from ..config import require_int
from ..errors import CacheError, CacheLockedError
from ..logs import logger
from . import directory
from .codec import EntryError, encode
from .entry import DiskStats, DiskTier, Entry
from .ledger import LEDGER_BYTES, Ledger, lock
from .order import EvictionOrder

_LOCK_TIMEOUT_S = 5.0  # to wait for writes of other processes
_READER_LOCK_TIMEOUT_S = 0.1
_BEAT_EVERY = 1000  # files of a scan
_LOG_EVERY_S = 60.0
# Caused by the process, not by the file: the next read may succeed.
_TRANSIENT_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class FileTier(DiskTier):
    """Entries as files in a directory that holds nothing else; evicts the least recently used first."""

    def __init__(self, path: str | Path, max_bytes: int, *, shared: bool = False) -> None:
        """Open or create the directory, remove what killed writers left, and evict down to `max_bytes`.

        Raises CacheLockedError if another tier has it open, unless both are `shared`, and CacheError if the
        directory cannot be used, or contains foreign files and no cache.
        """
        require_int("max_bytes", max_bytes, 1)
        self._path = os.path.abspath(path)
        self._budget = max_bytes - LEDGER_BYTES
        self._pid = os.getpid()
        self._eviction_order = EvictionOrder()  # as of the last scan
        self._rescan_needed = False
        self._stats_lock = threading.RLock()  # a signal handler may come in between
        self._evictions = self._errors = 0
        self._last_logged: dict[str, float] = {}
        self._closed = False
        self._lock = lock(self._path, shared=shared)
        try:
            self._ledger = Ledger(self._path)
            # Encoders that start together wait for the one that scans, however long that takes.
            with self._ledger.locked(_LOCK_TIMEOUT_S, patient=True) as locked:
                if not locked:
                    raise CacheLockedError(f"another process is writing to {self._path} and does not finish")
                if not (self._ledger.waited and self._ledger.clean):  # else the one before has just scanned
                    self._rescan()
                self._evict_to_fit(0)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise CacheError(
                    f"{self._path} cannot be used as a cache directory: {error.strerror}"
                ) from error
            raise

    def get(self, key: bytes) -> Entry | None:
        """See DiskTier. A damaged or unreadable file is removed."""
        if self._closed or os.getpid() != self._pid:
            return None
        path = directory.entry_path(self._path, key)
        try:
            with directory.open_entry(path) as (descriptor, status):
                try:
                    entry = directory.load(descriptor, status, key)
                except EntryError as error:
                    self._record_error("damaged entry", path, error)
                    self._remove_damaged(path, status)
                    return None
                directory.touch(descriptor)
                return entry
        except FileNotFoundError:
            return None
        except OSError as error:
            self._record_error("failed read", path, error)
            if error.errno not in _TRANSIENT_ERRNOS:
                self._remove_damaged(path)
        except (RuntimeError, MemoryError) as error:  # out of memory for the rows; Torch raises RuntimeError
            self._record_error("failed read", path, error)
        return None

    def put(self, key: bytes, entry: Entry) -> bool:
        """See DiskTier. Also returns False if other processes hold the lock for some seconds."""
        if self._closed or os.getpid() != self._pid:
            return False
        path = directory.entry_path(self._path, key)
        try:
            parts = encode(key, entry)
            if sum(map(len, parts)) > self._budget:
                return False
            with self._ledger.locked(_LOCK_TIMEOUT_S) as locked:
                if locked:
                    self._store(path, key, *parts)
                elif not self._closed:
                    error = TimeoutError(f"the ledger was locked for {_LOCK_TIMEOUT_S:.0f} s")
                    self._record_error("failed write", path, error)
                return locked
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            self._record_error("failed write", path, error)
            return False

    def stats(self) -> DiskStats:
        """See DiskTier. Entries and bytes are those of all processes, evictions and errors of this tier."""
        entries, size = self._ledger.read()
        with self._stats_lock:
            return DiskStats(entries, size, self._evictions, self._errors)

    def close(self) -> None:
        """See DiskTier. Waits for a running put; running gets finish normally."""
        self._closed = True
        if os.getpid() == self._pid:  # a forked child holds no lock, and the mutex may never be free
            self._ledger.close()
            self._lock.release()

    # --- under the ledger lock -----------------------------------------------------------------------

    def _store(self, path: str, key: bytes, header: bytes, payload: memoryview) -> None:
        size = len(header) + len(payload)
        if self._rescan_needed or not self._ledger.clean:
            self._rescan()
        self._ledger.mark_dirty()
        if self._is_stored(path, size):
            directory.touch(path)
            return
        self._evict_to_fit(size)
        temporary = directory.temporary_path(self._path, key)
        try:
            directory.write(temporary, header, payload)
            os.replace(temporary, path)
        except BaseException:
            self._ledger.clean = False  # until the temporary file is removed
            directory.remove(temporary)
            self._ledger.clean = True
            raise
        self._ledger.add(1, size)

    def _is_stored(self, path: str, size: int) -> bool:
        """Return whether the entry is stored already; remove anything else in its place."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        if stat.S_ISREG(status.st_mode) and status.st_size == size:
            return True
        directory.remove(path)
        self._rescan()
        return False

    def _evict_to_fit(self, size: int) -> None:
        """Evict until `size` more bytes fit into the budget."""
        rescans = 0
        while self._ledger.bytes > max(self._budget - size, 0):
            if not self._eviction_order:
                self._rescan()
                rescans += 1
                continue
            self._ledger.beat()
            used_ns, key = self._eviction_order.first()
            path = directory.entry_path(self._path, key)
            try:
                status = os.lstat(path)
            except FileNotFoundError:  # another process evicted it, and counted that
                self._eviction_order.remove_first()
                continue
            # A file used since the scan is newer than all unused ones: skip it. After two rescans evict it
            # nevertheless, or readers that keep using every entry could hold this thread here forever.
            if status.st_mtime_ns == used_ns or rescans >= 2:
                directory.remove(path)
                self._ledger.add(-1, -status.st_size)
                with self._stats_lock:
                    self._evictions += 1
            self._eviction_order.remove_first()

    def _rescan(self) -> None:
        """Scan and sweep the directory; renew the eviction order and the ledger's counts."""
        self._rescan_needed = False
        order, size, others = EvictionOrder(), 0, directory.Listing([], [], [], [])
        for used_ns, nbytes, path in directory.walk(self._path, others):
            order.add(used_ns, directory.key_of(path))
            size += nbytes
            if not len(order) % _BEAT_EVERY:
                self._ledger.beat()
        directory.sweep(others)
        self._eviction_order = order
        self._ledger.entries, self._ledger.bytes = len(order), size
        self._ledger.clean = True

    def _remove_damaged(self, path: str, read: os.stat_result | None = None) -> None:
        """Remove a damaged entry, unless it was replaced since it was read as `read`."""
        try:
            with self._ledger.locked(_READER_LOCK_TIMEOUT_S) as locked:
                status = os.lstat(path)
                if read is not None and (status.st_dev, status.st_ino) != (read.st_dev, read.st_ino):
                    return
                directory.remove(path)
                if locked:
                    self._ledger.add(-1, -status.st_size)
                    self._ledger.clean = False  # its counted size may have been another
                else:
                    self._rescan_needed = True
        except FileNotFoundError:
            pass
        except OSError as error:
            self._record_error("failed removal", path, error)

    def _record_error(self, kind: str, path: str, error: Exception) -> None:
        """Count an error, and log it unless one of this kind was logged within the last minute."""
        now = time.monotonic()
        with self._stats_lock:
            self._errors += 1
            count = self._errors
            if now - self._last_logged.get(kind, -_LOG_EVERY_S) < _LOG_EVERY_S:
                return
            self._last_logged[kind] = now
        logger.warning(
            "cache: %s, %s: %s (%d errors so far; others of this kind are not logged for %.0f s)",
            kind,
            path,
            error,
            count,
            _LOG_EVERY_S,
            extra={"mm_event": "cache_error", "mm_error": type(error).__name__},
        )
