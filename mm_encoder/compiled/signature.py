"""The inputs of a compiled tower. Nothing in a package checks them: wrong ones are garbage or a crash, so all
are checked here, before each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.tables import Tables
from ..families.trunk import VisionTower

TOKENS, BOUNDS, WINDOWS, ROWS = "tokens", "bounds", "windows", "rows"
"""The sizes that differ from call to call."""


SPECIAL = {"windows": 1, "order": 3}
"""Special rows that an index may name by negative numbers: the padding; start, newline and end."""


class Input(NamedTuple):
    """One input: [`length`, *`shape`], contiguous, on the CPU."""

    name: str
    length: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Signature:
    """The inputs of one tower, in order."""

    def __init__(self, tower: VisionTower) -> None:
        trunk = tower.trunk
        half = trunk.blocks[0].attn.head_dim // 2
        width = trunk.embed.weight.shape[0]
        self.merged = tower.merge**2
        """Tokens of a merge block, of which there must be whole numbers."""
        self.bytes = trunk.embed.weight[0].numel() // trunk.frames
        index = tower.grid_tables((1, tower.merge, tower.merge))
        inputs = [
            Input("patches", TOKENS, (self.bytes,), torch.uint8),
            Input("bounds", BOUNDS, (), torch.int64),
            Input("cos", TOKENS, (1, half), torch.float32),
            Input("sin", TOKENS, (1, half), torch.float32),
        ]
        if index.positions is not None:
            inputs.append(Input("positions", TOKENS, (width,), torch.float32))
        if index.windows is not None:
            inputs.append(Input("windows", WINDOWS, (index.windows.shape[1],), torch.int64))
        if index.order is not None:
            inputs.append(Input("order", ROWS, (), torch.int64))
        self.inputs = tuple(inputs)

    def arguments(self, patches: Tensor, tables: Tables) -> list[Tensor]:
        """Return the inputs in order, checked. Raises ValueError: it would be a bug of this library."""
        bounds = list(accumulate(tables.lengths, initial=0))
        if any(end <= begin for begin, end in pairwise(bounds)):
            raise ValueError(f"segments must not be empty, got lengths {tables.lengths}")
        given = (
            patches,
            torch.tensor(bounds, device="cpu"),
            *tables.rope,
            tables.positions,
            tables.windows,
            tables.order,
        )
        arguments = [tensor for tensor in given if tensor is not None]
        self.check(arguments, bounds[-1])
        return arguments

    def check(self, arguments: Sequence[Tensor], tokens: int) -> None:
        """Raise ValueError unless the arguments are what the compiled code takes for granted."""
        if len(arguments) != len(self.inputs):
            raise ValueError(f"the compiled tower takes {len(self.inputs)} inputs, got {len(arguments)}")
        if tokens < 1 or tokens % self.merged:
            raise ValueError(f"tokens must be a positive multiple of {self.merged}, got {tokens}")
        for wanted, got in zip(self.inputs, arguments, strict=True):
            length = tokens if wanted.length == TOKENS else got.shape[0] if got.ndim else 0
            shape = (length, *wanted.shape)
            if (
                tuple(got.shape) != shape
                or length < 1
                or got.dtype != wanted.dtype
                or got.device.type != "cpu"
                or got.layout is not torch.strided
                or not got.is_contiguous()
                or got.is_neg()
                or got.is_conj()
            ):
                raise ValueError(
                    f"{wanted.name} must be {list(shape)}, {wanted.dtype}, contiguous and on the CPU; got "
                    f"{list(got.shape)}, {got.dtype}, strides {_strides(got)}, on {got.device}"
                )
        by_name = {wanted.name: got for wanted, got in zip(self.inputs, arguments, strict=True)}
        if "windows" in by_name:
            _check_index("windows", by_name["windows"], tokens)
        if "order" in by_name:
            _check_index("order", by_name["order"], len(by_name["windows"]))


def _check_index(name: str, index: Tensor, count: int) -> None:
    """Raise ValueError unless an index stays among `count` rows and the special ones, see `Tables`."""
    least, most = (int(value) for value in index.aminmax())
    if least < -SPECIAL[name] or most >= count:
        raise ValueError(f"{name} must be from {-SPECIAL[name]} to {count - 1}, got {least} to {most}")


def _strides(tensor: Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else tensor.layout
