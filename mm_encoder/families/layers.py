"""What towers are made of. Parameters are declared without storage and assigned from a checkpoint.

Matrix products run in the tower's dtype; between them (residual stream, norms, rotations) values stay
float32. In bfloat16 that is nearer to the float32 result than the references' own bfloat16 runs, and
takes fewer kernels than casting back and forth. Nothing here reads Torch's default dtype or device,
which belong to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def parameter(*shape: int) -> nn.Parameter:
    """A parameter's name and shape; its values come with `load_state_dict(assign=True)`."""
    return nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float32), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T + bias in the weight's dtype. A weight declared with more axes (a convolution whose
    kernel is its stride) is used as [out, everything else].
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
    """down(silu(min(gate, limit)) * clip(up, -limit, limit)): the gate is bounded from above only."""

    def __init__(self, width: int, inner: int, limit: float, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(inner, width, bias=bias)
        self.up_proj = Linear(inner, width, bias=bias)
        self.down_proj = Linear(width, inner, bias=bias)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        # The projections' outputs are this call's own, so they are changed in place.
        gate = F.silu(self.gate_proj(x).clamp_(max=self.limit), inplace=True)
        up = self.up_proj(x).clamp_(-self.limit, self.limit)
        return self.down_proj(gate.mul_(up))


def look_up(patches: Tensor, table: Tensor) -> Tensor:
    """Normalise bytes by table: uint8 [n, channels·k] and [channels, 256] -> [n, channels, k].

    A reference's normalisation is a function of channel and byte, so its own 256 results a channel,
    looked up, are exact in any dtype and on any device.
    """
    channels = table.shape[0]
    offsets = torch.arange(channels, dtype=torch.int32, device=patches.device) * 256
    index = patches.view(patches.shape[0], channels, -1).to(torch.int32) + offsets.view(-1, 1)
    return table.flatten().index_select(0, index.flatten()).view(index.shape)


def repeat_frame(values: Tensor, frames: int) -> Tensor:
    """[n, c, y·x] -> [n, c·frames·y·x]: a still image is a clip of equal frames."""
    n, channels, area = values.shape
    return values.unsqueeze(2).expand(n, channels, frames, area).reshape(n, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Bidirectional attention within each of the packed segments of `lengths`.

    q, k and v are [tokens, heads, dim] with any strides; returns [tokens, heads·dim].
    """
    outputs = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1).unsqueeze(0) for x in segment))
        for segment in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True)
    ]
    merged = [out[0].transpose(0, 1).flatten(1) for out in outputs]
    return merged[0] if len(merged) == 1 else torch.cat(merged)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over pairs (j, j + dim/2); cos and sin [..., dim/2] broadcast against halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def grid_positions(
    grids: Sequence[tuple[int, int, int]], merge: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row and column of every patch of packed grids (t, h, w), float32 [sum(t·h·w)] each, where the
    patches of a merge x merge block are consecutive. Computed on `device`: nothing is waited for.
    """
    rows, columns = [], []
    for t, h, w in grids:
        shape = (t, h // merge, w // merge, merge, merge)
        y = torch.arange(h, dtype=torch.float32, device=device).view(1, -1, 1, merge, 1)
        x = torch.arange(w, dtype=torch.float32, device=device).view(1, 1, -1, 1, merge)
        rows.append(y.expand(shape).flatten())
        columns.append(x.expand(shape).flatten())
    return torch.cat(rows), torch.cat(columns)


def check_packing(patches: Tensor, grids: Sequence[tuple[int, int, int]], merge: int) -> None:
    """Raise ValueError unless the grids account for every patch and divide into merge blocks."""
    total = sum(t * h * w for t, h, w in grids)
    if total != patches.shape[0] or total == 0:
        raise ValueError(f"got {patches.shape[0]} patches for grids {list(grids)} of {total} patches")
    for grid in grids:
        if grid[1] % merge or grid[2] % merge:
            raise ValueError(f"the sides of grid {grid} must be multiples of {merge}")


def assign(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a declared module its values; norms keep theirs in float32."""
    module.load_state_dict(tensors, assign=True)
    for part in module.modules():
        if isinstance(part, (RMSNorm, LayerNorm)):
            part.float()
    module.requires_grad_(False).eval()


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The tensors that a declared module needs, by name."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}
