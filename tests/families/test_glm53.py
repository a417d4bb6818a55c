"""GLM-5.3 against transformers run here, on other seeds, sizes and settings than the golden files."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextVisionConfig
from transformers.models.glm5_next.image_processing_glm5_next import (
    Glm5NextImageProcessor,
    smart_resize,
)
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel

from mm_encoder import CheckpointError, Encoder, ImageSize, MediaPlanner
from mm_encoder.families.glm53 import Glm53, ProcessorConfig, plan_image
from mm_encoder.families.registry import load_family
from mm_encoder.media.picture import Picture

from ..conftest import GOLDEN

CPU = torch.device("cpu")


def write_checkpoint(folder: Path, vision: dict[str, Any], processor: dict[str, Any], seed: int) -> Any:
    """A checkpoint whose weights are a transformers model's; returns the model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Glm5NextVisionModel._from_config(Glm5NextVisionConfig(**vision)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim > 1:
            value.data = noise * 1.5 / math.sqrt(value[0].numel())
        else:
            value.data = noise * 0.3 + (1.0 if "norm" in name and "weight" in name else 0.0)
    state = {f"model.visual.{name}": value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "glm5_next", "vision_config": vision}))
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    return model


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"depth": 3, "hidden_size": 48, "num_heads": 3, "intermediate_size": 40, "out_hidden_size": 24},
        {"max_image_tokens": 50, "min_image_tokens": 9},
    ),
    (
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 1,
            "intermediate_size": 96,
            "out_hidden_size": 16,
            "projection_intermediate_size": 64,
            "attention_bias": False,
            "swiglu_limit": 0.5,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
        },
        {"max_image_tokens": 200, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.25]},
    ),
]


@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_pixels_and_rows_equal_transformers(tmp_path: Path, case: int) -> None:
    vision, processor = SETTINGS[case]
    model = write_checkpoint(tmp_path, vision, processor, seed=case)
    reference = Glm5NextImageProcessor(**processor)
    planner = MediaPlanner(tmp_path)
    sizes = [(301, 199), (30, 31), (5, 700), (64, 48), (1, 1), (28, 28), (400, 400)]
    with Encoder(tmp_path, device="cpu") as encoder:
        for seed, (width, height) in enumerate(sizes):
            image = Image.fromarray(noise(width, height, seed))
            theirs = reference(image, return_tensors="pt")
            plan, inputs = planner.prepare_inputs(image)
            assert torch.equal(inputs["pixel_values"], theirs["pixel_values"])
            assert inputs["grid_thws"].tolist() == theirs["image_grid_thw"].tolist()
            rows, metadata = encoder.generate(image)[0]
            with torch.no_grad():
                wanted = model(theirs["pixel_values"], grid_thw=theirs["image_grid_thw"]).pooler_output
            assert (rows - wanted).abs().max().item() <= 2e-5
            assert metadata.grid_thws == plan.grid_thws


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1", "CMYK"])
def test_every_mode_is_prepared_as_by_transformers(glm53_checkpoint: Path, mode: str) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 120, 4), np.uint8), "RGBA")
    image = image.convert("RGB").convert(mode) if mode in ("P", "1", "CMYK", "L") else image.convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes(range(256))
    settings = json.loads((glm53_checkpoint / "processor_config.json").read_text())["image_processor"]
    theirs = Glm5NextImageProcessor(**settings)(image, return_tensors="pt")
    _, inputs = MediaPlanner(glm53_checkpoint).prepare_inputs(image)
    assert torch.equal(inputs["pixel_values"], theirs["pixel_values"])


def reference_plan(size: ImageSize, p: ProcessorConfig) -> tuple[int, int, int, int]:
    """Canvas and content of transformers' smart_resize and resize."""
    width, height = size
    tall, wide = smart_resize(
        num_frames=p.temporal_patch_size,
        height=height,
        width=width,
        temporal_factor=p.temporal_patch_size,
        factor=p.factor,
        min_pixels=p.min_image_tokens,
        max_pixels=p.max_image_tokens,
    )
    scale = min(tall / height, wide / width)
    if p.temporal_patch_size * height * width >= p.unit * p.min_image_tokens:
        scale = min(1.0, scale)
    content = (max(1, min(wide, math.floor(width * scale))), max(1, min(tall, math.floor(height * scale))))
    return (wide, tall, *content)


@pytest.mark.parametrize(
    "processor",
    [
        ProcessorConfig(),
        ProcessorConfig(min_image_tokens=1, max_image_tokens=7),
        ProcessorConfig(patch_size=7, merge_size=3, temporal_patch_size=4, patch_expand_factor=2),
        ProcessorConfig(min_image_tokens=300, max_image_tokens=200),
    ],
)
def test_plans_equal_transformers_on_any_size(processor: ProcessorConfig) -> None:
    random.seed(7)
    sides = [
        lambda: random.randint(1, 20_000),
        lambda: random.randint(1, 300),
        lambda: 2 ** random.randint(0, 14),
    ]
    edges = [(1, 1), (1, 20_000), (20_000, 1), (28, 28), (29, 27), (56, 56), (111, 112)]
    sizes = edges + [(random.choice(sides)(), random.choice(sides)()) for _ in range(5000)]
    for size in map(ImageSize._make, sizes):
        plan = plan_image(size, processor)
        assert (*plan.canvas, *plan.content) == reference_plan(size, processor), size
        patch, merge = processor.patch_size, processor.merge_size
        assert plan.grid_thw == (1, plan.canvas.height // patch, plan.canvas.width // patch)
        assert plan.rows * merge**2 == plan.patch_count


def test_the_plan_is_what_preprocessing_makes(glm53_checkpoint: Path) -> None:
    _, family = load_family(glm53_checkpoint)
    random.seed(3)
    for _ in range(60):
        size = ImageSize(random.randint(1, 400), random.randint(1, 400))
        plan = family.plan(size)
        patches = family.patches(Picture(noise(*size)), plan)
        assert patches.data.shape == (plan.patch_count, 3 * 14 * 14)
        assert sorted(family.token_map(plan).flatten()) == list(range(plan.rows))


def test_packed_images_equal_the_same_images_alone(glm53_checkpoint: Path) -> None:
    _, family = load_family(glm53_checkpoint)
    tower = family.build_tower(CPU, torch.float32)
    sizes = [ImageSize(60, 90), ImageSize(200, 31), ImageSize(60, 90), ImageSize(7, 9)]
    prepared = [family.patches(Picture(noise(*s, seed=i)), family.plan(s)) for i, s in enumerate(sizes)]
    with torch.no_grad():
        alone = [tower(p.data, [p.plan.grid_thw]) for p in prepared]
        packed = tower(torch.cat([p.data for p in prepared]), [p.plan.grid_thw for p in prepared])
    assert torch.allclose(packed, torch.cat(alone), atol=1e-6, rtol=0)


def test_frames_of_a_clip_do_not_see_each_other(glm53_checkpoint: Path) -> None:
    _, family = load_family(glm53_checkpoint)
    tower = family.build_tower(CPU, torch.float32)
    size = ImageSize(56, 84)
    frames = [family.patches(Picture(noise(*size, seed=i)), family.plan(size)).data for i in range(2)]
    _, h, w = family.plan(size).grid_thw
    with torch.no_grad():
        clip = tower(torch.cat(frames), [(2, h, w)])
        alone = torch.cat([tower(frame, [(1, h, w)]) for frame in frames])
    assert torch.allclose(clip, alone, atol=1e-6, rtol=0)


def test_a_tower_refuses_grids_that_do_not_account_for_the_patches(glm53_checkpoint: Path) -> None:
    _, family = load_family(glm53_checkpoint)
    tower = family.build_tower(CPU, torch.float32)
    patches = torch.zeros(12, 588, dtype=torch.uint8)
    with pytest.raises(ValueError, match="12 patches for grids"):
        tower(patches, [(1, 4, 4)])
    with pytest.raises(ValueError, match="multiples of 2"):
        tower(patches, [(1, 3, 4)])


def test_parameters_are_ordinary_tensors(glm53_checkpoint: Path) -> None:
    tower: Any = load_family(glm53_checkpoint)[1].build_tower(CPU, torch.bfloat16)
    for name, value in tower.state_dict(keep_vars=True).items():
        assert not value.is_inference(), name
        assert not value.requires_grad, name
        assert value.device.type == "cpu", name
        assert value.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


# --- config ------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path, glm53_checkpoint: Path) -> Path:
    shutil.copytree(glm53_checkpoint, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def edit(path: Path, **changes: Any) -> None:
    """Set (or, with None, remove) keys of a JSON file; a__b reaches into an object."""
    value = json.loads(path.read_text())
    for key, change in changes.items():
        *outer, last = key.split("__")
        place = value
        for name in outer:
            place = place[name]
        if change is None:
            place.pop(last, None)
        else:
            place[last] = change
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "vision_config object, got None"),
        ({"vision_config__hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"vision_config__attention_dropout": 0.1}, "attention_dropout is 0.1, only 0"),
        ({"vision_config__rms_norm_eps": 0.0}, "rms_norm_eps must be positive"),
        ({"vision_config__rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ({"vision_config__swiglu_limit": -1}, "swiglu_limit must be positive"),
        ({"vision_config__depth": "24"}, "depth must be int, got '24'"),
        ({"vision_config__depth": True}, "depth must be int, got True"),
        ({"vision_config__num_heads": 5}, "hidden_size / num_heads"),
        ({"vision_config__num_heads": 32}, "hidden_size / num_heads"),
        ({"vision_config__patch_size": 16}, "patch_size is 14, the tower's 16"),
        ({"vision_config__spatial_merge_size": 3}, "merge_size is 2, the tower's 3"),
        ({"vision_config__attention_bias": 1}, "attention_bias must be bool"),
        ({"vision_config__rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', only 'axial'"),
        ({"vision_config__rope_parameters": ["axial"]}, "rope_parameters must be an object"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit(copied / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        Encoder(copied, device="cpu")
    with pytest.raises(CheckpointError, match=message):
        MediaPlanner(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_processor__resample": 2}, "resample is 2, only 3"),
        ({"image_processor__do_normalize": False}, "do_normalize is False, only True"),
        ({"image_processor__image_std": [0.1, 0.2]}, "image_std must hold 3 numbers"),
        ({"image_processor__image_std": [0.1, 0.2, 0.0]}, "image_std must be positive"),
        ({"image_processor__min_image_tokens": 0}, "min_image_tokens must be positive"),
        ({"image_processor": []}, "neither a processor_config.json"),
        ({"image_processor": None}, "neither a processor_config.json"),
    ],
)
def test_an_unsupported_processor_is_refused_by_name(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit(copied / "processor_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        MediaPlanner(copied)


def test_a_flat_preprocessor_file_serves_as_well(copied: Path, glm53_checkpoint: Path) -> None:
    nested = json.loads((copied / "processor_config.json").read_text())
    (copied / "processor_config.json").unlink()
    (copied / "preprocessor_config.json").write_text(json.dumps(nested["image_processor"]))
    flat, release = MediaPlanner(copied), MediaPlanner(glm53_checkpoint)
    assert flat.preprocessing_hash == release.preprocessing_hash
    assert flat.plan((640, 480)).grid_thws == release.plan((640, 480)).grid_thws


def test_preprocessing_hash_covers_every_setting(copied: Path) -> None:
    seen = {MediaPlanner(copied).preprocessing_hash}
    changes = [
        ("min_image_tokens", 17),
        ("max_image_tokens", 81),
        ("rescale_factor", 0.5),
        ("image_mean", [0.1, 0.2, 0.3]),
        ("image_std", [0.1, 0.2, 0.3]),
        ("patch_expand_factor", 2),
    ]
    for key, value in changes:
        edit(copied / "processor_config.json", **{f"image_processor__{key}": value})
        seen.add(MediaPlanner(copied).preprocessing_hash)
    assert len(seen) == 7


def test_recognition_goes_by_the_top_level(copied: Path) -> None:
    edit(copied / "config.json", vision_config__model_type="glm_ocr_vision")
    assert MediaPlanner(copied).family == "glm53"
    edit(copied / "config.json", model_type=None)
    assert MediaPlanner(copied).family == "glm53"
    edit(copied / "config.json", architectures=None)
    with pytest.raises(CheckpointError, match="no family fits config.json"):
        MediaPlanner(copied)
    assert MediaPlanner(copied, family="glm53").family == "glm53"
    with pytest.raises(ValueError, match="family must be one of glm53, kimi_k3, deepseek41, got 'glm'"):
        MediaPlanner(copied, family="glm")


def test_a_contradicting_alias_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Glm53):
        name = "other"

        @classmethod
        def recognises(cls, config: object) -> bool:
            return False

    monkeypatch.setattr("mm_encoder.families.registry.FAMILIES", (Other, Glm53))
    with pytest.raises(CheckpointError, match="family='other' contradicts config.json, which is of glm53"):
        MediaPlanner(copied, family="other")


# --- weights -----------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(dict(tensors)), folder / "model.safetensors")


def test_every_wrong_tensor_is_named_in_one_error(copied: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["model.visual.merger.proj.weight"]
        tensors["model.visual.merger.proj.weight_scale"] = torch.ones(1)
        tensors["model.visual.post_layernorm.weight"] = torch.ones(3)
        name = "model.visual.blocks.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        return tensors

    rewrite(copied, spoil)
    with pytest.raises(CheckpointError) as caught:
        Encoder(copied, device="cpu")
    message = str(caught.value)
    assert "1 missing (model.visual.merger.proj.weight)" in message
    assert "1 unexpected (model.visual.merger.proj.weight_scale)" in message
    assert "1 misshapen (model.visual.post_layernorm.weight [3], not [64])" in message
    assert "1 quantised (model.visual.blocks.0.mlp.up_proj.weight F8_E4M3)" in message


def test_a_long_list_of_names_is_cut(copied: Path) -> None:
    rewrite(copied, lambda tensors: {k: v for k, v in tensors.items() if "blocks" not in k})
    with pytest.raises(CheckpointError, match=r"28 missing \(.* and 20 more\)"):
        Encoder(copied, device="cpu")


@pytest.mark.parametrize("prefix", ["visual.", "vision_tower."])
def test_other_prefixes_hold_the_same_tower(copied: Path, glm53_checkpoint: Path, prefix: str) -> None:
    rewrite(copied, lambda ts: {k.replace("model.visual.", prefix): v for k, v in ts.items()})
    image = noise(50, 40)
    with Encoder(copied, device="cpu") as ported, Encoder(glm53_checkpoint, device="cpu") as release:
        assert torch.equal(ported.generate(image)[0].tensor, release.generate(image)[0].tensor)


def test_two_prefixes_at_once_are_ambiguous(copied: Path) -> None:
    rewrite(copied, lambda ts: ts | {"visual.extra": torch.ones(1)})
    with pytest.raises(CheckpointError, match="found 2 of them"):
        Encoder(copied, device="cpu")


def split_in_shards(folder: Path, count: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors |= {"model.language_model.embed_tokens.weight": torch.zeros(4, 4)}
    weight_map = {name: f"model-{i % count + 1}-of-{count}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_give_the_same_rows(copied: Path, glm53_checkpoint: Path, with_index: bool) -> None:
    split_in_shards(copied, 3)
    if not with_index:
        (copied / "model.safetensors.index.json").unlink()
    image = noise(50, 40)
    with Encoder(copied, device="cpu") as shards, Encoder(glm53_checkpoint, device="cpu") as whole:
        assert torch.equal(shards.generate(image)[0].tensor, whole.generate(image)[0].tensor)


def indexed(folder: Path, index: Any) -> None:
    """Rename the weights' file, which would count before an index, and write an index."""
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_only_shards_with_vision_tensors_are_opened(copied: Path) -> None:
    files = dict.fromkeys(NAMES_IN_FILE, "part.safetensors")
    files["model.language_model.norm.weight"] = "not-downloaded.safetensors"
    indexed(copied, {"weight_map": files})
    with Encoder(copied, device="cpu") as encoder:
        assert encoder.generate(noise(30, 30))[0].metadata.length > 0


NAMES_IN_FILE = list(load_file(GOLDEN / "glm53" / "checkpoint" / "model.safetensors"))
EXTRA = "model.visual.blocks.9.norm1.weight"


def test_a_tensor_that_its_shard_lacks_is_missing(copied: Path) -> None:
    rewrite(copied, lambda ts: {k: v for k, v in ts.items() if "blocks.1.norm" not in k})
    indexed(copied, {"weight_map": dict.fromkeys(NAMES_IN_FILE, "part.safetensors")})
    with pytest.raises(CheckpointError, match=r"2 missing \(.*norm1.weight in part.safetensors"):
        Encoder(copied, device="cpu")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x10"), "model.safetensors cannot be read"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors cannot be read"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json must hold an object"),
        (lambda f: indexed(f, {}), "has no weight_map"),
        (
            lambda f: indexed(f, {"weight_map": {"model.visual.x": "../../etc/passwd"}}),
            "names '../../etc/passwd'",
        ),
        (
            lambda f: indexed(f, {"weight_map": {"model.visual.x": ["part.safetensors"]}}),
            "which is not a file beside it",
        ),
        (
            lambda f: indexed(f, {"weight_map": dict.fromkeys([*NAMES_IN_FILE, EXTRA], "part.safetensors")}),
            r"1 unexpected \(model.visual.blocks.9.norm1.weight\)",
        ),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json cannot be read"),
        (
            lambda f: (
                [
                    shutil.copy(f / "model.safetensors", f / f"{name}.safetensors")
                    for name in ("again", "once")
                ]
                + [(f / "model.safetensors").unlink()]
            ),
            "is in both again.safetensors and once.safetensors",
        ),
        (
            lambda f: rewrite(f, lambda ts: {"lm_head.weight": torch.ones(1)}),
            "found none of them among 1 tensors",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused(copied: Path, break_it: Any, message: str) -> None:
    break_it(copied)
    with pytest.raises(CheckpointError, match=message):
        Encoder(copied, device="cpu")


def test_a_checkpoint_must_be_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a directory"):
        MediaPlanner(tmp_path / "absent")
