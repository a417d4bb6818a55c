"""Shared parts of the foyer tests: entries by size, tiers that are closed afterwards, and a fake foyer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm_encoder.cache.entry import Entry
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.contract import ImageMetadata

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
    """An entry of `nbytes` of noise, the same for the same seed."""
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
    """Open tiers in one directory; all are closed at the end."""
    tiers = []

    def open_tier(max_bytes: int = SMALLEST, path: Path = tmp_path / "cache") -> FoyerTier:
        tiers.append(FoyerTier(path, max_bytes))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


class Fake:
    """The part of foyer that the tier uses, in memory; tests may replace its methods."""

    made: Fake

    def __init__(self, storage_path: str, memory_capacity: int, storage_capacity: int) -> None:
        self.records: dict[bytes, bytes] = {}
        self.inserts = self.closes = 0
        type(self).made = Fake.made = self

    @property
    def entries(self) -> int:
        return min(len(self.records), 8)

    def insert(self, name: bytes, value: bytes) -> None:
        # foyer may bring back older values, so no name but a probe's may be used twice.
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
        """Return the names of the chunks, then of the manifests, without probes."""
        return sorted((name for name in self.records if len(name) > 20), key=len)


class PanicException(BaseException):
    """Has the name of foyer's own panic class."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a fake in place of foyer; keyword arguments replace its methods."""

    made: list[type[Fake]] = []

    def install(**methods: Any) -> None:
        kind = type("Fake", (Fake,), methods)
        made.append(kind)
        monkeypatch.setitem(sys.modules, "foyer", SimpleNamespace(HybridCache=kind))

    yield install
    # A class is in cycles with itself, and its records are megabytes.
    for kind in made:
        kind.made.records.clear()
