"""Behaviour that every disk tier shares, tested through the DiskTier interface."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mm_encoder.cache.entry import DiskTier, Entry
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.errors import CacheError, CacheLockedError

from .conftest import bytes_in, entry, key, same

MIB = 1024**2
BUDGET = 64 * MIB  # the smallest that every backend accepts

BACKENDS: dict[str, Callable[[Path], DiskTier]] = {
    "files": lambda path: FileTier(path, BUDGET),
    "foyer": lambda path: FoyerTier(path, BUDGET),
}


Opener = Callable[[], DiskTier]


@pytest.fixture(params=list(BACKENDS))
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Open a tier, in the same directory each time; all are closed at the end."""
    if request.param == "foyer":
        pytest.importorskip("foyer", reason="needs foyer-py, which needs Python 3.12 or newer")
    tiers: list[DiskTier] = []

    def make() -> DiskTier:
        tiers.append(BACKENDS[request.param](tmp_path / "cache"))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(opener: Opener) -> DiskTier:
    return opener()


def test_an_entry_comes_back(tier: DiskTier) -> None:
    shapes = [(1, 1), (3, 64), (2747, 64), (513, 4096)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    wanted = {}
    for number, (shape, dtype) in enumerate((shape, dtype) for shape in shapes for dtype in dtypes):
        wanted[key(number)] = entry(key(number), *shape, dtype)
        assert tier.put(key(number), wanted[key(number)])
    for of, what in wanted.items():
        assert same(tier.get(of), what)
    assert tier.stats().errors == 0


def test_each_hit_has_its_own_storage(tier: DiskTier) -> None:
    batch = entry(key(0), 24, 64)
    part = Entry(batch.rows[9:12], batch.metadata)
    assert tier.put(key(0), part)
    one, other = tier.get(key(0)), tier.get(key(0))
    assert one is not None
    assert other is not None
    assert one.nbytes == 3 * 64 * 2
    assert one.rows.data_ptr() != other.rows.data_ptr()
    one.rows.zero_()
    assert same(other, part)
    assert same(tier.get(key(0)), part)


def test_rows_outlive_the_tier(opener: Opener) -> None:
    tier = opener()
    assert tier.put(key(0), entry(key(0)))
    got = tier.get(key(0))
    tier.close()
    del tier
    gc.collect()
    assert same(got, entry(key(0)))


def test_rows_are_ordinary_tensors(tier: DiskTier) -> None:
    assert tier.put(key(0), entry(key(0)))
    with torch.inference_mode(), torch.device("meta"):
        got = tier.get(key(0))
    assert same(got, entry(key(0)))
    assert got is not None
    assert not got.rows.is_inference()
    assert not got.rows.requires_grad


def test_a_missing_key_is_a_miss_without_error(tier: DiskTier) -> None:
    assert tier.get(key(0)) is None
    assert tier.put(key(0), entry(key(0)))
    assert tier.get(key(1)) is None
    near = key(0)[:-1] + bytes([key(0)[-1] ^ 1])
    assert tier.get(near) is None
    assert tier.stats().errors == 0


def test_a_key_may_be_put_again(tier: DiskTier) -> None:
    for _ in range(3):
        assert tier.put(key(0), entry(key(0)))
    assert same(tier.get(key(0)), entry(key(0)))


def test_entries_survive_a_reopen(opener: Opener) -> None:
    for opening in range(3):
        tier = opener()
        for number in range(4 * opening):
            assert same(tier.get(key(number)), entry(key(number)))
        for number in range(4 * opening, 4 * opening + 4):
            assert tier.put(key(number), entry(key(number)))
        tier.close()


def test_an_entry_larger_than_the_budget_is_not_stored(tier: DiskTier) -> None:
    large = Entry(torch.ones(BUDGET // 4096 + 1, 1024), entry(key(0)).metadata)
    assert not tier.put(key(0), large)
    assert tier.get(key(0)) is None
    assert tier.put(key(0), entry(key(0)))
    assert same(tier.get(key(0)), entry(key(0)))


def test_the_files_stay_within_the_budget(tier: DiskTier, tmp_path: Path) -> None:
    """With entries of many sizes; every entry that is left has the right rows."""
    chance = random.Random(0)
    lengths = [chance.choice([1, 100, 400, 1000]) for _ in range(80)]
    kept = 0
    for number, length in enumerate(lengths):
        what = Entry(torch.full((length, 2048), float(number)), entry(key(number)).metadata)
        kept += tier.put(key(number), what)
        assert bytes_in(tmp_path / "cache") <= BUDGET
        assert tier.stats().bytes <= BUDGET
    assert kept >= 70
    assert sum(8192 * length for length in lengths) > 3 * BUDGET
    found = 0
    for number, length in enumerate(lengths):
        got = tier.get(key(number))
        if got is not None:
            found += 1
            assert got.rows.shape == (length, 2048)
            assert torch.all(got.rows == number)
            assert got.metadata == entry(key(number)).metadata
    assert 0 < found < 80


def test_the_counters_match_the_entries(tier: DiskTier) -> None:
    assert tier.stats().entries == tier.stats().evictions == tier.stats().errors == 0
    for number in range(5):
        assert tier.put(key(number), entry(key(number)))
    assert tier.stats().entries == 5
    assert 5 * entry(key(0)).nbytes <= tier.stats().bytes <= BUDGET


@pytest.mark.threads
def test_readers_get_right_rows_while_a_writer_evicts(tier: DiskTier) -> None:
    done = threading.Event()
    hits: list[int] = []
    wrong: list[int] = []

    def read(seed: int) -> None:
        chance, count = random.Random(seed), 0
        while not done.is_set():
            number = chance.randrange(40)
            got = tier.get(key(number))
            if got is not None:
                count += 1
                if not same(got, entry(key(number), 30, 1024)):
                    wrong.append(number)
        hits.append(count)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for reader in readers:
        reader.start()
    for number in range(40):
        assert tier.put(key(number), entry(key(number), 30, 1024))
    for number in range(40):
        assert same(tier.get(key(number)), entry(key(number), 30, 1024))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert sum(hits) > 0
    assert tier.stats().errors == 0


def test_every_get_after_close_is_a_miss(opener: Opener) -> None:
    tier = opener()
    assert tier.put(key(0), entry(key(0)))
    tier.close()
    tier.close()
    assert tier.get(key(0)) is None
    assert not tier.put(key(1), entry(key(1)))
    assert tier.stats().errors == 0
    reopened = opener()
    assert same(reopened.get(key(0)), entry(key(0)))
    assert reopened.get(key(1)) is None
    assert tier.get(key(0)) is None


@pytest.mark.threads
def test_close_during_reads_and_writes_serves_no_wrong_row(opener: Opener) -> None:
    tier = opener()
    assert tier.put(key(0), entry(key(0), 30, 1024))
    running = threading.Barrier(5)
    wrong: list[str] = []

    def read() -> None:
        running.wait()
        while (got := tier.get(key(0))) is not None:
            if not same(got, entry(key(0), 30, 1024)):
                wrong.append("rows")

    def write() -> None:
        running.wait()
        number = 1
        while tier.put(key(number), entry(key(number))):
            number += 1

    threads = [threading.Thread(target=work) for work in (read, read, read, write)]
    for thread in threads:
        thread.start()
    running.wait()
    tier.close()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.stats().errors == 0
    assert same(opener().get(key(0)), entry(key(0), 30, 1024))


def test_a_second_open_of_the_directory_is_refused(opener: Opener, tmp_path: Path) -> None:
    tier = opener()
    with pytest.raises(CacheLockedError, match=str(tmp_path / "cache")):
        opener()
    assert tier.put(key(0), entry(key(0)))
    tier.close()
    assert same(opener().get(key(0)), entry(key(0)))


def test_a_file_in_place_of_the_directory_is_refused(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    with pytest.raises(CacheError, match=str(tmp_path / "cache")):
        opener()
    assert (tmp_path / "cache").read_text() == "mine"
