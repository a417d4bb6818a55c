"""One image on its way through the engine."""

from __future__ import annotations

import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..contract import ImageResult, Patches, Plan
from ..device import out_of_memory
from ..errors import MMEncoderError, ReplicaError
from ..media.source import Source


@dataclass(eq=False, slots=True, weakref_slot=True)
class Job:
    """What was asked, what is known by now, and the future that its caller holds.

    `source` and `patches` are dropped as soon as the next stage has what it needs.
    """

    source: Source | None
    plan: Plan
    consumer: Any
    """The stream on which the caller will read the rows; None on the CPU."""
    nbytes: int
    future: Future[ImageResult] = field(default_factory=Future)
    patches: Patches | None = None
    mm_hash: str = ""
    held: bool = False
    """Whether the job holds a slot and its bytes; the scheduler's business."""
    timings: list[tuple[str, float]] = field(default_factory=list)
    _mark: float = field(default_factory=time.perf_counter)

    def stage_done(self, stage: str) -> None:
        """Book the time since the last stage ended, in milliseconds, under `stage`."""
        now = time.perf_counter()
        self.timings.append((stage, (now - self._mark) * 1e3))
        self._mark = now

    def succeed(self, result: ImageResult) -> None:
        """Hand the result to the caller; the job must be running (see `start`)."""
        self.future.set_result(result)

    def start(self) -> bool:
        """Point of no return for cancellation; False when the caller has cancelled."""
        return self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Hand `error`, as one of the library's, to the caller unless they have cancelled."""
        self.source = self.patches = None
        if self.future.running() or self.start():
            self.future.set_exception(_as_ours(error))


def _as_ours(error: BaseException) -> MMEncoderError:
    # A kept exception must not keep pictures and tensors: the frames that it went through let go.
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, MMEncoderError):
        return error
    ours = out_of_memory(error) or ReplicaError(f"encoding failed: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
