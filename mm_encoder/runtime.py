"""The runtime of this process: usable CPUs, versions, native kernels."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch

from . import _manifest, _native


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use, at least 1: its affinity, limited by the quotas of
    its cgroup and of those above it (version 2, or 1). `root` is the folder of /proc and /sys.
    """
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    return max(1, min([cpus, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Yield the whole CPUs of each cgroup quota."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        place = top / group.lstrip("/")
        # Seen from inside a container the path may be the host's, and then only the top exists.
        for folder in (place, *place.parents):
            if controllers:
                pair = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
            else:
                pair = " ".join(_lines(folder / "cpu.max")).split()
            if len(pair) == 2 and all(number.isdecimal() for number in pair) and int(pair[1]):
                yield int(pair[0]) // int(pair[1])
            if folder == top:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []  # another kind of system, or not readable


def loaded_libraries(name: str) -> list[str]:
    """Return the paths of the shared libraries `lib<name>.so*` in this process, sorted."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []  # another kind of system
    return sorted(set(re.findall(rf"/.*/lib{name}\.so[.\d]*", mapped)))


def identity() -> Mapping[str, str]:
    """Return versions and machine, in reading order."""
    return {
        "mm-encoder": _version("mm-encoder"),
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}, {usable_cpus()} CPUs",
        "torch": str(torch.__version__),
        "torch cuda": str(torch.version.cuda or "none"),
        **versions(),
        "native kernels": native_summary(),
    }


def native_summary() -> str:
    """Describe the native kernels in use, or why there are none."""
    manifest = _manifest.read(_native.LIBRARY)
    if _native.kernels is not None:
        built = "built in place" if manifest is None else str(manifest.get("policy", "a wheel"))
        return f"{_native.kernels.levels[-1]} (of {', '.join(_native.kernels.levels)}; {built})"
    why = "no library was built here" if manifest is None else "a pure wheel"
    return f"none ({why}; NumPy, Pillow and Torch do the work)"


def versions() -> Mapping[str, str]:
    """Return the versions of the packages besides Torch that a result depends on."""
    return {name: _version(name) for name in ("numpy", "pillow", "simplejpeg", "pillow-heif", "safetensors")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
