"""The settings of one encoder: the keyword arguments of `Encoder`, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import BatchConfig, CacheConfig, MediaLimits, require_int, require_seconds

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_REPLICAS = 32
_MAX_WORKERS = 256
_HANDOFFS = ("host", "stream")
_TOWERS = ("auto", "compiled", "eager")


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The arguments of `Encoder`, see there. Raises TypeError or ValueError naming what would be right."""

    device: torch.device
    dtype: torch.dtype
    cache: CacheConfig | None
    limits: MediaLimits
    stream_priority: int
    replicas_per_gpu: int
    share_weights: bool
    tower: str
    batching: BatchConfig | None
    handoff: str
    queue_depth: int | None
    queue_bytes: int
    preprocess_workers: int
    wedged_after: float

    def __post_init__(self) -> None:
        if self.batching is not None and not isinstance(self.batching, BatchConfig):
            raise TypeError(f"batching must be a BatchConfig or None, got {type(self.batching).__name__}")
        if self.cache is not None and not isinstance(self.cache, CacheConfig):
            raise TypeError(f"cache must be a CacheConfig or None, got {type(self.cache).__name__}")
        if type(self.stream_priority) is not int:
            raise TypeError(f"stream_priority must be an int, got {type(self.stream_priority).__name__}")
        require_int("replicas_per_gpu", self.replicas_per_gpu, 1, _MAX_REPLICAS)
        require_int("preprocess_workers", self.preprocess_workers, 1, _MAX_WORKERS)
        require_int("queue_depth", self.depth, 1)
        require_int("queue_bytes", self.queue_bytes, 1)
        require_seconds("wedged_after", self.wedged_after)
        if self.tower not in _TOWERS:
            raise ValueError(f"tower must be 'auto', 'compiled' or 'eager', got {self.tower!r}")
        if self.handoff not in _HANDOFFS:
            raise ValueError(f"handoff must be 'host' or 'stream', got {self.handoff!r}")
        if type(self.share_weights) is not bool:
            raise TypeError(f"share_weights must be a bool, got {type(self.share_weights).__name__}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {self.dtype!r}")

    @property
    def depth(self) -> int:
        """Jobs admitted and not yet running: by default two per replica, or two batches."""
        at_once = 1 if self.batching is None else self.batching.max_images
        return 2 * self.replicas_per_gpu * at_once if self.queue_depth is None else self.queue_depth

    @property
    def packed(self) -> bool:
        """Whether images that the tower runs together are packed."""
        return self.batching is not None and not self.batching.deterministic

    @property
    def results_on_cpu(self) -> bool:
        """Whether results are CPU tensors wherever the tower runs."""
        return self.cache is not None and self.cache.results == "cpu"
