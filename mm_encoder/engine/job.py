"""One image on its way through the engine."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from ..config import ImageOptions
from ..contract import ImageResult, Patches, Plan
from ..device import out_of_memory
from ..errors import MMEncoderError, ReplicaError
from ..media.source import ImageInput, Source

logger = logging.getLogger("mm_encoder")

E = TypeVar("E", bound=BaseException)


class JobState(StrEnum):
    """Where a job is; docs/engine.md draws how it gets from one to another."""

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


@dataclass(eq=False, slots=True, weakref_slot=True)
class Promise:
    """A future that gets one outcome: a result, an error, or its caller's cancelling it."""

    future: Future[ImageResult] = field(default_factory=Future, kw_only=True)
    deadline: float | None = field(default=None, kw_only=True)
    """On time.monotonic()'s clock."""
    on_done: Callable[[Any, BaseException | None], None] = field(default=lambda _, error: None, kw_only=True)
    """Called with the promise and its error once it has its outcome, before anyone can see that; not when
    it is cancelled.
    """
    _lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)
    _begun: bool = field(default=False, kw_only=True)
    """Whether the future left its pending state, which it can do once."""

    def start(self) -> bool:
        """Point of no return for cancellation; True for the one call that may give the outcome."""
        with self._lock:
            if self._begun:
                return False
            self._begun = True
            # A caller may have meddled with the future, which is theirs, and must hurt nobody else.
            if self.future.running() or (self.future.done() and not self.future.cancelled()):
                return not self.future.done()
            return self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        """Cancel the future, if that is still possible, in a thread that must survive its callbacks."""
        _resolve(lambda _: self.future.cancel(), None)

    def notify_cancelled(self) -> None:
        """Release those who wait for the cancelled future; `cancel` alone leaves them waiting."""
        self.start()  # which, of a cancelled future, is all that it does

    def succeed(self, result: ImageResult) -> None:
        """Hand the result to the caller of what was started."""
        self.on_done(self, None)
        _resolve(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        """Hand `error`, as one of the library's, to the caller of what was started."""
        ours = strip_tracebacks(_as_ours(error))
        self.on_done(self, ours)
        _resolve(self.future.set_exception, ours)

    def fail_if_pending(self, error: BaseException) -> None:
        """Fail it unless it was started, or cancelled, before."""
        if self.start():
            self.fail(error)


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
        error = _as_ours(error)
        if isinstance(error, ReplicaError):
            fields = {"mm_event": "job_failed", "mm_error": type(error).__name__, "mm_state": str(self.state)}
            logger.warning("an image failed while %s: %s", self.state, error, extra=fields)
        Promise.fail(self, error)  # super() does not work in a class with slots that is made anew


class Joined(MMEncoderError):
    """How a job ends whose image another job, or memory, already has the result of. No caller sees it."""


def strip_tracebacks(error: E) -> E:
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


def copy_error(error: E, message: str | None = None) -> E:
    """A copy to be raised elsewhere, as an exception takes on the frames of whoever raises it."""
    copy = type(error)(*error.args) if message is None else type(error)(message)
    copy.__cause__ = error.__cause__
    copy.__notes__ = list(getattr(error, "__notes__", ()))
    return copy


def _as_ours(error: BaseException) -> MMEncoderError:
    if isinstance(error, MMEncoderError):
        return error
    full = out_of_memory(error, "this image; the encoder goes on with the next")
    if full is not None:
        return full
    return replica_error("encoding failed", error)


def replica_error(what: str, cause: BaseException) -> ReplicaError:
    """An engine fault, chained to its cause, with what the cause's frames would tell as text."""
    error = ReplicaError(f"{what}: {type(cause).__name__}: {cause}")
    error.add_note("".join(traceback.format_tb(cause.__traceback__)).rstrip())
    error.__cause__ = strip_tracebacks(cause)
    return error


def _resolve(setter: Callable[[Any], object], value: Any) -> None:
    try:
        setter(value)
    except BaseException:
        # From a done-callback, where only plain Exceptions are caught: sys.exit() in it must not end
        # the engine's thread.
        logger.exception("a callback on a result failed")
