"""The cache from the command line: `encode --cache`, `key`, and what may be asked of a cache's directory."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from mm_encoder import CacheConfig, Encoder
from mm_encoder.cache import upkeep
from mm_encoder.cache.directory import LEDGER, LOCK
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.cli import build_app
from mm_encoder.cli import cache as caches
from mm_encoder.cli.options import parse_bytes
from mm_encoder.cli.terminal import bytes_of
from mm_encoder.families.glm53 import Glm53

from .helpers.command import GOLDEN_IMAGES, call, picture, run

pytestmark = pytest.mark.usefixtures("plain_output")


ORIGINS = re.compile(r"images/s; (\d+) from memory, (\d+) from disk, (\d+) computed\n")


def encode(checkpoint: Path, image: Path, out: Path, cache: Path, *options: object) -> tuple[int, ...]:
    """Encode with a cache; how many results came from memory, from disk, and were computed."""
    done = call("encode", checkpoint, image, "--out", out, "--device", "cpu", "--cache", cache, *options)
    assert (done.exit_code, done.stderr) == (0, "")
    return origins(done.stdout)


def origins(stdout: str) -> tuple[int, ...]:
    found = ORIGINS.search(stdout)
    assert found is not None, stdout
    return tuple(map(int, found.groups()))


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header, whose entries come in no set order, and the rest."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def state(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: contents of files, None for anything else."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else None
        for path in sorted(folder.rglob("*"))
    }


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.rows"))


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, glm53_checkpoint: Path) -> dict[str, bytes]:
    """The files of a cache's directory with three entries."""
    folder = tmp_path_factory.mktemp("cache")
    images = [(GOLDEN_IMAGES / name).read_bytes() for name in ("b.png", "f.png", "h.png")]
    config = CacheConfig(disk_path=folder, disk_bytes=4 * 1024**2, max_entry_bytes=1024**2)
    with Encoder(glm53_checkpoint, device="cpu", cache=config) as encoder:
        encoder.generate(images)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def directory(tmp_path: Path, filled: dict[str, bytes]) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name, data in filled.items():
        (folder / name).write_bytes(data)
    return folder


# encode --cache


def test_the_second_run_is_all_from_disk_and_a_new_picture_is_computed(
    tmp_path: Path, glm53_checkpoint: Path
) -> None:
    images, cache = tmp_path / "in", tmp_path / "new" / "cache"
    for seed in range(3):
        picture(images / f"{seed}.png", 50 + 20 * seed, seed=seed)
    outs = [tmp_path / f"{number}.safetensors" for number in range(4)]
    drawn = tmp_path / "drawn.png"
    assert encode(glm53_checkpoint, images, outs[0], cache) == (0, 0, 3)
    assert encode(glm53_checkpoint, images, outs[1], cache, "--preview", drawn) == (0, 3, 0)
    assert drawn.is_file()
    picture(images / "3.png", seed=3)
    assert encode(glm53_checkpoint, images, outs[2], cache) == (0, 3, 1)
    assert call("encode", glm53_checkpoint, images, "--out", outs[3], "--device", "cpu").exit_code == 0

    assert parts(outs[0]) == parts(outs[1])
    assert parts(outs[2]) == parts(outs[3])
    before, after = load_file(outs[0]), load_file(outs[2])
    assert set(after) == {*before, "3.png"}
    assert all(torch.equal(after[name], rows) for name, rows in before.items())


def test_the_line_is_as_it_was_without_a_cache(tmp_path: Path, glm53_checkpoint: Path) -> None:
    image, out = picture(tmp_path / "a.png"), tmp_path / "o.safetensors"
    done = call("encode", glm53_checkpoint, image, "--out", out, "--device", "cpu")
    assert re.search(r"images/s$", done.stdout, re.MULTILINE)
    assert "computed" not in done.stdout


def test_other_weights_dtypes_and_names_are_others(tmp_path: Path, glm53_checkpoint: Path) -> None:
    image, out, cache = picture(tmp_path / "a.png"), tmp_path / "o.safetensors", tmp_path / "cache"
    assert encode(glm53_checkpoint, image, out, cache) == (0, 0, 1)
    assert encode(glm53_checkpoint, image, out, cache, "--model", "mine") == (0, 0, 1)
    assert encode(glm53_checkpoint, image, out, cache, "--dtype", "bfloat16") == (0, 0, 1)
    assert encode(glm53_checkpoint, image, out, cache, "--dtype", "bfloat16", "--replicas", 2) == (0, 1, 0)
    [rows] = load_file(out).values()
    assert rows.dtype == torch.bfloat16


def test_the_same_picture_twice_in_a_run_and_faults(tmp_path: Path, glm53_checkpoint: Path) -> None:
    images, out = tmp_path / "in", tmp_path / "o.safetensors"
    for name in ("a.png", "b.png", "c.png"):
        picture(images / name)
    (images / "bad.png").write_bytes(b"\x89PNG no picture")
    for computed in (True, False):
        done = call(
            "encode", glm53_checkpoint, images, "--out", out, "--device", "cpu", "--cache", tmp_path / "c"
        )
        assert done.exit_code == 1
        [line] = done.stderr.splitlines()
        assert line.startswith(f"{images / 'bad.png'}: ")
        memory, disk, new = origins(done.stdout)
        assert memory + disk + new == 3
        assert (disk, new > 0) == ((0, True) if computed else (1, False))
        one, *others = load_file(out).values()
        assert len(others) == 2
        assert all(torch.equal(one, other) for other in others)
    assert len(entries(tmp_path / "c")) == 1


def test_the_budget_holds(tmp_path: Path, glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_LEAST_BYTES", 4)
    images, out, cache = tmp_path / "in", tmp_path / "o.safetensors", tmp_path / "cache"
    for seed in range(6):
        picture(images / f"{seed}.png", seed=seed)
    assert encode(glm53_checkpoint, images, out, cache, "--cache-bytes", "20K") == (0, 0, 6)
    kept = len(entries(cache))
    assert 0 < kept < 6
    assert sum(path.stat().st_size for path in cache.iterdir()) <= 20 * 1024
    # A smaller one evicts at once; all are larger than a quarter of it.
    done = call(
        "encode", glm53_checkpoint, images / "0.png", "--out", out, "--device", "cpu",
        "--cache", cache, "--cache-bytes", "4k",
    )  # fmt: skip
    assert done.exit_code == 0
    assert done.stderr == "mm-encoder: cache: results larger than 1.0 KiB (1024 bytes), not stored: 1\n"
    assert entries(cache) == []


def test_what_could_not_be_written_is_said(
    tmp_path: Path, glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileTier, "put", lambda *_: False)
    image, out = picture(tmp_path / "a.png"), tmp_path / "o.safetensors"
    done = call("encode", glm53_checkpoint, image, "--out", out, "--device", "cpu", "--cache", tmp_path / "c")
    assert (done.exit_code, done.stderr) == (0, "mm-encoder: cache: results not written: 1\n")
    assert out.is_file()


def test_a_damaged_entry_is_computed_again(tmp_path: Path, glm53_checkpoint: Path) -> None:
    image, cache = picture(tmp_path / "a.png"), tmp_path / "cache"
    outs = [tmp_path / f"{number}.safetensors" for number in range(3)]
    assert encode(glm53_checkpoint, image, outs[0], cache) == (0, 0, 1)
    [path] = entries(cache)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = call("encode", glm53_checkpoint, image, "--out", outs[1], "--device", "cpu", "--cache", cache)
    assert (done.exit_code, done.stderr) == (0, "mm-encoder: cache: errors: 1\n")
    assert origins(done.stdout) == (0, 0, 1)
    assert encode(glm53_checkpoint, image, outs[2], cache) == (0, 1, 0)
    assert parts(outs[0]) == parts(outs[1]) == parts(outs[2])


def make_file(path: Path) -> None:
    path.write_text("a file")


def make_others(path: Path) -> None:
    path.mkdir()
    (path / "\x1b[31mthesis.tex").write_text("not a cache's")


def make_empty(path: Path) -> None:
    path.mkdir()


def make_nothing(path: Path) -> None:
    pass


def make_looped(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_file, make_others, make_looped])
def test_encode_takes_no_other_s_directory(
    tmp_path: Path, glm53_checkpoint: Path, make: Callable[[Path], None]
) -> None:
    image, out, cache = picture(tmp_path / "a.png"), tmp_path / "o.safetensors", tmp_path / "cache"
    make(cache)
    before = state(tmp_path)
    done = call("encode", glm53_checkpoint, image, "--out", out, "--device", "cpu", "--cache", cache)
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert str(cache) in line
    assert line.isprintable()
    assert state(tmp_path) == before


def test_encode_refuses_a_directory_in_use(tmp_path: Path, glm53_checkpoint: Path, directory: Path) -> None:
    image, out = picture(tmp_path / "a.png"), tmp_path / "o.safetensors"
    tier = FileTier(directory, 1024**2)
    try:
        done = call("encode", glm53_checkpoint, image, "--out", out, "--device", "cpu", "--cache", directory)
        assert (done.exit_code, done.stdout) == (2, "")
        [line] = done.stderr.splitlines()
        assert "in use" in line
        assert not out.exists()
    finally:
        tier.close()
    assert encode(glm53_checkpoint, image, out, directory) == (0, 0, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache-bytes", "4G"], "--cache"),
        (["--cache", "c", "--cache-bytes", "4"], "at least 1M"),
        (["--cache", "c", "--cache-bytes", "0"], "at least 1M"),
        (["--cache", "c", "--cache-bytes", "much"], "512M"),
        (["--cache", "c", "--cache-bytes", "-1"], "512M"),
        (["--cache", "c", "--cache-bytes", "1.5G"], "512M"),
        (["--cache", "c", "--cache-bytes", ""], "512M"),
        (["--cache", "c", "--cache-bytes", "9" * 5000], "512M"),
    ],
)
def test_impossible_budgets(
    tmp_path: Path,
    glm53_checkpoint: Path,
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "a.png")
    done = call("encode", glm53_checkpoint, "a.png", "--out", "new/o.safetensors", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1048576", 1024**2), ("512M", 512 * 1024**2), ("4G", 4 * 1024**3), ("4g", 4 * 1024**3),
        ("4GiB", 4 * 1024**3), ("4gb", 4 * 1000**3), ("3K", 3072), ("2T", 2 * 1024**4), (" 1KB ", 1000),
    ],
)  # fmt: skip
def test_bytes_are_written_as_common_tools_do(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "4 G", "4B", "4P", "4GG", "1e9", "٤G", "0x10", "4G\n4", "+4G"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="512M"):
        parse_bytes(text)


def test_a_budget_has_room_for_four_of_the_largest() -> None:
    def made(text: str | None) -> tuple[int, int]:
        config = caches.cache_config(Path("c"), None if text is None else parse_bytes(text))
        assert config is not None
        return config.disk_bytes, config.max_entry_bytes

    assert made(None) == (4 * 1024**3, 256 * 1024**2)
    assert made("1T") == (1024**4, 256 * 1024**2)
    assert made("1M") == (1024**2, 256 * 1024)
    assert made("1048579") == (1024**2 + 3, 256 * 1024)
    assert caches.cache_config(None, None) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB (1024 bytes)"), (1536, "1.5 KiB (1536 bytes)"),
     (5 * 1024**5, "5120.0 TiB (5629499534213120 bytes)")],
)  # fmt: skip
def test_bytes_are_shown_for_people_and_in_full(count: int, text: str) -> None:
    assert bytes_of(count) == text


# key


def test_the_key_is_the_one_that_encode_keeps_results_under(
    tmp_path: Path, glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, cache = picture(tmp_path / "a.png"), tmp_path / "cache"
    options = ["--device", "cpu", "--dtype", "bfloat16", "--model", "me/mine", "--family", "glm53"]
    done = call(
        "encode", glm53_checkpoint, image, "--out", tmp_path / "o.safetensors", "--cache", cache, *options
    )
    assert done.exit_code == 0

    def build(*_: object) -> None:
        raise AssertionError("a tower was built")

    monkeypatch.setattr(Glm53, "build_tower", build)
    done = call("key", glm53_checkpoint, image, *options, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert [path.stem for path in entries(cache)] == [said["key"]]
    assert said["fields"]["dtype"] == "torch.bfloat16"
    assert said["fields"]["family"] == "glm53"
    assert len(said["fields"]["weights"]) == len(said["fields"]["content"]) == 64
    assert said["fields"]["torch"] == torch.__version__


def test_the_key_for_people_has_every_field_in_full_on_a_line(
    tmp_path: Path, glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    image = picture(tmp_path / "a.png")
    said = json.loads(call("key", glm53_checkpoint, image, "--json").stdout)
    done = call("key", glm53_checkpoint, image)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = dict(re.split(r"  +|$", line, maxsplit=1) for line in done.stdout.splitlines())
    assert list(lines) == [*said["fields"], "key"]
    assert lines == {**said["fields"], "key": said["key"]}


def test_what_changes_the_key(tmp_path: Path, glm53_checkpoint: Path) -> None:
    one, two = picture(tmp_path / "1.png"), picture(tmp_path / "2.png", seed=2)
    copied = tmp_path / "copy"
    copied.write_bytes(one.read_bytes())

    def key(image: Path, *options: str) -> str:
        done = call("key", glm53_checkpoint, image, "--device", "cpu", "--json", *options)
        assert (done.exit_code, done.stderr) == (0, "")
        return str(json.loads(done.stdout)["key"])

    plain = key(one)
    assert plain == key(one) == key(copied) == key(one, "--dtype", "float32", "--family", "glm53")
    assert len({plain, key(two), key(one, "--model", "m"), key(one, "--dtype", "float16")}) == 4


def test_key_says_whose_fault_it_is(tmp_path: Path, glm53_checkpoint: Path) -> None:
    good, bad = picture(tmp_path / "a.png"), tmp_path / "bad\n.png"
    bad.write_bytes(b"no picture")
    for image in (bad, tmp_path / "gone.png", tmp_path):
        done = call("key", glm53_checkpoint, image, "--device", "cpu")
        assert (done.exit_code, done.stdout) == (1, "")
        [line] = done.stderr.splitlines()
        assert line.startswith(f"{str(image).encode('unicode_escape').decode()}: ")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "processor_config.json"):
        (broken / name).write_bytes((glm53_checkpoint / name).read_bytes())
    (broken / "model.safetensors").write_bytes(b"garbage")
    for arguments, said in (
        ((tmp_path / "gone", good), "must be a directory"),
        ((broken, good), "model.safetensors cannot be read"),
        ((glm53_checkpoint, good, "--device", "tpu"), "device must be"),
        ((glm53_checkpoint, good, "--device", "cuda:99"), "no device"),
        ((glm53_checkpoint, good, "--family", "clip"), "family must be"),
    ):
        done = call("key", *arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        [line] = done.stderr.splitlines()
        assert line.startswith("mm-encoder: ")
        assert said in line


# cache stats, verify, clear


def facts(stdout: str) -> dict[str, str]:
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in lines)


def test_stats_says_what_is_there_in_use_or_not(directory: Path) -> None:
    size = sum(path.stat().st_size for path in entries(directory))
    expected = {
        "backend": "files",
        "entries": "3",
        "bytes": bytes_of(size),
        "budget": "not recorded: each encoder sets its own when it opens the directory",
    }
    before = state(directory)
    done = call("cache", "stats", directory)
    assert (done.exit_code, done.stderr) == (0, "")
    assert facts(done.stdout) == expected
    assert state(directory) == before

    tier = FileTier(directory, 1024**2)
    try:
        assert facts(call("cache", "stats", directory).stdout) == expected
    finally:
        tier.close()

    (directory / f"{'0' * 64}.tmp").write_bytes(b"half")
    (directory / "notes.txt").write_text("mine")
    more = facts(call("cache", "stats", directory).stdout)
    assert more.pop("unfinished").startswith("1 files")
    assert more.pop("foreign").startswith("1 files")
    assert more == expected


def test_verify_finds_all_whole_even_in_use(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    before = state(directory)
    size = sum(path.stat().st_size for path in entries(directory))
    tier = FileTier(directory, 1024**2)
    try:
        done = call("cache", "verify", directory)
    finally:
        tier.close()
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"3 intact entries, {bytes_of(size)}; 0 damaged\n"
    assert {k: v for k, v in state(directory).items() if k != LEDGER} == {
        k: v for k, v in before.items() if k != LEDGER
    }


def test_verify_names_every_damaged_file_and_its_reason(directory: Path) -> None:
    first, second, third = entries(directory)
    whole = first.read_bytes()
    names = {number: directory / f"{number:064x}.rows" for number in range(6)}
    names[0].write_bytes(b"")
    names[1].write_bytes(whole)  # another's
    names[2].mkdir()
    names[3].symlink_to(third)
    names[4].write_bytes(b"#!/bin/sh\n" + whole)
    names[5].write_bytes(whole + b"more")
    second.write_bytes(second.read_bytes()[:-1])
    flipped = bytearray(whole)
    flipped[-1] ^= 0x80
    first.write_bytes(flipped)
    before = state(directory)
    done = run("cache", "verify", directory)
    assert done.returncode == 1
    assert done.stdout == f"1 intact entries, {bytes_of(third.stat().st_size)}; 8 damaged\n"
    reasons = dict(line.split(": ", 1) for line in done.stderr.splitlines())
    assert set(reasons) == {str(path) for path in (*names.values(), first, second)}
    for path, said in {
        names[0]: "0 bytes",
        names[1]: "it is the entry of",
        names[2]: "not a regular file",
        names[3]: "not a regular file",
        names[4]: "does not start with the magic of an entry",
        names[5]: "bytes, but its header and rows take",
        second: "bytes, but its header and rows take",
        first: "checksum differs",
    }.items():
        assert said in reasons[str(path)]
    assert state(directory) == before


def test_clear_removes_a_cache_s_files_and_nothing_else(
    tmp_path: Path, glm53_checkpoint: Path, directory: Path
) -> None:
    size = sum(path.stat().st_size for path in entries(directory))
    target = tmp_path / "target"
    target.write_text("mine")
    strangers = {"notes.txt": b"mine", f"{'a' * 63}.rows": b"mine", f"{'0' * 64}.rows.bak": b"mine"}
    for name, data in strangers.items():
        (directory / name).write_bytes(data)
    (directory / f"{'0' * 64}.tmp").write_bytes(b"half")
    (directory / f"{'1' * 64}.rows").symlink_to(target)
    full = directory / f"{'2' * 64}.rows"
    full.mkdir()
    (full / "thesis.tex").write_text("mine")
    done = call("cache", "clear", directory)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"3 entries removed, {bytes_of(size)} freed\n"
    left = state(directory)
    left.pop(LEDGER)
    assert left == {**strangers, LOCK: b"", full.name: None, f"{full.name}/thesis.tex": b"mine"}
    assert target.read_text() == "mine"

    again = call("cache", "clear", directory)
    assert (again.exit_code, again.stdout) == (0, "0 entries removed, 0 bytes freed\n")
    image, out = picture(tmp_path / "a.png"), tmp_path / "o.safetensors"
    assert encode(glm53_checkpoint, image, out, directory) == (0, 0, 1)


@pytest.mark.parametrize("shared", [False, True])
def test_clear_refuses_a_directory_in_use(directory: Path, shared: bool) -> None:
    before = entries(directory)
    tier = FileTier(directory, 1024**2, shared=shared)
    try:
        done = call("cache", "clear", directory)
    finally:
        tier.close()
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "in use" in line
    assert str(directory) in line
    assert entries(directory) == before
    assert call("cache", "clear", directory).exit_code == 0


@pytest.mark.parametrize("command", ["stats", "verify", "clear"])
@pytest.mark.parametrize("make", [make_nothing, make_file, make_empty, make_others, make_looped])
def test_what_is_no_cache_is_refused_and_left_as_it_is(
    tmp_path: Path, command: str, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "cache"
    make(path)
    before = state(tmp_path)
    done = call("cache", command, path)
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"mm-encoder: {path} is not an mm-encoder cache: ")
    assert line.isprintable()
    assert state(tmp_path) == before


@pytest.mark.parametrize(
    "arguments", ["cache", "cache stats", "cache nonsense x", "cache stats a b", "key x"]
)
def test_a_wrong_command_line_is_2(arguments: str) -> None:
    done = call(*arguments.split())
    assert done.exit_code == 2


def test_help_names_every_option_and_command() -> None:
    for command, wanted in {
        "encode": ("--cache", "--cache-bytes"),
        "key": ("--device", "--dtype", "--model", "--family", "--json"),
        "cache": ("stats", "verify", "clear"),
    }.items():
        done = CliRunner().invoke(build_app(), [command, "--help"], env={"COLUMNS": "200"})
        assert done.exit_code == 0
        for name in wanted:
            assert re.search(rf"{name}\b", done.stdout)


def test_an_interrupted_command_is_130(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(upkeep, "verify", interrupted)
    done = call("cache", "verify", directory)
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr.startswith("mm-encoder: interrupted")


# of the foyer backend


@pytest.fixture
def foyer_directory(tmp_path: Path) -> Path:
    pytest.importorskip("foyer")
    FoyerTier(tmp_path / "foyer", 64 * 1024**2).close()
    return tmp_path / "foyer"


def test_stats_of_a_foyer_directory(foyer_directory: Path) -> None:
    tier = FoyerTier(foyer_directory, 64 * 1024**2)
    try:
        done = call("cache", "stats", foyer_directory)
    finally:
        tier.close()
    assert (done.exit_code, done.stderr) == (0, "")
    said = facts(done.stdout)
    assert said["backend"] == "foyer"
    assert said["entries"].startswith("not known")
    assert said["bytes"] == bytes_of(64 * 1024**2)
    assert said["budget"].startswith("the same")


def test_a_foyer_directory_is_not_verified(foyer_directory: Path) -> None:
    done = call("cache", "verify", foyer_directory)
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "an encoder verifies every entry" in line


def test_a_foyer_directory_is_cleared_unless_in_use(foyer_directory: Path) -> None:
    before = sorted(path.name for path in foyer_directory.iterdir())
    tier = FoyerTier(foyer_directory, 64 * 1024**2)
    try:
        done = call("cache", "clear", foyer_directory)
    finally:
        tier.close()
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "in use" in line
    assert str(foyer_directory) in line
    assert sorted(path.name for path in foyer_directory.iterdir()) == before

    strangers = {"notes.txt", "foyer-storage-direct-fs-1", "mm-encoder-foyer-mine.txt"}
    for name in strangers:
        (foyer_directory / name).write_text("mine")
    linked = foyer_directory / "foyer-storage-direct-fs-99999999"
    linked.symlink_to(foyer_directory / "notes.txt")
    done = call("cache", "clear", foyer_directory)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{bytes_of(64 * 1024**2)} freed\n"
    assert {path.name for path in foyer_directory.iterdir()} - {"mm-encoder-foyer.lock"} == {
        *strangers, linked.name,
    }  # fmt: skip


def test_a_cleared_foyer_directory_is_opened_again(foyer_directory: Path) -> None:
    assert call("cache", "clear", foyer_directory).exit_code == 0
    FoyerTier(foyer_directory, 64 * 1024**2).close()
    assert facts(call("cache", "stats", foyer_directory).stdout)["bytes"] == bytes_of(64 * 1024**2)


def test_encode_takes_no_foyer_directory(
    tmp_path: Path, glm53_checkpoint: Path, foyer_directory: Path
) -> None:
    image, out = picture(tmp_path / "a.png"), tmp_path / "o.safetensors"
    before = sorted(path.name for path in foyer_directory.iterdir())
    done = call(
        "encode", glm53_checkpoint, image, "--out", out, "--device", "cpu", "--cache", foyer_directory
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not an mm-encoder cache" in done.stderr
    assert sorted(path.name for path in foyer_directory.iterdir()) == before
