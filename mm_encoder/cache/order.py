"""The order of eviction, in 40 bytes an entry: a directory may hold millions."""

from __future__ import annotations

import numpy as np

_USED_BYTES, _KEY_BYTES = 8, 32
_RECORD_BYTES = _USED_BYTES + _KEY_BYTES
_OFFSET = 2**63  # a time before 1970 is negative


class EvictionOrder:
    """The entries of one scan, the least recently used first: add them all, then take one after another."""

    def __init__(self) -> None:
        # Records of time and key, big-endian, so that they sort as bytes.
        self._records = bytearray()
        self._sorted = False
        self._next = 0

    def add(self, used_ns: int, key: bytes) -> None:
        """Add an entry and its time of last use."""
        self._records += (used_ns + _OFFSET).to_bytes(_USED_BYTES, "big") + key

    def first(self) -> tuple[int, bytes]:
        """Return time of last use and key of the next entry to evict."""
        if not self._sorted:
            np.frombuffer(self._records, f"S{_RECORD_BYTES}").sort()  # in place
            self._sorted = True
        record = self._records[self._next : self._next + _RECORD_BYTES]
        return int.from_bytes(record[:_USED_BYTES], "big") - _OFFSET, bytes(record[_USED_BYTES:])

    def remove_first(self) -> None:
        """Go on to the next entry."""
        self._next += _RECORD_BYTES
        if self._next == len(self._records):
            self._records, self._next = bytearray(), 0  # nothing is kept of what has been evicted

    def __len__(self) -> int:
        """Return the number of entries left."""
        return (len(self._records) - self._next) // _RECORD_BYTES
