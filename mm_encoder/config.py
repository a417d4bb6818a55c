"""Settings that a caller may pass; frozen, and impossible values raise where they are made."""

from __future__ import annotations

from dataclasses import dataclass


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` if it is an int (no bool) within [low, high]; raise saying what would be right."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value


def require_seconds(name: str, value: object) -> float:
    """Return `value` as a float if it is a number of at least 0; raise saying what would be right."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__}")
    if not value >= 0:  # NaN is not
        raise ValueError(f"{name} must be at least 0 seconds, got {value}")
    return float(value)


def model_name(model: str | None, default: str) -> str:
    """The name for metadata and identity. Raises TypeError for what is no str."""
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model must be a str or None, got {type(model).__name__}")
    return default if model is None else model


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What one media item may weigh: `max_bytes` of source, `max_pixels` once decoded.

    The default pixel limit is a picture of 256 MiB as RGB. Both are decided before a pixel is allocated,
    and neither reads nor writes Pillow's own limit.
    """

    max_bytes: int = 256 * 1024**2
    max_pixels: int = 256 * 1024**2 // 3

    def __post_init__(self) -> None:
        require_int("max_bytes", self.max_bytes, 1)
        require_int("max_pixels", self.max_pixels, 1)


def media_limits(limits: MediaLimits | None) -> MediaLimits:
    """`limits`, by default MediaLimits(). Raises TypeError for anything else."""
    if limits is not None and not isinstance(limits, MediaLimits):
        raise TypeError(f"limits must be a MediaLimits, got {type(limits).__name__}")
    return limits or MediaLimits()


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How an image is read. `exif_orientation=False` keeps the stored orientation."""

    exif_orientation: bool = True

    def __post_init__(self) -> None:
        if type(self.exif_orientation) is not bool:
            raise TypeError(f"exif_orientation must be a bool, got {type(self.exif_orientation).__name__}")
