"""The foyer tier: records, damage, what must be refused at once, and foyer's ways to fail and to hang."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm_encoder.cache import foyer
from mm_encoder.cache.entry import DiskStats, Entry
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.contract import ImageMetadata
from mm_encoder.errors import CacheError, CacheLockedError

from ..helpers.programs import outcome_of
from ..helpers.waiting import HANG, until

needs_foyer = pytest.mark.skipif(
    find_spec("foyer") is None, reason="needs foyer-py, which needs Python 3.12 or newer"
)
MIB = 1024**2
SMALLEST = 64 * MIB
CHUNK = 4_150_000
REGIONS = "foyer-storage-direct-fs-*"


def key(name: object) -> bytes:
    return str(name).encode().rjust(32, b".")


def entry(nbytes: int, seed: int = 0) -> Entry:
    """Noise of `nbytes`, the same for the same seed."""
    noise = torch.randint(-(2**15), 2**15, (nbytes // 2, 1), generator=torch.Generator().manual_seed(seed))
    rows = noise.to(torch.int16).view(torch.bfloat16)
    length = len(rows)
    metadata = ImageMetadata(
        "m", f"{seed}", length, (length, 1), "bfloat16", "cpu", (1, 1), (0, length), ((1, 2, 2),), (3, 4)
    )
    return Entry(rows, metadata)


def same(one: Entry | None, other: Entry) -> bool:
    return (
        one is not None
        and one.metadata == other.metadata
        and one.rows.dtype == other.rows.dtype
        and torch.equal(one.rows.view(torch.int16), other.rows.view(torch.int16))
    )


Open = Callable[..., FoyerTier]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers in one directory, and closes them in the end."""
    tiers = []

    def open_tier(max_bytes: int = SMALLEST, path: Path = tmp_path / "cache") -> FoyerTier:
        tiers.append(FoyerTier(path, max_bytes))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


class Fake:
    """foyer, as far as the tier uses it, in memory, and open to meddling."""

    made: Fake

    def __init__(self, storage_path: str, memory_capacity: int, storage_capacity: int) -> None:
        self.records: dict[bytes, bytes] = {}
        self.inserts = self.closes = 0
        type(self).made = Fake.made = self

    @property
    def entries(self) -> int:
        return min(len(self.records), 8)

    def insert(self, name: bytes, value: bytes) -> None:
        # What foyer was given before may come back, so no name but a probe's is used twice.
        assert len(name) < 20 or name not in self.records
        self.inserts += 1
        self.records[name] = value

    def get(self, name: bytes) -> bytes | None:
        return self.records.get(name)

    def contains(self, name: bytes) -> bool:
        return name in self.records

    def close(self) -> None:
        self.closes += 1

    def entry_records(self) -> list[bytes]:
        """The names of chunks, then of manifests; probes are neither."""
        return sorted((name for name in self.records if len(name) > 20), key=len)


class PanicException(BaseException):
    """What foyer's own is called."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a fake in foyer's place; methods given by name are its own."""

    def install(**methods: Any) -> None:
        kind = type("Fake", (Fake,), methods)
        monkeypatch.setitem(sys.modules, "foyer", SimpleNamespace(HybridCache=kind))

    return install


# --- what is refused when it is made -----------------------------------------------------------------


def test_without_foyer_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "foyer", None)
    with pytest.raises(CacheError, match=r'Python 3\.12 .* pip install "mm-encoder\[foyer\]"'):
        FoyerTier(tmp_path / "cache", SMALLEST)
    assert list(tmp_path.iterdir()) == []


def test_another_package_of_that_name_is_not_foyer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foyer", SimpleNamespace())
    with pytest.raises(CacheError, match="foyer-py"):
        FoyerTier(tmp_path, SMALLEST)


def test_another_version_that_keeps_nothing_in_memory_is_refused(opened: Open, fake: Any) -> None:
    fake(entries=0)
    with pytest.raises(CacheError, match=r"0 shards instead of 8"):
        opened()
    assert Fake.made.closes == 1
    fake()
    opened()


@pytest.mark.parametrize("max_bytes", [0, 1, 16 * MIB, SMALLEST - 1])
def test_too_little_room_is_refused(tmp_path: Path, fake: Any, max_bytes: int) -> None:
    fake()
    with pytest.raises(
        CacheError, match=rf"at least {SMALLEST} bytes \(64 MiB\).* got {max_bytes}, rounded down"
    ):
        FoyerTier(tmp_path / "cache", max_bytes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("max_bytes", [64.0 * MIB, "64", True])
def test_room_is_an_int(tmp_path: Path, fake: Any, max_bytes: Any) -> None:
    fake()
    with pytest.raises(TypeError, match="max_bytes must be an int"):
        FoyerTier(tmp_path, max_bytes)


@needs_foyer
def test_all_of_the_room_is_taken_at_once_and_no_more_later(opened: Open, tmp_path: Path) -> None:
    tier = opened(SMALLEST + 16 * MIB - 1)
    files = sorted((tmp_path / "cache").glob(REGIONS))
    assert [file.stat().st_size for file in files] == [16 * MIB] * 4
    taken = sum(file.stat().st_blocks * 512 for file in files)
    assert taken >= SMALLEST
    for number in range(20):
        assert tier.put(key(number), entry(2 * CHUNK, number))
    assert sorted((tmp_path / "cache").glob(REGIONS)) == files
    assert sum(file.stat().st_blocks * 512 for file in files) == taken
    assert tier.stats().bytes == SMALLEST


@pytest.mark.parametrize("error", [28, 122])
def test_a_full_disk_is_seen_when_it_is_made(
    opened: Open, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    fake()

    def full(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("2"):
            raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CacheError, match=rf"no {SMALLEST} bytes .*: .*{os.strerror(error)}"):
            opened()
    assert list((tmp_path / "cache").glob(REGIONS)) == []
    opened()


@needs_foyer
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_small_disk_is_seen_when_it_is_made(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "small", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this system lets no disk be mounted")
    try:
        with pytest.raises(CacheError, match="No space left"):
            FoyerTier(tmp_path / "cache", 2 * SMALLEST)
        # What it took it has given back, and its lock.
        tier = FoyerTier(tmp_path / "cache", SMALLEST)
        assert tier.put(key("a"), entry(100))
        tier.close()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@needs_foyer
def test_too_few_descriptors_are_refused(tmp_path: Path) -> None:
    program = """
        import resource
        from mm_encoder.cache.foyer import FoyerTier
        from mm_encoder.errors import CacheError
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        try:
            FoyerTier(CHECKPOINT, 64 * 16 * 1024**2)
        except CacheError as error:
            print(error)
        FoyerTier(CHECKPOINT, 4 * 16 * 1024**2).close()
    """
    code, output, errors = outcome_of(program, tmp_path)
    assert (code, errors) == (0, "")
    assert output.startswith("foyer keeps 64 files open")
    assert "may open 100 (ulimit -n)" in output


def test_a_directory_of_others_is_left_as_it_is(tmp_path: Path, fake: Any) -> None:
    fake()
    names = ["a", "b", "foyer-storage-direct-fs-00000000.bak", "z"]
    for name in names:
        (tmp_path / name).write_bytes(b"theirs")
    with pytest.raises(CacheError, match=r"it holds a, b, foyer-storage-direct-fs-0+\.bak and 1 more"):
        FoyerTier(tmp_path, SMALLEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_two_backends_refuse_each_others_directory(tmp_path: Path, fake: Any) -> None:
    fake()
    FileTier(tmp_path / "files", SMALLEST).close()
    FoyerTier(tmp_path / "foyer", SMALLEST).close()
    with pytest.raises(CacheError, match="it holds mm-encoder-cache"):
        FoyerTier(tmp_path / "files", SMALLEST)
    with pytest.raises(CacheError, match="it holds foyer-storage"):
        FileTier(tmp_path / "foyer", SMALLEST)


def test_a_path_that_can_be_no_directory_is_refused(tmp_path: Path, fake: Any) -> None:
    fake()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(CacheError, match="cannot be opened"):
            FoyerTier(path, SMALLEST)


def test_a_link_in_the_place_of_a_region_is_not_followed(tmp_path: Path, fake: Any) -> None:
    fake()
    FoyerTier(tmp_path / "cache", SMALLEST).close()
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    region = tmp_path / "cache" / "foyer-storage-direct-fs-00000001"
    region.unlink()
    region.symlink_to(theirs)
    with pytest.raises(CacheError, match="allocated"):
        FoyerTier(tmp_path / "cache", SMALLEST)
    assert theirs.read_bytes() == b"theirs"
    FoyerTier(tmp_path / "cache", SMALLEST).close()


@needs_foyer
def test_a_directory_belongs_to_one_at_a_time(opened: Open, tmp_path: Path) -> None:
    tier = opened()
    with pytest.raises(CacheLockedError, match=f"{tmp_path}/cache is in use"):
        opened()
    program = """
        from mm_encoder.cache.foyer import FoyerTier
        from mm_encoder.errors import CacheLockedError
        try:
            FoyerTier(CHECKPOINT, 2**26)
        except CacheLockedError as error:
            print(error)
    """
    code, output, errors = outcome_of(program, tmp_path / "cache")
    assert (code, errors) == (0, "")
    assert f"{tmp_path}/cache is in use" in output
    # Neither of them has harmed the first.
    assert tier.put(key("a"), entry(CHUNK))
    assert same(tier.get(key("a")), entry(CHUNK))
    tier.close()
    assert same(opened().get(key("a")), entry(CHUNK))


@needs_foyer
def test_a_dropped_tier_is_closed(opened: Open, tmp_path: Path) -> None:
    tier = FoyerTier(tmp_path / "cache", SMALLEST)
    assert tier.put(key("a"), entry(100))
    del tier
    gc.collect()
    assert same(opened().get(key("a")), entry(100))


# --- entries -----------------------------------------------------------------------------------------


@needs_foyer
def test_entries_come_back_as_they_were_put(opened: Open) -> None:
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
def test_an_entry_owns_its_storage(opened: Open) -> None:
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
def test_another_capacity_wipes_what_was_there(opened: Open, tmp_path: Path, max_bytes: int) -> None:
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
def test_what_does_not_belong_together_is_wiped(opened: Open, tmp_path: Path, damage: str) -> None:
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
def test_foyer_evicts_and_that_is_no_error(opened: Open) -> None:
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
def test_what_does_not_fit_is_not_kept(opened: Open) -> None:
    tier = opened()
    assert not tier.put(key("large"), entry(9 * CHUNK))
    rows, metadata = entry(2)
    assert not tier.put(key("of a kind that is not kept"), Entry(rows.to(torch.int64), metadata))
    assert not tier.put(b"short key", entry(2))
    assert tier.stats() == DiskStats(0, SMALLEST, 0, 3)
    # None of them is foyer's fault, so the tier lives.
    assert tier.put(key("most"), entry(8 * CHUNK + 2))
    assert same(tier.get(key("most")), entry(8 * CHUNK + 2))


@needs_foyer
def test_a_header_may_be_long(opened: Open) -> None:
    rows, metadata = entry(CHUNK - 2)
    wide = Entry(rows, replace(metadata, grid_thws=((1, 1, 1),) * 130_000))
    tier = opened()
    assert tier.put(key("a"), wide)
    tier.close()
    assert same(opened().get(key("a")), wide)


def test_what_is_there_is_not_written_again(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(2 * CHUNK))
    inserts = Fake.made.inserts
    assert tier.put(key("a"), entry(2 * CHUNK))
    assert (Fake.made.inserts, tier.stats().entries) == (inserts, 1)


def test_a_key_is_a_miss_until_it_is_confirmed(opened: Open, fake: Any) -> None:
    # A get brings a manifest into foyer's memory, where `contains` takes it for written.
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


# --- damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_a_missing_record_is_a_miss_and_an_eviction(opened: Open, fake: Any, index: int) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(3 * CHUNK + 2))
    names = Fake.made.entry_records()
    assert len(names) == 4
    del Fake.made.records[names[index]]
    assert tier.get(key("a")) is None
    # Once it is known to be broken it is not read, and not counted, again.
    assert tier.get(key("a")) is None
    lost = index < 3  # without its manifest nothing tells that an entry was there
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


def test_chunks_of_another_entry_are_a_miss(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(2 * CHUNK))
    first, second, _ = Fake.made.entry_records()
    records = Fake.made.records
    records[first], records[second] = records[second], records[first]
    assert tier.get(key("a")) is None


def test_the_newest_record_of_a_key_is_the_first_to_be_read(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(100))
    Fake.made.records.update(dict.fromkeys(Fake.made.entry_records(), b"damaged"))
    assert tier.get(key("a")) is None
    assert tier.put(key("a"), entry(100))
    tier.close()
    records = Fake.made.records
    tier = opened()  # which knows nothing of the damage
    Fake.made.records.update(records)
    assert same(tier.get(key("a")), entry(100))
    assert tier.stats().errors == 0


def test_a_key_that_is_damaged_again_and_again_is_given_up(opened: Open, fake: Any) -> None:
    fake()
    tier = opened()
    for _ in range(8):
        assert tier.put(key("a"), entry(100))
        Fake.made.records.update(dict.fromkeys(Fake.made.entry_records(), b"damaged"))
        assert tier.get(key("a")) is None
    for _ in range(4):
        assert not tier.put(key("a"), entry(100))
    # That is no failure of foyer: the tier lives, and the key, once foyer has evicted it.
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
def test_damaged_region_files(opened: Open, tmp_path: Path, damage: Any, which: str) -> None:
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
def test_region_files_that_are_cut_while_open(opened: Open, tmp_path: Path) -> None:
    tier = opened()
    each = entry(2 * CHUNK + 100)
    assert tier.put(key("a"), each)
    for number in range(10):  # which push it out of foyer's memory
        assert tier.put(key(number), entry(100, number))
    for file in (tmp_path / "cache").glob(REGIONS):
        os.truncate(file, 0)
    assert tier.get(key("a")) is None
    assert tier.stats().errors == 1
    assert tier.put(key("b"), each)
    assert same(tier.get(key("b")), each)


# --- when foyer fails, or hangs ----------------------------------------------------------------------


def never(cache: Fake, name: bytes) -> bool:
    return False


def test_after_three_unconfirmed_puts_it_is_disabled(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_SECONDS", 0.01)
    fake(contains=never)
    tier = opened()
    for count in (1, 2, 3):
        assert not tier.put(key(count), entry(100))
        assert tier.stats() == DiskStats(0, SMALLEST, 0, count)
    dead = Fake.made
    assert dead.closes == 1
    inserts = dead.inserts
    assert not tier.put(key("a"), entry(100))
    assert tier.get(key("a")) is None
    assert dead.inserts == inserts
    tier.close()
    assert dead.closes == 1
    # The first failure of a kind is logged, not each; and the end.
    assert [(record.levelno, vars(record)["mm_event"]) for record in caplog.records] == [
        (logging.WARNING, "cache_error"),
        (logging.ERROR, "cache_error"),
    ]
    assert "3 puts in a row" in caplog.messages[-1]
    fake()
    assert opened().put(key("a"), entry(100))  # the directory was given free


def test_failures_that_are_not_in_a_row_disable_nothing(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_SECONDS", 0.01)
    fails = True
    fake(contains=lambda cache, name: not fails and name in cache.records)
    tier = opened()
    for number in range(4):
        for fails in (True, True, False):
            assert tier.put(key(number), entry(100)) is not fails
    assert tier.stats().errors == 8


def test_a_chunk_that_is_not_confirmed_leaves_no_manifest(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_SECONDS", 0.01)
    fake(insert=lambda cache, name, value: Fake.insert(cache, name, value) if len(value) < CHUNK else None)
    tier = opened()
    assert not tier.put(key("a"), entry(CHUNK + 100))
    assert Fake.made.entry_records() == []


def test_a_close_that_hangs_is_given_up(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foyer, "_CLOSE_SECONDS", 0.01)
    opens = threading.Event()
    fake(close=lambda cache: opens.wait())
    tier = opened()
    assert tier.put(key("a"), entry(100))
    tier.close()
    assert "does not close" in caplog.messages[-1]
    tier.close()
    assert tier.get(key("a")) is None
    assert not tier.put(key("b"), entry(100))
    # foyer's threads may still write, so nobody else may.
    with pytest.raises(CacheLockedError):
        opened()
    opens.set()
    until(lambda: not any(thread.name == "mm-encoder-foyer-close" for thread in threading.enumerate()))
    opened()


def test_close_ends_the_wait_for_confirmation(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foyer, "_CONFIRM_SECONDS", 1000.0)
    waits = threading.Event()

    def contains(cache: Fake, name: bytes) -> bool:
        if cache.entry_records():
            waits.set()
        return False

    fake(contains=contains)
    tier = opened()
    results = []
    writer = threading.Thread(target=lambda: results.append(tier.put(key("a"), entry(100))), daemon=True)
    writer.start()
    assert waits.wait(10)
    tier.close()
    writer.join(10)
    assert results == [False]
    assert tier.stats() == DiskStats(0, SMALLEST, 0, 0)
    opened()  # close had not to give up


def test_a_get_that_hangs_does_not_hold_up_close(
    opened: Open, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foyer, "_CLOSE_SECONDS", 0.01)
    hangs, opens = threading.Event(), threading.Event()

    def get(cache: Fake, name: bytes) -> bytes | None:
        hangs.set()
        opens.wait()
        return Fake.get(cache, name)

    fake(get=get)
    tier = opened()
    assert tier.put(key("a"), entry(100))
    reader = threading.Thread(target=tier.get, args=[key("a")])
    reader.start()
    assert hangs.wait(10)
    tier.close()
    assert Fake.made.closes == 1
    opens.set()
    reader.join()


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


ERRORS = [
    PanicException("index out of bounds"),
    RuntimeError("checksum mismatch"),
    OverflowError("too large"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_foyer_are_misses(opened: Open, fake: Any, error: BaseException) -> None:
    fake(__init__=failing(error))
    with pytest.raises(CacheError, match=str(error)):
        opened()
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(100))
    for name, call in (
        ("get", lambda: tier.get(key("a")) is None),
        ("contains", lambda: tier.get(key("b")) is None),
        ("insert", lambda: not tier.put(key("c"), entry(100))),
    ):
        errors = tier.stats().errors
        setattr(Fake.made, name, failing(error))
        assert call()
        assert tier.stats().errors == errors + 1
        delattr(Fake.made, name)
    assert tier.put(key("d"), entry(100))
    assert same(tier.get(key("d")), entry(100))
    Fake.made.__dict__["close"] = failing(error)
    tier.close()
    opened()  # whatever close said, the directory is free


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(opened: Open, fake: Any, kind: type[BaseException]) -> None:
    fake()
    tier = opened()
    assert tier.put(key("a"), entry(100))
    for name in ("get", "contains"):
        setattr(Fake.made, name, failing(kind()))
        with pytest.raises(kind):
            tier.get(key("a"))
        delattr(Fake.made, name)
    Fake.made.__dict__["insert"] = failing(kind())
    with pytest.raises(kind):
        tier.put(key("b"), entry(100))
    del Fake.made.__dict__["insert"]
    assert tier.stats().errors == 0
    assert tier.put(key("b"), entry(100))
    assert same(tier.get(key("a")), entry(100))


@needs_foyer
def test_after_close_all_is_a_miss(opened: Open) -> None:
    tier = opened()
    assert tier.put(key("a"), entry(100))
    tier.close()
    tier.close()
    assert tier.get(key("a")) is None
    assert not tier.put(key("b"), entry(100))
    assert tier.stats() == DiskStats(1, SMALLEST, 0, 0)
    assert opened().get(key("b")) is None


@needs_foyer
@pytest.mark.threads
def test_readers_while_it_writes_and_closes(opened: Open) -> None:
    tier = opened(2 * SMALLEST)
    entries = [entry(CHUNK // 2 * (number % 5), number) for number in range(10)]
    wrong: list[int] = []
    found: set[int] = set()
    done = threading.Event()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        while not done.is_set():
            number = chance.randrange(10)
            got = tier.get(key(number))
            if got is not None:
                found.add(number)
                if not same(got, entries[number]):
                    wrong.append(number)

    readers = [threading.Thread(target=read, args=[seed]) for seed in range(3)]
    for reader in readers:
        reader.start()
    try:
        for number, each in enumerate(entries):
            assert tier.put(key(number), each)
        until(lambda: len(found) == 10)
        tier.close()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert tier.stats().errors == 0
    tier = opened(2 * SMALLEST)
    assert all(same(tier.get(key(number)), each) for number, each in enumerate(entries))


# --- other processes ---------------------------------------------------------------------------------

PROGRAM = """
import random, resource
from mm_encoder.cache.entry import Entry
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.contract import ImageMetadata
from mm_encoder.errors import CacheLockedError
warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads is forked

def key(name):
    return str(name).encode().rjust(32, b".")

def entry(nbytes, seed):
    noise = torch.randint(-2**15, 2**15, (nbytes // 2, 1), generator=torch.Generator().manual_seed(seed))
    rows = noise.to(torch.int16).view(torch.bfloat16)
    return Entry(rows, ImageMetadata("m", str(seed), 1, (1,), "bfloat16", "cpu", (1,), (0, 1), (), (3, 4)))

def same(one, other):
    rows = [each.rows.view(torch.int16) for each in (one, other)]
    return one.metadata == other.metadata and torch.equal(*rows)
"""


def outcome(program: str, path: Path, limit: int = HANG) -> tuple[int, str, str]:
    return outcome_of(f"{PROGRAM}{program}", path, limit=limit)


@needs_foyer
def test_a_forked_child_touches_nothing(tmp_path: Path) -> None:
    program = """
tier = FoyerTier(CHECKPOINT, 2**26)
assert tier.put(key("a"), entry(1000, 0))

def drop():
    global tier
    del tier
    gc.collect()

for end in (sys.exit, tier.close, drop, lambda: os._exit(0)):
    child = os.fork()
    if child == 0:
        assert tier.get(key("a")) is None
        assert not tier.put(key("b"), entry(1000, 1))
        assert tier.stats().errors == 0
        end()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    try:
        FoyerTier(CHECKPOINT, 2**26)
    except CacheLockedError:
        print("locked")
assert tier.put(key("c"), entry(1000, 2))
assert same(tier.get(key("a")), entry(1000, 0)) and same(tier.get(key("c")), entry(1000, 2))
del end
tier.close()
tier = FoyerTier(CHECKPOINT, 2**26)
assert same(tier.get(key("a")), entry(1000, 0)) and same(tier.get(key("c")), entry(1000, 2))
assert tier.get(key("b")) is None
"""
    assert outcome(program, tmp_path) == (0, "locked\n" * 4, "")


@needs_foyer
def test_a_forked_child_may_open_one_of_its_own(tmp_path: Path) -> None:
    program = """
tier = FoyerTier(CHECKPOINT + "/parent", 2**26)
child = os.fork()
if child == 0:
    tier = FoyerTier(CHECKPOINT + "/child", 2**26)
    assert tier.put(key("a"), entry(1000, 0)) and same(tier.get(key("a")), entry(1000, 0))
    sys.exit()
print(os.waitpid(child, 0)[1])
"""
    assert outcome(program, tmp_path) == (0, "0\n", "")


@needs_foyer
@pytest.mark.parametrize("busy", ["nothing", "get", "put"])
def test_the_interpreter_exits_without_close(opened: Open, tmp_path: Path, busy: str) -> None:
    # A thread that comes back from foyer when the interpreter is gone would abort the process.
    program = f"""
tier = FoyerTier(CHECKPOINT, 2**26)
first, large = entry(4_150_000, 0), entry(4_150_000, 1)
assert tier.put(key("a"), first)
results = []

def get():
    # Kept, since tensors too must not be given free when the interpreter is gone.
    for _ in range(30):
        results.append(tier.get(key("a")))

def put():
    while tier.put(key(len(results)), large):
        results.append(None)

def nothing():
    results.extend([None] * 3)

for _ in range(2 if "{busy}" == "get" else 1):
    threading.Thread(target={busy}, daemon=True).start()
until(lambda: len(results) >= 3)
print("end")
"""
    assert outcome(program, tmp_path / "cache") == (0, "end\n", "")
    found = opened().get(key("a"))
    if busy != "put":  # which may have pushed it out
        assert found is not None
        assert torch.equal(found.rows.view(torch.int16), entry(4_150_000, 0).rows.view(torch.int16))


@needs_foyer
def test_the_interpreter_exits_although_foyer_does_not_close(tmp_path: Path) -> None:
    program = """
import foyer, types
import mm_encoder.cache.foyer as tiers
tiers._CLOSE_SECONDS = 0.05

class Hangs:
    def __init__(self, *arguments, **settings):
        self.cache = real(*arguments, **settings)
    def __getattr__(self, name):
        return getattr(self.cache, name)
    def close(self):
        time.sleep(1000)

real, foyer.HybridCache = foyer.HybridCache, Hangs
tier = FoyerTier(CHECKPOINT, 2**26)
assert tier.put(key("a"), entry(1000, 0))
tier.close()
print("end")
"""
    assert outcome(program, tmp_path) == (0, "end\n", "")


@needs_foyer
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What was put is there afterwards, and nothing that is wrong."""
    rounds = 60 if os.environ.get("FUZZ") else 5
    program = f"""
import shutil
chance = random.Random(0)

def rows_of(number):
    return entry(2 * random.Random(number).randrange(5_000_000), number)

def write(path, pipe, first):
    tier = FoyerTier(path, 2**28)
    for number in range(first, first + 12):
        each = rows_of(number)
        os.write(pipe, b"." if tier.put(key(number), each) else b"x")

def check(path, put):
    tier = FoyerTier(path, 2**28)
    for number in range(put + 12):
        found = tier.get(key(number))
        assert same(found, rows_of(number)) if found else number >= put, number
    assert tier.put(key("after"), rows_of(0)) and same(tier.get(key("after")), rows_of(0))
    tier.close()

def forked(work, *arguments):
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

killed = 0
for number in range({rounds}):
    path = f"{{CHECKPOINT}}/{{number}}"
    put = 0
    for _ in range(2):  # the second time after a kill
        output, pipe = os.pipe()
        child = forked(write, path, pipe, put)
        os.close(pipe)
        time.sleep(chance.uniform(0.01, 0.4))
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        while done := os.read(output, 100):
            assert set(done) == {{ord(".")}}
            put += len(done)
        os.close(output)
    child = forked(check, path, put)
    assert os.waitpid(child, 0)[1] == 0
    shutil.rmtree(path)
print("killed", killed > 0)
"""
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert outcome(program, tmp_path, limit=HANG + 20 * rounds) == (0, "killed True\n", "")
