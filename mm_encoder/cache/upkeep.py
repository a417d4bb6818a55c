"""What may be asked of a files backend's directory from outside: `mm-encoder cache stats|verify|clear`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..errors import CacheError
from .codec import EntryError
from .directory import key_of, load, open_entry, remove, require_cache, scan, sweep
from .ledger import Lock


class Description(NamedTuple):
    """A directory's files at one moment; `foreign` are names that no cache gives, which it leaves alone."""

    entries: int
    bytes: int
    temporaries: int
    foreign: int


class Verification(NamedTuple):
    """What reading every entry found: how many are whole, their bytes, and why each other is not."""

    intact: int
    bytes: int
    damaged: tuple[tuple[str, str], ...]
    """Name and reason."""
    temporaries: int
    foreign: int


def describe(path: str | Path) -> Description:
    """Count a cache's files, in use or not. Raises CacheError for what is no cache's directory."""
    require_cache(os.fspath(path))
    listing = scan(os.fspath(path))
    size = sum(file.bytes for file in listing.entries)
    return Description(len(listing.entries), size, len(listing.temporaries), len(listing.foreign))


def verify(path: str | Path) -> Verification:
    """Read and check every entry, and change nothing; an encoder may use the directory meanwhile.

    Raises CacheError for what is no cache's directory.
    """
    require_cache(os.fspath(path))
    listing = scan(os.fspath(path))
    intact = size = 0
    damaged = [(os.path.basename(irregular), "it is not a regular file") for irregular in listing.irregular]
    for file in sorted(listing.entries, key=lambda file: file.path):
        try:
            with open_entry(file.path) as (descriptor, status):
                load(descriptor, status, key_of(file.path))
        except FileNotFoundError:  # evicted meanwhile
            continue
        except EntryError as error:
            damaged.append((os.path.basename(file.path), str(error)))
        except OSError as error:
            damaged.append((os.path.basename(file.path), error.strerror or type(error).__name__))
        except (RuntimeError, MemoryError):  # as Torch says it
            damaged.append((os.path.basename(file.path), "not read: there is no memory for its rows"))
        else:
            intact, size = intact + 1, size + file.bytes
    return Verification(intact, size, tuple(damaged), len(listing.temporaries), len(listing.foreign))


def clear(path: str | Path) -> Description:
    """Remove all that a cache put there, and say what it was; the directory stays a cache's.

    Raises CacheLockedError while an encoder uses it, and CacheError for what is no cache's directory.
    """
    require_cache(os.fspath(path))
    lock = Lock(os.fspath(path), shared=False)
    try:
        before, listing = describe(path), scan(os.fspath(path))
        sweep(listing)
        for file in listing.entries:
            remove(file.path)
    except OSError as error:
        raise CacheError(f"{path} cannot be cleared: {error.strerror}") from error
    finally:
        lock.release()
    return before
