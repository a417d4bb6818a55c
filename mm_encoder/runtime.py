"""What this process is running on."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

import torch


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, cut by a cgroup quota (at least 1)."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2, or not ours to read
    return cpus


def identity() -> Mapping[str, str]:
    """Versions and machine, in the order in which a person would read them."""
    packages = {name: _version(name) for name in ("numpy", "pillow", "simplejpeg", "safetensors")}
    return {
        "mm-encoder": _version("mm-encoder"),
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}, {usable_cpus()} CPUs",
        "torch": str(torch.__version__),
        "torch cuda": str(torch.version.cuda or "none"),
        **packages,
        "native kernels": "no (this version has none; Torch, NumPy and Pillow do the work)",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
