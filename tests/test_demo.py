"""The demo's checkpoint and photographs: as released, reproducible, built once and whole."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from mm_encoder import Encoder, MediaPlanner, demo

DYING = """
import os
import sys
from pathlib import Path
from mm_encoder import demo

def save_and_die(tensors, path, metadata):
    Path(path).write_bytes(b"half")
    os._exit(9)

demo.save_file = save_and_die
demo.prepare(Path(sys.argv[1]))
"""


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.make_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


def test_names_and_keys_are_those_of_a_checkpoint_that_the_reference_wrote(
    checkpoint: Path, glm53_checkpoint: Path
) -> None:
    def pattern(tensors: dict[str, torch.Tensor]) -> set[tuple[str, int, torch.dtype]]:
        # All blocks have the same tensors; the golden one has two.
        return {(n.replace(".3.", ".1.").replace(".2.", ".0."), t.ndim, t.dtype) for n, t in tensors.items()}

    ours, golden = tensors_of(checkpoint), tensors_of(glm53_checkpoint)
    assert pattern(ours) == pattern(golden)
    assert len(ours) == 14 * 4 + 11
    for name in ("config.json", "processor_config.json"):
        wanted = json.loads((glm53_checkpoint / name).read_text())
        made = json.loads((checkpoint / name).read_text())
        assert made.keys() >= wanted.keys()
        for part in ("vision_config", "image_processor"):
            assert made.get(part, {}).keys() >= wanted.get(part, {}).keys()


def test_the_index_tells_where_each_tensor_lies(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard in shards:
        with safe_open(checkpoint / shard, framework="pt") as opened:
            assert {n for n, file in index["weight_map"].items() if file == shard} == set(opened.keys())
    total = sum(tensor.nbytes for tensor in tensors_of(checkpoint).values())
    assert index["metadata"]["total_size"] == total


def test_a_seed_makes_the_same_weights_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    first = tensors_of(demo.make_checkpoint(tmp_path / "a", seed=3))
    torch.rand(5)
    second = tensors_of(demo.make_checkpoint(tmp_path / "b", seed=3, shards=1))
    other = tensors_of(demo.make_checkpoint(tmp_path / "c", seed=4))
    torch.set_rng_state(before)
    tensors_of(demo.make_checkpoint(tmp_path / "a", seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.visual.merger.proj.weight"], other["model.visual.merger.proj.weight"])


def test_the_released_size_is_the_release_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its 1.1 GB are not made here: shapes and configs are.
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        shapes[name] = shape
        return torch.zeros(1)

    monkeypatch.setattr(demo, "_random", note)
    folder = demo.make_checkpoint(tmp_path, released_size=True)
    assert len(shapes) == 347  # as the spec counts
    assert shapes["model.visual.patch_embed.proj.weight"] == (1024, 3, 2, 14, 14)
    assert shapes["model.visual.blocks.23.mlp.down_proj.weight"] == (1024, 4096)
    assert shapes["model.visual.blocks.0.attn.q_norm.weight"] == (64,)
    assert shapes["model.visual.downsample.weight"] == (4096, 1024, 2, 2)
    assert shapes["model.visual.merger.gate_proj.weight"] == (10240, 4096)
    assert MediaPlanner(folder).plan((4000, 3000)).grid_thws == ((1, 154, 206),)


def test_an_encoder_takes_it_and_gives_finite_rows_that_differ(checkpoint: Path) -> None:
    with Encoder(checkpoint, device="cpu") as encoder:
        [(rows, metadata)] = encoder.generate([Image.effect_mandelbrot((90, 60), (-2, -1, 1, 1), 9)])
    assert encoder.family == "glm53"
    assert 900 <= metadata.length <= 1024
    assert rows.shape == (metadata.length, 512)
    assert bool(rows.isfinite().all())
    assert 0.1 < float(rows.std(0).mean()) < 10


def test_the_number_of_tokens_can_be_chosen(tmp_path: Path) -> None:
    planner = MediaPlanner(demo.make_checkpoint(tmp_path, image_tokens=(4, 9)))
    assert 4 <= planner.plan((5000, 4000)).length <= 9
    assert 4 <= planner.plan((1, 1)).length <= 9


def test_photographs_are_scikit_image_s_own_bytes(tmp_path: Path) -> None:
    paths = demo.photos(tmp_path / "photos")
    assert 5 <= len(paths) <= 8
    sizes = set()
    for path in paths:
        assert path.parent == tmp_path / "photos"
        with Image.open(path) as image:
            sizes.add(image.size)
            image.load()
        original = distribution("scikit-image").locate_file(f"skimage/data/{path.name}")
        assert path.read_bytes() == Path(str(original)).read_bytes()
    assert len(sizes) >= 4


def test_without_scikit_image_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="install with the extra demo, see docs/install.md"):
        demo.photos(tmp_path)


def test_it_builds_once(tmp_path: Path) -> None:
    first = demo.prepare(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert demo.prepare(tmp_path) == first
    # The lock is opened for writing by every run.
    changed = [p for p, time in times.items() if p.stat().st_mtime_ns != time and p.suffix != ".lock"]
    assert changed == []


def test_many_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    real = demo.make_checkpoint

    def counted(folder: Path) -> Path:
        made.append(folder)
        return real(folder)

    monkeypatch.setattr(demo, "make_checkpoint", counted)
    results: list[tuple[Path, list[Path]]] = []
    folder = tmp_path / "new"
    threads = [threading.Thread(target=lambda: results.append(demo.prepare(folder))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(results) == 6
    assert len({str(result) for result in results}) == 1


def test_an_interrupted_build_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=False)
    assert died.returncode == 9
    assert list(tmp_path.rglob("*.safetensors")) != []  # it did begin
    checkpoint, photos = demo.prepare(tmp_path)
    assert len(tensors_of(checkpoint)) == 67
    assert all(path.is_file() for path in photos)
    assert not (tmp_path / ".mm-encoder-work").exists()


def test_another_recipe_s_build_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = demo.prepare(tmp_path)
    (checkpoint / "left over").write_text("from the old recipe")
    monkeypatch.setattr(demo, "_RECIPE", 1000)
    demo.prepare(tmp_path)
    assert not (checkpoint / "left over").exists()
    assert len(tensors_of(checkpoint)) == 67


@pytest.mark.parametrize("damage", ["missing", "cut", "mark"])
def test_what_a_sweep_of_the_cache_left_is_built_anew(tmp_path: Path, damage: str) -> None:
    checkpoint, _ = demo.prepare(tmp_path)
    shard = checkpoint / "model-00001-of-00002.safetensors"
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:1000])
    else:
        (checkpoint / ".mm-encoder-demo.json").write_text("[]")
    demo.prepare(tmp_path)
    assert len(tensors_of(checkpoint)) == 67


def test_other_people_s_files_are_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "photos" / "mine.jpg"
    mine.parent.mkdir()
    mine.write_bytes(b"dear to me")
    with pytest.raises(FileExistsError, match="holds other files"):
        demo.prepare(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


def test_even_in_the_demo_s_own_folder(tmp_path: Path) -> None:
    checkpoint, _ = demo.prepare(tmp_path)
    checkpoint.rename(tmp_path / "kept")
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="not made by the demo"):
        demo.prepare(tmp_path)
    assert (checkpoint / "config.json").read_text() == "{}"


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert demo.default_folder() == Path("/caches/mm-encoder/demo")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert demo.default_folder() == Path("/somebody/.cache/mm-encoder/demo")
