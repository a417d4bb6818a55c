"""The entry that every tier stores, and the interface of a disk tier."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..contract import ImageMetadata


class Entry(NamedTuple):
    """A result: `rows` [length, width] on the CPU, contiguous; no other tensor shares their storage."""

    rows: torch.Tensor
    metadata: ImageMetadata

    @property
    def nbytes(self) -> int:
        """Size in bytes of the storage that the rows keep alive."""
        return self.rows.untyped_storage().nbytes()


class DiskStats(NamedTuple):
    """A disk tier's counters. `bytes` is the part of the budget that its files use."""

    entries: int
    bytes: int
    evictions: int
    errors: int


class DiskTier(Protocol):
    """Interface of a disk backend. Keys are 32 bytes. Only the constructor raises: later errors are counted
    and logged, and appear as a miss from `get` or False from `put`.
    """

    def get(self, key: bytes) -> Entry | None:
        """Return the entry, fully verified, in newly allocated storage; None on a miss. From any thread."""

    def put(self, key: bytes, entry: Entry) -> bool:
        """Store `entry` and return whether it is stored. From one thread at a time."""

    def stats(self) -> DiskStats:
        """Return the counters at this moment."""

    def close(self) -> None:
        """Finish writing and release the directory's lock. Idempotent."""
