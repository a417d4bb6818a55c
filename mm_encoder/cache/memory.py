"""The memory tier, bounded by bytes, and the process-wide count of cached bytes that are still alive."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..locks import AskableLock, guarded
from .entry import Entry

# Every storage in this process that was ever cached and is still alive, by id. This is exact: Torch keeps a
# storage's Python object (hence its id and weak references to it) for exactly as long as the storage, even if
# only C++ refers to it: a view, an array, a DLPack consumer. Removal takes no lock, so a storage may die
# anywhere, even inside the garbage collector.
_ALIVE: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def track(rows: torch.Tensor) -> None:
    """Count the storage of `rows` as cached until it is freed; once, however often it is tracked."""
    storage = rows.untyped_storage()
    _ALIVE[id(storage)] = storage


def live_cpu_bytes_process() -> int:
    """Return the bytes of all tracked storages that are alive: in a tier, evicted, or in a closed tier."""
    # valuerefs() copies in one step: the dictionary may change during the loop.
    storages = [reference() for reference in _ALIVE.valuerefs()]
    return sum(storage.nbytes() for storage in storages if storage is not None)


class MemoryStats(NamedTuple):
    """The memory tier's counters. `bytes` is the size of the entries' storages."""

    entries: int
    bytes: int
    evictions: int


@dataclass(slots=True)
class _Node:
    key: bytes
    entry: Entry
    nbytes: int
    freq: int = 0
    """Hits since it entered its queue, capped at 3."""


class MemoryTier:
    """Entries by key, in at most `max_bytes` of storage. Thread-safe.

    The eviction policy is S3-FIFO (Yang et al., SOSP 2023), by bytes. A new entry enters the small queue, a
    fifth of the budget, and is evicted from there unless it was hit, so that images seen once cannot push out
    the others. An entry that was hit moves on to the main queue, and stays there one more round per hit. The
    small queue's victims leave a ghost of their key for a while: a key that has one enters the main queue.
    `benchmarks/cache_policy.py` compares it with LRU.

    The budget counts the rows' bytes, not the objects around an entry, about 2 KiB.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_small_bytes = max_bytes // 5
        # A signal handler, or a finalizer, may close the tier while its own thread is inside it.
        self._lock = AskableLock()
        self._index: dict[bytes, _Node] = {}
        self._small: deque[_Node] = deque()
        self._main: deque[_Node] = deque()
        # Keys evicted from the small queue, with their sizes; together at most the main queue's capacity.
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = self._small_bytes = self._ghost_bytes = 0
        self._evictions = 0
        self._closed = False

    def get(self, key: bytes) -> Entry | None:
        """Return the entry itself, sharing its storage, which stays valid after eviction; None on a miss."""
        # No lock: a hit moves nothing, and it is harmless if hits of two threads are counted as one.
        node = self._index.get(key)
        if node is None:
            return None
        if node.freq < 3:
            node.freq += 1
        return node.entry

    def put(self, key: bytes, entry: Entry) -> None:
        """Store `entry`, unless it is larger than the budget or the key is present: the first entry stays, so
        that all hits share one storage.
        """
        nbytes = entry.nbytes
        # Held: inside another `put` of this thread, which cannot be waited for.
        if 0 < nbytes <= self._max_bytes and not self._lock.held():
            evicted = self._put(_Node(key, entry, nbytes))
            if evicted is not None:
                track(entry.rows)
            # Freed here, outside the lock: it takes a while, and finalizers of tensors may call this tier.

    @guarded
    def _put(self, node: _Node) -> list[_Node] | None:
        """Return what was evicted; None if the entry was not stored."""
        evicted: list[_Node] = []
        if self._closed or node.key in self._index:
            return None
        try:
            while self._bytes + node.nbytes > self._max_bytes:
                evicted.append(self._evict())
            self._add(node)
        except BaseException:  # an interrupt: better empty than with bytes that nothing evicts
            self._drop_all()
            raise
        return evicted

    @guarded
    def stats(self) -> MemoryStats:
        """Return the counters at this moment."""
        return MemoryStats(len(self._index), self._bytes, self._evictions)

    def clear(self) -> None:
        """Drop all entries, without counting them as evicted; at once, or when who is inside leaves."""
        self._lock.ask(self._drop_all)

    def close(self) -> None:
        """Drop all entries and store nothing from now on. Idempotent."""
        self._closed = True
        self.clear()

    def _drop_all(self) -> None:
        for dropped in (self._index, self._small, self._main):
            self._lock.after(dropped.clear)  # as in `put`
        self._index, self._small, self._main = {}, deque(), deque()
        self._ghosts = OrderedDict()
        self._bytes = self._small_bytes = self._ghost_bytes = 0

    def _add(self, node: _Node) -> None:
        self._index[node.key] = node
        self._bytes += node.nbytes
        if node.key in self._ghosts:
            self._ghost_bytes -= self._ghosts.pop(node.key)
            self._main.append(node)
        else:
            self._small.append(node)
            self._small_bytes += node.nbytes

    def _evict(self) -> _Node:
        """Remove and return the next victim. Call it only while bytes are in use, so there is one."""
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
