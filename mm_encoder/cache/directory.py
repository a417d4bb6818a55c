"""The directory of the files backend: what lies in it, and how an entry's file is read and written.

    mm-encoder-cache.lock     makes the directory a cache's; locked for as long as a tier is open, shared by
                              those who open it with shared=True, else exclusively
    mm-encoder-cache.ledger   how many entries, how many bytes; whoever changes an entry holds its lock
    <key in hex>.rows         an entry, immutable; its modification time is when it was last used
    <key in hex>.tmp          an entry being written, by the one who holds the ledger

Anything else is a stranger's, and left alone.
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
_FIRST_READ_BYTES = 4096  # has the whole header of most entries


class EntryFile(NamedTuple):
    """An entry's file as a scan saw it; those used longest ago sort first."""

    used_ns: int
    bytes: int
    path: str


class Listing(NamedTuple):
    """A directory's files. `temporaries` are whole or partly written; `irregular` have an entry's name and
    are no files, but links, folders, ...; `foreign` are names that no cache gives.
    """

    entries: list[EntryFile]
    temporaries: list[EntryFile]
    irregular: list[str]
    foreign: list[str]


def scan(path: str) -> Listing:
    """What lies in the directory now. What vanishes meanwhile is left out."""
    listing = Listing([], [], [], [])
    with os.scandir(path) as files:
        for file in files:
            match = _ENTRY_NAME.fullmatch(file.name)
            if match is None:
                if file.name not in (LOCK, LEDGER):
                    listing.foreign.append(file.name)
                continue
            try:
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                listing.irregular.append(file.path)
                continue
            kind = listing.entries if match[2] == "rows" else listing.temporaries
            kind.append(EntryFile(status.st_mtime_ns, status.st_size, file.path))
    return listing


def require_cache(path: str, names: list[str] | None = None) -> None:
    """Raise CacheError unless `path` is a directory that a cache made its own."""
    try:
        names = sorted(os.listdir(path)) if names is None else names
    except OSError as error:
        raise CacheError(f"{path} is no cache's directory: {error.strerror}") from error
    if LOCK not in names and LEDGER not in names:
        holds = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise CacheError(
            f"{path} is no cache's directory: it holds {holds or 'nothing'} (a new cache wants a new or an "
            "empty directory)"
        )


def entry_path(directory: str, key: bytes) -> str:
    """Where the entry of `key` lies."""
    return os.path.join(directory, f"{key.hex()}.rows")


def temporary_path(directory: str, key: bytes) -> str:
    """Where it is written before; in the same directory, so that a rename puts it in its place."""
    return os.path.join(directory, f"{key.hex()}.tmp")


def key_of(path: str) -> bytes:
    """The key whose entry lies at `path`."""
    return bytes.fromhex(os.path.basename(path).removesuffix(".rows"))


def remove(path: str) -> None:
    """Remove a file or a link, or an empty folder that lies in its place. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except (
        IsADirectoryError,
        PermissionError,
    ):  # which of them an unlinked folder gives depends on the system
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise
        os.rmdir(path)


def sweep(listing: Listing) -> None:
    """Remove what is no entry. For who holds the ledger: whoever wrote it and does not is dead."""
    for temporary in listing.temporaries:
        remove(temporary.path)
    for path in listing.irregular:
        with suppress(OSError):  # a folder with something in it, which is not ours to judge
            remove(path)


# --- entries -----------------------------------------------------------------------------------------


@contextmanager
def open_entry(path: str) -> Iterator[tuple[int, os.stat_result]]:
    """Descriptor and status of a file that is read; no link is followed, no pipe waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor, os.fstat(descriptor)
    finally:
        os.close(descriptor)


def load(descriptor: int, status: os.stat_result, key: bytes) -> Entry:
    """The entry of `key`, verified. Raises EntryError, or OSError where the system cannot read it."""
    if not stat.S_ISREG(status.st_mode):
        raise EntryError("it is not a regular file")
    head = os.pread(descriptor, _FIRST_READ_BYTES, 0)
    if len(head) < header_length(head) <= status.st_size:
        head = os.pread(descriptor, header_length(head), 0)
    header = read_header(head)
    wanted = header.header_bytes + header.payload_bytes
    if status.st_size != wanted:  # before that much is allocated
        raise EntryError(f"{status.st_size} bytes, but its header and rows take {wanted}")
    rows = empty_rows(header)
    unread, position = payload_view(rows), header.header_bytes
    while unread:  # the system reads no more than 2 GiB at a time
        count = os.preadv(descriptor, [unread], position)
        if count == 0:
            raise EntryError("it was cut while it was read")
        unread, position = unread[count:], position + count
    check(header, key, rows)
    return Entry(rows, header.metadata)


def write(path: str, *parts: bytes | memoryview) -> None:
    """A new file of these bytes, just used. Raises OSError, and then may have left a part of it."""
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
    """Note that an entry was used. In nanoseconds: by itself the system's stamps are milliseconds apart."""
    now = time.time_ns()
    with suppress(OSError):  # not the owner: then it only looks older than it is
        os.utime(file, ns=(now, now))
