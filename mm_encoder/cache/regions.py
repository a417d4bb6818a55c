"""The directory of the foyer backend: ownership, lock and region files."""

from __future__ import annotations

import os
import re
import resource
from functools import partial
from pathlib import Path

from ..config import require_int
from ..errors import CacheError
from . import codec
from .locks import Lock

_FORMAT = f"1.{codec.FORMAT}"
# Names that differ from those of the files backend, so that neither opens the other's directory. The stamp is
# an empty file whose name holds format, number of regions and generation: contents would exceed the budget.
LOCK, _STAMP = "mm-encoder-foyer.lock", "mm-encoder-foyer"
_STAMP_NAME = re.compile(rf"{_STAMP}-[0-9a-f.-]+")
_REGION_NAME = re.compile("foyer-storage-direct-fs-[0-9]{8}")
_KNOWN_NAME = re.compile("|".join((re.escape(LOCK), _STAMP_NAME.pattern, _REGION_NAME.pattern)))

REGION_BYTES = 16 * 1024**2
"""Size of a foyer region, and of its file."""
_MIN_REGIONS = 4  # with fewer, foyer's close() hangs
_SPARE_DESCRIPTORS = 64


def region_count(max_bytes: int) -> int:
    """Return the number of regions that fit into a budget. Raises CacheError if they are too few."""
    regions = require_int("max_bytes", max_bytes, 0) // REGION_BYTES
    if regions < _MIN_REGIONS:
        raise CacheError(
            f"the foyer backend needs at least {_MIN_REGIONS * REGION_BYTES} bytes (64 MiB) of disk; "
            f"got {max_bytes}, rounded down to {regions * REGION_BYTES} (a multiple of 16 MiB)"
        )
    return regions


def check_descriptors(regions: int) -> None:
    """Raise CacheError if the process may not open one file per region."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + regions + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise CacheError(
            f"foyer keeps {regions} files open, one per 16 MiB; with others and some to spare this process "
            f"needs {needed}, but may open {limit} (ulimit -n): raise the limit, or lower disk_bytes"
        )


def acquire_lock(path: Path) -> Lock:
    """Create the directory if it is missing, and lock it. Raises CacheError, CacheLockedError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"the cache cannot be opened in {path}: {error}") from error
    return Lock(os.fspath(path), LOCK, partial(_require_cache, path), shared=False)


def _require_cache(path: Path) -> None:
    foreign = sorted(name for name in os.listdir(path) if not _KNOWN_NAME.fullmatch(name))
    if foreign:
        raise CacheError(
            f"{path} must be empty or a foyer cache of this library; it contains {', '.join(foreign[:3])}"
            + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        )


def allocate(path: Path, regions: int) -> bytes:
    """Wipe a cache of another size or format, allocate all regions, and return the prefix of record names."""
    files = {f"foyer-storage-direct-fs-{index:08d}" for index in range(regions)}
    prefix = f"{_STAMP}-{_FORMAT}-{regions}-"
    found = set(os.listdir(path)) - {LOCK}
    stamps = [name for name in found if name.startswith(prefix)]
    if len(stamps) == 1 and found <= files | set(stamps):
        stamp = stamps[0]
    else:
        _wipe(path, found)
        stamp = prefix + os.urandom(8).hex()
    try:
        for name in sorted(files):
            descriptor = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, REGION_BYTES)
            finally:
                os.close(descriptor)
        (path / stamp).touch()
    except OSError as error:
        # Do not leave a partial cache that only fills the disk.
        _wipe(path, files | {stamp})
        raise CacheError(f"cannot allocate {regions * REGION_BYTES} bytes in {path}: {error}") from error
    return stamp.removeprefix(prefix).encode()


def _wipe(path: Path, names: set[str]) -> None:
    for name in sorted(names, reverse=True):  # the stamp first
        (path / name).unlink(missing_ok=True)


# --- for `mm-encoder cache` --------------------------------------------------------------------------


def is_foyer_directory(directory: Path) -> bool:
    """Return whether a directory belongs to this backend."""
    try:
        return any(name == LOCK or _STAMP_NAME.fullmatch(name) for name in os.listdir(directory))
    except OSError:
        return False


def allocated_bytes(directory: Path) -> int:
    """Return the bytes that the cache uses, which is also its budget."""
    return sum(file.stat(follow_symlinks=False).st_size for file in _files(directory))


def clear(directory: Path) -> int:
    """Remove everything but the lock, and return the bytes freed. Raises CacheError, CacheLockedError."""
    freed, lock = 0, Lock(os.fspath(directory), LOCK, lambda: None, shared=False)
    try:
        for file in _files(directory):
            freed += file.stat(follow_symlinks=False).st_size
            os.unlink(file.path)  # the stamp first: without it the next open wipes the rest
    except OSError as error:
        raise CacheError(f"{directory} cannot be cleared: {error.strerror}") from error
    finally:
        lock.release()
    return freed


def _files(directory: Path) -> list[os.DirEntry[str]]:
    """Return the files that make up the cache, stamps first."""
    with os.scandir(directory) as files:
        found = [file for file in files if file.is_file(follow_symlinks=False)]
    stamps = [file for file in found if _STAMP_NAME.fullmatch(file.name)]
    return stamps + [file for file in found if _REGION_NAME.fullmatch(file.name)]
