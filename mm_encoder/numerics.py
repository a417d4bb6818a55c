"""What of the host changes the bits of a result: its libraries and its machine, and settings of Torch.

The former are fixed when the encoder is made. The latter are the whole process's, and may be switched at any
time by code that knows nothing of the encoder: they are read for each key, and where a tower runs (`Watch`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TypeAlias

import torch
from torch.backends import cuda

from .runtime import loaded_libraries

Settings: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of a setting's name and its value, in a fixed order."""

# Read once by the libraries behind Torch, which choose other kernels by them.
_VARIABLES = (
    "ATEN_",
    "CUBLAS",
    "CUDNN_",
    "DNNL_",
    "MKL_",
    "NVIDIA_TF32_",
    "ONEDNN_",
    "TORCH_ALLOW_TF32_",
    "TORCH_BLAS_",
)

_here = threading.local()  # the watch of the tower that this thread runs


def describe(device: torch.device) -> dict[str, str]:
    """Return the fixed properties of the device and of the libraries that may change the bits of a result."""
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_VARIABLES)]
    fields = {
        "torch": str(torch.__version__),
        "torch build": hashlib.sha256(torch.__config__.show().encode()).hexdigest(),
        "environment": " ".join(variables) or "none",
    }
    if device.type == "cpu":
        return {
            "device": f"cpu {platform.machine()}",
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cuda": "none",
            **fields,
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda or "none"),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "cublas": _cublas_version(),
        **fields,
    }


def _cublas_version() -> str:
    """Return the versions of the cuBLAS libraries in this process; Torch may have been built for others."""
    versions = []
    with suppress(OSError, AttributeError):
        for path in loaded_libraries("cublas(?:Lt)?"):
            library, numbers = ctypes.CDLL(path), (ctypes.c_int * 3)()
            lt = "libcublasLt" in path
            get = library.cublasLtGetProperty if lt else library.cublasGetProperty
            for part in range(3):
                get(part, ctypes.byref(numbers, part * ctypes.sizeof(ctypes.c_int)))
            versions.append(".".join(map(str, numbers)))
    return " ".join(versions) or "unknown"


def _torch(name: str) -> Callable[[], object]:
    """Return a function of Torch that has no public name, or one for releases that lack it."""
    return getattr(torch._C, name, lambda: "unknown")


_THREADS = "torch threads"
"""They divide a product's sums. Unlike the others it is each thread's own; a new one takes the process's."""
_priority_order = getattr(torch._C, "_get_sdp_priority_order", tuple)
_ATTENTION: dict[str, Callable[[], object]] = {
    "flash attention": cuda.flash_sdp_enabled,
    "flash attention 3": _torch("_get_fa3_sdp_enabled"),
    "memory-efficient attention": cuda.mem_efficient_sdp_enabled,
    "cudnn attention": cuda.cudnn_sdp_enabled,
    "math attention": cuda.math_sdp_enabled,
    "math attention reductions": cuda.fp16_bf16_reduction_math_sdp_allowed,
    "other attention": _torch("_get_overrideable_sdp_enabled"),
    "attention order": lambda: tuple(_priority_order()),
    "deterministic": torch.are_deterministic_algorithms_enabled,
}
# Not torch.get_float32_matmul_precision(), which raises once the host has set one of these instead.
_CPU: dict[str, Callable[[], object]] = {
    # As mkldnn.matmul.fp32_precision, which takes seven times as long.
    "matmul precision": lambda: torch._C._get_fp32_precision_getter("mkldnn", "matmul"),
    "mkldnn": _torch("_get_mkldnn_enabled"),
    "mkldnn deterministic": _torch("_get_mkldnn_deterministic"),
    "fp16 reductions": _torch("_get_cpu_allow_fp16_reduced_precision_reduction"),
    _THREADS: torch.get_num_threads,
}
_CUDA: dict[str, Callable[[], object]] = {
    "matmul precision": lambda: torch._C._get_fp32_precision_getter("cuda", "matmul"),
    "fp16 reductions": _torch("_get_cublas_allow_fp16_reduced_precision_reduction"),
    "bf16 reductions": _torch("_get_cublas_allow_bf16_reduced_precision_reduction"),
    "fp16 accumulation": _torch("_get_cublas_allow_fp16_accumulation"),
    "blas library": _torch("_get_blas_preferred_backend"),
    "tuned products": _torch("_cuda_tunableop_is_enabled"),
    "cudnn enabled": _torch("_get_cudnn_enabled"),
}


def read_settings(device: torch.device) -> Settings:
    """Return Torch's settings, as the host has them now, that may change the bits of a result on `device`."""
    return settings_reader(device)()


def settings_reader(device: torch.device, threads: int | None = None) -> Callable[[], Settings]:
    """Return a quick `read_settings` for one device; `threads` is Torch's number of threads where the tower
    runs, by default that of the thread that reads.
    """
    getters = {**_ATTENTION, **(_CPU if device.type == "cpu" else _CUDA)}
    if threads is not None and _THREADS in getters:
        getters[_THREADS] = lambda: threads
    names, calls = tuple(getters), tuple(getters.values())

    @lru_cache(64)
    def named(values: tuple[object, ...]) -> Settings:
        return tuple(zip(names, map(str, values), strict=True))

    return lambda: named(tuple([call() for call in calls]))


class Watch:
    """Notes under which settings a thread's tower runs: at begin and end, and where `sample` is called."""

    def __init__(self, device: torch.device) -> None:
        self._read = settings_reader(device)
        self._seen: set[Settings] = set()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Watch the calling thread inside this context."""
        self._seen.clear()
        _here.watch = self
        try:
            self.note()
            yield
            self.note()
        finally:
            _here.watch = None

    def note(self) -> None:
        """Note the settings at this moment."""
        self._seen.add(self._read())

    @property
    def settings(self) -> Settings | None:
        """The settings of the last run; None if they were switched meanwhile."""
        return next(iter(self._seen)) if len(self._seen) == 1 else None


def sample() -> None:
    """Note the settings at this moment if the calling thread is watched."""
    watch: Watch | None = getattr(_here, "watch", None)
    if watch is not None:
        watch.note()
