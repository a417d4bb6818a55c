"""The released GLM-5.3 tower (24 layers, random weights) beside transformers' on the same weights."""

from __future__ import annotations

import torch

from mm_encoder.families.glm53 import NAMES, GlmTower, VisionConfig
from mm_encoder.families.layers import normalize_bytes, repeat_frame
from mm_encoder.families.trunk import assign, rename

from .samples import version
from .timing import medians, ratio, table

DEPTH = 24
RELEASED = {"depth": DEPTH, "out_hidden_size": 4096, "projection_intermediate_size": 10240}
GRIDS = [("224x224", (1, 16, 16)), ("640x480", (1, 36, 46))]


def main() -> None:
    try:
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextVisionConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel
    except ImportError as error:
        print(f"tower: needs transformers ({error})")
        return
    table_ = torch.randn(3, 256)
    tower = GlmTower(VisionConfig.read({"vision_config": RELEASED}), table_)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(like.shape).normal_(0, 0.02, generator=generator) + (like.ndim == 1)
        for name, like in tower.state_dict().items()
    }
    assign(tower, weights)
    with torch.device("meta"):
        reference = Glm5NextVisionModel(Glm5NextVisionConfig(**RELEASED))
    reference.load_state_dict({rename(k, NAMES): v for k, v in weights.items()}, assign=True)
    reference.eval()
    half = tower.trunk.blocks[0].attn.head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32) / half
    reference.rotary_pos_emb.inv_freq = 1.0 / (10000.0**steps)  # a buffer that is not in the state dict

    rows = []
    for name, grid in GRIDS:
        patches = torch.randint(0, 256, (grid[1] * grid[2], 588), dtype=torch.uint8)
        pixels = repeat_frame(normalize_bytes(patches, table_), 2)
        grid_thw = torch.tensor([grid])
        with torch.no_grad():
            difference = tower(patches, [grid]) - reference(pixels, grid_thw=grid_thw).pooler_output

            def ours(patches: torch.Tensor = patches, grid: tuple[int, int, int] = grid) -> object:
                return tower(patches, [grid])

            def theirs(pixels: torch.Tensor = pixels, grid_thw: torch.Tensor = grid_thw) -> object:
                return reference(pixels, grid_thw=grid_thw)

            ms = medians({"ours": ours, "theirs": theirs}, rounds=7)
        worst = f"{difference.abs().max().item():.0e}"
        rows.append([name, *ms.values(), ratio(ms["theirs"], ms["ours"]), worst])
    table(
        f"GLM-5.3 tower, {DEPTH} layers, float32, CPU, {torch.get_num_threads()} threads, ms (median of 7)",
        [
            "image",
            "ours",
            f"transformers {version('transformers')} (SDPA)",
            "theirs / ours",
            "largest difference",
        ],
        rows,
    )
