"""The released model sizes: every tensor is asked for; a photo runs through a few random blocks."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mm_encoder import Encoder
from mm_encoder.families.registry import load_family
from mm_encoder.families.weights import Checkpoint

from .conftest import GOLDEN

GLM = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "out_hidden_size": 4096,
    "projection_intermediate_size": 10240,
    "swiglu_limit": 10.0,
}
KIMI = {
    "vt_hidden_size": 1024,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 12,
    "vt_intermediate_size": 4096,
    "qkv_hidden_size": 1536,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "mm_hidden_size": 1024,
}
DEEPSEEK = {
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
}
# (family, vision_config, text width, tensors, patch grid of a 640x480 photo, rows and their width)
RELEASED = [
    ("glm53", GLM, 4096, 347, (1, 36, 46), (414, 4096)),
    ("kimi_k3", KIMI, 7168, 168, (1, 36, 46), (414, 7168)),
    ("deepseek41", DEEPSEEK, 5120, 266, (1, 35, 46), (206, 5120)),
]


DEPTHS = ("depth", "vt_num_hidden_layers", "num_hidden_layers")
BLOCKS = 3
"""Blocks of the tower that encodes the photo: all have the same sizes, and take gigabytes together."""


class Requested(Exception):
    """Carries the shapes of what a tower loads from its checkpoint, raised in place of loading it."""

    def __init__(self, wanted: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.shapes = {name: like.shape for name, like in wanted.items()}


def write_config(folder: Path, name: str, vision: dict[str, Any], width: int) -> None:
    """Write the config files of the fixture with the given sizes."""
    config = json.loads((GOLDEN / name / "checkpoint" / "config.json").read_text())
    config["vision_config"] |= vision
    config["text_config"]["hidden_size"] = width
    (folder / "config.json").write_text(json.dumps(config))
    for file in (GOLDEN / name / "checkpoint").glob("*processor_config.json"):
        settings = json.loads(file.read_text())
        settings.get("image_processor", {}).pop("max_image_tokens", None)
        settings.get("media_proc_cfg", {}).pop("in_patch_limit", None)
        (folder / file.name).write_text(json.dumps(settings))


def requested(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of the tensors that the tower loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "files", {"model.visual.": "", "vision.": "", "vision_tower.": ""})
        patch.setattr(Checkpoint, "shape", lambda *_: None)
        patch.setattr(Checkpoint, "only_prefix", lambda *_: "model.visual.")

        def request(_: Checkpoint, wanted: Mapping[str, torch.Tensor], *__: Any) -> None:
            raise Requested(wanted)

        patch.setattr(Checkpoint, "load", request)
        try:  # pytest.raises would keep the tower, by a cycle through the traceback
            load_family(folder)[1].build_tower(torch.device("cpu"), torch.bfloat16)
        except Requested as error:
            return error.shapes
    raise AssertionError("the tower loaded nothing")


def write_weights(folder: Path) -> None:
    """Write random bfloat16 weights."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor, shape in requested(folder).items():
        value = torch.empty(shape, dtype=torch.bfloat16)
        value.normal_(0, 0.02 if len(shape) > 1 else 0.1, generator=generator)
        tensors[tensor] = value + 1 if "norm" in tensor and tensor.endswith("weight") else value
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "vision", "width", "count", "grid", "shape"), RELEASED, ids=[row[0] for row in RELEASED]
)
def test_the_released_size_encodes_a_photo(
    tmp_path: Path,
    name: str,
    vision: dict[str, Any],
    width: int,
    count: int,
    grid: tuple[int, int, int],
    shape: tuple[int, int],
) -> None:
    write_config(tmp_path, name, vision, width)
    shapes = requested(tmp_path)
    assert len(shapes) == count
    write_config(tmp_path, name, vision | dict.fromkeys(vision.keys() & set(DEPTHS), BLOCKS), width)
    assert requested(tmp_path).items() <= shapes.items()
    write_weights(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    with Encoder(tmp_path, device="cpu", dtype=torch.bfloat16) as encoder:
        rows, metadata = encoder.generate(buffer.getvalue())[0]
    (tmp_path / "model.safetensors").unlink()
    assert metadata.grid_thws == (grid,)
    assert rows.shape == shape
    assert rows.isfinite().all()
    assert rows.float().std() > 0
