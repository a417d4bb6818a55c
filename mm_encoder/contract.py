"""The values that travel between the parts: sizes, plans, patches, results. Frozen, checked when made."""

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
        """Make a still image's plan; `rows` counts the rows of a patch grid (h, w)."""
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
    """What is known of an image before it is encoded: its rows and their grid, named as in `ImageMetadata`.

    `preprocessing_hash` identifies the preprocessing rules and numbers of the checkpoint. `original_size` is
    (width, height) as a viewer shows the image, or as encoded with `exif_orientation=False`.
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
    """A result without its rows; plain immutable values, picklable, hashable.

    `mm_hash` covers the model name, the kind of input and the content, but not the image options, the
    weights or the dtype: as a key of your own, use it with what you vary, and pass `model=`. `strides` are in
    elements. `embedding_offsets` are cumulative row counts. `grid_thws` holds the patch grid (t, h, w) before
    merging. `original_size` is (width, height) as a viewer shows the image, or as encoded with
    `exif_orientation=False`.
    `cache` tells where the rows came from (None: no cache in use). `timings` are (stage, milliseconds),
    excluded from comparison and hash.
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
    """Where an encoder is in its life; docs/architecture.md draws the transitions."""

    STARTING = "starting"
    """Replicas are loading."""
    READY = "ready"
    DEGRADED = "degraded"
    """It serves, but a replica is lost (for good) or a thread is wedged (until it finishes its image)."""
    FAILED = "failed"
    """No replica is left; every call fails at once."""
    DRAINING = "draining"
    """It was closed, and finishes the jobs it had accepted."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """One thread of the engine. `busy_s`: seconds at its present job or batch, None without one; `wedged`:
    longer than the encoder's `wedged_after`.
    """

    name: str
    alive: bool
    busy_s: float | None
    wedged: bool


@dataclass(frozen=True, slots=True)
class Health:
    """An encoder at one moment.

    `queue_length` and `queue_bytes` are the jobs that have a slot and are not yet running, `oldest_s` the age
    in seconds of the oldest of them, `waiting` the callers that wait for a slot. `last_error` is the engine's
    last failure as text; invalid images do not count. `tower` is "compiled", or "Python" and why.
    """

    state: EncoderState
    replicas: tuple[WorkerHealth, ...]
    preprocessing: tuple[WorkerHealth, ...]
    queue_length: int
    queue_bytes: int
    waiting: int
    oldest_s: float | None
    last_error: str | None
    tower: str = "Python"

    @property
    def serving(self) -> bool:
        """Whether new work is accepted; for readiness probes."""
        return self.state in (EncoderState.READY, EncoderState.DEGRADED)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Milliseconds that recent images spent in one stage, as nearest-rank percentiles."""

    stage: str
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """Counts of the engine's jobs since construction: one per image that came to the queue.

    Every job ends as exactly one of `succeeded`, `failed`, `cancelled`, `late` (its deadline passed),
    `refused` (queue full, or closed while it waited for a slot) and `joined` (with a cache: another job or
    memory has the result), or is `in_flight`. `errors` has (class name, count) pairs of the failed. `stages`
    covers up to 1024 recent results and includes `total`; empty before the first.

    Not counted: calls that raise at once (closed, no replica left, an invalid argument). With a cache also
    callers without a job of their own, whatever they receive: hits, those that joined another caller's job,
    and those whose lookup failed or that left during it. A job with several callers is `late` or `cancelled`
    only if the last of them left for this reason.
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
    """A cache's counts since it was opened, and its contents. A lookup counts once, as a hit in memory or on
    disk, as `joined` (waits for another job, whatever comes of it) or, when its image is about to be decoded,
    as a miss. One that failed, was refused, cancelled or late before that counts as none.

    `bypasses` are results larger than `max_entry_bytes`; `dropped` were not written to disk, because the
    backlog was full or the write failed; `stalled` are lookups that went on as a miss, because the disk took
    longer than their timeout or deadline. `live_cpu_bytes_process` are the bytes of cached rows alive in this
    process, wherever they are referenced.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    joined: int = 0
    bypasses: int = 0
    dropped: int = 0
    stalled: int = 0
    errors: int = 0
    memory_entries: int = 0
    memory_bytes: int = 0
    memory_evictions: int = 0
    disk_entries: int = 0
    disk_bytes: int = 0
    disk_evictions: int = 0
    live_cpu_bytes_process: int = 0
