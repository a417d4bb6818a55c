"""The child process that compiles a tower: `python -m mm_encoder.compiled.export`, see `build`.

Reads one JSON object from stdin, {checkpoint, family, dtype, out}, and writes a shared library to `out`. It
ends when stdin does, so it does not outlive its parent. Only this module imports Torch's compiler.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..families.registry import load_family
from ..families.tables import Tables
from ..families.trunk import VisionTower, assign, tensor_dtypes
from .signature import BOUNDS, ROWS, TOKENS, WINDOWS, Signature

_MOST = 1 << 24  # of tokens, rows and segments: more than any image has
_SHIM = (
    "AOTITorchError aoti_torch_cpu_packed_attention(AtenTensorHandle q, AtenTensorHandle k, "
    "AtenTensorHandle v, AtenTensorHandle bounds, AtenTensorHandle* ret0)"
)


def main() -> None:
    """Compile what stdin asks for."""
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    dtype = getattr(torch, asked["dtype"])
    _, family = load_family(asked["checkpoint"], asked["family"])
    tower = family.declare_tower(torch.empty(family.table.shape, dtype=dtype))
    # Values do not matter: memory that is never written to takes no room.
    dtypes = tensor_dtypes(tower, dtype)
    assign(tower, {n: torch.empty(v.shape, dtype=dtypes[n]) for n, v in tower.state_dict().items()})
    compile_tower(tower, Path(asked["out"]))


def compile_tower(tower: VisionTower, out: Path) -> None:
    """Compile the tower's `run` for the CPU to a shared library. Takes a minute and more."""
    import torch._inductor

    operator = _define_attention()
    signature = Signature(tower)
    merge = tower.merge
    with torch.no_grad():
        tables = tower.tables([(1, 6 * merge, 8 * merge), (1, 4 * merge, 4 * merge)], 64 * merge**2)
        patches = torch.zeros(sum(tables.lengths), signature.bytes, dtype=torch.uint8)
        arguments = signature.arguments(patches, tables)
        blocks = torch.export.Dim("blocks", min=1, max=_MOST // merge**2)
        sizes = {
            TOKENS: merge**2 * blocks if merge > 1 else torch.export.Dim(TOKENS, min=2, max=_MOST),
            BOUNDS: torch.export.Dim(BOUNDS, min=2, max=_MOST),
            WINDOWS: torch.export.Dim(WINDOWS, min=2, max=_MOST),
            ROWS: torch.export.Dim(ROWS, min=2, max=_MOST),
        }
        shapes = tuple({0: sizes[input_.length]} for input_ in signature.inputs)
        _say("exporting")
        exported = torch.export.export(
            _Run(tower, signature, operator), tuple(arguments), dynamic_shapes=(shapes,), strict=False
        )
        _say("compiling")
        package = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(out.with_suffix(".pt2")),
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.custom_ops_to_c_shims": {operator: [_SHIM]},
                "cpp.dynamic_threads": True,  # as many as the host has set when it runs
            },
        )
    _unpack(Path(package), out)


class _Run(nn.Module):
    """The part of a tower that is compiled, with tensors as its only inputs."""

    def __init__(self, tower: VisionTower, signature: Signature, operator: Any) -> None:
        super().__init__()
        self.tower, self.names, self.operator = tower, [i.name for i in signature.inputs], operator

    def forward(self, *arguments: Tensor) -> Tensor:
        by_name = dict(zip(self.names, arguments, strict=True))
        patches, bounds = by_name.pop("patches"), by_name.pop("bounds")
        tables = Tables((), (by_name.pop("cos"), by_name.pop("sin")), **by_name)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.operator(q, k, v, bounds)  # type: ignore[no-any-return]

        return self.tower.run(patches, tables, attend)


def _define_attention() -> Any:
    """Define the operator that stands for `aoti_torch_cpu_packed_attention`, see native/attention.cpp."""
    name = "mm_encoder::packed_attention"
    torch.library.define(name, "(Tensor q, Tensor k, Tensor v, Tensor bounds) -> Tensor")

    def shape_only(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])

    torch.library.register_fake(name)(shape_only)
    return torch.ops.mm_encoder.packed_attention.default


def _unpack(package: Path, out: Path) -> None:
    """Take the shared library out of Torch's package, whose other files have paths of this machine."""
    with zipfile.ZipFile(package) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        with archive.open(name) as source, open(out, "wb") as target:
            shutil.copyfileobj(source, target)


def _say(step: str) -> None:
    print(step, file=sys.__stdout__, flush=True)


def _end_with_parent(parent: int) -> None:
    """Kill this process and its compilers when the parent has closed stdin, or has died: a process that it
    forked may hold the pipe open.
    """
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 1.0)[0] and not sys.stdin.read(1):
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
