"""The part that all families' towers share, from bytes to the last norm, and the loading of weights."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Block, Grid, LayerNorm, Linear, RMSNorm, Rope, normalize_bytes, parameter, repeat_frame
from .weights import Checkpoint

Renames: TypeAlias = Sequence[tuple[str, str]]
"""Pairs of a part of a module's tensor name and its replacement in the checkpoint. Applied in order."""


class Trunk(nn.Module):
    """Byte normalisation, patch embedding, positions, blocks and final norm, for packed images.

    table: [channels, 256], the normalised value of each byte.
    merge: patches of a merge x merge block are consecutive; 1 is raster order.
    frames: number of equal frames in a still image's patch.
    """

    def __init__(
        self,
        table: Tensor,
        embed: Linear,
        blocks: Iterable[Block],
        norm: nn.Module,
        *,
        theta: float,
        merge: int = 1,
        frames: int = 1,
        positions: PositionTable | None = None,
    ) -> None:
        super().__init__()
        self.table, self.embed, self.norm, self.positions = table, embed, norm, positions
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.theta, self.merge, self.frames = theta, merge, frames
        self.tables = GridTables()

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """uint8 [sum(t·h·w), channels·patch²] and one grid per image -> float32 [sum(t·h·w), width]."""
        _check_packing(patches, grids, self.merge)
        pixels = repeat_frame(normalize_bytes(patches, self.table), self.frames)
        x = self.embed(pixels).float()
        device = x.device
        if self.positions is not None:
            make = self.positions.interpolated
            x = x + torch.cat([self.tables.get(("positions", g), partial(make, g))[0] for g in grids])
        make_rope = partial(grid_rope, self.merge, self.blocks[0].attn.head_dim, self.theta, device)
        rope = _pack([self.tables.get(("rope", g), partial(make_rope, g)) for g in grids])
        lengths = [h * w for t, h, w in grids for _ in range(t)]  # no attention between frames
        for block in self.blocks:
            x = block(x, rope, lengths)
        return self.norm(x)


def grid_rope(merge: int, head_dim: int, theta: float, device: torch.device, grid: Grid) -> Rope:
    """Compute the RoPE tables of one grid on `device`: angles (row·f, column·f) with
    f_k = theta^(-2k / (head_dim/2)), the patches of a merge x merge block consecutive.
    """
    t, h, w = grid
    half = head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    frequencies = 1.0 / (theta**steps)
    blocks = (t, h // merge, w // merge, merge, merge)
    row = torch.arange(h, dtype=torch.float32, device=device).view(1, -1, 1, merge, 1).expand(blocks)
    column = torch.arange(w, dtype=torch.float32, device=device).view(1, 1, -1, 1, merge).expand(blocks)
    angles = torch.cat([p.reshape(-1, 1) * frequencies for p in (row, column)], dim=1).unsqueeze(1)
    return angles.cos(), angles.sin()


class PositionTable(nn.Module):
    """Learned position embeddings of a fixed grid, interpolated to other grids."""

    def __init__(self, height: int, width: int, channels: int, mode: str) -> None:
        super().__init__()
        self.weight = parameter(height, width, channels)
        self.mode = mode

    def interpolated(self, grid: Grid) -> tuple[Tensor]:
        """Return the embeddings of `grid`, float32 [t·h·w, channels] in raster order."""
        t, h, w = grid
        table = self.weight.float()
        if table.shape[:2] != (h, w):
            planes = table.permute(2, 0, 1).unsqueeze(0)
            table = F.interpolate(planes, (h, w), mode=self.mode, align_corners=False)[0].permute(1, 2, 0)
        return (table.reshape(h * w, -1).repeat(t, 1),)


class GridTables(threading.local):
    """An LRU cache of tables that depend on a grid alone.

    One cache per thread: each replica's thread has its own CUDA stream, and a table made on one stream must
    not be read on another that has not waited for it. Tables larger than `max_bytes` are not kept.
    """

    def __init__(self, max_bytes: int = 64 * 1024**2) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._tables: OrderedDict[Hashable, tuple[Tensor, ...]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> Any:
        """Return the table under `key`; call `make` if it is missing."""
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = make()
        size = sum(part.untyped_storage().nbytes() for part in table)
        if size <= self.max_bytes:
            self._tables[key] = table
            self.nbytes += size
            while self.nbytes > self.max_bytes:
                _, old = self._tables.popitem(last=False)
                self.nbytes -= sum(part.untyped_storage().nbytes() for part in old)
        return table


def _pack(tables: Sequence[Rope]) -> Rope:
    if len(tables) == 1:
        return tables[0]
    cos, sin = zip(*tables, strict=True)
    return torch.cat(cos), torch.cat(sin)


def _check_packing(patches: Tensor, grids: Sequence[Grid], merge: int) -> None:
    """Raise ValueError unless the grids account for every patch and divide into merge blocks."""
    total = sum(t * h * w for t, h, w in grids)
    if total != patches.shape[0] or total == 0:
        raise ValueError(f"got {patches.shape[0]} patches for grids {list(grids)} of {total} patches")
    for grid in grids:
        if grid[1] % merge or grid[2] % merge:
            raise ValueError(f"the sides of grid {grid} must be multiples of {merge}")


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    renames: Renames,
    prefixes: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load a declared module from a checkpoint. Raises CheckpointError for unknown names under `prefixes`."""
    declared = module.state_dict()
    names = {name: rename(name, renames) for name in declared}
    exact = _norm_tensors(module)
    wanted = {
        names[name]: value.to(torch.float32 if name in exact else dtype) for name, value in declared.items()
    }
    tensors = checkpoint.load(wanted, prefixes, device)
    assign(module, {name: tensors[theirs] for name, theirs in names.items()})


def rename(name: str, renames: Renames) -> str:
    """Translate a module's tensor name to the checkpoint's."""
    for ours, theirs in renames:
        name = name.replace(ours, theirs)
    return name


def assign(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Assign values to a declared module; the parameters of norms become float32."""
    exact = _norm_tensors(module)
    values = {name: value.float() if name in exact else value for name, value in tensors.items()}
    module.load_state_dict(values, assign=True)
    module.requires_grad_(False).eval()


def _norm_tensors(module: nn.Module) -> set[str]:
    norms = {name: part for name, part in module.named_modules() if isinstance(part, (RMSNorm, LayerNorm))}
    return {f"{name}.{tensor}" for name, part in norms.items() for tensor in part.state_dict()}
