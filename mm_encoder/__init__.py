"""Image bytes -> embedding rows of a multimodal LLM's vision tower, inside the serving process."""

import logging

from .config import BatchConfig, CacheConfig, ImageOptions, MediaLimits
from .contract import (
    CacheStats,
    EncoderState,
    EncoderStats,
    Health,
    ImageMetadata,
    ImageResult,
    ImageSize,
    MediaPlan,
    StageTimes,
    WorkerHealth,
)
from .encoder import Encoder
from .errors import (
    CacheError,
    CacheLockedError,
    CheckpointError,
    DeadlineExceededError,
    DeviceOutOfMemoryError,
    EncoderBusyError,
    EncoderClosedError,
    ForkedProcessError,
    MediaDecodeError,
    MediaError,
    MediaTooLargeError,
    MMEncoderError,
    PlanMismatchError,
    ReplicaError,
    RuntimeMismatchError,
    UnsupportedMediaError,
)
from .planner import MediaPlanner

logging.getLogger("mm_encoder").addHandler(logging.NullHandler())

# fmt: off
__all__ = [
    "BatchConfig", "CacheConfig", "CacheError", "CacheLockedError", "CacheStats", "CheckpointError",
    "DeadlineExceededError", "DeviceOutOfMemoryError", "Encoder", "EncoderBusyError",
    "EncoderClosedError", "EncoderState", "EncoderStats", "ForkedProcessError", "Health",
    "ImageMetadata", "ImageOptions", "ImageResult", "ImageSize", "MMEncoderError",
    "MediaDecodeError", "MediaError", "MediaLimits", "MediaPlan", "MediaPlanner",
    "MediaTooLargeError", "PlanMismatchError", "ReplicaError", "RuntimeMismatchError", "StageTimes",
    "UnsupportedMediaError", "WorkerHealth",
]
# fmt: on
