"""Kimi-K3's own rules: plan, native-mode resize, chessboard, config variants, tensor names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mm_encoder import CheckpointError, Encoder, ImageSize, MediaLimits, MediaPlanner, MediaTooLargeError
from mm_encoder.families.kimi_k3 import KimiK3, ProcessorConfig, plan_image
from mm_encoder.families.registry import load_family
from mm_encoder.media.source import open_source

from ..conftest import GOLDEN

CHECKPOINT = GOLDEN / "kimi_k3" / "checkpoint"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")


def edit(path: Path, outer: str, **changes: Any) -> None:
    value = json.loads(path.read_text())
    for key, change in changes.items():
        if change is None:
            value[outer].pop(key, None)
        else:
            value[outer][key] = change
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("size", "content", "grid"),
    [
        ((4000, 3500), (3836, 3356), (1, 240, 274)),  # over the limit by a little: it is approximate
        ((640, 480), (640, 480), (1, 36, 46)),
        ((1, 1), (1, 1), (1, 2, 2)),
        ((20_000, 10), (7168, 3), (1, 2, 512)),
        ((10, 20_000), (3, 7168), (1, 512, 2)),
        ((28, 28), (28, 28), (1, 2, 2)),
        ((29, 28), (29, 28), (1, 2, 4)),
    ],
)
def test_plans_at_the_released_settings(
    size: tuple[int, int], content: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    plan = plan_image(ImageSize(*size), ProcessorConfig())
    assert (plan.content, plan.grid_thw) == (content, grid)


def by_hand(image: Image.Image, content: ImageSize, canvas: ImageSize) -> np.ndarray:
    """Resize in Pillow's native mode, then the chessboard pixel by pixel, then black."""
    resized = image.resize(content, Image.Resampling.BICUBIC)
    page = np.zeros((canvas.height, canvas.width, 3), np.uint8)
    if resized.mode == "RGB" or not (
        "A" in resized.getbands() or resized.info.get("transparency") is not None
    ):
        page[: content.height, : content.width] = np.asarray(resized.convert("RGB"))
        return page
    rgba = np.asarray(resized.convert("RGBA")).astype(np.float32)
    for y in range(content.height):
        for x in range(content.width):
            ground = np.float32(180 if (y // 8 + x // 8) % 2 else 255)
            alpha = rgba[y, x, 3] / np.float32(255)
            page[y, x] = (alpha * rgba[y, x, :3] + (np.float32(1) - alpha) * ground).astype(np.uint8)
    return page


def in_mode(mode: str, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(pixels)
    if mode == "P+alpha":
        image = image.convert("RGB").convert("P")
        image.info["transparency"] = bytes(np.arange(256, dtype=np.uint8))
        return image
    if mode == "L+key":
        image = image.convert("L")
        image.info["transparency"] = 128
        return image
    return image.convert("RGB").convert(mode) if mode in ("P", "1", "CMYK", "L") else image.convert(mode)


def pages(family: KimiK3, image: Any) -> np.ndarray:
    """What a picture became before it was cut into patches."""
    source = open_source(image, MediaLimits())
    plan = family.plan(source.size)
    rows = family.patches(source.decode(MediaLimits()), plan).data.numpy()
    _, h, w = plan.grid_thw
    return rows.reshape(h, w, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(h * 14, w * 14, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1", "CMYK", "P+alpha", "L+key"])
@pytest.mark.parametrize("size", [(300, 190), (90, 64), (20, 333)])
def test_every_mode_is_resized_as_it_is_and_filled_after(mode: str, size: tuple[int, int]) -> None:
    family = load_family(CHECKPOINT)[1]
    assert isinstance(family, KimiK3)
    image = in_mode(mode, *size)
    plan = family.plan(ImageSize(*size))
    assert np.array_equal(pages(family, image), by_hand(image, plan.content, plan.canvas))


def test_rgb_with_a_colour_key_is_taken_as_it_is() -> None:
    family = load_family(CHECKPOINT)[1]
    assert isinstance(family, KimiK3)
    plain, keyed = in_mode("RGB", 50, 40), in_mode("RGB", 50, 40)
    keyed.info["transparency"] = keyed.getpixel((0, 0))
    assert np.array_equal(pages(family, keyed), pages(family, plain))


def with_background(folder: Path, **changes: Any) -> KimiK3:
    edit(folder / "preprocessor_config.json", "media_proc_cfg", **changes)
    family = load_family(folder)[1]
    assert isinstance(family, KimiK3)
    return family


def clear(width: int, height: int) -> np.ndarray:
    return np.zeros((height, width, 4), np.uint8)


@pytest.mark.parametrize(("pattern", "level"), [("white", 255), ("black", 0), ("gray", 128)])
def test_plain_backgrounds(copied: Path, pattern: str, level: int) -> None:
    family = with_background(copied, transparent_bg_config={"pattern": pattern})
    assert (pages(family, clear(28, 28)) == level).all()


def test_a_chessboard_by_its_settings(copied: Path) -> None:
    board = {
        "pattern": "chessboard",
        "chessboard_square_size": 5,
        "chessboard_square_on_top_left": False,
        "chessboard_white_value": 250,
        "chessboard_gray_value": 7,
    }
    page = pages(with_background(copied, transparent_bg_config=board), clear(28, 28))
    assert page[0, 0, 0] == page[4, 4, 0] == page[5, 5, 0] == 7
    assert page[0, 5, 0] == page[5, 0, 0] == 250


def test_without_a_background_alpha_is_dropped(copied: Path) -> None:
    family = with_background(copied, transparent_bg_config=None)
    pixels = clear(28, 28)
    pixels[:, :, 0] = 200
    assert (pages(family, pixels)[:, :, 0] == 200).all()


def test_filling_before_the_resize(copied: Path) -> None:
    family = with_background(copied, transparent_bg_fill_stage=None, in_patch_limit=4)
    page = pages(family, clear(224, 224))  # 8-pixel squares, reduced eightfold, blur into one grey
    assert 200 < page.mean() < 235
    assert page.std() < 45


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_emb_type": "learned"}, "pos_emb_type is 'learned', only 'divided_fixed'"),
        ({"pos_emb_interpolation_mode": "nearest"}, "only 'bilinear' or 'bicubic'"),
        ({"merge_type": "mean"}, "merge_type is 'mean'"),
        ({"merge_kernel_size": [3, 3]}, r"merge_kernel_size is \[3, 3\]"),
        ({"norm_type": "batchnorm"}, "only 'rmsnorm' or 'layernorm'"),
        ({"mlp_type": "glu"}, "mlp_type is 'glu'"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act is 'silu'"),
        ({"mm_hidden_size": 7}, "mm_hidden_size is 7, only 64"),
        ({"qkv_hidden_size": 97}, "qkv_hidden_size / vt_num_attention_heads"),
        ({"patch_size": 16}, "patch_size is 14, the tower's 16"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit(copied / "config.json", "vision_config", **changes)
    with pytest.raises(CheckpointError, match=message):
        MediaPlanner(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens is 64, only null"),
        ({"merge_kernel_size": 3}, "merge_kernel_size is 3, only 2"),
        ({"transparent_bg_fill_stage": "never"}, "only 'before_resize' or 'after_resize'"),
        ({"transparent_bg_config": {"pattern": "plaid"}}, "pattern is 'plaid', only 'chessboard'"),
        ({"in_patch_limit": 0}, "in_patch_limit must be positive"),
        ({"patch_limit_on_one_side": 513}, "patch_limit_on_one_side must be at most 512"),
        ({"transparent_bg_config": {"chessboard_gray_value": 300}}, "chessboard values must be 0 to 255"),
    ],
)
def test_an_unsupported_processor_is_refused_by_name(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit(copied / "preprocessor_config.json", "media_proc_cfg", **changes)
    with pytest.raises(CheckpointError, match=message):
        MediaPlanner(copied)


def test_ported_projector_names_hold_the_same_rows(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    ported = {
        k.replace("proj.0", "linear_1").replace("proj.2", "linear_2") if k.startswith("mm_") else k: v
        for k, v in tensors.items()
    }
    assert ported.keys() != tensors.keys()
    save_file(ported, copied / "model.safetensors")
    image = np.zeros((40, 50, 3), np.uint8)
    with Encoder(copied, device="cpu") as port, Encoder(CHECKPOINT, device="cpu") as release:
        assert torch.equal(port.generate(image)[0].tensor, release.generate(image)[0].tensor)


def test_layer_norms_and_biases_where_the_config_has_them(copied: Path) -> None:
    absent = dict.fromkeys(["norm_type", "attn_bias", "linear_bias", "patch_embed_proj_bias"])
    edit(copied / "config.json", "vision_config", **absent, pos_emb_interpolation_mode=None)
    with pytest.raises(CheckpointError, match=r"\d+ missing \(.*norm.*bias"):
        Encoder(copied, device="cpu")
    tensors = load_file(copied / "model.safetensors")
    for name, value in list(tensors.items()):
        if name.startswith("vision_tower.") and name.endswith(".weight") and "pos_emb" not in name:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(value.shape[0], dtype=value.dtype)
    save_file(tensors, copied / "model.safetensors")
    image = np.random.default_rng(0).integers(0, 256, (100, 130, 3), np.uint8)
    with Encoder(copied, device="cpu") as layered, Encoder(CHECKPOINT, device="cpu") as release:
        ours, theirs = layered.generate(image)[0].tensor, release.generate(image)[0].tensor
    assert ours.isfinite().all()
    assert not torch.allclose(ours, theirs, atol=1e-2)


def test_a_missing_attention_width_is_the_towers(copied: Path) -> None:
    for change in (None, 64):
        edit(copied / "config.json", "vision_config", qkv_hidden_size=change, vt_num_attention_heads=4)
        with pytest.raises(CheckpointError, match=r"misshapen \(.*wo.weight \[64, 96\], not \[64, 64\]"):
            Encoder(copied, device="cpu")


def test_an_odd_limit_that_padding_exceeds_is_refused_for_that_image() -> None:
    odd = ProcessorConfig(patch_limit_on_one_side=5)
    assert plan_image(ImageSize(50, 50), odd).grid_thw == (1, 4, 4)
    with pytest.raises(MediaTooLargeError, match="padded beyond 70 pixels"):
        plan_image(ImageSize(500, 50), odd)
