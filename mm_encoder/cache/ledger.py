"""Who may open the files backend's directory, who may change it, and what it weighs.

The locks are flock's. It has shared ones, each open is an owner of its own, even in one process, the system
lets go of them when a process dies, and a forked child that closes its copy takes nothing from its parent. A
child closes it at once, as the lock would outlive the parent with it.
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

_RECORD = struct.Struct("<QQQ")  # entries, bytes, 1 while they are being changed
LEDGER_BYTES = _RECORD.size
"""What the ledger's own file takes; the lock's is empty."""


class Lock:
    """A lock on a directory, until `release` or until nobody refers to it."""

    def __init__(self, path: str, *, shared: bool) -> None:
        """Make the directory if need be and lock it. Raises CacheError."""
        _ensure_directory(path)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            descriptor = _open_file(path, LOCK)
        except OSError as error:
            raise CacheError(f"the cache's directory {path} is not writable: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise CacheLockedError(
                    f"the cache's directory {path} is in use by another encoder; it belongs to one at a "
                    "time, or to several that all open it with shared=True"
                ) from None
            raise CacheError(f"the cache's directory {path} cannot be locked: {error.strerror}") from error
        self.release = _make_closer(self, descriptor)


def _ensure_directory(path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CacheError(f"{path} cannot be a cache's directory: {error.strerror}") from error
    if names:
        require_cache(path, names)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CacheError(f"the cache's directory {path} is not writable")


def _open_file(path: str, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.join(path, name), flags, 0o666)


def _make_closer(owner: object, descriptor: int) -> weakref.finalize[..., Any]:
    """What closes the descriptor: when it is called, when nobody refers to the owner, in a forked child."""
    close = weakref.finalize(owner, _unlock_and_close, descriptor, os.getpid())
    close.atexit = False  # the system does it then, and a thread may still be at work
    os.register_at_fork(after_in_child=close)
    return close


def _unlock_and_close(descriptor: int, owner: int) -> None:
    # Unlocked by name, as a child that was forked outside Python may have a copy; never by a child.
    if os.getpid() == owner:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class Ledger:
    """How many entries and bytes a directory has, in a file of its own.

    They may be read at any time, and changed by who holds the lock: one thread of one process. Who is killed
    while holding it leaves them unsettled, and who comes next counts anew.
    """

    def __init__(self, path: str) -> None:
        """Open it. Raises OSError."""
        self._path = os.path.join(path, LEDGER)
        self._descriptor = _open_file(path, LEDGER)
        self._mutex = threading.Lock()
        self._close = _make_closer(self, self._descriptor)
        self.entries = self.bytes = 0
        self.clean = False

    @contextmanager
    def locked(self, seconds: float) -> Iterator[bool]:
        """Hold the lock; False where it is not to be had within `seconds`, or is closed.

        What is made of `entries`, `bytes` and `clean` is written at the end, whatever happens.
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
                    with suppress(OSError):  # it stays unsettled then, and the first error is the one to tell
                        self._write(self.clean)
                    raise
                self._write(self.clean)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def mark_dirty(self) -> None:
        """Say that files are about to change."""
        self._write(clean=False)

    def add(self, entries: int, size: int) -> None:
        """Say that they have."""
        self.entries = max(self.entries + entries, 0)
        self.bytes = max(self.bytes + size, 0)

    def read(self) -> tuple[int, int]:
        """Entries and bytes, by anyone at any time; so not by a descriptor that may be closed meanwhile."""
        try:
            with open(self._path, "rb") as file:
                return _parse(file.read())[:2]
        except OSError:
            return 0, 0

    def close(self) -> None:
        """Close it once no thread of this process holds it."""
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
    """Entries, bytes, and whether they are right."""
    if len(data) != LEDGER_BYTES:  # just made
        return 0, 0, False
    entries, size, dirty = _RECORD.unpack(data)
    return entries, size, dirty == 0
