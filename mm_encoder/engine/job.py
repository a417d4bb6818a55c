"""One image on its way through the engine."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..contract import ImageResult, Patches, Plan
from ..device import out_of_memory
from ..errors import MMEncoderError, ReplicaError
from ..media.source import Source

logger = logging.getLogger("mm_encoder")

E = TypeVar("E", bound=BaseException)


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
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _told: bool = False
    """Whether the waiters of a cancelled future were told; a future allows that once."""

    def stage_done(self, stage: str) -> None:
        """Book the time since the last stage ended, in milliseconds, under `stage`."""
        now = time.perf_counter()
        self.timings.append((stage, (now - self._mark) * 1e3))
        self._mark = now

    def start(self) -> bool:
        """Point of no return for cancellation; False when the caller has cancelled."""
        with self._lock:
            if not self._told:
                started = self.future.set_running_or_notify_cancel()
                self._told = not started
                return started
            return False

    def tell_cancelled(self) -> None:
        """Release those who wait for the cancelled future; `cancel` alone leaves them waiting."""
        self.start()  # which, of a cancelled future, is all that it does

    def succeed(self, result: ImageResult) -> None:
        """Hand the result to the caller; the job must be running (see `start`)."""
        _resolve(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        """Hand `error`, as one of the library's, to the caller unless they have cancelled."""
        self.source = self.patches = None
        if self.future.running() or self.start():
            _resolve(self.future.set_exception, without_frames(_as_ours(error)))


def without_frames(error: E) -> E:
    """`error`, from which no frame can be reached: a kept exception must not keep pictures, tensors or
    weights alive, nor itself, through the frames that it went through.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            waiting += (link.__cause__, link.__context__)
    return error


def _as_ours(error: BaseException) -> MMEncoderError:
    if isinstance(error, MMEncoderError):
        return error
    full = out_of_memory(error, "this image; the encoder goes on with the next")
    if full is not None:
        return full
    failed = ReplicaError(f"encoding failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    # What the frames would have told, as text.
    failed.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    return failed


def _resolve(setter: Callable[[Any], None], value: Any) -> None:
    try:
        setter(value)
    except BaseException:
        # From a done-callback, where only plain Exceptions are caught: sys.exit() in it must not end
        # the engine's thread.
        logger.exception("a callback on a result failed")
