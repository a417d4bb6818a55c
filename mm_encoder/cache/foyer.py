"""The disk tier on foyer's region files, preallocated in full (extra `foyer`, Python 3.12 and newer).

An entry is several foyer records: full chunks of its rows, then a manifest with a nonce, the header and the
remaining rows. foyer accepts no value over 16 MiB, may bring back an overwritten or removed key, and silently
drops values that arrive too fast. So a record's name is never reused, records are inserted in small batches
and each batch is confirmed, and the manifest comes last: everything it names was on disk before it.

foyer does the eviction: it frees its 16 MiB regions in FIFO order with a second chance. Neither this order
nor recent reads survive a restart, and each start that writes costs a full cache one region. "On disk" means
in the kernel's page cache, without fsync.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from ..errors import CacheError
from . import codec
from .entry import DiskStats, DiskTier, Entry
from .foyer_handle import HandleClosed, OpenHandle, log, translate_panics
from .regions import REGION_BYTES, acquire_lock, allocate, check_descriptors, region_count

_CHUNK_BYTES = 4_150_000  # four per region, with foyer's own headers
_CHUNKS_PER_BATCH = 3  # foyer's write queue holds 16 MiB, and drops the rest
_NONCE_BYTES = 16
_MAX_MANIFESTS = 8  # per key; all but the newest are bad
_SHARDS = 8  # of foyer's memory; each keeps one entry, however small the capacity
_CONFIRM_TIMEOUT_S = 5.0
_LOG_EVERY_S = 60.0
_MAX_FAILURES = 3


class FoyerTier(DiskTier):
    """Entries in foyer's region files in the directory `path`, for one encoder at a time.

    Opening allocates all of `max_bytes`, at least 64 MiB, rounded down to 16 MiB. Raises CacheLockedError if
    the directory is in use, and CacheError if it cannot be used or contains foreign files, or if foyer-py,
    disk space or file descriptors are missing. A key stands for one result: putting it again while it is
    stored changes nothing. A forked child gets and puts nothing.
    """

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        hybrid_cache = _import_foyer()
        regions = region_count(max_bytes)
        self._bytes = regions * REGION_BYTES
        path = Path(path)
        check_descriptors(regions)
        lock = acquire_lock(path)
        try:
            self._generation = allocate(path, regions)
            with translate_panics():
                cache = hybrid_cache(str(path), memory_capacity=0, storage_capacity=self._bytes)
        except Exception as error:
            lock.release()
            if isinstance(error, CacheError):
                raise
            raise CacheError(f"the cache cannot be opened in {path}: {error}") from error
        self._handle = OpenHandle(cache, lock)
        # Runs when the tier is collected, and at interpreter exit.
        self._close = weakref.finalize(self, self._handle.close)
        self._max_chunks = (regions - 2) * 4  # foyer keeps one region clean, and writes to another
        self._written = self._evictions = self._errors = self._failures = 0
        self._unconfirmed_key = b""
        self._stats_lock = threading.RLock()  # a signal handler may come in between
        self._last_logged: dict[str, float] = {}
        self._bad_manifests: set[bytes] = set()  # manifests whose entry was read and failed
        try:
            with self._handle.use() as cache:
                self._probes = _find_probes(cache)
        except Exception as error:
            self.close()
            raise CacheError(f"foyer-py does not behave like version 0.0.6; install that: {error}") from error

    def get(self, key: bytes) -> Entry | None:
        """See DiskTier. An entry that foyer has partly overwritten is a miss."""
        try:
            with self._handle.use() as cache:
                # A get would bring the unconfirmed manifest into foyer's memory, where `contains` cannot tell
                # it from one on disk: `put` would then take it for confirmed.
                return None if key == self._unconfirmed_key else self._read(cache, key)
        except HandleClosed:
            return None
        except Exception as error:
            self._record_error("an entry cannot be read", error)
            return None

    def put(self, key: bytes, entry: Entry) -> bool:
        """See DiskTier. The third failure in a row closes the tier."""
        try:
            with self._handle.use() as cache:
                written = self._read(cache, key) is not None or self._write(cache, key, entry)
            self._failures = 0
            return written
        except HandleClosed:
            return False
        except ValueError as error:  # the entry is invalid; foyer did not fail
            self._record_error("an entry cannot be stored", error)
            return False
        except Exception as error:
            self._record_error("an entry was dropped", error)
            self._failures += 1
        if self._failures == _MAX_FAILURES:
            log(logging.ERROR, f"{_MAX_FAILURES} puts in a row failed; the disk tier is disabled")
            self.close()
        return False

    def stats(self) -> DiskStats:
        """See DiskTier. foyer lists no entries: `entries` counts all that this tier wrote, lost or not.
        `bytes` is the size of the region files. `evictions` counts entries that turned out to lack a record.
        """
        return DiskStats(self._written, self._bytes, self._evictions, self._errors)

    def close(self) -> None:
        """Close foyer within seconds, and release the directory. Everything put is on disk already."""
        self._close()

    def _read(self, cache: Any, key: bytes) -> Entry | None:
        for attempt in reversed(range(_MAX_MANIFESTS)):
            name = self._manifest_name(key, attempt)
            if name in self._bad_manifests or not cache.contains(name):
                continue
            try:
                return self._assemble(cache, key, name)
            except _RecordMissing:
                with self._stats_lock:
                    self._evictions += 1
            except Exception as error:
                self._record_error("an entry is damaged", error)
            if len(self._bad_manifests) > 100_000:  # foyer has overwritten most of them long ago
                self._bad_manifests.clear()
            self._bad_manifests.add(name)
        return None

    def _assemble(self, cache: Any, key: bytes, name: bytes) -> Entry:
        manifest = memoryview(_read_record(cache, name))
        header = codec.read_header(manifest[_NONCE_BYTES:])
        tail = manifest[_NONCE_BYTES + header.header_bytes :]
        whole = header.payload_bytes // _CHUNK_BYTES
        if header.payload_bytes != whole * _CHUNK_BYTES + len(tail):
            raise codec.EntryError(f"{len(tail)} bytes after {whole} chunks of {header.payload_bytes} bytes")
        rows = codec.empty_rows(header)
        payload = codec.payload_view(rows)
        for index in range(whole):
            chunk = _read_record(cache, self._chunk_name(bytes(manifest[:_NONCE_BYTES]), index))
            if len(chunk) != _CHUNK_BYTES:
                raise codec.EntryError(f"chunk {index} has {len(chunk)} bytes instead of {_CHUNK_BYTES}")
            payload[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES] = chunk
        payload[whole * _CHUNK_BYTES :] = tail
        codec.check(header, key, rows)
        return Entry(rows, header.metadata)

    def _write(self, cache: Any, key: bytes, entry: Entry) -> bool:
        """Return whether the entry was written; False if the tier is closing."""
        header, payload = codec.encode(key, entry)
        whole = len(payload) // _CHUNK_BYTES
        nonce = os.urandom(_NONCE_BYTES)
        manifest = b"".join((nonce, header, payload[whole * _CHUNK_BYTES :]))
        used = [n for n in range(_MAX_MANIFESTS) if cache.contains(self._manifest_name(key, n))]
        attempt = used[-1] + 1 if used else 0
        if whole > self._max_chunks or attempt == _MAX_MANIFESTS:
            raise ValueError(f"{len(payload)} bytes of rows are too many, or were damaged {len(used)} times")
        chunks = [self._chunk_name(nonce, index) for index in range(whole)]
        for first in range(0, whole, _CHUNKS_PER_BATCH):
            names = chunks[first : first + _CHUNKS_PER_BATCH]
            for index, name in enumerate(names, first):
                cache.insert(name, bytes(payload[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES]))
            if not self._wait_until_written(cache, names):
                return False
        name = self._manifest_name(key, attempt)
        self._unconfirmed_key = key
        try:
            cache.insert(name, manifest)
            written = self._wait_until_written(cache, [name])
        finally:
            self._unconfirmed_key = b""
        self._bad_manifests.discard(name)
        self._written += written
        return written

    def _wait_until_written(self, cache: Any, names: list[bytes]) -> bool:
        """Push foyer's memory to its writer, and wait until its index has `names`; False if closing."""
        for probe in self._probes:
            cache.insert(probe, b"")
        deadline = time.monotonic() + _CONFIRM_TIMEOUT_S
        while not all(map(cache.contains, names)):
            if self._handle.closing:
                # Not raised: a traceback would keep tensors, which must be freed before the interpreter is.
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"foyer did not write a record within {_CONFIRM_TIMEOUT_S} s")
            time.sleep(0.0005)
        return True

    def _manifest_name(self, key: bytes, attempt: int) -> bytes:
        return self._generation + key + bytes([attempt])

    def _chunk_name(self, nonce: bytes, index: int) -> bytes:
        return self._generation + nonce + index.to_bytes(4, "little")

    def _record_error(self, what: str, error: Exception) -> None:
        """Count an error, and log it unless one of this kind was logged within the last minute."""
        now = time.monotonic()
        with self._stats_lock:
            self._errors += 1
            count, last = self._errors, self._last_logged.get(what, -_LOG_EVERY_S)
            if now - last < _LOG_EVERY_S:
                return
            self._last_logged[what] = now
        log(logging.WARNING, f"{what}: {error} ({count} errors so far)", error)


class _RecordMissing(Exception):
    """foyer no longer has a record."""


def _read_record(cache: Any, name: bytes) -> bytes:
    value: bytes | None = cache.get(name)
    if value is None:
        raise _RecordMissing
    return value


def _find_probes(cache: Any) -> list[bytes]:
    """Return one key per shard: inserting them pushes out the entries that the shards keep in memory."""
    found: list[bytes] = []
    for number in range(1000):
        before = cache.entries
        probe = b"probe %d" % number
        cache.insert(probe, b"")
        if cache.entries > before:
            found.append(probe)
        if len(found) == _SHARDS:
            return found
    raise RuntimeError(f"found {len(found)} shards instead of {_SHARDS}")


def _import_foyer() -> Any:
    try:
        return importlib.import_module("foyer").HybridCache
    except (ImportError, AttributeError) as error:
        raise CacheError(
            'disk_backend="foyer" needs Python 3.12 or newer and the package foyer-py: install with the '
            "extra foyer, see docs/install.md"
        ) from error
