"""The directory of the files backend: its layout, and reading and writing of entry files.

    mm-encoder-cache.lock     marks the directory as a cache; locked while a tier is open: shared if it was
                              opened with shared=True, else exclusive
    mm-encoder-cache.ledger   numbers of entries and bytes; its lock is held while entries are changed
    <key in hex>.rows         an entry, immutable; its modification time is the time of last use
    <key in hex>.tmp          an entry being written by the process that holds the ledger lock

Every other file is foreign, and is never touched.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..errors import CacheError
from .codec import EntryError, check, empty_rows, header_length, payload_view, read_header
from .entry import Entry

LOCK = "mm-encoder-cache.lock"
LEDGER = "mm-encoder-cache.ledger"
_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.(rows|tmp)")
_FIRST_READ_BYTES = 4096  # enough for the whole header of most entries


class EntryFile(NamedTuple):
    """An entry's file as seen by a scan; the least recently used file sorts first."""

    used_ns: int
    bytes: int
    path: str


class Listing(NamedTuple):
    """A directory's contents. `temporaries` may be complete or partly written. `irregular` are links, folders
    and the like under the name of an entry. `foreign` are names that no cache uses.
    """

    entries: list[EntryFile]
    temporaries: list[EntryFile]
    irregular: list[str]
    foreign: list[str]


def scan(path: str) -> Listing:
    """List the directory, leaving out files that disappear during the scan."""
    listing = Listing([], [], [], [])
    for file in walk(path, listing):
        listing.entries.append(file)
    return listing


def walk(path: str, others: Listing) -> Iterator[EntryFile]:
    """Yield the entries one by one, as there may be millions, and add everything else to `others`."""
    with os.scandir(path) as files:
        for file in files:
            match = _ENTRY_NAME.fullmatch(file.name)
            if match is None:
                if file.name not in (LOCK, LEDGER):
                    others.foreign.append(file.name)
                continue
            try:
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                others.irregular.append(file.path)
                continue
            found = EntryFile(status.st_mtime_ns, status.st_size, file.path)
            if match[2] == "rows":
                yield found
            else:
                others.temporaries.append(found)


def require_cache(path: str, *, or_empty: bool = False) -> None:
    """Raise CacheError unless `path` is a directory of the files backend."""
    try:
        if any(os.path.lexists(os.path.join(path, name)) for name in (LOCK, LEDGER)):
            return
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CacheError(f"{path} is not an mm-encoder cache: {error.strerror}") from error
    if names and all(map(_ENTRY_NAME.fullmatch, names)):
        return  # a cleaner of old files has removed the two
    if names or not or_empty:
        holds = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise CacheError(
            f"{path} is not an mm-encoder cache: it contains {holds or 'nothing'}; give a cache's directory, "
            "or for a new cache a new or empty one"
        )


def entry_path(directory: str, key: bytes) -> str:
    """Return the path of the entry of `key`."""
    return os.path.join(directory, f"{key.hex()}.rows")


def temporary_path(directory: str, key: bytes) -> str:
    """Return the path it is first written to: in the same directory, so that a rename replaces atomically."""
    return os.path.join(directory, f"{key.hex()}.tmp")


def key_of(path: str) -> bytes:
    """Return the key of the entry at `path`."""
    return bytes.fromhex(path[-69:-5])  # 64 digits and .rows


def remove(path: str) -> None:
    """Remove a file or link, or an empty folder of that name. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):  # unlink of a folder: which one depends on the system
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise
        os.rmdir(path)


def sweep(listing: Listing) -> None:
    """Remove temporaries and irregular names.

    The caller must hold the ledger lock: a temporary file seen under it was left by a writer that died.
    """
    for temporary in listing.temporaries:
        remove(temporary.path)
    for path in listing.irregular:
        with suppress(OSError):  # a folder with contents, which may be the user's
            remove(path)


# --- entries -----------------------------------------------------------------------------------------


@contextmanager
def open_entry(path: str) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file for reading, as descriptor and status; follows no link and does not wait for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor, os.fstat(descriptor)
    finally:
        os.close(descriptor)


def load(descriptor: int, status: os.stat_result, key: bytes) -> Entry:
    """Read and verify the entry of `key`. Raises EntryError if it is invalid, OSError if reading fails."""
    if not stat.S_ISREG(status.st_mode):
        raise EntryError("it is not a regular file")
    head = os.pread(descriptor, _FIRST_READ_BYTES, 0)
    if len(head) < header_length(head) <= status.st_size:
        head = os.pread(descriptor, header_length(head), 0)
    header = read_header(head)
    wanted = header.header_bytes + header.payload_bytes
    if status.st_size != wanted:  # checked before that much is allocated
        raise EntryError(f"{status.st_size} bytes, but its header and rows take {wanted}")
    rows = empty_rows(header)
    unread, position = payload_view(rows), header.header_bytes
    while unread:  # Linux reads at most 2 GiB per call
        count = os.preadv(descriptor, [unread], position)
        if count == 0:
            raise EntryError("it was truncated while it was read")
        unread, position = unread[count:], position + count
    check(header, key, rows)
    return Entry(rows, header.metadata)


def write(path: str, *parts: bytes | memoryview) -> None:
    """Write a new file, marked as just used. Raises OSError, and may then leave a partial file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        for part in parts:
            unwritten = memoryview(part)
            while unwritten:
                unwritten = unwritten[os.write(descriptor, unwritten) :]
        touch(descriptor)
    finally:
        os.close(descriptor)


def touch(file: int | str) -> None:
    """Set the time of last use to now, in nanoseconds: the kernel's own timestamps are milliseconds apart."""
    now = time.time_ns()
    with suppress(OSError):  # not the file's owner: it then only looks older than it is
        os.utime(file, ns=(now, now))
