"""GLM-5.3-Flash (`glm5_next`): the vision tower of zai-org's release.

The reference is transformers' `models/glm5_next`, which wrote the checkpoint; the formulas below follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..contract import ImageSize, Patches, Plan
from ..errors import CheckpointError
from ..media.geometry import composite_over_white
from ..media.patches import Bicubic, resize_and_patchify
from ..media.picture import Picture
from .family import Family, check_agreement, check_heads, read_settings, require, section
from .layers import Attend, Attention, Block, ClampedSwiGLU, LayerNorm, Linear, RMSNorm, normalized_on_host
from .tables import Tables
from .trunk import Renames, Trunk, VisionTower
from .weights import Checkpoint

# The module's names on the left, the checkpoint's on the right.
NAMES = (
    ("trunk.embed", "patch_embed.proj"),
    ("trunk.blocks", "blocks"),
    ("trunk.norm", "post_layernorm"),
    ("downsample", "downsample"),
    ("merger", "merger"),
)
_ALIASES = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}
_CHANNELS = 3
_MERGER_NORM_EPS = 1e-5  # torch's LayerNorm default, which the reference relies on


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """`vision_config` of config.json, with the reference's defaults; the release sets some otherwise."""

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
        vision = section(config, where)
        require(vision, where, hidden_act="silu", in_channels=_CHANNELS, attention_dropout=0)
        rope = vision.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise CheckpointError(f"{where}.rope_parameters must be an object, got {rope!r}")
        require(rope, f"{where}.rope_parameters", rope_type=("axial", "default"))  # read as axial
        flat = {**vision, "rope_theta": rope.get("rope_theta")}
        read = read_settings(cls, flat, where, _ALIASES)
        check_heads(read.hidden_size, read.num_heads, "hidden_size / num_heads")
        return read


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
            files = "a processor_config.json with an image_processor object nor a preprocessor_config.json"
            raise CheckpointError(f"there is neither {files} in {str(checkpoint.path)!r}")
        require(config, where, do_convert_rgb=True, do_resize=True, do_rescale=True, do_normalize=True)
        require(config, where, resample=3)  # bicubic
        return read_settings(cls, config, where, may_be_zero=("image_mean",))

    @property
    def factor(self) -> int:
        """Canvas sides are multiples of this, in pixels."""
        return self.patch_size * self.merge_size * self.patch_expand_factor

    @property
    def unit(self) -> int:
        """Pixels of the volume (frames x height x width) per token."""
        return self.temporal_patch_size * self.factor**2


def plan_image(size: ImageSize, processor: ProcessorConfig) -> Plan:
    """Plan canvas and content of one image as the reference's `smart_resize` and `resize` do."""
    width, height = size
    factor, frames = processor.factor, processor.temporal_patch_size
    low, high = (n * processor.unit for n in (processor.min_image_tokens, processor.max_image_tokens))

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
        while first <= last:  # binary search for the tallest content whose canvas fits
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
    return Plan.on_canvas(
        size,
        ImageSize(content_w, content_h),
        ImageSize(canvas_w, canvas_h),
        patch=processor.patch_size,
        rows=lambda h, w: h * w // processor.merge_size**2,
    )


class Glm53(Family):
    """GLM-5.3-Flash images."""

    name = "glm53"  # recognised by the top level alone: copies differ in vision_config.model_type
    model_type, architecture = "glm5_next", "Glm5NextForConditionalGeneration"
    lookalike_prefixes = ("glm", "Glm")
    checkpoints = ("zai-org/GLM-5.3-Flash", "nvidia/GLM-5.3-Flash-NVFP4")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.vision = VisionConfig.read(checkpoint.config)
        self.processor = ProcessorConfig.read(checkpoint)
        check_agreement(
            patch_size=(self.processor.patch_size, self.vision.patch_size),
            temporal_patch_size=(self.processor.temporal_patch_size, self.vision.temporal_patch_size),
            merge_size=(self.processor.merge_size, self.vision.spatial_merge_size),
        )
        self.merge = self.processor.merge_size
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

    def patches(self, picture: Picture, plan: Plan) -> Patches:
        side, merge = self.processor.patch_size, self.processor.merge_size
        pixels = composite_over_white(picture.pixels)
        return resize_and_patchify(pixels, plan, patch=side, merge=merge, bicubic=Bicubic.TORCH, fill=0)

    def pixel_values(self, patches: Patches, dtype: torch.dtype) -> Tensor:
        frames = self.processor.temporal_patch_size
        return normalized_on_host(patches.data, self.table, dtype, frames).flatten(1)

    @property
    def tensor_prefixes(self) -> tuple[str, ...]:
        return (self.checkpoint.only_prefix(("model.visual.", "visual.", "vision_tower.")),)

    def declare_tower(self, table: Tensor) -> GlmTower:
        return GlmTower(self.vision, table)

    @property
    def renames(self) -> Renames:
        return [(ours, self.tensor_prefixes[0] + theirs) for ours, theirs in NAMES]


class Merger(ClampedSwiGLU):
    """proj, LayerNorm, exact GELU, then the clamped SwiGLU; only the norm has a bias."""

    def __init__(self, config: VisionConfig) -> None:
        width, inner = config.out_hidden_size, config.projection_intermediate_size
        super().__init__(width, inner, config.swiglu_limit, bias=False)
        self.proj = Linear(width, width, bias=False)
        self.post_projection_norm = LayerNorm(width, _MERGER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.gelu(self.post_projection_norm(self.proj(x))))


class GlmTower(VisionTower):
    """Trunk, downsampling and merger."""

    def __init__(self, config: VisionConfig, table: Tensor) -> None:
        super().__init__()
        width, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        patch, frames, merge = config.patch_size, config.temporal_patch_size, config.spatial_merge_size

        def block() -> Block:
            attention = Attention(width, config.num_heads, bias=bias, norm_eps=eps)
            mlp = ClampedSwiGLU(width, config.intermediate_size, config.swiglu_limit, bias=bias)
            return Block(RMSNorm(width, eps), attention, RMSNorm(width, eps), mlp)

        self.trunk = Trunk(
            table,
            Linear(width, _CHANNELS, frames, patch, patch),
            (block() for _ in range(config.depth)),
            RMSNorm(width, eps),
            theta=config.rope_theta,
            merge=merge,
            frames=frames,
        )
        self.downsample = Linear(config.out_hidden_size, width, merge, merge)
        self.merge, self.merger = merge, Merger(config)

    def run(self, patches: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """uint8 [sum(t·h·w), 3·patch²] -> rows [sum(t·h·w) / merge², out]."""
        x = self.trunk(patches, tables, attend)
        # One row per merge x merge block, flattened as (channel, y, x) like a convolution's window.
        x = x.view(-1, self.merge**2, x.shape[-1]).transpose(1, 2).flatten(1)
        return self.merger(self.downsample(x))
