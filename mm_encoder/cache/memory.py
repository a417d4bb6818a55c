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
class _Node:
    key: bytes
    entry: Entry
    nbytes: int
    freq: int = 0
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
        self._max_small_bytes = max_bytes // 5
        self._lock = threading.Lock()
        self._index: dict[bytes, _Node] = {}
        self._small: deque[_Node] = deque()
        self._main: deque[_Node] = deque()
        # What left the small queue, and what it weighed: together no more than the main queue may hold.
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = self._small_bytes = self._ghost_bytes = 0
        self._evictions = 0
        self._closed = False

    def get(self, key: bytes) -> Entry | None:
        """The entry that was put, itself: the same storage for everyone, theirs also once it is evicted."""
        # No lock: a hit moves nothing, and it does no harm if two threads' hits are counted as one.
        node = self._index.get(key)
        if node is None:
            return None
        if node.freq < 3:
            node.freq += 1
        return node.entry

    def put(self, key: bytes, entry: Entry) -> None:
        """Keep `entry`, unless it is larger than the whole budget. Of two for one key the first stays, so
        that all who hit share one storage.
        """
        nbytes = entry.nbytes
        if not 0 < nbytes <= self._max_bytes:
            return
        # Freed after the lock: it takes a while, and whoever watches these tensors may call us.
        evicted: list[_Node] = []
        with self._lock:
            if self._closed or key in self._index:
                return
            while self._bytes + nbytes > self._max_bytes:
                evicted.append(self._evict())
            node = self._index[key] = _Node(key, entry, nbytes)
            self._bytes += nbytes
            if key in self._ghosts:
                self._ghost_bytes -= self._ghosts.pop(key)
                self._main.append(node)
            else:
                self._small.append(node)
                self._small_bytes += nbytes
        track(entry.rows)

    def stats(self) -> MemoryStats:
        """Counts at this moment."""
        with self._lock:
            return MemoryStats(len(self._index), self._bytes, self._evictions)

    def clear(self) -> None:
        """Drop everything; what was dropped doesn't count as evicted."""
        with self._lock:
            dropped = self._index, self._small, self._main
            self._index, self._small, self._main = {}, deque(), deque()
            self._ghosts.clear()
            self._bytes = self._small_bytes = self._ghost_bytes = 0
        del dropped  # after the lock, as in `put`

    def close(self) -> None:
        """Drop everything and keep nothing from now on; twice is fine."""
        with self._lock:
            self._closed = True
        self.clear()

    def _evict(self) -> _Node:
        """Take out the next to go. There is one: called only while bytes are in use."""
        while True:
            if self._small_bytes > self._max_small_bytes or not self._main:
                node = self._small.popleft()
                self._small_bytes -= node.nbytes
                if not node.freq:
                    self._add_ghost(node)
                    break
                node.freq = 0
            else:
                node = self._main.popleft()
                if not node.freq:
                    break
                node.freq -= 1
            self._main.append(node)
        del self._index[node.key]
        self._bytes -= node.nbytes
        self._evictions += 1
        return node

    def _add_ghost(self, node: _Node) -> None:
        self._ghosts[node.key] = node.nbytes
        self._ghost_bytes += node.nbytes
        while self._ghost_bytes > self._max_bytes - self._max_small_bytes:
            _, nbytes = self._ghosts.popitem(last=False)
            self._ghost_bytes -= nbytes
