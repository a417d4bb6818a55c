"""The ledger of a files backend: its numbers of entries and bytes, whose lock is held while they change."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from ..errors import CacheError
from .directory import LEDGER, LOCK, require_cache, touch
from .locks import Closer, Lock, open_file

_RECORD = struct.Struct("<QQQ")  # entries, bytes, dirty flag
LEDGER_BYTES = _RECORD.size
"""Size of the ledger's file; the lock file is empty."""


def lock(path: str, *, shared: bool) -> Lock:
    """Create the directory of a files backend if it is missing, and lock it. Raises CacheError."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise CacheError(f"{path} cannot be used as a cache directory: it is a file") from error
    except OSError as error:
        raise CacheError(f"{path} cannot be used as a cache directory: {error.strerror}") from error
    remedy = ", or open it with shared=True in all of them"
    return Lock(path, LOCK, partial(_check_directory, path), shared=shared, remedy=remedy)


def _check_directory(path: str) -> None:
    require_cache(path, or_empty=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CacheError(f"the cache directory {path} is not writable")


class Ledger:
    """A directory's numbers of entries and bytes with a dirty flag, stored in a file.

    Anyone may read them at any time; only the holder of the lock, a thread of one process, changes them. A
    process killed while files change leaves the dirty flag set; the next holder rescans the directory. So
    does the next after someone removed the file: the lock is always that of the file that has the name.
    """

    def __init__(self, path: str) -> None:
        """Open the ledger's file, created if it is missing. Raises OSError."""
        self._path = os.path.join(path, LEDGER)
        self._descriptor = open_file(path, LEDGER)
        self._mutex = threading.RLock()
        self._closing = False
        self._close = Closer(self, self._descriptor)
        self.entries = self.bytes = 0
        self.clean = False
        self.waited = False
        """Whether the lock was another's when `locked` was called last."""
        self._last_beat = 0.0

    @contextmanager
    def locked(self, seconds: float, *, patient: bool = False) -> Iterator[bool]:
        """Hold the lock; yields False if it is not free within `seconds`, or if the ledger is closed. If
        `patient`, the seconds begin anew whenever the holder shows that it goes on, see `beat`.

        `entries`, `bytes` and `clean` are read first and written back at the end, also after an exception.
        """
        # A signal handler may have come in between: what its own thread holds is not free.
        if self._held_here() or not self._mutex.acquire(timeout=seconds):
            yield False
            return
        try:
            if not (self._close.alive and self._acquire_flock(seconds, patient)):
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
            if self._closing:
                self.close()

    def beat(self) -> None:
        """Show those who wait for the lock that its holder goes on; to be called often where much is done."""
        now = time.monotonic()
        if now - self._last_beat > 0.1:
            self._last_beat = now
            touch(self._descriptor)

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
            # Whatever has its name by now: no pipe is waited for, no link followed, no more read than it has.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return _parse(os.pread(descriptor, LEDGER_BYTES, 0))[:2]
            finally:
                os.close(descriptor)
        except OSError:
            return 0, 0

    def close(self) -> None:
        """Close the ledger, once no thread of this process holds its lock; if this one does, in a signal
        handler, when it leaves.
        """
        self._closing = True
        if not self._held_here():
            with self._mutex:
                self._close()

    def _held_here(self) -> bool:
        return self._mutex._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _acquire_flock(self, seconds: float, patient: bool) -> bool:
        self.waited, pause, beaten = False, 0.001, self._beaten_ns()
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.waited = True
                if patient and self._beaten_ns() != beaten:
                    beaten, deadline = self._beaten_ns(), time.monotonic() + seconds
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 0.02) if patient else pause
            else:
                if self._has_its_name():
                    return True
                self._reopen()

    def _beaten_ns(self) -> int:
        return os.fstat(self._descriptor).st_mtime_ns

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _reopen(self) -> None:
        descriptor = open_file(*os.path.split(self._path))
        try:
            os.dup2(descriptor, self._descriptor, inheritable=False)  # closes the file that lost its name
        finally:
            os.close(descriptor)

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
