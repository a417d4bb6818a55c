"""Layers of the vision towers. Parameters are declared without storage and assigned from a checkpoint.

Matrix products run in the tower's dtype; everything between them (residual stream, norms, RoPE) is float32.
For bfloat16 towers that is closer to the float32 result than the references' own bfloat16 runs, and needs
fewer kernels than casting back and forth. Nothing here reads Torch's default dtype or device: they belong to
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..numerics import sample

Grid: TypeAlias = tuple[int, int, int]
"""A patch grid (t, h, w), before merging."""

Rope: TypeAlias = tuple[Tensor, Tensor]
"""RoPE tables: cos and sin, float32 [tokens, 1, head_dim/2]."""

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k and v within each packed segment, see `attention`."""


def parameter(*shape: int) -> nn.Parameter:
    """Declare a parameter's shape; `load_state_dict(assign=True)` gives it values."""
    return nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float32), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T + bias in the weight's dtype. A weight with more axes (a convolution whose stride equals
    its kernel) is used as [out, product of the others].
    """

    def __init__(self, out: int, *inputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = parameter(out, *inputs)
        self.bias = parameter(out) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer normalisation with weight and bias, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(width)
        self.bias = parameter(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)


class ClampedSwiGLU(nn.Module):
    """down(silu(min(gate, limit)) * clip(up, -limit, limit)): the gate has an upper bound only."""

    def __init__(self, width: int, inner: int, limit: float, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(inner, width, bias=bias)
        self.up_proj = Linear(inner, width, bias=bias)
        self.down_proj = Linear(width, inner, bias=bias)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        # Nothing else holds the projections' outputs, so they can be changed in place.
        gate = F.silu(self.gate_proj(x).clamp_(max=self.limit), inplace=True)
        up = self.up_proj(x).clamp_(-self.limit, self.limit)
        return self.down_proj(gate.mul_(up))


class PackedSwiGLU(nn.Module):
    """down(silu(gate) * up), with the rows of gate and up in one matrix, in that order; no biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = Linear(2 * inner, width, bias=False)
        self.down = Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class GeluMLP(nn.Module):
    """down(gelu(up(x))), with the exact GELU or its tanh approximation."""

    def __init__(self, width: int, inner: int, *, out: int = 0, bias: bool, tanh: bool = False) -> None:
        super().__init__()
        self.up = Linear(inner, width, bias=bias)
        self.down = Linear(out or width, inner, bias=bias)
        self.approximate = "tanh" if tanh else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Attention(nn.Module):
    """Bidirectional multi-head self-attention with RoPE over packed segments.

    `qkv` holds the rows of q, k and v, each head-major. With `norm_eps`, queries and keys are normalised per
    head before RoPE. `inner` is the width of all heads together, by default `width`.
    """

    def __init__(
        self, width: int, heads: int, *, inner: int = 0, bias: bool, norm_eps: float | None = None
    ) -> None:
        super().__init__()
        inner = inner or width
        self.heads, self.head_dim = heads, inner // heads
        self.qkv = Linear(3 * inner, width, bias=bias)
        self.proj = Linear(width, inner, bias=bias)
        self.q_norm = None if norm_eps is None else RMSNorm(self.head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(self.head_dim, norm_eps)

    def deinterleave_rope(self) -> None:
        """Reorder each head's query and key rows, once, so that `apply_rope` suits a checkpoint that rotates
        dims (2j, 2j+1), even j by the column and odd j by the row. Dot products stay the same.
        """
        dim = self.head_dim
        pairs = [*range(1, dim // 2, 2), *range(0, dim // 2, 2)]  # rows first, as in grid_rope
        order = [2 * j for j in pairs] + [2 * j + 1 for j in pairs]
        for values in (self.qkv.weight, self.qkv.bias):
            if values is not None:
                by_head = values.view(3, self.heads, dim, -1)
                by_head[:2] = by_head[:2, :, order]

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        q = q.float() if self.q_norm is None else self.q_norm(q)
        k = k.float() if self.k_norm is None else self.k_norm(k)
        q, k = apply_rope(q, rope).to(v.dtype), apply_rope(k, rope).to(v.dtype)
        return self.proj(attend(q, k, v))


class Block(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x)); x is the float32 residual stream."""

    def __init__(self, norm1: nn.Module, attn: Attention, norm2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        sample()  # in between, other threads may run and switch a setting
        x = x + self.attn(self.norm1(x), rope, attend)
        return x + self.mlp(self.norm2(x))


def normalize_bytes(patches: Tensor, table: Tensor) -> Tensor:
    """Normalise bytes by table lookup: uint8 [n, channels·k] and [channels, 256] -> [n, channels, k].

    A reference's normalisation is a function of channel and byte, so a table of its 256 results per
    channel is exact in any dtype and on any device.
    """
    channels = table.shape[0]
    offsets = torch.arange(channels, dtype=torch.int32, device=patches.device) * 256
    index = patches.view(patches.shape[0], channels, -1).to(torch.int32) + offsets.view(-1, 1)
    return table.flatten().index_select(0, index.flatten()).view(index.shape)


def normalized_on_host(patches: Tensor, table: Tensor, dtype: torch.dtype, frames: int = 1) -> Tensor:
    """Normalise as `normalize_bytes`, cast to `dtype` and repeat as `repeat_frame`: [n, channels, frames·k].

    For callers without a device, which must work in a forked process: NumPy looks up, because Torch would
    start its thread pool, and threads do not survive a fork. The table is cast, not the values: same bits.
    """
    channels = table.shape[0]
    cast = table.to(dtype)
    items = cast.view(torch.uint8).numpy().view(_ITEMS[cast.itemsize])
    index = patches.numpy().reshape(patches.shape[0], channels, 1, -1)
    values = np.empty((patches.shape[0], channels, frames, index.shape[-1]), items.dtype)
    for channel in range(channels):
        values[:, channel] = items[channel][index[:, channel]]
    return torch.from_numpy(values).view(dtype).flatten(2)


_ITEMS = {1: "i1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}  # NumPy types of any kind, by size


def repeat_frame(values: Tensor, frames: int) -> Tensor:
    """Repeat a still image as equal frames of a clip: [n, c, y·x] -> [n, c·frames·y·x]."""
    n, channels, area = values.shape
    return values.unsqueeze(2).expand(n, channels, frames, area).reshape(n, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute bidirectional attention within each packed segment; `lengths` are the segments' tokens.

    q, k and v are [tokens, heads, dim] with any strides; returns [tokens, heads·dim].
    """
    outputs = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1).unsqueeze(0) for x in segment))
        for segment in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True)
    ]
    merged = [out[0].transpose(0, 1).flatten(1) for out in outputs]
    return merged[0] if len(merged) == 1 else torch.cat(merged)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Apply rotary embedding to [tokens, heads, dim], over pairs of dims (j, j + dim/2)."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
