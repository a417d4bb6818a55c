"""Entries in a foyer tier: round trips, wiping, eviction, and puts that are not confirmed yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder.cache.entry import DiskStats, Entry

from .conftest import CHUNK, MIB, REGIONS, SMALLEST, Fake, Open, entry, key, needs_foyer, same


@needs_foyer
def test_entries_of_all_sizes_come_back(opened: Open) -> None:
    sizes = [0, 2, CHUNK - 2, CHUNK, CHUNK + 2, 3 * CHUNK - 2, 3 * CHUNK, 3 * CHUNK + 2, 22_000_000]
    tier = opened(2 * SMALLEST)
    for size in sizes:
        assert tier.put(key(size), entry(size, size))
        assert same(tier.get(key(size)), entry(size, size))
    assert tier.stats() == DiskStats(len(sizes), 2 * SMALLEST, 0, 0)
    tier.close()
    tier = opened(2 * SMALLEST)
    for size in sizes:
        assert same(tier.get(key(size)), entry(size, size))
    assert tier.get(key("never put")) is None
    assert tier.stats() == DiskStats(0, 2 * SMALLEST, 0, 0)


@needs_foyer
def test_each_hit_has_its_own_storage(opened: Open) -> None:
    tier = opened()
    assert tier.put(key("a"), entry(1000))
    first, second = tier.get(key("a")), tier.get(key("a"))
    assert first is not None
    assert second is not None
    assert first.nbytes == 1000
    first.rows.zero_()
    assert same(second, entry(1000))


@needs_foyer
@pytest.mark.parametrize("max_bytes", [SMALLEST, 3 * SMALLEST])
def test_another_capacity_wipes_the_cache(opened: Open, tmp_path: Path, max_bytes: int) -> None:
    tier = opened(2 * SMALLEST)
    assert tier.put(key("a"), entry(CHUNK))
    tier.close()
    tier = opened(max_bytes)
    assert tier.get(key("a")) is None
    assert len(list((tmp_path / "cache").glob(REGIONS))) == max_bytes // (16 * MIB)
    assert tier.put(key("a"), entry(CHUNK, 1))
    tier.close()
    assert same(opened(max_bytes).get(key("a")), entry(CHUNK, 1))


@needs_foyer
@pytest.mark.parametrize("damage", ["no stamp", "another format", "two stamps", "a region too many"])
def test_inconsistent_files_are_wiped(opened: Open, tmp_path: Path, damage: str) -> None:
    tier = opened()
    assert tier.put(key("a"), entry(CHUNK))
    tier.close()
    (stamp,) = (tmp_path / "cache").glob("mm-encoder-foyer-*")
    if damage == "no stamp":
        stamp.unlink()
    elif damage == "another format":
        stamp.rename(stamp.with_name("mm-encoder-foyer-0.0-4-0123456789abcdef"))
    elif damage == "two stamps":
        stamp.with_name(stamp.name[:-1] + "01"[stamp.name[-1] == "0"]).touch()
    else:
        (tmp_path / "cache" / "foyer-storage-direct-fs-00000004").touch()
    tier = opened()
    assert len(list((tmp_path / "cache").iterdir())) == 4 + 2  # regions, lock and stamp
    assert tier.get(key("a")) is None
    assert tier.put(key("a"), entry(CHUNK, 1))
    assert same(tier.get(key("a")), entry(CHUNK, 1))


@needs_foyer
def test_eviction_by_foyer_is_no_error(opened: Open) -> None:
    tier = opened()
    entries = [entry(size, size) for size in range(2 * CHUNK, 2 * CHUNK + 80, 2)]
    for number, each in enumerate(entries):
        assert tier.put(key(number), each)
        assert same(tier.get(key(number)), each)
    kept = 0
    for number, each in enumerate(entries):
        found = tier.get(key(number))
        assert found is None or same(found, each)
        kept += found is not None
    assert 2 <= kept <= 8
    assert tier.stats().errors == 0


@needs_foyer
def test_invalid_and_too_large_entries_are_not_stored(opened: Open) -> None:
    tier = opened()
    assert not tier.put(key("large"), entry(9 * CHUNK))
    rows, metadata = entry(2)
    assert not tier.put(key("unsupported dtype"), Entry(rows.to(torch.int64), metadata))
    assert not tier.put(b"short key", entry(2))
    assert tier.stats() == DiskStats(0, SMALLEST, 0, 3)
    # foyer failed in none of these, so the tier stays open.
    assert tier.put(key("most"), entry(8 * CHUNK + 2))
    assert same(tier.get(key("most")), entry(8 * CHUNK + 2))


@needs_foyer
def test_a_long_header_comes_back(opened: Open) -> None:
    rows, metadata = entry(CHUNK - 2)
    wide = Entry(rows, replace(metadata, grid_thws=((1, 1, 1),) * 130_000))
    tier = opened()
    assert tier.put(key("a"), wide)
    tier.close()
    assert same(opened().get(key("a")), wide)


def test_a_stored_entry_is_not_written_again(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(2 * CHUNK))
    inserts = Fake.made.inserts
    assert tier.put(key("a"), entry(2 * CHUNK))
    assert (Fake.made.inserts, tier.stats().entries) == (inserts, 1)


def test_a_key_is_a_miss_until_it_is_confirmed(opened: Open, fake: Any) -> None:
    # A get brings a manifest into foyer's memory, where `contains` reports it as written.
    seen: list[Entry | None] = []

    def contains(cache: Fake, name: bytes) -> bool:
        if name in cache.records and not seen:
            seen.append(tier.get(key("a")))
        return name in cache.records

    fake(contains=contains)
    tier = opened()
    assert tier.put(key("a"), entry(100))
    assert seen == [None]
    assert same(tier.get(key("a")), entry(100))
