"""One contract, held by every family of the registry."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_encoder import (
    CheckpointError,
    Encoder,
    ImageSize,
    MediaPlanner,
    MediaTooLargeError,
    UnsupportedMediaError,
)
from mm_encoder.families.family import Family
from mm_encoder.families.layers import Grid
from mm_encoder.families.registry import FAMILIES, load_family
from mm_encoder.families.tables import Tables, TableStore
from mm_encoder.families.trunk import VisionTower
from mm_encoder.media.picture import Picture

from ..conftest import GOLDEN

CPU = torch.device("cpu")
NAMES = [family.name for family in FAMILIES]


def noise(width: int, height: int, seed: int = 0) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture(pixels)


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest) -> Family:
    return load_family(GOLDEN / request.param / "checkpoint")[1]


def random_sizes(count: int, longest: int) -> list[ImageSize]:
    random.seed(count)
    sides = [
        lambda: random.randint(1, longest),
        lambda: random.randint(1, 300),
        lambda: 2 ** random.randint(0, 14),
        lambda: random.randint(1, 4),
    ]
    return [
        ImageSize(min(longest, random.choice(sides)()), min(longest, random.choice(sides)()))
        for _ in range(count)
    ]


def test_any_size_has_a_plan_that_adds_up(family: Family) -> None:
    refused = 0
    for size in random_sizes(2000, 20_000):
        try:
            plan = family.plan(size)
        except MediaTooLargeError:
            refused += 1
            continue
        t, h, w = plan.grid_thw
        assert (t, h * 14, w * 14) == (1, plan.canvas.height, plan.canvas.width)
        placed = family.token_map(plan)
        assert len(np.unique(placed)) == placed.size <= plan.rows
        assert 0 <= placed.min() <= placed.max() < plan.rows
        if family.name == "deepseek41":
            assert plan.rows == -(-h // 3) * (-(-w // 3) + 1) + 2 <= 44
        else:
            assert plan.rows == h * w // 4
    # Only DeepSeek's tiny fixture limit leaves the thinnest images without pixels.
    assert refused == 0 or (family.name == "deepseek41" and refused < 300)


def test_preprocessing_and_tower_make_what_was_planned(family: Family) -> None:
    tower = family.build_tower(CPU, torch.float32)
    done = 0
    for size in random_sizes(50, 4000):
        if size.width * size.height > 200_000:
            continue
        try:
            plan = family.plan(size)
        except MediaTooLargeError:
            continue
        patches = family.patches(noise(*size), plan)
        assert patches.data.shape == (plan.patch_count, 3 * 14 * 14)
        assert patches.data.dtype == torch.uint8
        with torch.no_grad():
            assert tower(patches.data, [plan.grid_thw]).shape[0] == plan.rows
        done += 1
    assert done > 20


def test_packed_images_equal_the_same_images_alone(family: Family) -> None:
    tower = family.build_tower(CPU, torch.float32)
    sizes = [ImageSize(60, 90), ImageSize(200, 31), ImageSize(60, 90), ImageSize(7, 9)]
    prepared = [family.patches(noise(*s, seed=i), family.plan(s)) for i, s in enumerate(sizes)]
    with torch.no_grad():
        alone = [tower(p.data, [p.plan.grid_thw]) for p in prepared]
        packed = tower(torch.cat([p.data for p in prepared]), [p.plan.grid_thw for p in prepared])
    difference = (packed - torch.cat(alone)).abs().max() / packed.abs().max()
    assert difference.item() <= 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_owned_and_described(name: str, dtype: torch.dtype) -> None:
    images = [noise(80, 50, 1).pixels, noise(30, 120, 2).pixels]
    with Encoder(GOLDEN / name / "checkpoint", device="cpu", dtype=dtype) as encoder:
        results = encoder.generate(images)
    for rows, metadata in results:
        assert rows.dtype == dtype
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
        assert rows.is_contiguous()
        assert not rows.is_inference()
        assert metadata.embedding_offsets == (0, len(rows))
        assert metadata.shape == tuple(rows.shape)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_for_a_tower_of_ones_own(name: str) -> None:
    planner = MediaPlanner(GOLDEN / name / "checkpoint")
    for dtype in (torch.float32, torch.bfloat16):
        plan, inputs = planner.prepare_inputs(np.zeros((50, 60, 3), np.uint8), dtype=dtype)
        assert inputs["pixel_values"].dtype == dtype
        assert len(inputs["pixel_values"]) == np.prod(plan.grid_thws[0])
        assert inputs["pixel_values"].shape[1:] == ((1176,) if name == "glm53" else (3, 14, 14))


@pytest.mark.parametrize("name", ["glm53", "kimi_k3"])
def test_a_mean_of_zero_is_a_mean(name: str, tmp_path: Path) -> None:
    copied = shutil.copytree(GOLDEN / name / "checkpoint", tmp_path / "checkpoint")
    (path,) = copied.glob("*processor_config.json")
    settings = json.loads(path.read_text())
    (inner,) = (v for v in settings.values() if isinstance(v, dict))
    inner |= {"image_mean": [0, 0.0, 0.5], "image_std": [1, 1, 0.25]}
    path.write_text(json.dumps(settings))
    _, inputs = MediaPlanner(copied).prepare_inputs(np.full((56, 56, 3), 51, np.uint8))
    values = inputs["pixel_values"].flatten(1).unflatten(1, (3, -1))
    for channel, value in enumerate([0.2, 0.2, -1.2]):
        assert torch.allclose(values[:, channel], torch.tensor(value))


def test_refuses_grids_that_do_not_account_for_the_patches(family: Family) -> None:
    tower = family.build_tower(CPU, torch.float32)
    with pytest.raises(ValueError, match="12 patches for grids"):
        tower(torch.zeros(12, 588, dtype=torch.uint8), [(1, 4, 4)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", "WAV audio"),
        (b"\0\0\0\x18ftypisom", "MP4/QuickTime video"),
        (b"\x1aE\xdf\xa3" + bytes(20), "Matroska/WebM video"),
        (b"ID3\x04" + bytes(20), "MP3 audio"),
        (b"\xff\xfb\x90\x64" + bytes(20), "MP3 audio"),
        (b"\0\0\0\x18ftypM4A ", "M4A audio"),
        (b"FORM\0\0\0\0AIFFCOMM", "AIFF audio"),
        (b"\0\0\0\x08wide\0\0\0\0mdat", "MP4/QuickTime video"),
        (b"\x47" + bytes(187) + b"\x47" + bytes(187), "MPEG transport stream video"),
        (b"FLV\x01" + bytes(20), "Flash video"),
    ],
)
def test_audio_and_video_are_refused_in_the_familys_name(name: str, data: bytes, kind: str) -> None:
    checkpoint = GOLDEN / name / "checkpoint"
    with pytest.raises(UnsupportedMediaError, match=f"^{name} takes still images: {kind} is not decoded"):
        MediaPlanner(checkpoint).plan(data)
    with Encoder(checkpoint, device="cpu") as encoder, pytest.raises(UnsupportedMediaError, match=kind):
        encoder.generate([data])


@pytest.mark.parametrize(
    "image",
    [
        b"%PDF-1.7",
        b"8BPS" + bytes(30),
        "photo.jpg",
        np.zeros((2, 2, 2), np.uint8),
        np.zeros((2, 2), np.int64),
    ],
    ids=["pdf", "psd", "str", "shape", "dtype"],
)
def test_what_is_neither_audio_nor_video_is_refused_without_the_familys_name(image: Any) -> None:
    planner = MediaPlanner(GOLDEN / NAMES[0] / "checkpoint")
    with pytest.raises(UnsupportedMediaError) as refused:
        planner.prepare_inputs(image)
    assert "still images" not in str(refused.value)


@pytest.mark.parametrize("vision", [True, False])
def test_an_unknown_config_lists_what_is_supported(vision: bool, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "ours"} | ({"vision_config": {}} if vision else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        MediaPlanner(tmp_path)
    message = str(refused.value)
    assert all(checkpoint in message for family in FAMILIES for checkpoint in family.checkpoints)
    assert ("family=" in message) == vision
    assert message.endswith(
        "pass family=glm53 or kimi_k3 or deepseek41" if vision else "has no vision_config"
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_alias_names_the_family_of_an_unknown_config(name: str, tmp_path: Path) -> None:
    copied = shutil.copytree(GOLDEN / name / "checkpoint", tmp_path / "checkpoint")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "ours", "architectures": None}))
    with pytest.raises(CheckpointError, match="no family fits"):
        MediaPlanner(copied)
    assert MediaPlanner(copied, family=name).family == name
    for other in set(NAMES) - {name}:
        with pytest.raises(CheckpointError, match=f"family='{other}' contradicts config.json, which is of"):
            MediaPlanner(GOLDEN / name / "checkpoint", family=other)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("kimi_k3", {"model_type": "kimi_k25"}, "looks like kimi_k3, but model_type 'kimi_k25'"),
        ("kimi_k3", {"mm_projector_type": "patchmerger"}, "looks like kimi_k3, but mm_projector_type"),
        ("kimi_k3", {"only model_type": "kimi_k25"}, "looks like kimi_k3, but model_type 'kimi_k25'"),
        ("kimi_k3", {"architectures": ["KimiK25ForX"]}, "looks like kimi_k3, but architecture 'KimiK25ForX'"),
        ("kimi_k3", {"only model_type": "glm5_next"}, "is of glm53 and kimi_k3"),
        ("deepseek41", {"architectures": ["DeepseekV4ForX"]}, "like deepseek41, but architecture 'Deepseek"),
        ("deepseek41", {"text.model_type": "deepseek_v4_text"}, "but its text_config.model_type is 'deeps"),
        ("deepseek41", {"model_type": "deepseek_v4"}, "looks like deepseek41, but model_type 'deepseek_v4'"),
        ("deepseek41", {"vision.model_type": "x"}, "looks like deepseek41, but its vision_config.model_type"),
        ("glm53", {"model_type": "glm4v"}, "looks like glm53, but model_type 'glm4v'"),
    ],
)
def test_a_lookalike_is_refused_with_the_reason(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    copied = shutil.copytree(GOLDEN / name / "checkpoint", tmp_path / "checkpoint")
    config = json.loads((copied / "config.json").read_text())
    for key, value in changes.items():
        if key == "model_type":
            config |= {"model_type": value, "architectures": ["Older"]}
            continue
        if key == "only model_type":
            config["model_type"] = value
            continue
        if key == "architectures":
            config |= {"model_type": None, "architectures": value}
            continue
        if key == "text.model_type":
            config["text_config"]["model_type"] = value
            continue
        key = key.removeprefix("vision.")
        if value is None:
            del config["vision_config"][key]
        else:
            config["vision_config"][key] = value
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        MediaPlanner(copied)
    with pytest.raises(CheckpointError, match=message):
        MediaPlanner(copied, family=name)


def test_unexpected_tensors_under_any_prefix_are_named(family: Family, tmp_path: Path) -> None:
    copied = shutil.copytree(GOLDEN / family.name / "checkpoint", tmp_path / "checkpoint")
    tensors = load_file(copied / "model.safetensors")
    name = next(iter(tensors))
    stray = name.rpartition(".")[0] + ".weight_scale" if "." in name else name + "_scale"
    save_file(tensors | {stray: torch.ones(1)}, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected \("):
        Encoder(copied, device="cpu")


def test_norms_keep_the_precision_they_are_stored_in(family: Family, tmp_path: Path) -> None:
    copied = shutil.copytree(GOLDEN / family.name / "checkpoint", tmp_path / "checkpoint")
    tensors = load_file(copied / "model.safetensors")
    fine = {n: t.float() + 1e-3 if "norm" in n and t.ndim == 1 else t for n, t in tensors.items()}
    save_file(fine, copied / "model.safetensors")
    tower: Any = load_family(copied)[1].build_tower(CPU, torch.bfloat16)
    stored = {tuple(t.tolist()) for n, t in fine.items() if "norm" in n and t.ndim == 1}
    held = {tuple(t.tolist()) for n, t in tower.state_dict().items() if "norm" in n and t.ndim == 1}
    assert held == stored


# --- what the towers share ---------------------------------------------------------------------------


def test_tables_are_kept_within_their_bound_and_the_last_used_stay() -> None:
    store = TableStore(max_bytes=1000)
    made: list[int] = []

    def table(name: int, size: int) -> None:
        def make(grid: Grid) -> Tables:
            made.append(grid[0])
            part = torch.zeros(size // 2, dtype=torch.uint8)
            return Tables((1,), (part, part.clone()))

        store.get((name, 1, 1), 0, make)

    for name, size in [(1, 400), (2, 400), (1, 400), (3, 400), (1, 400), (2, 400)]:
        table(name, size)
        assert store.nbytes <= 1000
    assert made == [1, 2, 3, 2]
    table(9, 2000)
    assert store.nbytes <= 1000
    table(9, 2000)
    assert made[-2:] == [9, 9]


def test_each_thread_has_tables_of_its_own(family: Family) -> None:
    tower: Any = family.build_tower(CPU, torch.float32)
    assert isinstance(tower, VisionTower)
    patches = torch.zeros(24, 588, dtype=torch.uint8)
    with torch.no_grad():
        tower(patches, [(1, 4, 6)])
    held = tower.store.nbytes
    assert held > 0
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(tower.store.nbytes))
    thread.start()
    thread.join()
    assert elsewhere == [0]
    with torch.no_grad():
        tower(patches, [(1, 4, 6)])
    assert tower.store.nbytes == held
