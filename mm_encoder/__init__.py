"""Image bytes -> embedding rows of a multimodal LLM's vision tower, inside the serving process."""

import logging

from .config import ImageOptions, MediaLimits
from .contract import ImageMetadata, ImageResult, ImageSize, MediaPlan
from .encoder import Encoder
from .errors import (
    CheckpointError,
    DeviceOutOfMemoryError,
    EncoderClosedError,
    ForkedProcessError,
    MediaDecodeError,
    MediaError,
    MediaTooLargeError,
    MMEncoderError,
    PlanMismatchError,
    ReplicaError,
    UnsupportedMediaError,
)
from .planner import MediaPlanner

logging.getLogger("mm_encoder").addHandler(logging.NullHandler())

__all__ = [
    "CheckpointError",
    "DeviceOutOfMemoryError",
    "Encoder",
    "EncoderClosedError",
    "ForkedProcessError",
    "ImageMetadata",
    "ImageOptions",
    "ImageResult",
    "ImageSize",
    "MMEncoderError",
    "MediaDecodeError",
    "MediaError",
    "MediaLimits",
    "MediaPlan",
    "MediaPlanner",
    "MediaTooLargeError",
    "PlanMismatchError",
    "ReplicaError",
    "UnsupportedMediaError",
]
