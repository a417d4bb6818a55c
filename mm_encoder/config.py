"""Settings of callers: frozen dataclasses whose impossible values raise when they are made."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Literal

_TEN_YEARS = 10 * 365 * 86400.0


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` if it is an int (no bool) within [low, high]; raise TypeError or ValueError."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value


def require_count(name: str, value: object, high: int | None = None) -> int:
    """Return `value` as an int if it is an integer within [1, high], NumPy's too; raise TypeError or
    ValueError.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return require_int(name, int(value) if whole else value, 1, high)  # type: ignore[call-overload]


def require_seconds(name: str, value: object) -> float:
    """Return `value` as a float if it is a number, at least 0, NumPy's too; raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__}")
    if value != value or value < 0:
        raise ValueError(f"{name} must be at least 0 seconds, got {value}")
    return float(value) if value < _TEN_YEARS else _TEN_YEARS  # waits take no larger numbers


def require_moment(name: str, value: object) -> float:
    """Return `value` as a float if it is a time of time.monotonic(), NumPy's numbers too; raise TypeError or
    ValueError.
    """
    wanted = f"{name} must be a moment on time.monotonic()'s clock, got"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{wanted} {type(value).__name__}")
    moment = float(value)
    if moment != moment:
        raise ValueError(f"{wanted} nan; None is no deadline")
    if _TEN_YEARS < moment - time.monotonic() < float("inf"):
        raise ValueError(f"{wanted} {value}: that is years ahead (was it time.time()?)")
    return moment


def model_name(model: str | None, default: str) -> str:
    """Return the name for metadata and identity. Raises TypeError unless `model` is a str or None."""
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model must be a str or None, got {type(model).__name__}")
    return default if model is None else model


def expand_home(name: str, path: str | Path) -> Path:
    """Return `path` with a leading `~` or `~user` replaced by that home directory, as a shell does. Raises
    ValueError if it is not known: a folder named `~` must never be made.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{name}: the home directory in {os.fspath(path)!r} is not known (is HOME set?); write the "
            "path in full"
        ) from None


def user_cache(name: str) -> Path:
    """Return `mm-encoder` in the user's cache directory ($XDG_CACHE_HOME, else ~/.cache), for the setting or
    folder `name`. Raises ValueError if neither is known.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(cache) if os.path.isabs(cache) else expand_home(name, "~/.cache")) / "mm-encoder"


_FORMATS = ("AVIF", "BMP", "GIF", "HEIC", "JPEG", "PNG", "TIFF", "WebP")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one media item: `max_bytes` of its source, `max_pixels` once decoded, and the `formats` of
    encoded files that are allowed, by name in any case.

    The default pixel limit is an RGB image of 256 MiB; by default every format that is decoded is allowed.
    All are checked before a pixel is allocated, and independent of Pillow's own limit.
    """

    max_bytes: int = 256 * 1024**2
    max_pixels: int = 256 * 1024**2 // 3
    formats: Collection[str] = _FORMATS

    def __post_init__(self) -> None:
        require_int("max_bytes", self.max_bytes, 1)
        require_int("max_pixels", self.max_pixels, 1)
        object.__setattr__(self, "formats", _checked_formats(self.formats))


def _checked_formats(formats: object) -> tuple[str, ...]:
    if isinstance(formats, (str, bytes)) or not isinstance(formats, Collection):
        raise TypeError(f"formats must be a collection of names, got {type(formats).__name__}")
    names = {name.lower(): name for name in _FORMATS}
    unknown = [name for name in formats if not isinstance(name, str) or name.lower() not in names]
    if unknown or not formats:
        got = repr(unknown[0]) if unknown else "none"
        raise ValueError(f"formats must be among {', '.join(_FORMATS)}; got {got}")
    return tuple(sorted({names[name.lower()] for name in formats}))


def media_limits(limits: MediaLimits | None) -> MediaLimits:
    """Return `limits`, by default MediaLimits(). Raises TypeError for anything else."""
    if limits is not None and not isinstance(limits, MediaLimits):
        raise TypeError(f"limits must be a MediaLimits, got {type(limits).__name__}")
    return limits or MediaLimits()


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Options of one image. `exif_orientation=False` keeps the orientation in which it is stored."""

    exif_orientation: bool = True

    def __post_init__(self) -> None:
        if type(self.exif_orientation) is not bool:
            raise TypeError(f"exif_orientation must be a bool, got {type(self.exif_orientation).__name__}")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Batching: a replica takes the ready images that follow one another as far as they fit, whosever they
    are, and runs its tower once for all of them. It never waits for more to come.

    max_patches: patches of a batch, t·h·w of each image's `grid_thw`; an image with more runs alone.
    max_images: images of a batch.
    deterministic: bits equal to those of the image alone: each image of a batch has its own run of the tower.
        Otherwise the images are packed, and rows may differ in the last bits with what they are packed with.
    """

    max_patches: int
    max_images: int
    deterministic: bool = False

    def __post_init__(self) -> None:
        require_int("max_patches", self.max_patches, 1)
        require_int("max_images", self.max_images, 1)
        if type(self.deterministic) is not bool:
            raise TypeError(f"deterministic must be a bool, got {type(self.deterministic).__name__}")


_MIB = 1024**2
_MAX_ENTRY = 1024 * _MIB


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A cache of results, in memory and, with `disk_path` and `disk_bytes`, on disk.

    memory_bytes: bytes of results that the memory tier keeps; 0 keeps none.
    disk_path: a directory for the cache alone; one encoder uses it at a time, or several with `shared`.
    disk_bytes: bytes that its files may take, at least four times `max_entry_bytes`.
    max_entry_bytes: larger results are returned and not kept; up to 1 GiB.
    results: "cpu": every result is a CPU tensor, shared by all callers that hit it. "device": a miss returns
        the device tensor at once and fills the cache behind it; a hit is uploaded.
    disk_backend: "files", or "foyer" (extra `foyer`, Python 3.12 or newer).
    shared: several encoders of one machine use `disk_path` together, all with `shared`; "files" only.
    """

    memory_bytes: int = 1024 * _MIB
    disk_path: str | Path | None = None
    disk_bytes: int = 0
    max_entry_bytes: int = 256 * _MIB
    results: Literal["cpu", "device"] = "cpu"
    disk_backend: Literal["files", "foyer"] = "files"
    shared: bool = False

    def __post_init__(self) -> None:
        require_int("memory_bytes", self.memory_bytes, 0)
        require_int("disk_bytes", self.disk_bytes, 0)
        require_int("max_entry_bytes", self.max_entry_bytes, 1, _MAX_ENTRY)
        for name, value, known in (
            ("results", self.results, ("cpu", "device")),
            ("disk_backend", self.disk_backend, ("files", "foyer")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}")
        if type(self.shared) is not bool:
            raise TypeError(f"shared must be a bool, got {type(self.shared).__name__}")
        if self.disk_path is not None and not isinstance(self.disk_path, (str, Path)):
            raise TypeError(f"disk_path must be a str, a Path or None, got {type(self.disk_path).__name__}")
        if self.disk_path == "":
            raise ValueError("disk_path must name a directory, got ''")
        if (self.disk_path is None) != (self.disk_bytes == 0):
            raise ValueError(
                f"disk_path and disk_bytes go together: got {self.disk_path!r} and {self.disk_bytes}"
            )
        if self.disk_path is not None and self.disk_bytes < 4 * self.max_entry_bytes:
            raise ValueError(
                f"disk_bytes must hold four entries of max_entry_bytes: got {self.disk_bytes}, needs "
                f"{4 * self.max_entry_bytes} (or a smaller max_entry_bytes)"
            )
        if self.shared and (self.disk_path is None or self.disk_backend != "files"):
            raise ValueError("shared=True needs a disk_path and disk_backend='files'")
