"""One image on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..config import ImageOptions
from ..contract import ImageResult, Patches, Plan
from ..errors import ReplicaError
from ..logs import logger
from ..media.source import ImageInput, Source
from ..numerics import Settings
from .faults import as_ours
from .future import Future
from .promise import Promise


class JobState(StrEnum):
    """Where a job is; docs/architecture.md draws how it gets from one to another."""

    WAITING = "waiting"
    """For a slot; once opened, for its bytes."""
    OPENING = "opening"
    """The calling thread takes a snapshot and reads the header."""
    QUEUED = "queued"
    PREPARING = "preparing"
    """A preprocessing thread has it: hash, decode, patches."""
    READY = "ready"
    RUNNING = "running"
    """A replica has it; it can no longer be cancelled."""
    DONE = "done"
    """Its future has its outcome."""


@dataclass(eq=False, slots=True)
class Job(Promise):
    """The request, what is known of it by now, and its future. `image`, `source` and `patches` are dropped as
    soon as the next stage has what it needs.
    """

    image: ImageInput | None
    options: ImageOptions | None = None
    expected: int | None = None
    consumer: Any = None
    """The stream on which the caller will read the rows; None on the CPU."""

    timeout: float | None = None
    """Seconds that it may wait for its slot and its bytes; None: any time."""
    number: int = -1
    """Its place in the order of arrival."""
    source: Source | None = None
    plan: Plan | None = None
    """Known once the image is opened."""
    patches: Patches | None = None
    mm_hash: str = ""
    on_start: Callable[[], None] = lambda: None
    """Called once a replica has taken the job."""
    on_computed: Callable[[Settings | None, Any], None] = lambda settings, done: None
    """Called with the settings that the tower ran under, None if they were switched meanwhile; and with the
    event at which the rows are complete, None if they are.
    """
    flight: Any = None
    """Its waiters, where there is a cache (see coalescer.py)."""
    caller_future: Future[ImageResult] | None = None
    """The future that its first caller holds, where there is a cache; else callers hold `future`."""
    stage: JobState = JobState.WAITING
    """How far it has got; `state` also says whether it is done."""
    done: bool = False
    counted: bool = False
    """Whether the tally has its outcome."""
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds by stage."""
    created_at: float = field(default_factory=time.monotonic)
    _mark: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        """Bytes that the opened job will hold: its snapshot, its pixels and its patches."""
        assert self.source is not None
        assert self.plan is not None
        return self.source.nbytes + 3 * self.plan.canvas.width * self.plan.canvas.height

    @property
    def finished(self) -> bool:
        """Whether nothing more needs to be done for the job."""
        return self.done or self.future.cancelled()

    @property
    def state(self) -> JobState:
        """Where the job is. A job that is done stays so, whichever thread still works on it."""
        return JobState.DONE if self.done else self.stage

    def move_to(self, state: JobState) -> None:
        """Record how far the job has got."""
        self.stage = state

    def mark_done(self) -> JobState | None:
        """Mark the job done. Returns its state before to the first caller, None to later ones."""
        before, self.done = self.state, True
        return None if before is JobState.DONE else before

    def stage_done(self, stage: str) -> None:
        """Add the milliseconds since the previous stage ended to `stage`."""
        now = time.perf_counter()
        self.timings[stage] = self.timings.get(stage, 0.0) + (now - self._mark) * 1e3
        self._mark = now

    def abandon(self, why: BaseException | None) -> None:
        """Fail with `why`, or cancel if it is None, because the last waiter has left."""
        if why is None:
            self.cancel()
        else:
            self.fail_if_pending(why)

    def release_buffers(self) -> None:
        """Drop the image in all its forms."""
        self.image = self.source = self.patches = None

    def fail(self, error: BaseException) -> None:
        """As `Promise.fail`; also logs a fault of the engine."""
        error, state, first = as_ours(error), self.state, not self.future.done()
        try:
            Promise.fail(self, error)  # super() does not work in a class with slots that is made anew
        finally:
            if first and isinstance(error, ReplicaError):
                fields = {"mm_event": "job_failed", "mm_error": type(error).__name__, "mm_state": str(state)}
                logger.warning("an image failed while %s: %s", state, error, extra=fields)
