"""What the tiers keep, and what a disk tier is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..contract import ImageMetadata


class Entry(NamedTuple):
    """A result: `rows` [length, width] on the CPU, contiguous, in a storage of their own."""

    rows: torch.Tensor
    metadata: ImageMetadata

    @property
    def nbytes(self) -> int:
        """Bytes of the storage that the rows keep alive."""
        return self.rows.untyped_storage().nbytes()


class DiskStats(NamedTuple):
    """A disk tier's counts. `bytes` are those that its files take of the budget."""

    entries: int
    bytes: int
    evictions: int
    errors: int


class DiskTier(Protocol):
    """The seam between the tiers. Keys are 32 bytes. After the constructor nothing raises: a fault is
    counted, logged, and a miss or a put that did not happen.
    """

    def get(self, key: bytes) -> Entry | None:
        """The entry as it was put, verified in full, in a storage of its own; from any thread."""

    def put(self, key: bytes, entry: Entry) -> bool:
        """Keep `entry`; whether it is kept. From one thread at a time."""

    def stats(self) -> DiskStats:
        """Counts at this moment."""

    def close(self) -> None:
        """Finish, and give the directory free; twice is fine."""
