"""The second disk tier: foyer's region files, allocated in full beforehand (extra `foyer`, Python 3.12).

An entry is records of foyer: whole chunks of its rows, then a manifest of nonce, header and what is left of
the rows. foyer takes no value over 16 MiB, brings an overwritten or removed key back to life, and drops what
it is given too quickly without a word. So every record has a name that is never used again, a few records at
a time are handed over and confirmed, and the manifest comes last: what it names was on disk before it.

Nothing is evicted here: foyer frees its 16 MiB regions first in, first out with a second chance. Neither that
order nor what was read lately survives a restart, and each start that writes costs a full cache a region.
"On disk" means in the kernel's page cache, without fsync.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import CacheError
from . import codec
from .entry import DiskStats, DiskTier, Entry
from .regions import REGION_BYTES, acquire_lock, allocate, check_descriptors, region_count

logger = logging.getLogger("mm_encoder")

_CHUNK = 4_150_000  # four to a region, with foyer's own headers
_BATCH = 3  # chunks at a time: foyer's queue holds 16 MiB, and drops the rest
_NONCE = 16
_ATTEMPTS = 8  # manifests that one key may have; all but the newest are broken
_SHARDS = 8  # each keeps one entry in memory, however small the capacity
_CONFIRM_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_LOG_EVERY_SECONDS = 60.0
_STRIKES = 3


class FoyerTier(DiskTier):
    """Entries in foyer's region files below `path`, which belongs to one encoder at a time.

    Takes the whole of `max_bytes`, rounded down to 16 MiB, when it is made; at least 64 MiB. Raises
    CacheLockedError when the directory is in use, and CacheError when it cannot be used, holds files of
    others, or when foyer-py, room or file descriptors are missing. A key stands for one result: putting it
    again while it is there changes nothing. In a forked child everything is a miss.
    """

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        hybrid_cache = _import_foyer()
        self._regions = region_count(max_bytes)
        path = Path(path)
        check_descriptors(self._regions)
        lock = acquire_lock(path)
        try:
            self._generation = allocate(path, self._regions)
            with _translated():
                cache = hybrid_cache(
                    str(path), memory_capacity=0, storage_capacity=self._regions * REGION_BYTES
                )
        except Exception as error:
            lock.release()
            if isinstance(error, CacheError):
                raise
            raise CacheError(f"the cache cannot be opened in {path}: {error}") from error
        self._open = _OpenCache(cache, lock)
        # Closes it when the tier is dropped, and at interpreter exit.
        self._close = weakref.finalize(self, self._open.close)
        self._max_chunks = (self._regions - 2) * 4  # foyer keeps a region clean, and writes in another
        self._kept = self._lost = self._errors = self._strikes = 0
        self._putting = b""
        self._counting = threading.Lock()
        self._logged: dict[str, float] = {}
        self._broken: set[bytes] = set()  # manifests that were read and found wanting
        try:
            with self._open.use() as cache:
                self._probes = _probes(cache)
        except Exception as error:
            self.close()
            raise CacheError(f"foyer does not work as version 0.0.6 does: {error}") from error

    def get(self, key: bytes) -> Entry | None:
        """The entry, verified in full. One that foyer has written over in part is a miss."""
        try:
            with self._open.use() as cache:
                # Until it is confirmed, only this keeps it from being taken for confirmed: a get would make
                # it one of the entries in memory, which `contains` does not tell from those on disk.
                return None if key == self._putting else self._read(cache, key)
        except _Closed:
            return None
        except Exception as error:
            self._fault("an entry cannot be read", error)
            return None

    def put(self, key: bytes, entry: Entry) -> bool:
        """Keep `entry`; whether foyer has it on disk. The third failure in a row closes the tier."""
        try:
            with self._open.use() as cache:
                kept = self._read(cache, key) is not None or self._write(cache, key, entry)
            self._strikes = 0
            return kept
        except _Closed:
            return False
        except ValueError as error:  # the entry is at fault, not foyer
            self._fault("an entry cannot be kept", error)
            return False
        except Exception as error:
            self._fault("an entry was dropped", error)
            self._strikes += 1
        if self._strikes == _STRIKES:
            _log(logging.ERROR, f"{_STRIKES} puts in a row failed; it is disabled")
            self.close()
        return False

    def stats(self) -> DiskStats:
        """What can be known, as foyer lists nothing. `entries`: those that this tier wrote, whether or not
        foyer has written over them since; not those it found. `bytes`: the region files. `evictions`: entries
        that were found to lack a record.
        """
        return DiskStats(self._kept, self._regions * REGION_BYTES, self._lost, self._errors)

    def close(self) -> None:
        """Close foyer, for which it has seconds, and give the directory free. All that was put is on disk."""
        self._close()

    def _read(self, cache: Any, key: bytes) -> Entry | None:
        for attempt in reversed(range(_ATTEMPTS)):
            name = self._manifest(key, attempt)
            if name in self._broken or not cache.contains(name):
                continue
            try:
                return self._assembled(cache, key, name)
            except _Lost:
                with self._counting:
                    self._lost += 1
            except Exception as error:
                self._fault("an entry is damaged", error)
            if len(self._broken) > 100_000:  # most of them foyer has long written over
                self._broken.clear()
            self._broken.add(name)
        return None

    def _assembled(self, cache: Any, key: bytes, name: bytes) -> Entry:
        manifest = memoryview(_record(cache, name))
        header = codec.read_header(manifest[_NONCE:])
        tail = manifest[_NONCE + header.header_bytes :]
        whole = header.payload_bytes // _CHUNK
        if header.payload_bytes != whole * _CHUNK + len(tail):
            raise codec.EntryError(f"{len(tail)} bytes left of {header.payload_bytes} in chunks of {_CHUNK}")
        rows = codec.empty_rows(header)
        payload = codec.payload_view(rows)
        for index in range(whole):
            chunk = _record(cache, self._chunk(bytes(manifest[:_NONCE]), index))
            if len(chunk) != _CHUNK:
                raise codec.EntryError(f"chunk {index} has {len(chunk)} bytes instead of {_CHUNK}")
            payload[index * _CHUNK : (index + 1) * _CHUNK] = chunk
        payload[whole * _CHUNK :] = tail
        codec.check(header, key, rows)
        return Entry(rows, header.metadata)

    def _write(self, cache: Any, key: bytes, entry: Entry) -> bool:
        """Whether it was written; False when the tier is being closed."""
        header, payload = codec.encode(key, entry)
        whole = len(payload) // _CHUNK
        nonce = os.urandom(_NONCE)
        manifest = b"".join((nonce, header, payload[whole * _CHUNK :]))
        used = [n for n in range(_ATTEMPTS) if cache.contains(self._manifest(key, n))]
        attempt = used[-1] + 1 if used else 0
        if whole > self._max_chunks or attempt == _ATTEMPTS:
            raise ValueError(f"{len(payload)} bytes of rows, {len(used)} times damaged before")
        for first in range(0, whole, _BATCH):
            names = [self._chunk(nonce, index) for index in range(first, min(first + _BATCH, whole))]
            for index, name in enumerate(names, first):
                cache.insert(name, bytes(payload[index * _CHUNK : (index + 1) * _CHUNK]))
            if not self._confirmed(cache, names):
                return False
        name = self._manifest(key, attempt)
        self._putting = key
        try:
            cache.insert(name, manifest)
            kept = self._confirmed(cache, [name])
        finally:
            self._putting = b""
        self._broken.discard(name)
        self._kept += kept
        return kept

    def _confirmed(self, cache: Any, names: list[bytes]) -> bool:
        """Push what foyer has in memory to its writer, and wait until its index has these."""
        for probe in self._probes:
            cache.insert(probe, b"")
        deadline = time.monotonic() + _CONFIRM_SECONDS
        while not all(map(cache.contains, names)):
            if self._open.closing:
                # Not raised: a traceback would keep tensors, which must be gone before the interpreter is.
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"foyer did not write it within {_CONFIRM_SECONDS} s")
            time.sleep(0.0005)
        return True

    def _manifest(self, key: bytes, attempt: int) -> bytes:
        return self._generation + key + bytes([attempt])

    def _chunk(self, nonce: bytes, index: int) -> bytes:
        return self._generation + nonce + index.to_bytes(4, "little")

    def _fault(self, what: str, error: Exception) -> None:
        """Count it, and log it unless one of its kind was logged within the last minute."""
        now = time.monotonic()
        with self._counting:
            self._errors += 1
            count, last = self._errors, self._logged.get(what, -_LOG_EVERY_SECONDS)
            if now - last < _LOG_EVERY_SECONDS:
                return
            self._logged[what] = now
        _log(logging.WARNING, f"{what}: {error} ({count} errors so far)", error)


class _Closed(Exception):
    """It is closed, or belongs to the parent process."""


class _Lost(Exception):
    """foyer does not have a record any more."""


class _Panic(Exception):
    """foyer panicked."""


class _OpenCache:
    """foyer's handle and the directory's lock. It knows no tier, so that it can close when that is gone."""

    def __init__(self, cache: Any, lock: FileLock) -> None:
        self._cache = cache
        self._lock = lock
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls = 0
        self.closing = False

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The handle, which stays open meanwhile. Raises _Closed."""
        # In a forked child every call on the parent's handle hangs, and the lock here may never be free.
        if os.getpid() != self._process:
            raise _Closed
        with self._changed:
            if self.closing:
                raise _Closed
            self._calls += 1
        try:
            with _translated():
                yield self._cache
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def close(self) -> None:
        if os.getpid() != self._process:
            # Even the handle's destructor hangs in a forked child: one reference too many, and it never runs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        with self._changed:
            self.closing = True
            idle = self._changed.wait_for(lambda: not self._calls, _CLOSE_SECONDS)
        thread = threading.Thread(target=self._finish, name="mm-encoder-foyer-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is exiting and starts no thread. All entries are on disk; the process's end
            # closes the rest, if only no destructor is run that may hang.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        thread.join(_CLOSE_SECONDS)
        if not idle or thread.is_alive():
            _log(logging.ERROR, "it does not close; its directory stays locked until it does")

    def _finish(self) -> None:
        # The last reference is this one, so that a destructor that hangs is out of everybody's way too.
        cache, self._cache = self._cache, None
        try:
            with _translated():
                cache.close()
        except Exception as error:
            _log(logging.WARNING, f"close failed: {error}", error)
        del cache
        self._lock.release()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """foyer's panics are no Exception, and their class can be had by its name only."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _Panic(f"foyer panicked: {error}") from error


def _log(level: int, message: str, error: Exception | None = None) -> None:
    fields = {"mm_event": "cache_error"} | ({"mm_error": type(error).__name__} if error else {})
    logger.log(level, "cache, foyer: %s", message, extra=fields)


def _record(cache: Any, name: bytes) -> bytes:
    value: bytes | None = cache.get(name)
    if value is None:
        raise _Lost
    return value


def _probes(cache: Any) -> list[bytes]:
    """Keys, one of every shard: inserting them pushes out whatever the shards keep in memory."""
    found: list[bytes] = []
    for number in range(1000):
        before = cache.entries
        probe = b"probe %d" % number
        cache.insert(probe, b"")
        if cache.entries > before:
            found.append(probe)
        if len(found) == _SHARDS:
            return found
    raise RuntimeError(f"{len(found)} shards instead of {_SHARDS}")


def _import_foyer() -> Any:
    try:
        return importlib.import_module("foyer").HybridCache
    except (ImportError, AttributeError) as error:
        raise CacheError(
            'disk_backend="foyer" needs Python 3.12 or newer and the package foyer-py: '
            'pip install "mm-encoder[foyer]"'
        ) from error
