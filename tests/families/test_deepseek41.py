"""DeepSeek-V4.1's own rules: plan, centred padding, dropped alpha, the span, config and tensor variants."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from mm_encoder import CheckpointError, Encoder, ImageSize, MediaLimits, MediaPlanner, MediaTooLargeError
from mm_encoder.families.deepseek41 import DeepSeek41, VisionConfig, plan_image
from mm_encoder.families.registry import load_family
from mm_encoder.media.source import open_source

from ..conftest import GOLDEN

CHECKPOINT = GOLDEN / "deepseek41" / "checkpoint"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    value = json.loads(path.read_text())
    value["vision_config"] |= changes
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((301, 199), (1, 32, 48)),
        ((1024, 768), (1, 55, 74)),
        ((4000, 3000), (1, 81, 108)),
        ((3000, 10), (1, 3, 673)),
        ((2, 4000), (1, 1533, 3)),
        ((19, 17), (1, 37, 42)),
    ],
)
def test_plans_at_the_released_settings(size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    plan = plan_image(ImageSize(*size), VisionConfig())
    assert plan.grid_thw == grid
    assert plan.rows <= 1024


def page_of(family: DeepSeek41, image: Any) -> tuple[np.ndarray, Any]:
    """What a picture became before it was cut into patches, and its plan."""
    source = open_source(image, MediaLimits())
    plan = family.plan(source.size)
    rows = family.patches(source.decode(MediaLimits()), plan).data.numpy()
    _, h, w = plan.grid_thw
    return rows.reshape(h, w, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(h * 14, w * 14, 3), plan


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1", "CMYK"])
@pytest.mark.parametrize("size", [(300, 190), (90, 64), (20, 333), (1, 40), (57, 57), (999, 3)])
def test_pictures_are_padded_as_by_pillow(mode: str, size: tuple[int, int]) -> None:
    family = load_family(CHECKPOINT)[1]
    assert isinstance(family, DeepSeek41)
    pixels = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 4), np.uint8)
    image = Image.fromarray(pixels)
    image = image.convert("RGB").convert(mode) if mode in ("L", "P", "1", "CMYK") else image.convert(mode)
    page, plan = page_of(family, image)
    wanted = ImageOps.pad(image.convert("RGB"), plan.canvas, color=(127, 127, 127))
    assert np.array_equal(page, np.asarray(wanted))


def test_a_finite_ratio_stretches_what_is_wider(copied: Path) -> None:
    edit(copied, max_wh_ratio=2)
    family = load_family(copied)[1]
    assert isinstance(family, DeepSeek41)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 300, 3), np.uint8)
    page, plan = page_of(family, pixels)
    assert plan.content == plan.canvas
    assert np.array_equal(page, np.asarray(Image.fromarray(pixels).resize(plan.canvas)))
    narrow, plan = page_of(family, pixels[:, :70])
    assert plan.content != plan.canvas
    assert np.array_equal(
        narrow, np.asarray(ImageOps.pad(Image.fromarray(pixels[:, :70]), plan.canvas, color=(127,) * 3))
    )


def test_the_span_is_framed_by_the_learned_rows() -> None:
    special = load_file(CHECKPOINT / "model.safetensors")
    with Encoder(CHECKPOINT, device="cpu") as encoder:
        rows, metadata = encoder.generate(np.zeros((100, 150, 3), np.uint8))[0]
    _, h, w = metadata.grid_thws[0]
    down, across = -(-h // 3), -(-w // 3)
    assert len(rows) == down * (across + 1) + 2
    assert torch.equal(rows[0], special["image_start"].float())
    assert torch.equal(rows[-1], special["image_end"].float())
    for line in range(down):
        newline = rows[(line + 1) * (across + 1)]
        assert torch.equal(newline, special["image_newline"].float())
    placed = load_family(CHECKPOINT)[1].token_map(plan_image(ImageSize(150, 100), _vision()))
    framing = {0, len(rows) - 1} | {(line + 1) * (across + 1) for line in range(down)}
    assert set(placed.flatten()) == set(range(len(rows))) - framing


def _vision() -> VisionConfig:
    return VisionConfig.read(json.loads((CHECKPOINT / "config.json").read_text()))


def test_an_image_too_thin_to_keep_a_pixel_is_refused() -> None:
    with pytest.raises(MediaTooLargeError, match="90000x1 is too thin for 1024 tokens"):
        plan_image(ImageSize(90_000, 1), VisionConfig())
    assert plan_image(ImageSize(20_000, 1), VisionConfig()).rows <= 1024


def test_a_kernel_shaped_patch_embedding_holds_the_same_rows(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = "vision.patch_embed.proj.weight"
    tensors[name] = tensors[name].view(-1, 3, 14, 14)
    save_file(tensors, copied / "model.safetensors")
    image = np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8)
    with Encoder(copied, device="cpu") as port, Encoder(CHECKPOINT, device="cpu") as release:
        assert torch.equal(port.generate(image)[0].tensor, release.generate(image)[0].tensor)


def test_the_older_models_extra_row_is_unexpected(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | {"image_pad": tensors["image_end"].clone()}, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected \(image_pad\)"):
        Encoder(copied, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_wh_ratio": 0}, "max_wh_ratio must be positive or null, got 0"),
        ({"max_wh_ratio": -2.0}, "max_wh_ratio must be positive or null"),
        ({"max_wh_ratio": "8"}, "max_wh_ratio must be positive or null"),
        ({"max_wh_ratio": True}, "max_wh_ratio must be positive or null"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
        ({"num_attention_heads": 5}, "hidden_size / num_attention_heads"),
        ({"max_image_tokens": 3}, "max_image_tokens must be at least 4, got 3"),
        ({"min_pixels": 1.5}, "min_pixels must be int, got 1.5"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit(copied, **changes)
    with pytest.raises(CheckpointError, match=message):
        MediaPlanner(copied)


def test_preprocessing_hash_covers_every_setting(copied: Path) -> None:
    seen = {MediaPlanner(copied).preprocessing_hash}
    for key, value in [("max_image_tokens", 45), ("min_pixels", 40_001), ("max_wh_ratio", 8)]:
        edit(copied, **{key: value})
        seen.add(MediaPlanner(copied).preprocessing_hash)
    assert len(seen) == 4


def test_every_size_has_a_plan_within_the_limit_or_is_too_thin() -> None:
    for ratio in (1, 2, 3):
        for limit in (4, 5, 9, 44):
            config = VisionConfig(downsample_ratio=ratio, max_image_tokens=limit, min_pixels=1)
            for width in (1, 2, 13, 14, 15, 60, 900, 7000):
                for height in (1, 3, 14, 29, 500, 6000):
                    try:
                        plan = plan_image(ImageSize(width, height), config)
                    except MediaTooLargeError:
                        continue
                    assert plan.rows <= limit
