"""What a tower needs besides patches and weights: tables that depend on the images' grids alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .layers import Grid, Rope


class Tables(NamedTuple):
    """The tables of one image or of several packed ones, on the tower's device.

    In an index, a negative number names a special row, which `stacked` puts behind the others.
    """

    lengths: tuple[int, ...]
    """Tokens of each segment: there is no attention between images, nor between frames."""
    rope: Rope
    positions: Tensor | None = None
    """Learned position embeddings, float32 [tokens, width]."""
    windows: Tensor | None = None
    """int64 [windows, side²]: the tokens of each window; -1 is padding."""
    order: Tensor | None = None
    """int64 [rows]: the window or special row that each embedding row is."""


class TableStore(threading.local):
    """An LRU cache of the tables of single grids.

    One store per thread: each replica's thread has its own CUDA stream, and a table made on one stream must
    not be read on another that has not waited for it. Tables larger than `max_bytes` are not kept.
    """

    def __init__(self, max_bytes: int = 64 * 1024**2) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._tables: OrderedDict[tuple[Grid, int], Tables] = OrderedDict()

    def get(self, grid: Grid, version: int, make: Callable[[Grid], Tables]) -> Tables:
        """Return the grid's tables of one version of the weights; call `make` if they are missing."""
        key = grid, version
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        tables = make(grid)
        size = _nbytes(tables)
        if size <= self.max_bytes:
            self._tables[key] = tables
            self.nbytes += size
            while self.nbytes > self.max_bytes:
                _, old = self._tables.popitem(last=False)
                self.nbytes -= _nbytes(old)
        return tables


def _nbytes(tables: Tables) -> int:
    tensors = (*tables.rope, tables.positions, tables.windows, tables.order)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


def pack(tables: Sequence[Tables]) -> Tables:
    """Join the tables of several images, in their order."""
    if len(tables) == 1:
        return tables[0]
    cos, sin = (torch.cat(parts) for parts in zip(*(t.rope for t in tables), strict=True))
    positions, windows, order = (
        [part for part in parts if part is not None]
        for parts in zip(*((t.positions, t.windows, t.order) for t in tables), strict=True)
    )
    return Tables(
        tuple(length for t in tables for length in t.lengths),
        (cos, sin),
        torch.cat(positions) if positions else None,
        _join_indices(windows, [sum(t.lengths) for t in tables]),
        _join_indices(order, [len(index) for index in windows]),
    )


def _join_indices(indices: Sequence[Tensor], counts: Sequence[int]) -> Tensor | None:
    """Join indices into sequences of `counts` elements, which follow one another."""
    if not indices:
        return None
    offsets = accumulate(counts, initial=0)
    moved = [torch.where(i < 0, i, i + offset) for i, offset in zip(indices, offsets, strict=False)]
    return torch.cat(moved)


def stacked(rows: Tensor, *special: Tensor) -> Tensor:
    """Put special rows [width] behind `rows` [n, width], in which -1 then is the last of them."""
    return torch.cat((rows, *(row.unsqueeze(0) for row in special)))


def window_index(grid: Grid, side: int) -> np.ndarray:
    """Return the tokens of each window of side x side of a still image's grid; see `Tables.windows`."""
    _, h, w = grid
    tokens = np.pad(np.arange(h * w).reshape(h, w), ((0, -h % side), (0, -w % side)), constant_values=-1)
    down, across = tokens.shape[0] // side, tokens.shape[1] // side
    return tokens.reshape(down, side, across, side).swapaxes(1, 2).reshape(-1, side**2)


def grid_rope(merge: int, head_dim: int, theta: float, device: torch.device, grid: Grid) -> Rope:
    """Compute the RoPE tables of one grid on `device`: angles (row·f, column·f) with
    f_k = theta^(-2k / (head_dim/2)), the patches of a merge x merge block consecutive.
    """
    t, h, w = grid
    half = head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    frequencies = 1.0 / (theta**steps)
    blocks = (t, h // merge, w // merge, merge, merge, half // 2)
    row = torch.arange(h, dtype=torch.float32, device=device).view(1, -1, 1, merge, 1, 1) * frequencies
    column = torch.arange(w, dtype=torch.float32, device=device).view(1, 1, -1, 1, merge, 1) * frequencies
    angles = torch.cat((row.expand(blocks), column.expand(blocks)), dim=-1).view(-1, 1, half)
    return angles.cos(), angles.sin()
