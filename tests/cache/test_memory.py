"""The memory tier: budget, eviction policy, shared storages, and the count of live cached bytes."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_encoder.cache.entry import Entry
from mm_encoder.cache.memory import MemoryStats, MemoryTier, live_cpu_bytes_process, track
from mm_encoder.contract import ImageMetadata

from ..helpers.threads import joined, started

WIDTH = 16
ROW = WIDTH * 4


def key(name: object) -> bytes:
    return str(name).encode().rjust(32, b".")


def entry(length: int = 1, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> Entry:
    rows = torch.full((length, WIDTH), fill, dtype=dtype)
    metadata = ImageMetadata(
        "m",
        "0" * 64,
        length,
        (length, WIDTH),
        str(dtype),
        "cpu",
        (WIDTH, 1),
        (0, length),
        ((1, 2, 2),),
        (1, 1),
    )
    return Entry(rows, metadata)


def run_in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run `work` in `count` threads that start at once; raise what any of them raised."""
    start, raised = threading.Barrier(count), list[BaseException]()

    def run(index: int) -> None:
        start.wait()
        try:
            work(index)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Freeze the objects of all imported modules, so that gc.collect() does not traverse them each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def alive() -> Iterator[Callable[[], int]]:
    """Count the live cached bytes created in this test; none of them may outlive it."""
    gc.collect()
    before = live_cpu_bytes_process()
    yield lambda: live_cpu_bytes_process() - before
    gc.collect()
    assert live_cpu_bytes_process() == before


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Switch threads every 10 microseconds: at the default interval, a tier without its lock would pass."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# ---- entries and budget ----------------------------------------------------------------------------------


def test_a_hit_is_the_same_entry_and_storage() -> None:
    tier, kept = MemoryTier(10 * ROW), entry(3, 7.0)
    tier.put(key("a"), kept)
    hits = [tier.get(key("a")) for _ in range(3)]
    assert all(hit is kept for hit in hits)
    assert hits[0] is not None
    assert hits[0].rows.data_ptr() == kept.rows.data_ptr()
    assert tier.get(key("b")) is None


def test_the_first_of_two_puts_stays() -> None:
    tier, first = MemoryTier(10 * ROW), entry(2)
    tier.put(key("a"), first)
    tier.put(key("a"), entry(5))
    assert tier.get(key("a")) is first
    assert tier.stats() == MemoryStats(entries=1, bytes=2 * ROW, evictions=0)


def test_capacity_zero_keeps_nothing(alive: Callable[[], int]) -> None:
    tier, one = MemoryTier(0), entry()
    tier.put(key("a"), one)
    tier.put(key("empty"), entry(0))
    assert tier.get(key("a")) is None
    assert tier.stats() == (0, 0, 0)
    assert alive() == 0, "an entry that was not stored is not counted"


def test_an_entry_larger_than_the_budget_evicts_nothing() -> None:
    tier = MemoryTier(3 * ROW)
    tier.put(key("a"), entry(3))
    tier.put(key("large"), entry(4))
    assert tier.get(key("large")) is None
    assert tier.get(key("a")) is not None
    assert tier.stats() == (1, 3 * ROW, 0)
    tier.put(key("just"), entry(3))  # an exact fit takes the whole budget
    assert tier.stats() == (1, 3 * ROW, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_counted_by_storage(dtype: torch.dtype) -> None:
    tier, one = MemoryTier(2**20), entry(5, dtype=dtype)
    tier.put(key("own"), one)
    assert tier.stats().bytes == 5 * WIDTH * dtype.itemsize
    # D16: a slice that keeps its batch alive is charged the batch.
    batch = entry(80, dtype=dtype)
    tier.put(key("slice"), Entry(batch.rows[10:15], batch.metadata))
    assert tier.stats().bytes == 85 * WIDTH * dtype.itemsize


def test_keys_are_compared_in_full() -> None:
    """D15: keys that agree in all but their first or last bits are different."""
    names = [bytes(31) + b"\1", bytes(31) + b"\2", b"\1" + bytes(31), b"\2" + bytes(31), bytes(32)]
    tier = MemoryTier(10 * ROW)
    for fill, name in enumerate(names):
        tier.put(name, entry(1, fill))
    found = [tier.get(name) for name in names]
    assert [one and one.rows[0, 0].item() for one in found] == [0, 1, 2, 3, 4]


def test_clear_empties_and_close_disables_the_tier() -> None:
    tier = MemoryTier(2 * ROW)
    for name in "abc":
        tier.put(key(name), entry())
    tier.clear()
    assert tier.stats() == (0, 0, 1)
    assert tier.get(key("c")) is None
    tier.put(key("c"), entry())
    assert tier.get(key("c")) is not None
    tier.close()
    tier.close()
    assert tier.get(key("c")) is None
    tier.put(key("c"), entry())  # a result that arrives late
    assert tier.stats() == (0, 0, 1)


@settings(max_examples=200, deadline=None)
@given(
    budget=st.integers(0, 40),
    asked=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 15), st.booleans()), max_size=120),
)
def test_the_counters_match_the_entries_that_get_returns(
    budget: int, asked: list[tuple[int, int, bool]]
) -> None:
    tier = MemoryTier(budget * ROW)
    kept: dict[int, Entry] = {}
    accepted = 0
    for name, length, put in asked:
        if put:
            new, known = entry(length), tier.get(key(name))
            tier.put(key(name), new)
            found = tier.get(key(name))
            if known is not None:
                assert found is known
            else:
                assert (found is new) == (length <= budget)
                accepted += found is new
                kept[name] = new
        else:
            assert tier.get(key(name)) in (None, kept.get(name))
        stats = tier.stats()
        assert stats.bytes <= budget * ROW
    gettable = [found for name in kept if (found := tier.get(key(name))) is not None]
    stats = tier.stats()
    assert (stats.entries, stats.bytes) == (len(gettable), sum(one.nbytes for one in gettable))
    assert stats.evictions == accepted - len(gettable)


# ---- the policy ------------------------------------------------------------------------------------------


class Lru:
    """The control: LRU with the same budget."""

    def __init__(self, max_bytes: int) -> None:
        self.free, self.kept = max_bytes, OrderedDict[bytes, Entry]()

    def get(self, name: bytes) -> Entry | None:
        if name in self.kept:
            self.kept.move_to_end(name)
        return self.kept.get(name)

    def put(self, name: bytes, one: Entry) -> None:
        self.kept[name] = one
        self.free -= one.nbytes
        while self.free < 0:
            self.free += self.kept.popitem(last=False)[1].nbytes


def hits(tier: MemoryTier | Lru, names: Any) -> int:
    found = 0
    for name in names:
        if tier.get(key(name)) is None:
            tier.put(key(name), entry())
        else:
            found += 1
    return found


def test_hits_in_the_small_queue_count_no_further_in_the_main_queue() -> None:
    """An entry that was hit often is promoted, and then evicted before others unless it is hit again."""
    tier = MemoryTier(5 * ROW)
    for name in "abcde":
        tier.put(key(name), entry())
        for _ in range(3 if name == "a" else 1):
            tier.get(key(name))
    tier.put(key("f"), entry())
    assert tier.get(key("a")) is None
    assert all(tier.get(key(name)) is not None for name in "bcdef")


@pytest.mark.parametrize("place", ["_add", "_evict", "_add_ghost"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_put_leaves_a_tier_that_still_keeps_its_budget(
    monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    tier = MemoryTier(5 * ROW)
    for name in range(5):
        tier.put(key(name), entry())
    method = getattr(MemoryTier, place)

    def interrupted(*arguments: Any) -> None:
        method(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MemoryTier, place, interrupted)
        with pytest.raises(error):
            tier.put(key("x"), entry())
    for name in range(20):
        tier.put(key(name), entry())
        assert tier.stats().bytes <= 5 * ROW
    assert tier.stats()[:2] == (5, 5 * ROW)


@pytest.mark.parametrize(("kind", "kept"), [(MemoryTier, 30), (Lru, 0)])
def test_a_scan_does_not_evict_entries_that_were_hit(kind: type[MemoryTier] | type[Lru], kept: int) -> None:
    tier = kind(50 * ROW)
    hits(tier, [*range(30)] * 2)
    hits(tier, range(1000, 2000))
    assert hits(tier, range(30)) == kept


@pytest.mark.parametrize(("kind", "least"), [(MemoryTier, 500), (Lru, 0)])
def test_a_loop_larger_than_the_budget_still_hits(kind: type[MemoryTier] | type[Lru], least: int) -> None:
    found = hits(kind(50 * ROW), [*range(55)] * 20)
    assert found >= least
    assert found == 0 or least


def test_a_ghost_that_returns_enters_the_main_queue() -> None:
    tier = MemoryTier(50 * ROW)
    hits(tier, range(50))
    hits(tier, range(100, 130))
    assert tier.get(key(20)) is None, "seen once, and evicted"
    hits(tier, [20])
    hits(tier, range(1000, 1200))
    assert tier.get(key(20)) is not None
    assert tier.get(key(130)) is None


def test_an_entry_that_is_no_longer_hit_is_evicted_in_the_end() -> None:
    tier = MemoryTier(50 * ROW)
    hits(tier, [*range(40)] * 9)
    hits(tier, [100 + n for n in range(40) for _ in range(2)] * 5)
    assert hits(tier, range(100, 140)) == 40
    assert hits(tier, range(40)) <= 10


def test_a_large_entry_evicts_as_much_as_it_needs() -> None:
    tier = MemoryTier(10 * ROW)
    hits(tier, range(10))
    tier.put(key("large"), entry(7))
    assert tier.stats() == (4, 10 * ROW, 7)


def test_memory_does_not_grow_with_the_keys_seen() -> None:
    tier = MemoryTier(50 * ROW)
    one = entry()
    sizes = []
    tracemalloc.start()
    try:
        for names in (range(2_000), range(2_000, 20_000)):
            for name in names:
                tier.put(key(name), one)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[-1] - sizes[0] < 20_000, sizes  # a key alone is 65 bytes, and there were 18,000 more
    assert tier.stats().entries == 50


# ---- threads ---------------------------------------------------------------------------------------------


@pytest.mark.threads
@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_never_exceed_the_budget(seed: int, quick_switches: None) -> None:
    budget = 60 * ROW
    tier, over, done = MemoryTier(budget), list[MemoryStats](), threading.Event()

    def watch() -> None:
        while not done.is_set():
            stats = tier.stats()
            if stats.bytes > budget or stats.entries > 60 or stats.bytes % ROW:
                over.append(stats)

    def work(index: int) -> None:
        rng = random.Random(f"{seed} {index}")
        for _ in range(400):
            name = rng.randrange(40)
            found = tier.get(key(name))
            if found is None:
                tier.put(key(name), entry(rng.randint(1, 20), name))
            else:
                assert found.rows[-1, -1].item() == name
            if rng.random() < 0.01:
                tier.clear()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run_in_threads(8, work)
    done.set()
    watcher.join()
    assert over == []
    kept = [found for name in range(40) if (found := tier.get(key(name))) is not None]
    assert tier.stats()[:2] == (len(kept), sum(one.nbytes for one in kept))


@pytest.mark.threads
@pytest.mark.parametrize(("capacity", "most"), [(3, 3), (0, 0), (1, 1)])
def test_rows_stay_right_while_requests_evict_each_other(
    capacity: int, most: int, alive: Callable[[], int]
) -> None:
    """D17: at most three entries fit; requests hold the entries they found and recompute evicted ones."""
    tier, puts = MemoryTier(capacity * 2 * ROW), Counter[int]()

    def work(index: int) -> None:
        for _ in range(50):
            held = []
            for fill, name in enumerate("ABCDEA"):
                found = tier.get(key(name))
                if found is None:
                    found = entry(2, fill % 5)
                    tier.put(key(name), found)
                    tier.put(key("large"), entry(7))
                    puts[index] += 1
                held.append(found)
            assert [one.rows[1, 0].item() for one in held] == [0, 1, 2, 3, 4, 0]

    run_in_threads(8, work)
    stats = tier.stats()
    assert stats.entries == most
    assert stats.bytes == alive() == most * 2 * ROW
    assert stats.evictions <= puts.total() - most
    assert tier.get(key("large")) is None
    tier.close()
    assert alive() == 0


@pytest.mark.threads
def test_many_puts_of_one_key_leave_one_storage(alive: Callable[[], int]) -> None:
    for turn in range(20):
        tier = MemoryTier(100 * ROW)
        got: list[Entry | None] = [None] * 8

        def work(
            index: int, tier: MemoryTier = tier, got: list[Entry | None] = got, turn: int = turn
        ) -> None:
            tier.put(key(turn), entry(2))
            got[index] = tier.get(key(turn))

        run_in_threads(8, work)
        assert got[0] is not None
        assert all(one is got[0] for one in got)
        assert alive() == tier.stats().bytes == 2 * ROW
        del tier, got, work


@pytest.mark.threads
@pytest.mark.parametrize("step", ["_add", "_evict"])
@pytest.mark.parametrize("call", ["close", "clear", "stats", "put"])
def test_a_signal_handler_may_call_the_tier_inside_a_put(
    monkeypatch: pytest.MonkeyPatch, alive: Callable[[], int], call: str, step: str
) -> None:
    tier, calls = MemoryTier(4 * ROW), list[str]()
    for name in range(4):
        tier.put(key(name), entry())
    add_ghost, add = MemoryTier._add_ghost, MemoryTier._add

    def handle() -> None:
        if not calls:
            calls.append(call)
            tier.put(key("handler"), entry()) if call == "put" else getattr(tier, call)()

    def interrupted(self: MemoryTier, node: Any) -> None:
        handle()
        (add if step == "_add" else add_ghost)(self, node)

    # In the midst of `_evict`, where the victim has left its queue and not the index.
    monkeypatch.setattr(MemoryTier, "_add" if step == "_add" else "_add_ghost", interrupted)
    joined([started(lambda: tier.put(key("new"), entry()))])
    assert calls == [call]
    kept = 0 if call in ("close", "clear") else 4
    assert (tier.stats().entries, tier.stats().bytes, alive()) == (kept, kept * ROW, kept * ROW)
    tier.put(key("later"), entry())
    assert (tier.get(key("later")) is None) == (call == "close")
    assert tier.stats().bytes == sum(node.nbytes for node in (*tier._small, *tier._main))
    tier.close()


def test_a_put_after_close_stores_nothing(alive: Callable[[], int]) -> None:
    for _ in range(20):
        tier = MemoryTier(100 * ROW)

        def work(index: int, tier: MemoryTier = tier) -> None:
            if index == 0:
                tier.close()
            for turn in range(10):
                tier.put(key((index, turn)), entry())

        run_in_threads(4, work)
        assert tier.stats()[:2] == (0, 0)
        assert alive() == 0


def test_a_finalizer_of_an_evicted_tensor_may_use_the_tier() -> None:
    tier, seen = MemoryTier(2 * ROW), []

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            seen.append(tier.stats())
            tier.put(key("from a finaliser"), entry())

    def put(name: str) -> None:
        plain = entry()
        tier.put(key(name), Entry(plain.rows.as_subclass(Watched), plain.metadata))

    def work(_: int) -> None:
        for name in "abc":
            put(name)
        tier.clear()

    run_in_threads(1, work)
    assert len(seen) == 3


# ---- live bytes ------------------------------------------------------------------------------------------


def holders() -> dict[str, Callable[[torch.Tensor], object]]:
    return {
        "the rows": lambda rows: rows,
        "a view": lambda rows: rows[3:4],
        "another dtype": lambda rows: rows.view(torch.uint8),
        "a detached tensor": lambda rows: rows.detach(),
        "a parameter": lambda rows: torch.nn.Parameter(rows),
        "the storage": lambda rows: rows.untyped_storage(),
        "NumPy's view": lambda rows: rows.numpy(),
        "a slice of NumPy's view": lambda rows: rows.numpy()[5:, 2:],
        "a tensor over NumPy's view": lambda rows: torch.from_numpy(rows.numpy()),
        "NumPy through DLPack": lambda rows: np.from_dlpack(rows),
        "a tensor through DLPack": lambda rows: torch.utils.dlpack.from_dlpack(rows)[1:],
        "a DLPack capsule": lambda rows: rows.__dlpack__(),
        "a memoryview": lambda rows: memoryview(rows.numpy()),
        "autograd alone": lambda rows: rows @ torch.ones(WIDTH, WIDTH, requires_grad=True),
        "a cycle": _cycle,
        "a view apart from a cycle": lambda rows: (_cycle(rows), rows[1:])[1],
        "a view apart from its storage's cycle": lambda rows: (_cycle(rows.untyped_storage()), rows[1:])[1],
    }


def _cycle(held: object) -> object:
    ring: list[object] = [held]
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    ("holder", "inference"),
    # In inference mode autograd saves nothing.
    [(name, mode) for name in holders() for mode in (False, True) if not (mode and "autograd" in name)],
)
def test_a_storage_counts_as_alive_while_anything_refers_to_it(
    holder: str, inference: bool, alive: Callable[[], int]
) -> None:
    with torch.inference_mode(inference):
        tier, one = MemoryTier(100 * ROW), entry(10)
        tier.put(key("a"), one)
        assert alive() == 10 * ROW
        held = holders()[holder](one.rows)
        tier.put(key("b"), entry(95))
        assert tier.get(key("a")) is None
        del one
        gc.collect()
        assert alive() == 105 * ROW, "evicted, and referred to"
        tier.close()
        gc.collect()
        assert alive() == 10 * ROW, "closed, and referred to"
        del held
        gc.collect()
        assert alive() == 0


def test_copies_do_not_count_as_cached_bytes(alive: Callable[[], int]) -> None:
    tier, one = MemoryTier(100 * ROW), entry(10)
    tier.put(key("a"), one)
    copies = one.rows.clone(), one.rows.numpy().copy(), one.rows.to(torch.float64)
    assert alive() == 10 * ROW
    del one
    tier.close()
    assert alive() == 0
    del copies


def test_a_storage_is_counted_once(alive: Callable[[], int]) -> None:
    one = entry(10)
    tiers = [MemoryTier(100 * ROW), MemoryTier(100 * ROW)]
    for tier in tiers:
        for turn in range(3):
            tier.put(key(turn), one)
        track(one.rows[2:])
    assert alive() == 10 * ROW
    del one
    tiers[0].close()
    assert alive() == 10 * ROW
    tiers[1].close()
    assert alive() == 0


def test_views_stay_valid_after_eviction_and_close() -> None:
    tier = MemoryTier(10 * ROW)
    tier.put(key("a"), entry(10, 5.0))
    found = tier.get(key("a"))
    assert found is not None
    view = found.rows[4:6]
    del found
    tier.put(key("b"), entry(10, 6.0))
    tier.close()
    others = [entry(10, 7.0) for _ in range(100)]  # would reuse the memory if it were freed
    assert view.eq(5.0).all()
    del others


@pytest.mark.threads
def test_the_count_is_exact_when_storages_die_in_many_threads(alive: Callable[[], int]) -> None:
    done, read = threading.Event(), list[int]()

    def watch() -> None:
        while not done.is_set():
            read.append(alive())

    def work(index: int) -> None:
        for turn in range(500):
            rows = entry().rows
            track(rows)
            view = rows[:, 2:]
            del rows
            array = view.numpy()
            del view
            again = torch.from_numpy(array)
            track(again)  # a new storage over the same memory
            del array
            if turn % 100 == index:
                gc.collect(0)
            del again

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run_in_threads(8, work)
    done.set()
    watcher.join()
    assert alive() == 0
    # Each thread has at most one of each, and the two differ: `again` starts two columns in.
    assert min(read) >= 0
    assert max(read) <= 8 * 2 * ROW


def test_the_count_does_not_disturb_interpreter_exit() -> None:
    program = (
        "import torch\n"
        "from mm_encoder.cache.entry import Entry\n"
        "from mm_encoder.cache.memory import MemoryTier, live_cpu_bytes_process\n"
        "class Late:\n"
        "    def __del__(self): print(live_cpu_bytes_process() >= 0)\n"
        "tier, late = MemoryTier(2**20), Late()\n"
        "for name in range(100): tier.put(bytes([name]) * 32, Entry(torch.ones(10, 10), None))\n"
        "view = tier.get(bytes(32)).rows[2:]\n"
        "cycle = [tier]; cycle.append(cycle)\n"
        "del tier, cycle\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")


@pytest.mark.needs_cuda
def test_pinned_storage_is_counted_too(alive: Callable[[], int]) -> None:
    tier, one = MemoryTier(100 * ROW), entry(10)
    pinned = torch.empty(10, WIDTH, pin_memory=True)
    tier.put(key("a"), Entry(pinned, one.metadata))
    assert tier.stats().bytes == alive() == 10 * ROW
    view = pinned[2:]
    del pinned
    tier.close()
    assert alive() == 10 * ROW
    del view
    assert alive() == 0
