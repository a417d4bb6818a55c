"""The disk tier of plain files: one for each entry, written aside and renamed into its place.

A read takes no lock: it opens, reads and verifies a file that never changes, and stamps it as used. The
files' times are the order of use, so it outlives the process and holds over all processes that share a
directory, and memory keeps nothing but the last scan's list of what to evict next. A write holds the ledger
from making room to the rename, so the files together, a partly written one included, are within the budget at
any moment; several processes write in turn. Nothing is synced to the disk: what a crash of the machine
damages, the checksums find.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from pathlib import Path

from ..config import require_int
from ..errors import CacheError, CacheLockedError
from .codec import EntryError, encode
from .directory import (
    EntryFile,
    entry_path,
    load,
    open_entry,
    remove,
    scan,
    sweep,
    temporary_path,
    touch,
    write,
)
from .entry import DiskStats, DiskTier, Entry
from .ledger import LEDGER_BYTES, Ledger, Lock

logger = logging.getLogger("mm_encoder")

_LOCK_TIMEOUT_S = 5.0  # for the other processes' writes
_READER_LOCK_TIMEOUT_S = 0.1
_LOG_EVERY_S = 60.0
# The process, not the file, is at fault: the next read may succeed.
_TRANSIENT_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class FileTier(DiskTier):
    """Entries as files in a directory of their own, the least recently used evicted first."""

    def __init__(self, path: str | Path, max_bytes: int, *, shared: bool = False) -> None:
        """Open the directory, made if need be, sweep what killed writers left, evict down to `max_bytes`.

        Raises CacheLockedError where another tier has it open, unless both say `shared`; and CacheError where
        it cannot be used, or has files of someone else and none of a cache.
        """
        require_int("max_bytes", max_bytes, 1)
        self._path = os.path.abspath(path)
        self._budget = max_bytes - LEDGER_BYTES
        self._pid = os.getpid()
        self._eviction_order: list[EntryFile] = []  # by the last scan, those to evict first at the end
        self._rescan_needed = False
        self._stats_lock = threading.Lock()
        self._evictions = self._errors = 0
        self._last_logged: dict[str, float] = {}
        self._closed = False
        self._lock = Lock(self._path, shared=shared)
        try:
            self._ledger = Ledger(self._path)
            with self._ledger.locked(_LOCK_TIMEOUT_S) as locked:
                if not locked:
                    raise CacheLockedError(f"another process is writing to {self._path} and does not end")
                self._rescan()
                self._evict_to_fit(0)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise CacheError(f"{self._path} cannot be a cache's directory: {error.strerror}") from error
            raise

    def get(self, key: bytes) -> Entry | None:
        """See DiskTier."""
        if self._closed or os.getpid() != self._pid:
            return None
        path = entry_path(self._path, key)
        try:
            with open_entry(path) as (descriptor, status):
                try:
                    entry = load(descriptor, status, key)
                except EntryError as error:
                    self._record_error("damaged entry", path, error)
                    self._remove_damaged(path, status)
                    return None
                touch(descriptor)
                return entry
        except FileNotFoundError:
            return None
        except OSError as error:
            self._record_error("failed read", path, error)
            if error.errno not in _TRANSIENT_ERRNOS:
                self._remove_damaged(path)
        except (RuntimeError, MemoryError) as error:  # no room for the rows; Torch's is a RuntimeError
            self._record_error("failed read", path, error)
        return None

    def put(self, key: bytes, entry: Entry) -> bool:
        """See DiskTier. False also where the other processes leave it no turn for some seconds."""
        if self._closed or os.getpid() != self._pid:
            return False
        path = entry_path(self._path, key)
        try:
            parts = encode(key, entry)
            if sum(map(len, parts)) > self._budget:
                return False
            with self._ledger.locked(_LOCK_TIMEOUT_S) as locked:
                if locked:
                    self._store(path, key, *parts)
                elif not self._closed:
                    self._record_error(
                        "failed write", path, TimeoutError(f"no turn in {_LOCK_TIMEOUT_S:.0f} s")
                    )
                return locked
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            self._record_error("failed write", path, error)
            return False

    def stats(self) -> DiskStats:
        """See DiskTier. Entries and bytes are of all processes, evictions and errors of this tier."""
        entries, size = self._ledger.read()
        with self._stats_lock:
            return DiskStats(entries, size, self._evictions, self._errors)

    def close(self) -> None:
        """See DiskTier. Waits for a put under way; gets under way end as they would."""
        self._closed = True
        if os.getpid() == self._pid:  # a forked child has no lock to give back, and may not get the ledger's
            self._ledger.close()
            self._lock.release()

    # --- what needs the ledger -----------------------------------------------------------------------

    def _store(self, path: str, key: bytes, header: bytes, payload: memoryview) -> None:
        size = len(header) + len(payload)
        if self._rescan_needed or not self._ledger.clean:
            self._rescan()
        self._ledger.mark_dirty()
        if self._is_stored(path, size):
            touch(path)
            return
        self._evict_to_fit(size)
        temporary = temporary_path(self._path, key)
        try:
            write(temporary, header, payload)
            os.replace(temporary, path)
        except BaseException:
            self._ledger.clean = False  # unless it can be removed
            remove(temporary)
            self._ledger.clean = True
            raise
        self._ledger.add(1, size)

    def _is_stored(self, path: str, size: int) -> bool:
        """Whether the entry need not be written. What else lies in its place goes."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        if stat.S_ISREG(status.st_mode) and status.st_size == size:
            return True
        remove(path)
        self._rescan()
        return False

    def _evict_to_fit(self, size: int) -> None:
        """Evict until `size` more bytes are within the budget."""
        rescans = 0
        while self._ledger.bytes > max(self._budget - size, 0):
            if not self._eviction_order:
                self._rescan()
                rescans += 1
                continue
            file = self._eviction_order[-1]
            try:
                status = os.lstat(file.path)
            except FileNotFoundError:  # another process evicted it, and told the ledger
                self._eviction_order.pop()
                continue
            # Used since the scan, so younger than all the scan saw that were not. Twice in a row is enough,
            # or readers who use everything all the time could keep this thread here.
            if status.st_mtime_ns == file.used_ns or rescans >= 2:
                remove(file.path)
                self._ledger.add(-1, -status.st_size)
                with self._stats_lock:
                    self._evictions += 1
            self._eviction_order.pop()

    def _rescan(self) -> None:
        """Scan the directory, for what to evict first and for the ledger, and sweep it."""
        self._rescan_needed = False
        listing = scan(self._path)
        sweep(listing)
        self._eviction_order = sorted(listing.entries, reverse=True)
        self._ledger.entries = len(self._eviction_order)
        self._ledger.bytes = sum(file.bytes for file in self._eviction_order)
        self._ledger.clean = True

    def _remove_damaged(self, path: str, read: os.stat_result | None = None) -> None:
        """Remove a bad entry, unless another was put in its place since it was read."""
        try:
            with self._ledger.locked(_READER_LOCK_TIMEOUT_S) as locked:
                status = os.lstat(path)
                if read is not None and (status.st_dev, status.st_ino) != (read.st_dev, read.st_ino):
                    return
                remove(path)
                if locked:
                    self._ledger.add(-1, -status.st_size)
                    self._ledger.clean = False  # it may have been counted with another size
                else:
                    self._rescan_needed = True
        except FileNotFoundError:
            pass
        except OSError as error:
            self._record_error("failed removal", path, error)

    def _record_error(self, kind: str, path: str, error: Exception) -> None:
        """Count it, and log it unless one of its kind was logged within the last minute."""
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
