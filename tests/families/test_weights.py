"""A checkpoint's files: which of them counts, what is loaded, and that its digest is of just that."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mm_encoder import CacheConfig, CheckpointError, Encoder, MediaPlanner
from mm_encoder.families import weights
from mm_encoder.families.glm53 import Glm53
from mm_encoder.families.registry import load_family
from mm_encoder.families.weights import Checkpoint

from ..conftest import GOLDEN
from ..helpers.images import png
from ..helpers.waiting import HANG

CHECKPOINT = GOLDEN / "glm53" / "checkpoint"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CPU = torch.device("cpu")
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 4096\n"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))


def digest_of(checkpoint: Path) -> str:
    opened, family = load_family(checkpoint)
    return opened.digest(family.tensor_prefixes)


def other_weights() -> dict[str, torch.Tensor]:
    return {name: value * 1.25 for name, value in load_file(CHECKPOINT / WHOLE).items()}


def replace(checkpoint: Path, values: dict[str, torch.Tensor]) -> None:
    """Replace the weights as an update of a model's directory does."""
    save_file(values, checkpoint / "new")
    (checkpoint / "new").replace(checkpoint / WHOLE)


# --- which file counts -------------------------------------------------------------------------------


def stale_index(folder: Path) -> None:
    names = load_file(folder / WHOLE)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-2.safetensors")})
    )


BESIDE: dict[str, Callable[[Path], object]] = {
    "an index of shards that are gone": stale_index,
    "an index that is broken": lambda folder: (folder / INDEX).write_text("{"),
    "an older shard": lambda folder: save_file(other_weights(), folder / "model-00001-of-2.safetensors"),
    "another copy": lambda folder: shutil.copy(folder / WHOLE, folder / "consolidated.safetensors"),
}


@pytest.mark.parametrize("what", BESIDE)
def test_one_whole_file_counts_before_what_is_left_beside_it(copied: Path, what: str) -> None:
    BESIDE[what](copied)
    image = png(90, 60)
    with Encoder(copied, device="cpu") as beside, Encoder(CHECKPOINT, device="cpu") as alone:
        assert torch.equal(beside.generate(image)[0].tensor, alone.generate(image)[0].tensor)
    assert digest_of(copied) == digest_of(CHECKPOINT)


def test_without_it_a_missing_shard_is_named(copied: Path) -> None:
    stale_index(copied)
    (copied / WHOLE).unlink()
    with pytest.raises(CheckpointError, match=r"^model-00001-of-2.safetensors cannot be read"):
        Encoder(copied, device="cpu")


@pytest.mark.parametrize("name", [WHOLE, INDEX, "part.safetensors", "config.json", "processor_config.json"])
def test_a_git_lfs_pointer_is_named_as_such(copied: Path, name: str) -> None:
    if name in (INDEX, "part.safetensors"):
        (copied / WHOLE).unlink()
    (copied / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=f"^{name} is a git-lfs pointer .* run `git lfs pull`$"):
        Encoder(copied, device="cpu")


# --- what is loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before loading", "after loading"])
def test_rows_are_kept_under_the_digest_of_the_weights_that_made_them(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The directory is updated while an encoder starts: no row of one set is served for the other."""
    image = png(80, 50)
    cache = CacheConfig(memory_bytes=0, disk_path=tmp_path / "cache", disk_bytes=2**26, max_entry_bytes=2**20)
    build = Glm53.build_tower

    def updated(self: Glm53, *arguments: Any) -> Any:
        if moment == "before loading":
            replace(copied, other_weights())
        tower = build(self, *arguments)
        replace(copied, other_weights())
        return tower

    with monkeypatch.context() as patch:
        patch.setattr(Glm53, "build_tower", updated)
        with Encoder(copied, "m", device="cpu", cache=cache) as starting:
            made = starting.generate(image)[0].tensor
    with Encoder(CHECKPOINT, "m", device="cpu") as old, Encoder(copied, "m", device="cpu") as new:
        rows = {"old": old.generate(image)[0].tensor, "new": new.generate(image)[0].tensor}
    loaded = "new" if moment == "before loading" else "old"
    assert torch.equal(made, rows[loaded])
    for name, checkpoint in (("old", CHECKPOINT), ("new", copied)):
        with Encoder(checkpoint, "m", device="cpu", cache=cache) as encoder:
            result = encoder.generate(image)[0]
        assert torch.equal(result.tensor, rows[name])
        assert result.metadata.cache == ("disk" if name == loaded else "miss")


def test_what_is_written_into_the_file_later_changes_nothing(copied: Path) -> None:
    opened, family = load_family(copied)
    before = digest_of(copied)
    tower: Any = family.build_tower(CPU, torch.float32)
    kept = {name: value.clone() for name, value in tower.state_dict().items()}
    data = (copied / WHOLE).read_bytes()
    with open(copied / WHOLE, "r+b") as file:
        file.seek(len(data) // 2)
        file.write(bytes(len(data) - len(data) // 2))
    assert all(torch.equal(value, kept[name]) for name, value in tower.state_dict().items())
    assert opened.digest(family.tensor_prefixes) == before != digest_of(copied)


def test_replicas_that_would_load_different_weights_are_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, turn = Checkpoint.load, threading.Lock()

    def update_after_each(self: Checkpoint, *arguments: Any) -> Any:
        with turn:
            tensors = load(self, *arguments)
            replace(copied, other_weights())
        return tensors

    monkeypatch.setattr(Checkpoint, "load", update_after_each)
    with pytest.raises(CheckpointError, match=r"^the weights changed while they were loaded"):
        Encoder(copied, device="cpu", replicas_per_gpu=2)
    with Encoder(copied, device="cpu", replicas_per_gpu=2, share_weights=True):
        pass


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("share", [False, True])
def test_a_cache_adds_no_reading_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, replicas: int, share: bool
) -> None:
    read: Counter[str] = Counter()

    class Counted:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.opened = safe_open(*arguments, **options)

        def __enter__(self) -> Counted:
            self.opened.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.opened.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.opened, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            read[name] += 1
            tensor: torch.Tensor = self.opened.get_tensor(name)
            return tensor

    monkeypatch.setattr(weights, "safe_open", Counted)
    with Encoder(
        CHECKPOINT, device="cpu", cache=CacheConfig(), replicas_per_gpu=replicas, share_weights=share
    ) as encoder:
        encoder.submit(png()).result(HANG)
    names = [name for name in load_file(CHECKPOINT / WHOLE) if "visual" in name]
    assert read == dict.fromkeys(names, 1 if share else replicas)


def test_no_weights_are_read_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(weights, "safe_open", refuse)
    assert MediaPlanner(CHECKPOINT).plan((90, 60)).length > 0
