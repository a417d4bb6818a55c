"""DeepSeek-V4.1-Flash (`deepseek_v41`): the vision tower, aligner and image span.

The reference is the checkpoint's inference code; the formulas below follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contract import ImageSize, Patches, Plan
from ..errors import CheckpointError, MediaTooLargeError
from ..media.patches import Bicubic, resize_and_patchify
from ..media.picture import Picture
from . import layers
from .family import Family, check_heads, read_settings, section
from .layers import Attend, Attention, Block, GeluMLP, Grid, Linear, PackedSwiGLU, RMSNorm
from .tables import Tables, stacked
from .trunk import Trunk, VisionTower
from .weights import Checkpoint

_CHANNELS = 3
_TEXT = "deepseek_v41_text"
_START, _NEWLINE, _END = -3, -2, -1  # the special rows of a span, see `Tables`
_NORM_EPS = 1e-6  # a constant of the reference; text_config.rms_norm_eps belongs to the language model
_FILL = 127  # of the padding around an image that keeps its aspect ratio
# The module's names on the left, the checkpoint's on the right.
_NAMES = (
    ("trunk.embed", "vision.patch_embed.proj"),
    ("trunk", "vision"),
    ("attn.qkv", "attn.wqkv"),
    ("attn.proj", "attn.wo"),
    ("mlp.gate_up", "mlp.w1"),
    ("mlp.down", "mlp.w2"),
    ("aligner.up", "aligner.w1"),
    ("aligner.down", "aligner.w2"),
)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """`vision_config` of config.json."""

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 1e4
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    """Rows of a whole image span, including its start, newline and end rows."""
    min_pixels: int = 295936
    max_wh_ratio: float = math.inf

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> VisionConfig:
        vision = dict(section(config, "vision_config"))
        ratio = vision.pop("max_wh_ratio", None)
        if ratio is not None and (type(ratio) not in (int, float) or not 0 < ratio < math.inf):
            raise CheckpointError(f"vision_config.max_wh_ratio must be positive or null, got {ratio!r}")
        limit = {} if ratio is None else {"max_wh_ratio": ratio}
        read = read_settings(cls, vision | limit, "vision_config")
        check_heads(read.hidden_size, read.num_attention_heads, "hidden_size / num_attention_heads")
        if read.max_image_tokens < 4:
            raise CheckpointError(
                f"vision_config.max_image_tokens must be at least 4, got {read.max_image_tokens}"
            )
        return read


def token_grid(grid_h: int, grid_w: int, ratio: int) -> tuple[int, int]:
    """Return token rows and columns of a patch grid; partial windows at the right and bottom count."""
    return -(-grid_h // ratio), -(-grid_w // ratio)


def plan_image(size: ImageSize, config: VisionConfig) -> Plan:
    """Plan canvas, content and span of one image, in float64 as in the reference."""
    patch, ratio, limit = config.patch_size, config.downsample_ratio, config.max_image_tokens
    width: float = size.width
    height = size.height
    if width > height * config.max_wh_ratio:
        width = height * config.max_wh_ratio
    if width * height < config.min_pixels:
        grow = (config.min_pixels / (width * height)) ** 0.5
        width, height = int(width * grow), int(height * grow)

    def rows_of(grid_h: int, grid_w: int) -> int:
        down, across = token_grid(grid_h, grid_w, ratio)
        return down * (across + 1) + 2

    canvas_w, canvas_h = math.ceil(width / patch) * patch, math.ceil(height / patch) * patch
    if rows_of(canvas_h // patch, canvas_w // patch) > limit:
        cell = patch * ratio
        aspect = height / width
        most_w = math.sqrt((limit - 2) / aspect + 0.25) - 0.5
        most_h = most_w * aspect
        if most_w < 1:
            canvas_w, canvas_h = cell, (limit - 2) // 2 * cell
        elif most_h < 1:
            canvas_w, canvas_h = (limit - 3) * cell, cell
        else:
            shrink = min(math.floor(most_w) * cell / width, math.floor(most_h) * cell / height)
            canvas_h = math.floor(height * shrink / patch) * patch
            canvas_w = math.floor(width * shrink / patch) * patch
    thin = f"an image of {size.width}x{size.height} is too thin for {limit} tokens"
    if min(canvas_w, canvas_h) < 1 or rows_of(canvas_h // patch, canvas_w // patch) > limit:
        raise MediaTooLargeError(f"{thin}: it would have no patch left")
    content_w, content_h = canvas_w, canvas_h
    left = top = 0
    if size.width < config.max_wh_ratio * size.height:  # else stretched to the whole canvas
        if size.width / size.height > canvas_w / canvas_h:
            content_h = round(size.height / size.width * canvas_w)
            top = round((canvas_h - content_h) * 0.5)
        elif size.width / size.height < canvas_w / canvas_h:
            content_w = round(size.width / size.height * canvas_h)
            left = round((canvas_w - content_w) * 0.5)
    if min(content_w, content_h) < 1:  # the reference fails to resize these
        raise MediaTooLargeError(f"{thin}: it would have no pixels left")
    content, canvas = ImageSize(content_w, content_h), ImageSize(canvas_w, canvas_h)
    return Plan.on_canvas(size, content, canvas, patch=patch, rows=rows_of, offset=(left, top))


class DeepSeek41(Family):
    """DeepSeek-V4.1-Flash images."""

    name = "deepseek41"
    model_type, architecture = "deepseek_v41", "DeepseekV41ForCausalLM"
    lookalike_prefixes = ("deepseek_v4", "DeepseekV4")
    tensor_prefixes = ("vision.", "aligner.", "image_")
    renames = _NAMES
    checkpoints = ("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash-1017")

    @classmethod
    def why_lookalike(cls, config: Mapping[str, Any]) -> str | None:
        vision, text = config.get("vision_config"), config.get("text_config")
        kind = vision.get("model_type") if isinstance(vision, dict) else None
        text_kind = text.get("model_type", _TEXT) if isinstance(text, dict) else _TEXT
        if cls.has_name(config) and kind != "deepseek_v41_vision":
            return f"its vision_config.model_type is {kind!r}, not 'deepseek_v41_vision'"
        if cls.has_name(config) and text_kind != _TEXT:
            return f"its text_config.model_type is {text_kind!r}, not {_TEXT!r}"
        return super().why_lookalike(config)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.vision = VisionConfig.read(checkpoint.config)
        text = section(checkpoint.config, "text_config")
        self.out = read_settings(TextConfig, text, "text_config").hidden_size
        # (x/255 - 0.5) / 0.5 in float32, then always rounded to bfloat16, as in the reference.
        x = torch.arange(256, dtype=torch.float32, device="cpu") / 255
        self.table = ((x - 0.5) / 0.5).to(torch.bfloat16).float().expand(_CHANNELS, 256).contiguous()

    @property
    def preprocessing(self) -> Mapping[str, Any]:
        names = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio")
        config = asdict(self.vision)
        return {k: str(config[k]) for k in names} | {
            "resize": "pillow bicubic, across then down",
            "alpha": "dropped",
        }

    def plan(self, size: ImageSize) -> Plan:
        return plan_image(size, self.vision)

    def patches(self, picture: Picture, plan: Plan) -> Patches:
        patch = self.vision.patch_size
        return resize_and_patchify(picture.pixels, plan, patch=patch, bicubic=Bicubic.PILLOW, fill=_FILL)

    def token_map(self, plan: Plan) -> np.ndarray:
        down, across = token_grid(*plan.grid_thw[1:], self.vision.downsample_ratio)
        return 1 + np.arange(down)[:, None] * (across + 1) + np.arange(across)

    def declare_tower(self, table: torch.Tensor) -> DeepSeekTower:
        kernel = self.checkpoint.shape("vision.patch_embed.proj.weight") or ()
        return DeepSeekTower(self.vision, self.out, table, len(kernel) == 4)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The part of `text_config` that is used."""

    hidden_size: int = 5120


class DeepSeekTower(VisionTower):
    """Trunk, aligner, and the rows that frame an image."""

    def __init__(self, config: VisionConfig, out: int, table: Tensor, kernel_axes: bool = False) -> None:
        super().__init__()
        self.window = config.downsample_ratio
        width, patch = config.hidden_size, config.patch_size

        def block() -> Block:
            attention = Attention(width, config.num_attention_heads, bias=True)
            mlp = PackedSwiGLU(width, config.intermediate_size)
            return Block(RMSNorm(width, _NORM_EPS), attention, RMSNorm(width, _NORM_EPS), mlp)

        # Some ports store the patch embedding as a convolution kernel, in the same order.
        inputs = (_CHANNELS, patch, patch) if kernel_axes else (_CHANNELS * patch**2,)
        self.trunk = Trunk(
            table,
            Linear(width, *inputs),
            (block() for _ in range(config.num_hidden_layers)),
            RMSNorm(width, _NORM_EPS),
            theta=config.rope_theta,
        )
        self.aligner = GeluMLP(width * self.window**2, out, out=out, bias=True)
        self.image_start, self.image_newline, self.image_end = (layers.parameter(out) for _ in range(3))

    def grid_tables(self, grid: Grid) -> Tables:
        down, across = token_grid(*grid[1:], self.window)
        # Start, each token row followed by a newline, and end.
        body = np.pad(
            np.arange(down * across).reshape(down, across), ((0, 0), (0, 1)), constant_values=_NEWLINE
        )
        order = self.on_device(np.concatenate(([_START], body.ravel(), [_END])))
        return super().grid_tables(grid)._replace(order=order)

    def run(self, patches: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """uint8 [sum(h·w), 3·patch²] -> the images' spans [rows, out]."""
        x = self.trunk(patches, tables, attend)
        # One row per window, flattened as (channel, y, x); those at the edges are padded with zeros.
        windows = stacked(x, x.new_zeros(x.shape[-1]))[tables.windows].transpose(1, 2).flatten(1)
        rows = self.aligner(windows)
        return stacked(rows, self.image_start, self.image_newline, self.image_end)[tables.order]
