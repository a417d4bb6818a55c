"""GLM-5.3-Flash (`glm5_next`): the vision tower of zai-org's release.

The reference is transformers' `models/glm5_next`, which saved the checkpoint; formulas below are its.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..contract import ImageSize, Patches, Plan
from ..errors import CheckpointError
from ..media.decode import Pixels
from ..media.geometry import over_white, place, resize_bicubic_torch
from ..media.patches import patchify
from .family import Family, Grid, read_settings, require
from .layers import (
    ClampedSwiGLU,
    LayerNorm,
    Linear,
    RMSNorm,
    assign,
    attention,
    check_packing,
    grid_positions,
    look_up,
    repeat_frame,
    rotate_halves,
    shapes_of,
)
from .weights import Checkpoint

_MODEL_TYPE = "glm5_next"
_ARCHITECTURE = "Glm5NextForConditionalGeneration"
# As released; as engines keep it; as MLX ports do.
_PREFIXES = ("model.visual.", "visual.", "vision_tower.")
_CHANNELS = 3
_MERGER_NORM_EPS = 1e-5  # torch's LayerNorm default, which the reference relies on


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """`vision_config` of config.json, with its class's defaults (the release differs in some)."""

    depth: int = 24
    hidden_size: int = 1024
    num_heads: int = 16
    intermediate_size: int = 4096
    out_hidden_size: int = 1536
    projection_intermediate_size: int = 10240
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 10.0
    attention_bias: bool = True
    rope_theta: float = 1e4

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> VisionConfig:
        where = "vision_config"
        vision = config.get(where)
        if not isinstance(vision, dict):
            raise CheckpointError(f"config.json must have a {where} object, got {vision!r}")
        require(vision, "hidden_act", "silu", where)
        require(vision, "in_channels", _CHANNELS, where)
        require(vision, "attention_dropout", 0, where)
        rope = vision.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise CheckpointError(f"{where}.rope_parameters must be an object, got {rope!r}")
        if rope.get("rope_type") != "default":  # which the reference reads as axial
            require(rope, "rope_type", "axial", f"{where}.rope_parameters")
        flat = {**vision, "rope_theta": rope.get("rope_theta")}
        aliases = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}
        read = read_settings(cls, flat, where, aliases)
        if read.hidden_size % read.num_heads or read.head_dim % 4:
            raise CheckpointError(
                f"hidden_size / num_heads must be a multiple of 4, got {read.hidden_size} / {read.num_heads}"
            )
        return read

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """`image_processor` of processor_config.json, or a flat preprocessor_config.json."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    patch_expand_factor: int = 1
    min_image_tokens: int = 16
    max_image_tokens: int = 8000
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # CLIP's
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ProcessorConfig:
        where = "image_processor"
        config = (checkpoint.read_json("processor_config.json") or {}).get(where)
        if config is None:
            where = "preprocessor_config.json"
            config = checkpoint.read_json(where)
        if not isinstance(config, dict):
            raise CheckpointError(
                "there is neither a processor_config.json with an image_processor object nor a "
                f"preprocessor_config.json in {str(checkpoint.path)!r}"
            )
        for step in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
            require(config, step, True, where)
        require(config, "resample", 3, where)  # bicubic
        return read_settings(cls, config, where)

    @property
    def factor(self) -> int:
        """Sides of the canvas are multiples of this, in pixels."""
        return self.patch_size * self.merge_size * self.patch_expand_factor

    @property
    def unit(self) -> int:
        """Pixels of the volume (frames x height x width) that count as one token."""
        return self.temporal_patch_size * self.factor**2


def plan_image(size: ImageSize, processor: ProcessorConfig) -> Plan:
    """Canvas and content of one image: the reference's `smart_resize` and `resize`."""
    width, height = size
    factor, frames = processor.factor, processor.temporal_patch_size
    low = processor.min_image_tokens * processor.unit
    high = processor.max_image_tokens * processor.unit

    def up(value: int) -> int:
        return -(-value // factor) * factor

    canvas_h, canvas_w = up(height), up(width)
    if frames * canvas_h * canvas_w < low:
        scale = math.sqrt(low / (frames * height * width))
        canvas_h = up(max(1, math.ceil(height * scale)))
        canvas_w = up(max(1, math.ceil(width * scale)))
    if frames * canvas_h * canvas_w > high:
        canvas_h, canvas_w = factor, factor
        first, last = 1, height
        while first <= last:  # the tallest content whose canvas fits
            content = (first + last) // 2
            candidate = up(content), up(max(1, width * content // height))
            if frames * candidate[0] * candidate[1] <= high:
                canvas_h, canvas_w = candidate
                first = content + 1
            else:
                last = content - 1

    scale = min(canvas_h / height, canvas_w / width)
    if frames * height * width >= low:
        scale = min(1.0, scale)
    content_h = max(1, min(canvas_h, math.floor(height * scale)))
    content_w = max(1, min(canvas_w, math.floor(width * scale)))
    grid = (1, canvas_h // processor.patch_size, canvas_w // processor.patch_size)
    return Plan(
        source=size,
        content=ImageSize(content_w, content_h),
        canvas=ImageSize(canvas_w, canvas_h),
        offset=(0, 0),
        grid_thw=grid,
        rows=grid[1] * grid[2] // processor.merge_size**2,
    )


class Glm53(Family):
    """GLM-5.3-Flash images."""

    name = "glm53"
    checkpoints = ("zai-org/GLM-5.3-Flash", "nvidia/GLM-5.3-Flash-NVFP4")

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        # By the top level only: vision_config.model_type is not the same everywhere.
        return config.get("model_type") == _MODEL_TYPE or config.get("architectures") == [_ARCHITECTURE]

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.vision = VisionConfig.read(checkpoint.config)
        self.processor = ProcessorConfig.read(checkpoint)
        for mine, theirs in (
            ("patch_size", self.vision.patch_size),
            ("temporal_patch_size", self.vision.temporal_patch_size),
            ("merge_size", self.vision.spatial_merge_size),
        ):
            if getattr(self.processor, mine) != theirs:
                raise CheckpointError(
                    f"the processor's {mine} is {getattr(self.processor, mine)}, the tower's {theirs}"
                )
        # (x - mean/r) / (std/r) in float32, as the reference fuses rescaling with normalisation.
        x = torch.arange(256, dtype=torch.float32, device="cpu")
        scale = 1.0 / self.processor.rescale_factor
        mean, std = (
            torch.tensor(v, dtype=torch.float32, device="cpu").unsqueeze(1) * scale
            for v in (self.processor.image_mean, self.processor.image_std)
        )
        self.table = (x - mean) / std

    @property
    def preprocessing(self) -> Mapping[str, Any]:
        return asdict(self.processor) | {"resize": "torch uint8 bicubic antialias", "alpha": "white"}

    def plan(self, size: ImageSize) -> Plan:
        return plan_image(size, self.processor)

    def patches(self, pixels: Pixels, plan: Plan) -> Patches:
        content = resize_bicubic_torch(over_white(pixels), plan.content)
        page = place(content, plan.canvas, plan.offset, fill=0)
        rows = patchify(page, self.processor.patch_size, self.processor.merge_size)
        return Patches(torch.from_numpy(rows), plan)

    def pixel_values(self, patches: Patches, dtype: torch.dtype) -> Tensor:
        values = look_up(patches.data, self.table)
        return repeat_frame(values, self.processor.temporal_patch_size).to(dtype)

    def token_map(self, plan: Plan) -> np.ndarray:
        merge = self.processor.merge_size
        return np.arange(plan.rows).reshape(plan.grid_thw[1] // merge, -1)

    def build_tower(self, device: torch.device, dtype: torch.dtype) -> GlmTower:
        tower = GlmTower(self.vision, self.table.to(device, dtype))
        assign(tower, self.checkpoint.load(shapes_of(tower), _PREFIXES, device, dtype))
        return tower


class Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_heads
        self.qkv = Linear(3 * width, width, bias=config.attention_bias)
        self.proj = Linear(width, width, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], 3, self.heads, -1)
        q, k, v = qkv.unbind(1)
        q = rotate_halves(self.q_norm(q), cos, sin).to(v.dtype)
        k = rotate_halves(self.k_norm(k), cos, sin).to(v.dtype)
        return self.proj(attention(q, k, v, lengths))


class Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.mlp = ClampedSwiGLU(
            config.hidden_size, config.intermediate_size, config.swiglu_limit, bias=config.attention_bias
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, lengths)
        return x + self.mlp(self.norm2(x))


class Merger(ClampedSwiGLU):
    """proj, LayerNorm, erf-GELU, then the clamped SwiGLU; no biases but the norm's."""

    def __init__(self, config: VisionConfig) -> None:
        width = config.out_hidden_size
        super().__init__(width, config.projection_intermediate_size, config.swiglu_limit, bias=False)
        self.proj = Linear(width, width, bias=False)
        self.post_projection_norm = LayerNorm(width, _MERGER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


class PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch = config.patch_size
        self.proj = Linear(config.hidden_size, _CHANNELS, config.temporal_patch_size, patch, patch)


class GlmTower(nn.Module):
    """Attributes are named as in the checkpoint, whose tensors they hold."""

    def __init__(self, config: VisionConfig, table: Tensor) -> None:
        super().__init__()
        self.config = config
        self.table = table
        merge = config.spatial_merge_size
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.post_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.downsample = Linear(config.out_hidden_size, config.hidden_size, merge, merge)
        self.merger = Merger(config)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """uint8 [sum(t·h·w), 3·patch²] and a grid an image -> rows [sum(t·h·w) / merge², out]."""
        config, merge = self.config, self.config.spatial_merge_size
        check_packing(patches, grids, merge)
        pixels = repeat_frame(look_up(patches, self.table), config.temporal_patch_size)
        x = self.patch_embed.proj(pixels).float()
        cos, sin = self._rotations(grids, x.device)
        lengths = [h * w for t, h, w in grids for _ in range(t)]  # frames do not see each other
        for block in self.blocks:
            x = block(x, cos, sin, lengths)
        x = self.post_layernorm(x)
        # Each merge x merge block as one row, flattened as (channel, y, x) like a convolution's window.
        x = x.view(-1, merge**2, config.hidden_size).transpose(1, 2).flatten(1)
        return self.merger(self.downsample(x))

    def _rotations(self, grids: Sequence[Grid], device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [tokens, 1, head_dim/2]: angles (row·f, column·f) with
        f_k = theta^(-2k / (head_dim/2)).
        """
        half = self.config.head_dim // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
        frequencies = 1.0 / (self.config.rope_theta**steps)
        positions = grid_positions(grids, self.config.spatial_merge_size, device)
        angles = torch.cat([p.unsqueeze(1) * frequencies for p in positions], dim=1)
        angles = angles.unsqueeze(1)
        return angles.cos(), angles.sin()
