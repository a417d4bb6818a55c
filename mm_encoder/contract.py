"""What travels between the parts: sizes, plans, patches, results. Frozen, and checked when made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class ImageSize(NamedTuple):
    """A width and a height in pixels, in that order."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How one image becomes rows: integers only, known from its size alone.

    The image is resized from `source` to `content` and placed at `offset` (left, top) on a canvas of
    `canvas` pixels, which is cut into `grid_thw` patches (t, h, w, before merging) and yields `rows`
    embedding rows.
    """

    source: ImageSize
    content: ImageSize
    canvas: ImageSize
    offset: tuple[int, int]
    grid_thw: tuple[int, int, int]
    rows: int

    def __post_init__(self) -> None:
        left, top = self.offset
        fits = (
            left >= 0
            and top >= 0
            and left + self.content.width <= self.canvas.width
            and top + self.content.height <= self.canvas.height
        )
        if not fits or min(*self.content, *self.grid_thw, self.rows) < 1:
            raise ValueError(f"impossible plan: {self}")

    @classmethod
    def on_canvas(
        cls,
        source: ImageSize,
        content: ImageSize,
        canvas: ImageSize,
        *,
        patch: int,
        rows: Callable[[int, int], int],
        offset: tuple[int, int] = (0, 0),
    ) -> Plan:
        """A still image's plan; `rows` counts the rows of a patch grid (h, w)."""
        h, w = canvas.height // patch, canvas.width // patch
        return cls(source, content, canvas, offset, (1, h, w), rows(h, w))

    @property
    def patch_count(self) -> int:
        """t·h·w: the patches that enter the tower."""
        t, h, w = self.grid_thw
        return t * h * w

    @property
    def embedding_offsets(self) -> tuple[int, int]:
        """Where the image's rows start and end: cumulative row counts."""
        return (0, self.rows)


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """What a caller may know of an image before it is encoded: how many rows, and where they belong.

    Fields are named as in `ImageMetadata`. `preprocessing_hash` names the rules that were applied.
    """

    model: str
    family: str
    preprocessing_hash: str
    length: int
    embedding_offsets: tuple[int, ...]
    grid_thws: tuple[tuple[int, int, int], ...]
    original_size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Patches:
    """One image ready for a tower: uint8 `data` [t·h·w, channels·patch·patch] in the family's order."""

    data: torch.Tensor
    plan: Plan

    def __post_init__(self) -> None:
        if self.data.ndim != 2 or self.data.shape[0] != self.plan.patch_count:
            raise ValueError(
                f"got patches of shape {tuple(self.data.shape)}, but the plan has "
                f"{self.plan.patch_count} patches"
            )


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """What is known of a result besides its rows; plain immutable values, picklable, hashable.

    `strides` are in elements. `embedding_offsets` are cumulative row counts. `grid_thws` holds the patch
    grid (t, h, w) before merging. `original_size` is (width, height) as a viewer shows the image.
    `cache` says where the rows came from (None: no cache in use). `timings` are (stage, milliseconds);
    they take no part in comparison and hash.
    """

    model: str
    mm_hash: str
    length: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: tuple[int, ...]
    embedding_offsets: tuple[int, ...]
    grid_thws: tuple[tuple[int, int, int], ...]
    original_size: tuple[int, int]
    cache: str | None = None
    timings: tuple[tuple[str, float], ...] = field(default=(), compare=False)


class ImageResult(NamedTuple):
    """Embedding rows [length, width] with their metadata. The tensor owns its storage."""

    tensor: torch.Tensor
    metadata: ImageMetadata


class EncoderState(StrEnum):
    """Where an encoder is in its life; docs/architecture.md draws how it gets from one to another."""

    STARTING = "starting"
    """Replicas are loading."""
    READY = "ready"
    DEGRADED = "degraded"
    """It serves, but a replica is lost, or a thread has been at one job for longer than it should."""
    FAILED = "failed"
    """No replica is left: every call fails at once."""
    DRAINING = "draining"
    """It was closed and finishes what it had accepted."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """One thread of the engine. `busy_s`: seconds at its present job, None when it has none. `wedged`:
    that is longer than the encoder's `wedged_after`.
    """

    name: str
    alive: bool
    busy_s: float | None
    wedged: bool


@dataclass(frozen=True, slots=True)
class Health:
    """An encoder at one moment.

    `queue_length` and `queue_bytes` are jobs admitted and not yet running, `waiting` callers in line for
    room, `oldest_s` the age in seconds of the oldest admitted job that is not yet running. `last_error` is
    the engine's last fault as text; faults of media are the callers' and not counted here.
    """

    state: EncoderState
    replicas: tuple[WorkerHealth, ...]
    preprocessing: tuple[WorkerHealth, ...]
    queue_length: int
    queue_bytes: int
    waiting: int
    oldest_s: float | None
    last_error: str | None

    @property
    def serving(self) -> bool:
        """Whether new work is accepted: what a readiness probe wants to know."""
        return self.state in (EncoderState.READY, EncoderState.DEGRADED)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Milliseconds that recent images spent in one stage: nearest-rank percentiles."""

    stage: str
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """Counts since construction of what came to the engine: with a cache, what was not found there.

    Every image ends as exactly one of `succeeded`, `failed`, `cancelled`, `late` (its deadline passed),
    `refused` (no room in time, or closed) and `joined` (with a cache: the same image was under way), or is
    `in_flight`. `errors` counts the failed by the error's name. `stages` covers up to 1024 recent results,
    `total` included; empty before the first.
    """

    requests: int
    in_flight: int
    succeeded: int
    failed: int
    cancelled: int
    late: int
    refused: int
    joined: int
    errors: tuple[tuple[str, int], ...]
    stages: tuple[StageTimes, ...]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A cache's counts since it was opened, and what it holds. Every lookup counts once, as a hit in memory
    or on disk, as `joined` (the same image was under way) or as a miss.

    `bypasses` are results larger than `max_entry_bytes`, `dropped` those that the disk tier's writer had no
    room for, or could not write. `live_cpu_bytes_process` are bytes of cached rows alive in this process,
    wherever they are referenced.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    joined: int = 0
    bypasses: int = 0
    dropped: int = 0
    errors: int = 0
    memory_entries: int = 0
    memory_bytes: int = 0
    memory_evictions: int = 0
    disk_entries: int = 0
    disk_bytes: int = 0
    disk_evictions: int = 0
    live_cpu_bytes_process: int = 0
