"""One image on its way through the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..config import ImageOptions
from ..contract import ImageResult, Patches, Plan
from ..errors import ReplicaError
from ..media.source import ImageInput, Source
from .faults import as_ours
from .promise import Promise

logger = logging.getLogger("mm_encoder")


class JobState(StrEnum):
    """Where a job is; docs/architecture.md draws how it gets from one to another."""

    WAITING = "waiting"
    """For a slot of the queue; once opened, for room for its bytes."""
    OPENING = "opening"
    """The calling thread takes the snapshot and reads the header."""
    QUEUED = "queued"
    PREPARING = "preparing"
    """A preprocessing thread has it: hash, decode, patches."""
    READY = "ready"
    RUNNING = "running"
    """A replica has it; it can be cancelled no more."""
    DONE = "done"
    """Its future has its one outcome."""


@dataclass(eq=False, slots=True)
class Job(Promise):
    """What was asked, what is known by now, and the future of it.

    `image`, `source` and `patches` are dropped as soon as the next stage has what it needs.
    """

    image: ImageInput | None
    options: ImageOptions | None = None
    expected: int | None = None
    consumer: Any = None
    """The stream on which the caller will read the rows; None on the CPU."""

    number: int = 0
    """Its place in the order of arrival."""
    source: Source | None = None
    plan: Plan | None = None
    """Known once the image is opened."""
    patches: Patches | None = None
    mm_hash: str = ""
    on_start: Callable[[], None] = lambda: None
    """Called once a replica has it."""
    flight: Any = None
    """Who waits for it, where there is a cache (see `cached.py`)."""
    caller_future: Future[ImageResult] | None = None
    """What the caller who began it holds instead of `future`, where there is a cache."""
    state: JobState = JobState.WAITING
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds by stage."""
    created_at: float = field(default_factory=time.monotonic)
    _mark: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        """What the opened job will hold: its snapshot, its pixels and the canvas cut into patches."""
        assert self.source is not None
        assert self.plan is not None
        return self.source.nbytes + 3 * self.plan.canvas.width * self.plan.canvas.height

    @property
    def finished(self) -> bool:
        """Whether nothing more needs to be done for it."""
        return self.state is JobState.DONE or self.future.cancelled()

    def move_to(self, state: JobState) -> None:
        """Note where it is now. What is done stays so, whoever still works on it."""
        with self._lock:
            if self.state is not JobState.DONE:
                self.state = state

    def mark_done(self) -> JobState | None:
        """It is done: where it was, for the one who says so first."""
        with self._lock:
            before = self.state
            self.state = JobState.DONE
            return None if before is JobState.DONE else before

    def stage_done(self, stage: str) -> None:
        """Book the time since the last stage ended, in milliseconds, under `stage`."""
        now = time.perf_counter()
        self.timings[stage] = self.timings.get(stage, 0.0) + (now - self._mark) * 1e3
        self._mark = now

    def abandon(self, why: BaseException | None) -> None:
        """Nobody waits for it any more; the last who did went because of `why`, or cancelled."""
        if why is None:
            self.cancel()
        else:
            self.fail_if_pending(why)

    def release_buffers(self) -> None:
        """Hold no picture any more."""
        self.image = self.source = self.patches = None

    def fail(self, error: BaseException) -> None:
        """As any promise; a fault of the engine is logged."""
        error = as_ours(error)
        if isinstance(error, ReplicaError):
            fields = {"mm_event": "job_failed", "mm_error": type(error).__name__, "mm_state": str(self.state)}
            logger.warning("an image failed while %s: %s", self.state, error, extra=fields)
        Promise.fail(self, error)  # super() does not work in a class with slots that is made anew
