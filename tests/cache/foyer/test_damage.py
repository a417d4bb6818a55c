"""Damaged and missing foyer records and region files are misses, never wrong rows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_encoder.cache.entry import DiskStats

from .conftest import CHUNK, MIB, REGIONS, SMALLEST, Fake, Open, entry, key, needs_foyer, same


@pytest.mark.parametrize("index", range(4))
def test_a_missing_record_is_a_miss_and_counts_as_eviction(opened: Open, fake: Any, index: int) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(3 * CHUNK + 2))
    names = Fake.made.entry_records()
    assert len(names) == 4
    del Fake.made.records[names[index]]
    assert tier.get(key("a")) is None
    # A known bad manifest is neither read nor counted again.
    assert tier.get(key("a")) is None
    lost = index < 3  # without its manifest nothing shows that there was an entry
    assert tier.stats() == DiskStats(1, SMALLEST, int(lost), 0)
    assert tier.put(key("a"), entry(3 * CHUNK + 2))
    assert same(tier.get(key("a")), entry(3 * CHUNK + 2))


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda value: b"",
    "cut": lambda value: value[:-1],
    "half": lambda value: value[: len(value) // 2],
    "longer": lambda value: value + b"\0",
    "zeroed": lambda value: bytes(len(value)),
    "first bit": lambda value: flipped(value, 0),
    "bit of the header": lambda value: flipped(value, 100),
    "last bit": lambda value: flipped(value, len(value) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_damaged_record_is_a_miss(opened: Open, fake: Any, index: int, damage: str) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(2 * CHUNK + 2))
    name = Fake.made.entry_records()[index]
    Fake.made.records[name] = DAMAGES[damage](Fake.made.records[name])
    assert tier.get(key("a")) is None
    # A manifest whose nonce is wrong names chunks that are not there.
    counted = (1, 0) if (index, damage) == (2, "first bit") else (0, 1)
    assert tier.stats()[2:] == counted
    assert tier.put(key("a"), entry(2 * CHUNK + 2))
    assert same(tier.get(key("a")), entry(2 * CHUNK + 2))
    assert tier.stats()[2:] == counted


def test_an_entry_under_another_key_is_a_miss(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(100))
    (name,) = Fake.made.entry_records()
    Fake.made.records[name.replace(key("a"), key("b"))] = Fake.made.records[name]
    assert tier.get(key("b")) is None
    assert same(tier.get(key("a")), entry(100))


def test_swapped_chunks_are_a_miss(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(2 * CHUNK))
    first, second, _ = Fake.made.entry_records()
    records = Fake.made.records
    records[first], records[second] = records[second], records[first]
    assert tier.get(key("a")) is None


def test_the_newest_manifest_of_a_key_is_read_first(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(100))
    Fake.made.records.update(dict.fromkeys(Fake.made.entry_records(), b"damaged"))
    assert tier.get(key("a")) is None
    assert tier.put(key("a"), entry(100))
    tier.close()
    records = Fake.made.records
    tier = opened()  # a new tier does not know of the damage
    Fake.made.records.update(records)
    assert same(tier.get(key("a")), entry(100))
    assert tier.stats().errors == 0


def test_a_key_is_given_up_after_eight_damaged_manifests(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    for _ in range(8):
        assert tier.put(key("a"), entry(100))
        Fake.made.records.update(dict.fromkeys(Fake.made.entry_records(), b"damaged"))
        assert tier.get(key("a")) is None
    for _ in range(4):
        assert not tier.put(key("a"), entry(100))
    # foyer did not fail: the tier stays open, and the key works again once foyer has evicted it.
    assert tier.put(key("b"), entry(100))
    Fake.made.records.clear()
    assert tier.put(key("a"), entry(100))
    assert same(tier.get(key("a")), entry(100))


def zeroed(file: Path, _: random.Random) -> None:
    file.write_bytes(bytes(16 * MIB))


def garbage(file: Path, chance: random.Random) -> None:
    file.write_bytes(chance.randbytes(16 * MIB))


def truncated(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(16 * MIB))


def bits_flipped(file: Path, chance: random.Random) -> None:
    with file.open("r+b") as region:
        for at in [*range(0, 48, 3), *(chance.randrange(16 * MIB) for _ in range(20))]:
            region.seek(at)
            old = region.read(1)[0]
            region.seek(at)
            region.write(bytes([old ^ 1 << chance.randrange(8)]))


def longer(file: Path, chance: random.Random) -> None:
    with file.open("ab") as region:
        region.write(chance.randbytes(1000))


def deleted(file: Path, _: random.Random) -> None:
    file.unlink()


@needs_foyer
@pytest.mark.parametrize("damage", [zeroed, garbage, truncated, bits_flipped, longer, deleted])
@pytest.mark.parametrize("which", ["first", "all"])
def test_damaged_region_files_serve_no_wrong_rows(
    opened: Open, tmp_path: Path, damage: Any, which: str
) -> None:
    tier = opened()
    entries = {key(number): entry(size, number) for number, size in enumerate([100, CHUNK, 3 * CHUNK, 9000])}
    for name, each in entries.items():
        assert tier.put(name, each)
    tier.close()
    files = sorted((tmp_path / "cache").glob(REGIONS))
    chance = random.Random(damage.__name__)
    for file in files if which == "all" else files[:1]:
        damage(file, chance)
    tier = opened()
    found = {name: tier.get(name) for name in entries}
    for name, each in entries.items():
        assert found[name] is None or same(found[name], each)
    if which == "all" and damage in (zeroed, garbage, deleted):
        assert list(found.values()) == [None] * len(entries)
    assert [file.stat().st_size for file in files] == [16 * MIB] * 4
    if damage is longer:
        assert None not in found.values()
    for name, each in entries.items():
        assert tier.put(name, each)
        assert same(tier.get(name), each)


@needs_foyer
def test_region_files_truncated_while_open_are_misses(opened: Open, tmp_path: Path) -> None:
    tier = opened()
    each = entry(2 * CHUNK + 100)
    assert tier.put(key("a"), each)
    for number in range(10):  # push the entry out of foyer's memory
        assert tier.put(key(number), entry(100, number))
    for file in (tmp_path / "cache").glob(REGIONS):
        os.truncate(file, 0)
    assert tier.get(key("a")) is None
    assert tier.stats().errors == 1
    assert tier.put(key("b"), each)
    assert same(tier.get(key("b")), each)
