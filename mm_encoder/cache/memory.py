"""Results in memory, within a budget of bytes, and the count of those that are alive anywhere."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .entry import Entry

# Every storage that was cached and is alive, by id. Process-wide, as what it answers is. It can't be wrong
# about when: Torch keeps a storage's Python object (so its id, and weak references to it) for exactly as
# long as the storage itself, also where only C++ refers to it: a view, an array, a DLPack consumer.
# Removal takes no lock, so a storage may die anywhere, within the garbage collector too.
_ALIVE: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def track(rows: torch.Tensor) -> None:
    """Count the storage of `rows` as cached payload until it dies; once, however often it is tracked."""
    storage = rows.untyped_storage()
    _ALIVE[id(storage)] = storage


def live_cpu_bytes_process() -> int:
    """Bytes of tracked storages that are alive in this process: in a tier, evicted, or after its close."""
    # A list, made in one step: the dictionary may change while its items are asked.
    storages = [reference() for reference in _ALIVE.valuerefs()]
    return sum(storage.nbytes() for storage in storages if storage is not None)


class MemoryStats(NamedTuple):
    """The memory tier's counts. `bytes` are those of the entries' storages."""

    entries: int
    bytes: int
    evictions: int


@dataclass(slots=True)
class _Kept:
    key: bytes
    entry: Entry
    nbytes: int
    asked: int = 0
    """Hits since it entered its queue, at most 3."""


class MemoryTier:
    """Entries by key, `max_bytes` of storage at most; from any thread.

    The policy is S3-FIFO (Yang et al., SOSP 2023) by bytes. What is new stands in a short queue, a fifth
    of the budget, and goes from there unless it was asked for again, so that images seen once can't push
    out the others. What was asked for moves to the main queue, and stays there for another round for each
    hit. A key that left the short queue is remembered for a while, and enters the main queue if it returns.
    `benchmarks/cache_policy.py` compares it with LRU.

    The budget is of the rows' bytes; the objects around an entry, about 2 KiB, are not counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_young_bytes = max_bytes // 5
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Kept] = {}
        self._young: deque[_Kept] = deque()
        self._main: deque[_Kept] = deque()
        # What left the young queue, and what it weighed: together no more than the main queue may hold.
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = self._young_bytes = self._ghost_bytes = 0
        self._evictions = 0
        self._closed = False

    def get(self, key: bytes) -> Entry | None:
        """The entry that was put, itself: the same storage for everyone, theirs also once it is evicted."""
        # No lock: a hit moves nothing, and it does no harm if two threads' hits are counted as one.
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.asked < 3:
            kept.asked += 1
        return kept.entry

    def put(self, key: bytes, entry: Entry) -> None:
        """Keep `entry`, unless it is larger than the whole budget. Of two for one key the first stays, so
        that all who hit share one storage.
        """
        nbytes = entry.nbytes
        if not 0 < nbytes <= self._max_bytes:
            return
        # Freed after the lock: it takes a while, and whoever watches these tensors may call us.
        evicted: list[_Kept] = []
        with self._lock:
            if self._closed or key in self._kept:
                return
            while self._bytes + nbytes > self._max_bytes:
                evicted.append(self._evict())
            kept = self._kept[key] = _Kept(key, entry, nbytes)
            self._bytes += nbytes
            if key in self._ghosts:
                self._ghost_bytes -= self._ghosts.pop(key)
                self._main.append(kept)
            else:
                self._young.append(kept)
                self._young_bytes += nbytes
        track(entry.rows)

    def stats(self) -> MemoryStats:
        """Counts at this moment."""
        with self._lock:
            return MemoryStats(len(self._kept), self._bytes, self._evictions)

    def clear(self) -> None:
        """Drop everything; what was dropped doesn't count as evicted."""
        with self._lock:
            dropped = self._kept, self._young, self._main
            self._kept, self._young, self._main = {}, deque(), deque()
            self._ghosts.clear()
            self._bytes = self._young_bytes = self._ghost_bytes = 0
        del dropped  # after the lock, as in `put`

    def close(self) -> None:
        """Drop everything and keep nothing from now on; twice is fine."""
        with self._lock:
            self._closed = True
        self.clear()

    def _evict(self) -> _Kept:
        """Take out the next to go. There is one: called only while bytes are in use."""
        while True:
            if self._young_bytes > self._max_young_bytes or not self._main:
                kept = self._young.popleft()
                self._young_bytes -= kept.nbytes
                if not kept.asked:
                    self._remember(kept)
                    break
                kept.asked = 0
            else:
                kept = self._main.popleft()
                if not kept.asked:
                    break
                kept.asked -= 1
            self._main.append(kept)
        del self._kept[kept.key]
        self._bytes -= kept.nbytes
        self._evictions += 1
        return kept

    def _remember(self, kept: _Kept) -> None:
        self._ghosts[kept.key] = kept.nbytes
        self._ghost_bytes += kept.nbytes
        while self._ghost_bytes > self._max_bytes - self._max_young_bytes:
            _, nbytes = self._ghosts.popitem(last=False)
            self._ghost_bytes -= nbytes
