"""Maintenance of a files backend's directory: `mm-encoder cache stats|verify|clear`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..errors import CacheError
from .codec import EntryError
from .directory import key_of, load, open_entry, remove, require_cache, scan, sweep
from .ledger import lock


class Description(NamedTuple):
    """Counts of a directory's files at one moment; `foreign` are names that no cache uses or touches."""

    entries: int
    bytes: int
    temporaries: int
    foreign: int


class Verification(NamedTuple):
    """The result of reading every entry: count and bytes of the intact ones, reasons for the damaged."""

    intact: int
    bytes: int
    damaged: tuple[tuple[str, str], ...]
    """(file name, reason) each."""
    temporaries: int
    foreign: int


def describe(path: str | Path) -> Description:
    """Count the files of a cache, in use or not. Raises CacheError if `path` is not a cache."""
    require_cache(os.fspath(path))
    listing = scan(os.fspath(path))
    size = sum(file.bytes for file in listing.entries)
    return Description(len(listing.entries), size, len(listing.temporaries), len(listing.foreign))


def verify(path: str | Path) -> Verification:
    """Read and check every entry without changes; an encoder may use the directory at the same time.

    Raises CacheError if `path` is not a cache.
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
        except (RuntimeError, MemoryError):  # Torch raises RuntimeError
            damaged.append((os.path.basename(file.path), "not read: not enough memory for its rows"))
        else:
            intact, size = intact + 1, size + file.bytes
    return Verification(intact, size, tuple(damaged), len(listing.temporaries), len(listing.foreign))


def clear(path: str | Path) -> Description:
    """Remove all entries and temporary files, and return the counts from before; it stays a cache directory.

    Raises CacheLockedError while an encoder uses it, and CacheError if `path` is not a cache.
    """
    require_cache(os.fspath(path))
    held = lock(os.fspath(path), shared=False)
    try:
        before, listing = describe(path), scan(os.fspath(path))
        sweep(listing)
        for file in listing.entries:
            remove(file.path)
    except OSError as error:
        raise CacheError(f"{path} cannot be cleared: {error.strerror}") from error
    finally:
        held.release()
    return before
