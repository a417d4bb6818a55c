"""The part that all families' towers share, from bytes to the last norm, and the loading of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import (
    Attend,
    Block,
    Grid,
    LayerNorm,
    Linear,
    RMSNorm,
    attention,
    normalize_bytes,
    parameter,
    repeat_frame,
)
from .tables import Tables, TableStore, grid_rope, pack, window_index
from .weights import Checkpoint

Renames: TypeAlias = Sequence[tuple[str, str]]
"""Pairs of a part of a module's tensor name and its replacement in the checkpoint. Applied in order."""


class Trunk(nn.Module):
    """Byte normalisation, patch embedding, positions, blocks and final norm, for packed images.

    table: [channels, 256], the normalised value of each byte.
    merge: patches of a merge x merge block are consecutive; 1 is raster order.
    frames: number of equal frames in a still image's patch.
    """

    table: Tensor

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
        self.register_buffer("table", table, persistent=False)  # not in the checkpoint
        self.embed, self.norm, self.positions = embed, norm, positions
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.theta, self.merge, self.frames = theta, merge, frames

    def forward(self, patches: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """uint8 [tokens, channels·patch²] and the tables of their grids -> float32 [tokens, width]."""
        pixels = repeat_frame(normalize_bytes(patches, self.table), self.frames)
        x = self.embed(pixels).float()
        if tables.positions is not None:
            x = x + tables.positions
        for block in self.blocks:
            x = block(x, tables.rope, attend)
        return self.norm(x)

    @property
    def version(self) -> int:
        """A number that changes when the weights that tables are made of are changed in place."""
        weight = None if self.positions is None else self.positions.weight
        return 0 if weight is None or weight.is_inference() else weight._version

    def tables(self, grid: Grid) -> Tables:
        """Make the tables of one grid: segments, RoPE and positions."""
        t, h, w = grid
        device = self.embed.weight.device
        rope = grid_rope(self.merge, self.blocks[0].attn.head_dim, self.theta, device, grid)
        positions = None if self.positions is None else self.positions.interpolated(grid)
        return Tables((h * w,) * t, rope, positions)


class VisionTower(nn.Module, ABC):
    """A family's tower in two halves: `tables`, all that depends on the grids, and `run`, the computation,
    which never looks at a value and so is the same for every grid.
    """

    trunk: Trunk
    merge = 1
    """Side, in patches, of the blocks that grids must divide into."""
    window = 0
    """Side, in patches, of the windows that rows are made of; 0 if their tokens follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.store = TableStore()

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """uint8 [sum(t·h·w), bytes] and one grid per image -> rows [rows, width] in the images' order."""
        tables = self.tables(grids, len(patches))
        return self.run(patches, tables, partial(attention, lengths=tables.lengths))

    def tables(self, grids: Sequence[Grid], patches: int) -> Tables:
        """Return the packed tables of the images' grids, made once a grid. Raises ValueError unless they
        account for every patch and divide into merge blocks.
        """
        check_packing(patches, grids, self.merge)
        version = self.trunk.version
        return pack([self.store.get(grid, version, self.grid_tables) for grid in grids])

    def grid_tables(self, grid: Grid) -> Tables:
        """Make the tables of one grid."""
        tables = self.trunk.tables(grid)
        if not self.window:
            return tables
        return tables._replace(windows=self.on_device(window_index(grid, self.window)))

    def on_device(self, index: np.ndarray) -> Tensor:
        """Return an index on the tower's device; on a GPU the host waits for the copy, once a grid."""
        return torch.as_tensor(index, dtype=torch.int64, device=self.trunk.embed.weight.device)

    @abstractmethod
    def run(self, patches: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Compute the rows; `attend` is attention within each of the tables' segments."""


class PositionTable(nn.Module):
    """Learned position embeddings of a fixed grid, interpolated to other grids."""

    def __init__(self, height: int, width: int, channels: int, mode: str) -> None:
        super().__init__()
        self.weight = parameter(height, width, channels)
        self.mode = mode

    def interpolated(self, grid: Grid) -> Tensor:
        """Return the embeddings of `grid`, float32 [t·h·w, channels] in raster order."""
        t, h, w = grid
        table = self.weight.float()
        if table.shape[:2] != (h, w):
            planes = table.permute(2, 0, 1).unsqueeze(0)
            table = F.interpolate(planes, (h, w), mode=self.mode, align_corners=False)[0].permute(1, 2, 0)
        return table.reshape(h * w, -1).repeat(t, 1)


def check_packing(patches: int, grids: Sequence[Grid], merge: int) -> None:
    """Raise ValueError unless the grids account for every patch and divide into merge blocks."""
    total = sum(t * h * w for t, h, w in grids)
    if total != patches or total == 0:
        raise ValueError(f"got {patches} patches for grids {list(grids)} of {total} patches")
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
    declared, dtypes = module.state_dict(), tensor_dtypes(module, dtype)
    names = {name: rename(name, renames) for name in declared}
    wanted = {names[name]: value.to(dtypes[name]) for name, value in declared.items()}
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


def tensor_dtypes(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of a tower of `dtype`: the parameters of norms are float32."""
    exact = _norm_tensors(module)
    return {name: torch.float32 if name in exact else dtype for name in module.state_dict()}


def _norm_tensors(module: nn.Module) -> set[str]:
    norms = {name: part for name, part in module.named_modules() if isinstance(part, (RMSNorm, LayerNorm))}
    return {f"{name}.{tensor}" for name, part in norms.items() for tensor in part.state_dict()}
