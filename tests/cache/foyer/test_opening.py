"""Opening a foyer tier: what it takes, what it refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm_encoder.cache.files import FileTier
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.errors import CacheError, CacheLockedError

from ...helpers.programs import outcome_of
from .conftest import CHUNK, MIB, REGIONS, SMALLEST, Fake, Open, entry, key, needs_foyer, same


def test_without_foyer_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "foyer", None)
    with pytest.raises(CacheError, match=r"Python 3\.12 .* install with the extra foyer, see docs/inst"):
        FoyerTier(tmp_path / "cache", SMALLEST)
    assert list(tmp_path.iterdir()) == []


def test_another_package_of_that_name_is_not_foyer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foyer", SimpleNamespace())
    with pytest.raises(CacheError, match="foyer-py"):
        FoyerTier(tmp_path, SMALLEST)


def test_a_version_that_keeps_nothing_in_memory_is_refused(opened: Open, fake: Any) -> None:
    fake(entries=0)
    with pytest.raises(CacheError, match=r"found 0 shards instead of 8"):
        opened()
    assert Fake.made.closes == 1
    fake()
    opened()


@pytest.mark.parametrize("max_bytes", [0, 1, 16 * MIB, SMALLEST - 1])
def test_a_budget_below_the_minimum_is_refused(tmp_path: Path, fake: Any, max_bytes: int) -> None:
    fake()
    with pytest.raises(
        CacheError, match=rf"at least {SMALLEST} bytes \(64 MiB\).* got {max_bytes}, rounded down"
    ):
        FoyerTier(tmp_path / "cache", max_bytes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("max_bytes", [64.0 * MIB, "64", True])
def test_max_bytes_must_be_an_int(tmp_path: Path, fake: Any, max_bytes: Any) -> None:
    fake()
    with pytest.raises(TypeError, match="max_bytes must be an int"):
        FoyerTier(tmp_path, max_bytes)


@needs_foyer
def test_the_whole_budget_is_allocated_at_open_and_not_exceeded(opened: Open, tmp_path: Path) -> None:
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
def test_a_full_disk_is_reported_at_open(
    opened: Open, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    fake()

    def full(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("2"):
            raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CacheError, match=rf"cannot allocate {SMALLEST} bytes .*: .*{os.strerror(error)}"):
            opened()
    assert list((tmp_path / "cache").glob(REGIONS)) == []
    opened()


@needs_foyer
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_small_disk_is_reported_at_open(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "small", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this system lets no disk be mounted")
    try:
        with pytest.raises(CacheError, match="No space left"):
            FoyerTier(tmp_path / "cache", 2 * SMALLEST)
        # The failed open released its lock and the allocated space.
        tier = FoyerTier(tmp_path / "cache", SMALLEST)
        assert tier.put(key("a"), entry(100))
        tier.close()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@needs_foyer
def test_too_few_file_descriptors_are_refused(tmp_path: Path) -> None:
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


def test_a_directory_of_foreign_files_is_refused_and_unchanged(tmp_path: Path, fake: Any) -> None:
    fake()
    names = ["a", "b", "foyer-storage-direct-fs-00000000.bak", "z"]
    for name in names:
        (tmp_path / name).write_bytes(b"foreign")
    with pytest.raises(CacheError, match=r"it contains a, b, foyer-storage-direct-fs-0+\.bak and 1 more"):
        FoyerTier(tmp_path, SMALLEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_two_backends_refuse_each_others_directory(tmp_path: Path, fake: Any) -> None:
    fake()
    FileTier(tmp_path / "files", SMALLEST).close()
    FoyerTier(tmp_path / "foyer", SMALLEST).close()
    with pytest.raises(CacheError, match="it contains mm-encoder-cache"):
        FoyerTier(tmp_path / "files", SMALLEST)
    with pytest.raises(CacheError, match="it contains foyer-storage"):
        FileTier(tmp_path / "foyer", SMALLEST)


def test_a_file_in_the_path_is_refused(tmp_path: Path, fake: Any) -> None:
    fake()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(CacheError, match="cannot be opened"):
            FoyerTier(path, SMALLEST)


def test_a_link_in_place_of_a_region_is_not_followed(tmp_path: Path, fake: Any) -> None:
    fake()
    FoyerTier(tmp_path / "cache", SMALLEST).close()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"foreign")
    region = tmp_path / "cache" / "foyer-storage-direct-fs-00000001"
    region.unlink()
    region.symlink_to(foreign)
    with pytest.raises(CacheError, match="cannot allocate"):
        FoyerTier(tmp_path / "cache", SMALLEST)
    assert foreign.read_bytes() == b"foreign"
    FoyerTier(tmp_path / "cache", SMALLEST).close()


@needs_foyer
def test_a_second_open_of_a_directory_is_refused(opened: Open, tmp_path: Path) -> None:
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
    # Neither attempt harmed the first tier.
    assert tier.put(key("a"), entry(CHUNK))
    assert same(tier.get(key("a")), entry(CHUNK))
    tier.close()
    assert same(opened().get(key("a")), entry(CHUNK))


@needs_foyer
def test_a_collected_tier_is_closed(opened: Open, tmp_path: Path) -> None:
    tier = FoyerTier(tmp_path / "cache", SMALLEST)
    assert tier.put(key("a"), entry(100))
    del tier
    gc.collect()
    assert same(opened().get(key("a")), entry(100))
