"""The settings of one encoder: the keyword arguments of `Encoder`, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import CacheConfig, MediaLimits, media_limits, require_int, require_seconds
from .device import default_dtype, parse_device
from .runtime import usable_cpus

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_REPLICAS = 32
_MAX_WORKERS = 256
_HANDOFFS = ("host", "stream")


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What `Encoder` was asked for, with defaults filled in; its docstring explains each."""

    device: torch.device
    dtype: torch.dtype
    cache: CacheConfig | None
    limits: MediaLimits
    stream_priority: int
    replicas: int
    share_weights: bool
    handoff: str
    queue_depth: int
    queue_bytes: int
    preprocess_workers: int
    wedged_after: float

    @classmethod
    def checked(
        cls,
        *,
        device: str | torch.device,
        dtype: torch.dtype | None,
        cache: CacheConfig | None,
        limits: MediaLimits | None,
        stream_priority: int,
        replicas_per_gpu: int,
        share_weights: bool,
        batching: None,
        handoff: str,
        queue_depth: int | None,
        queue_bytes: int,
        preprocess_workers: int | None,
        wedged_after: float,
    ) -> EncoderSettings:
        """Check the arguments of `Encoder`. Raises TypeError or ValueError naming what would be right."""
        if batching is not None:
            raise NotImplementedError("batching= is not built yet; leave it out or pass None")
        if cache is not None and not isinstance(cache, CacheConfig):
            raise TypeError(f"cache must be a CacheConfig or None, got {type(cache).__name__}")
        if type(stream_priority) is not int:
            raise TypeError(f"stream_priority must be an int, got {type(stream_priority).__name__}")
        replicas = require_int("replicas_per_gpu", replicas_per_gpu, 1, _MAX_REPLICAS)
        workers = min(4, usable_cpus()) if preprocess_workers is None else preprocess_workers
        require_int("preprocess_workers", workers, 1, _MAX_WORKERS)
        depth = require_int("queue_depth", 2 * replicas if queue_depth is None else queue_depth, 1)
        require_int("queue_bytes", queue_bytes, 1)
        seconds = require_seconds("wedged_after", wedged_after)
        if handoff not in _HANDOFFS:
            raise ValueError(f"handoff must be 'host' or 'stream', got {handoff!r}")
        limits = media_limits(limits)
        target = parse_device(device)
        if type(share_weights) is not bool:
            raise TypeError(f"share_weights must be a bool, got {type(share_weights).__name__}")
        dtype = default_dtype(target) if dtype is None else dtype
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
        return cls(
            device=target,
            dtype=dtype,
            cache=cache,
            limits=limits,
            stream_priority=stream_priority,
            replicas=replicas,
            share_weights=share_weights,
            handoff=handoff,
            queue_depth=depth,
            queue_bytes=queue_bytes,
            preprocess_workers=workers,
            wedged_after=seconds,
        )

    @property
    def results_on_cpu(self) -> bool:
        """Whether results are CPU tensors wherever the tower runs."""
        return self.cache is not None and self.cache.results == "cpu"
