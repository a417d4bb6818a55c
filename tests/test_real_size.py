"""The released size: 24 layers, 1024 wide, 4096 out; random weights. The one heavy test (about 3 GB)."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mm_encoder import Encoder
from mm_encoder.families.glm53 import GlmTower, VisionConfig
from mm_encoder.families.layers import shapes_of

RELEASED = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
RELEASED |= {"out_hidden_size": 4096, "projection_intermediate_size": 10240}


@pytest.fixture
def released_checkpoint(tmp_path: Path) -> Path:
    config = {"model_type": "glm5_next", "vision_config": RELEASED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {}}))
    shapes = shapes_of(GlmTower(VisionConfig.read(config), torch.zeros(3, 256)))
    assert len(shapes) == 347
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        scale = 0.02 if len(shape) > 1 else 0.1
        value = torch.empty(shape, dtype=torch.bfloat16).normal_(0, scale, generator=generator)
        tensors[f"model.visual.{name}"] = value + 1 if "norm" in name and "weight" in name else value
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_the_released_size_encodes_a_photo(released_checkpoint: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    with Encoder(released_checkpoint, device="cpu", dtype=torch.bfloat16) as encoder:
        rows, metadata = encoder.generate(buffer.getvalue())[0]
    assert metadata.grid_thws == ((1, 36, 46),)
    assert rows.shape == (36 * 46 // 4, 4096)
    assert rows.isfinite().all()
    assert rows.float().std() > 0
