"""The producer's side of a caller's future: one outcome, whichever thread gives it first."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..contract import ImageResult
from ..logs import logger
from .faults import as_ours, strip_tracebacks
from .future import Future


@dataclass(eq=False, slots=True, weakref_slot=True)
class Promise:
    """The producer's side of a caller's future. It gets one outcome: result, error or cancellation.

    It has no lock of its own: the future's state decides races, so it may be cancelled anywhere. What was
    interrupted is completed by `complete`.
    """

    future: Future[ImageResult] = field(default_factory=Future, kw_only=True)
    deadline: float | None = field(default=None, kw_only=True)
    """On time.monotonic()'s clock."""
    on_done: Callable[[Any, BaseException | None], None] = field(default=lambda _, error: None, kw_only=True)
    """Called with the promise and its error (None: a result) right before the outcome can be seen; when the
    future is cancelled, after that. Called again if an interrupt came between: that must change nothing.
    """
    on_outcome: Callable[[Any], object] = field(default=lambda future: None, kw_only=True)
    """A done-callback of the future whose interruption may lose nothing: it is called again then."""
    begun: bool = field(default=False, kw_only=True)
    """Whether somebody has the right to give the outcome."""
    _verdict: BaseException | None = field(default=None, kw_only=True)
    """The error that the future gets, once that is decided."""

    def start(self, verdict: BaseException | None = None) -> bool:
        """Rule out cancelling; True for the one call that may give the outcome. With `verdict` it is decided
        to be that error.
        """
        # The future is the caller's, who may have set its state; that must hurt nobody else.
        with self.future._condition:
            if self.begun:
                return False
            self._verdict = verdict  # first, so that `complete` knows what an interrupted call had decided
            self.begun = self.future.begin()
            if not self.begun:
                self._verdict = None
            return self.begun

    def watch(self) -> None:
        """Have `on_done` called with a CancelledError once the caller cancels the future.

        The future refers to its promise weakly: otherwise it would keep its own result alive in a cycle.
        """
        noticed = partial(_on_cancelled, weakref.ref(self), os.getpid())
        self.future.add_done_callback(noticed)  # before the caller's callbacks, and
        self.future.on_cancel = noticed  # if that one was interrupted, or had too little stack

    def cancel(self) -> None:
        """Cancel the future if that is still possible. The calling thread survives its callbacks."""
        try:
            self.future.cancel()
        except BaseException:
            # sys.exit() in a done-callback, where only plain Exceptions are caught, must not end a thread
            # of the engine.
            logger.exception("a callback on a result failed")

    def complete(self) -> None:
        """Bring to its end what was interrupted: give the error that was decided, or cancel."""
        if self._verdict is not None:
            self.complete_failing()
        elif not self.begun:
            self.future.cancel()

    def complete_failing(self) -> None:
        """Give the error that was decided, if one was and it was not given."""
        verdict = self._verdict
        if verdict is not None and not self.future.done() and (self.begun or self.start(verdict)):
            self.fail(verdict)

    def notify_cancelled(self) -> None:
        """Wake those who wait for the cancelled future; `Future.cancel` alone leaves them waiting."""
        self.future.notify_cancelled()

    def succeed(self, result: ImageResult) -> None:
        """Give the caller the result, after `start`."""
        self.on_done(self, None)
        self._resolve(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        """Give the caller `error`, as one of the library's, after `start`."""
        ours = strip_tracebacks(as_ours(error))
        self.on_done(self, ours)
        self._resolve(self.future.set_exception, ours)

    def fail_if_pending(self, error: BaseException) -> None:
        """Fail unless it was started or cancelled before."""
        if self.start(verdict=error):
            self.fail(error)

    def _resolve(self, setter: Callable[[Any], object], value: Any) -> None:
        called_back = False
        try:
            if not self.future.done():  # the caller may have done it, or a call that was interrupted
                setter(value)
                called_back = True
        except InvalidStateError:
            pass  # another thread gave it this moment: `complete_failing` may be called in several
        except BaseException:
            # From a done-callback, see `cancel`; or an interrupt, before the outcome was set.
            logger.exception("a callback on a result failed")
        finally:
            if not self.future.done():
                setter(value)
            if not called_back:
                self.on_outcome(self.future)


def _on_cancelled(watched: weakref.ref[Promise], pid: int, future: Future[ImageResult]) -> None:
    promise = watched()  # None where a thread that had it noticed first
    # In a forked child this is a copy, and the threads that held locks are not there.
    if promise is not None and future.cancelled() and os.getpid() == pid:
        promise.on_done(promise, CancelledError())
        promise.notify_cancelled()
