"""Kimi-K3 (`kimi_k3`): MoonViT vision tower, patch merger and projector.

The reference is the checkpoint's remote code; the formulas below follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..contract import ImageSize, Patches, Plan
from ..errors import CheckpointError, MediaTooLargeError
from ..media.geometry import Background, composite_over, resize_native
from ..media.patches import Bicubic, resize_and_patchify
from ..media.picture import Picture
from .family import Family, check_agreement, check_heads, read_settings, require, section
from .layers import Attend, Attention, Block, GeluMLP, LayerNorm, Linear, RMSNorm
from .tables import Tables
from .trunk import PositionTable, Renames, Trunk, VisionTower
from .weights import Checkpoint

_CHANNELS, _MERGE = 3, 2
_ROPE_THETA = 1e4
_LONGEST = 512  # patches on a side: the size of the reference's RoPE tables
# Since torch 2.7, nn.RMSNorm without an eps uses float32's, for bfloat16 too. Ports made on older versions
# hard-code bfloat16's 2^-7; it is not known which one the model was first served with.
_RMS_EPS = torch.finfo(torch.float32).eps
_LAYER_NORM_EPS = 1e-5
# The module's names on the left, the checkpoint's on the right; GGUF-like ports name some otherwise.
_NAMES = (
    ("norm1.", "norm0."),
    ("norm2.", "norm1."),
    ("attn.qkv", "wqkv"),
    ("attn.proj", "wo"),
    ("mlp.up", "mlp.fc0"),
    ("mlp.down", "mlp.fc1"),
    ("trunk.embed", "vision_tower.patch_embed.proj"),
    ("trunk.positions", "vision_tower.patch_embed.pos_emb"),
    ("trunk.blocks", "vision_tower.encoder.blocks"),
    ("trunk.norm", "vision_tower.encoder.final_layernorm"),
    ("post_norm", "mm_projector.post_norm"),
)
_RELEASED = (("projector.up", "mm_projector.proj.0"), ("projector.down", "mm_projector.proj.2"))
_PORTED = (("projector.up", "mm_projector.linear_1"), ("projector.down", "mm_projector.linear_2"))


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """`vision_config` of config.json. Defaults are the code's; the release sets some keys otherwise."""

    vt_hidden_size: int = 1024
    vt_num_hidden_layers: int = 27
    vt_num_attention_heads: int = 12
    vt_intermediate_size: int = 4096
    qkv_hidden_size: int = 1024
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    pos_emb_interpolation_mode: str = "bicubic"
    norm_type: str = "layernorm"
    attn_bias: bool = True
    linear_bias: bool = True
    patch_embed_proj_bias: bool = True
    projector_ln_eps: float = 1e-5
    text_hidden_size: int = 7168

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> VisionConfig:
        where = "vision_config"
        vision = dict(section(config, where))
        width = vision.get("vt_hidden_size") or vision.get("hidden_size") or 1024
        require(
            vision,
            where,
            pos_emb_type="divided_fixed",
            pos_emb_interpolation_mode=("bilinear", "bicubic"),
            merge_type="sd2_tpool",
            merge_kernel_size=[_MERGE, _MERGE],
            norm_type=("rmsnorm", "layernorm"),
            mlp_type="mlp2",
            mm_projector_type="patchmergerv2",
            projector_hidden_act="gelu",
            mm_hidden_size=width,
        )
        vision["vt_hidden_size"] = width
        vision["qkv_hidden_size"] = vision.get("qkv_hidden_size") or width
        text = config.get("text_config")
        if isinstance(text, dict) and text.get("hidden_size") is not None:
            vision["text_hidden_size"] = text["hidden_size"]
        read = read_settings(cls, vision, where)
        names = "qkv_hidden_size / vt_num_attention_heads"
        check_heads(read.qkv_hidden_size, read.vt_num_attention_heads, names)
        return read


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """`media_proc_cfg` of preprocessor_config.json."""

    in_patch_limit: int = 65536
    patch_size: int = 14
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    transparent_bg_fill_stage: str = "before_resize"

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> tuple[ProcessorConfig, Background | None]:
        where, file = "media_proc_cfg", "preprocessor_config.json"
        config = section(checkpoint.read_json(file) or {}, where, file)
        require(
            config,
            where,
            merge_kernel_size=_MERGE,
            fixed_output_tokens=(),
            transparent_bg_fill_stage=("before_resize", "after_resize"),
        )
        read = read_settings(cls, config, where, may_be_zero=("image_mean",))
        if read.patch_limit_on_one_side > _LONGEST:
            raise CheckpointError(f"{where}.patch_limit_on_one_side must be at most {_LONGEST}")
        if config.get("transparent_bg_config") is None:
            return read, None
        background = section(config, "transparent_bg_config", where)
        require(background, "transparent_bg_config", pattern=Background.PATTERNS)
        levels = ("chessboard_white_value", "chessboard_gray_value")
        return read, read_settings(Background, background, "transparent_bg_config", may_be_zero=levels)


def plan_image(size: ImageSize, processor: ProcessorConfig) -> Plan:
    """Plan content and canvas of one image, in float64: never enlarged, padded at the right and bottom."""
    patch, limit = processor.patch_size, processor.in_patch_limit
    longest = processor.patch_limit_on_one_side * patch
    width, height = size
    scale = min(
        1.0,
        math.sqrt(limit / (max(1, width // patch) * max(1, height // patch))),
        longest / width,
        longest / height,
    )
    content_w, content_h = (min(max(1, int(side * scale)), longest) for side in size)
    block = patch * _MERGE
    canvas = ImageSize(-(-content_w // block) * block, -(-content_h // block) * block)
    if max(canvas) > longest:  # only with an odd limit; the reference asserts that it does not happen
        raise MediaTooLargeError(f"an image of {width}x{height} is padded beyond {longest} pixels")
    content = ImageSize(content_w, content_h)
    return Plan.on_canvas(size, content, canvas, patch=patch, rows=lambda h, w: h * w // _MERGE**2)


class KimiK3(Family):
    """Kimi-K3 images."""

    name = "kimi_k3"
    model_type, architecture = "kimi_k3", "KimiK3ForConditionalGeneration"
    lookalike_prefixes = ("kimi", "Kimi")
    tensor_prefixes = ("vision_tower.", "mm_projector.")
    merge = _MERGE
    checkpoints = ("moonshotai/Kimi-K3",)

    @classmethod
    def why_lookalike(cls, config: Mapping[str, Any]) -> str | None:
        vision = config.get("vision_config")
        kind = vision.get("mm_projector_type") if isinstance(vision, dict) else None
        if cls.has_name(config) and kind != "patchmergerv2":  # K2.5 has another one
            return f"mm_projector_type {kind!r} belongs to an older model"
        return super().why_lookalike(config)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.vision = VisionConfig.read(checkpoint.config)
        self.processor, self.background = ProcessorConfig.read(checkpoint)
        check_agreement(patch_size=(self.processor.patch_size, self.vision.patch_size))
        # x/255, - mean and * 1/std, each computed in float64 and rounded to float32, as NumPy does in place.
        x = (np.arange(256) / 255.0).astype(np.float32)
        mean, std = (np.array(v)[:, None] for v in (self.processor.image_mean, self.processor.image_std))
        self.table = torch.from_numpy(((x - mean).astype(np.float32) * (1.0 / std)).astype(np.float32))

    @property
    def preprocessing(self) -> Mapping[str, Any]:
        rules = {"resize": "pillow bicubic, across then down, native mode"}
        return asdict(self.processor) | rules | {"background": self.background and asdict(self.background)}

    def plan(self, size: ImageSize) -> Plan:
        return plan_image(size, self.processor)

    def patches(self, picture: Picture, plan: Plan) -> Patches:
        if self.processor.transparent_bg_fill_stage == "before_resize":
            picture = Picture(composite_over(picture, self.background))
        if picture.native is not None or picture.pixels.shape[2] == 4:
            picture = Picture(composite_over(resize_native(picture, plan.content), self.background))
        patch = self.vision.patch_size
        return resize_and_patchify(picture.pixels, plan, patch=patch, bicubic=Bicubic.PILLOW, fill=0)

    def declare_tower(self, table: Tensor) -> KimiTower:
        return KimiTower(self.vision, table)

    @property
    def renames(self) -> Renames:
        return _NAMES + (_PORTED if "mm_projector.linear_1.weight" in self.checkpoint.files else _RELEASED)

    def build_tower(self, device: torch.device, dtype: torch.dtype) -> VisionTower:
        tower = super().build_tower(device, dtype)
        for block in tower.trunk.blocks:
            block.attn.deinterleave_rope()
        return tower


class KimiTower(VisionTower):
    """Trunk, merger and projector."""

    merge = window = _MERGE

    def __init__(self, config: VisionConfig, table: Tensor) -> None:
        super().__init__()
        width, patch = config.vt_hidden_size, config.patch_size
        height, across = config.init_pos_emb_height, config.init_pos_emb_width

        def norm() -> nn.Module:
            rms = config.norm_type == "rmsnorm"
            return RMSNorm(width, _RMS_EPS) if rms else LayerNorm(width, _LAYER_NORM_EPS)

        def block() -> Block:
            heads, inner = config.vt_num_attention_heads, config.qkv_hidden_size
            attention = Attention(width, heads, inner=inner, bias=config.attn_bias)
            mlp = GeluMLP(width, config.vt_intermediate_size, bias=config.linear_bias, tanh=True)
            return Block(norm(), attention, norm(), mlp)

        self.trunk = Trunk(
            table,
            Linear(width, _CHANNELS, patch, patch, bias=config.patch_embed_proj_bias),
            (block() for _ in range(config.vt_num_hidden_layers)),
            norm(),
            theta=_ROPE_THETA,
            positions=PositionTable(height, across, width, config.pos_emb_interpolation_mode),
        )
        merged = width * _MERGE**2
        self.projector = GeluMLP(merged, merged, out=config.text_hidden_size, bias=False)
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_ln_eps)

    def run(self, patches: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """uint8 [sum(h·w), 3·patch²] -> rows [sum(h·w) / 4, out]."""
        x = self.trunk(patches, tables, attend)
        rows = self.projector(x[tables.windows].flatten(1))
        return self.post_norm(rows).to(rows.dtype)
