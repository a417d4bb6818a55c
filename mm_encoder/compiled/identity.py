"""What a package depends on: it fits if all of this is the same."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from ..errors import RuntimeMismatchError
from ..families import layers, tables, trunk
from ..families.family import Family
from ..families.trunk import VisionTower, tensor_dtypes
from . import signature

FORMAT = 1
"""Version of the package's layout and of how it is called."""


def identity(family: Family, tower: VisionTower, dtype: torch.dtype) -> dict[str, str]:
    """Return, by name, everything that the package of a declared or loaded tower depends on.

    The values of weights are not: all replicas, and all checkpoints of one shape, share packages.
    """
    dtypes = tensor_dtypes(tower, dtype)
    shapes = {name: (*value.shape, str(dtypes[name])) for name, value in tower.state_dict().items()}
    return {
        "format": str(FORMAT),
        "family": family.name,
        "config": json.dumps(family.tower_config, sort_keys=True, default=str),
        "tensors": _digest(json.dumps(shapes, sort_keys=True)),
        "sources": _sources(type(tower)),
        "dtype": str(dtype),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "torch build": _digest(torch.__config__.show()),
        "device": f"cpu {platform.machine()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu flags": _cpu_flags(),
    }


def key_of(identity: dict[str, str]) -> str:
    """Return the name under which the package of an identity is kept."""
    return _digest(json.dumps(identity, sort_keys=True))


@cache
def _sources(tower: type[VisionTower]) -> str:
    """Return the digest of the code that the computation is made from."""
    modules = [layers, tables, trunk, signature, inspect.getmodule(tower)]
    try:
        sources = [inspect.getsource(module) for module in modules if module is not None]
        sources.append(resources.files(__package__).joinpath("export.py").read_text(encoding="utf-8"))
        return _digest("\0".join(sources))
    except OSError as error:
        raise RuntimeMismatchError(f"the sources of the tower cannot be read: {error}") from None


@cache
def _cpu_flags() -> str:
    """Return a digest of the instruction sets that this CPU has: kernels are compiled for all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _digest(platform.processor())
    flags = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    return _digest(" ".join(sorted(flag for line in flags for flag in line.split())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
