"""Advisory locks of the files backend's directory, and the ledger of its entries and bytes.

The locks use flock: it can be shared, every open() is a separate owner even within a process, the kernel
releases it when a process dies, and a forked child that closes its copy does not unlock its parent. A child
closes its copy at once, because the lock would otherwise outlive the parent.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import CacheError, CacheLockedError
from .directory import LEDGER, LOCK, require_cache

_RECORD = struct.Struct("<QQQ")  # entries, bytes, dirty flag
LEDGER_BYTES = _RECORD.size
"""Size of the ledger's file; the lock file is empty."""


class Lock:
    """A lock on a directory, held until `release` is called or the object is collected."""

    def __init__(self, path: str, *, shared: bool) -> None:
        """Create the directory if it is missing and lock it without waiting. Raises CacheError."""
        _ensure_directory(path)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            descriptor = _open_file(path, LOCK)
        except OSError as error:
            raise CacheError(f"the cache directory {path} is not writable: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise CacheLockedError(
                    f"the cache directory {path} is in use by another encoder; use another directory, "
                    "or open it with shared=True in all of them"
                ) from None
            raise CacheError(f"the cache directory {path} cannot be locked: {error.strerror}") from error
        self.release = _make_closer(self, descriptor)


def _ensure_directory(path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CacheError(f"{path} cannot be used as a cache directory: {error.strerror}") from error
    if names:
        require_cache(path, names)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CacheError(f"the cache directory {path} is not writable")


def _open_file(path: str, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.join(path, name), flags, 0o666)


def _make_closer(owner: object, descriptor: int) -> weakref.finalize[..., Any]:
    """Return what closes the descriptor: when called, when `owner` is collected, or in a forked child."""
    close = weakref.finalize(owner, _unlock_and_close, descriptor, os.getpid())
    close.atexit = False  # the kernel does it then, and a thread may still be writing
    os.register_at_fork(after_in_child=close)
    return close


def _unlock_and_close(descriptor: int, owner: int) -> None:
    # LOCK_UN, as a child forked outside Python may hold a copy of the descriptor; a child never unlocks.
    if os.getpid() == owner:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class Ledger:
    """A directory's numbers of entries and bytes with a dirty flag, stored in a file.

    Anyone may read them at any time; only the holder of the lock, a thread of one process, changes them. A
    process killed while files change leaves the dirty flag set; the next holder rescans the directory.
    """

    def __init__(self, path: str) -> None:
        """Open the ledger's file, created if it is missing. Raises OSError."""
        self._path = os.path.join(path, LEDGER)
        self._descriptor = _open_file(path, LEDGER)
        self._mutex = threading.Lock()
        self._close = _make_closer(self, self._descriptor)
        self.entries = self.bytes = 0
        self.clean = False

    @contextmanager
    def locked(self, seconds: float) -> Iterator[bool]:
        """Hold the lock; yields False if it is not free within `seconds`, or if the ledger is closed.

        `entries`, `bytes` and `clean` are read first and written back at the end, also after an exception.
        """
        deadline = time.monotonic() + seconds
        if not self._mutex.acquire(timeout=seconds):
            yield False
            return
        try:
            if not (self._close.alive and self._acquire_flock(deadline)):
                yield False
                return
            try:
                self._read()
                try:
                    yield True
                except BaseException:
                    with suppress(OSError):  # it stays dirty, and the first error matters more
                        self._write(self.clean)
                    raise
                self._write(self.clean)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def mark_dirty(self) -> None:
        """Set the dirty flag in the file, before entry files change."""
        self._write(clean=False)

    def add(self, entries: int, size: int) -> None:
        """Count a change of the entry files; the lock's exit writes it."""
        self.entries = max(self.entries + entries, 0)
        self.bytes = max(self.bytes + size, 0)

    def read(self) -> tuple[int, int]:
        """Return entries and bytes, without the lock; reopens the file, as `close` may run meanwhile."""
        try:
            with open(self._path, "rb") as file:
                return _parse(file.read())[:2]
        except OSError:
            return 0, 0

    def close(self) -> None:
        """Close the ledger, once no thread of this process holds its lock."""
        with self._mutex:
            self._close()

    def _acquire_flock(self, deadline: float) -> bool:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.001)

    def _read(self) -> None:
        self.entries, self.bytes, self.clean = _parse(os.pread(self._descriptor, LEDGER_BYTES, 0))

    def _write(self, clean: bool) -> None:
        os.pwrite(self._descriptor, _RECORD.pack(self.entries, self.bytes, not clean), 0)


def _parse(data: bytes) -> tuple[int, int, bool]:
    """Return entries, bytes, and whether they are clean."""
    if len(data) != LEDGER_BYTES:  # newly created
        return 0, 0, False
    entries, size, dirty = _RECORD.unpack(data)
    return entries, size, dirty == 0
