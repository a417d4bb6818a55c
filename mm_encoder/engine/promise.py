"""The producer's side of a caller's future: one outcome, whoever races to give it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..contract import ImageResult
from .faults import as_ours, strip_tracebacks

logger = logging.getLogger("mm_encoder")


@dataclass(eq=False, slots=True, weakref_slot=True)
class Promise:
    """The producer's side of a caller's future. It gets one outcome: result, error or cancellation."""

    future: Future[ImageResult] = field(default_factory=Future, kw_only=True)
    deadline: float | None = field(default=None, kw_only=True)
    """On time.monotonic()'s clock."""
    on_done: Callable[[Any, BaseException | None], None] = field(default=lambda _, error: None, kw_only=True)
    """Called with the promise and its error (None: a result) right before the outcome can be seen; not called
    when it is cancelled.
    """
    _lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)
    _begun: bool = field(default=False, kw_only=True)
    """Whether the future has left its pending state, which it does once."""

    def start(self) -> bool:
        """Rule out cancelling; True for the one call that may give the outcome."""
        with self._lock:
            if self._begun:
                return False
            self._begun = True
            # The future is the caller's, who may have set its state; that must hurt nobody else.
            if self.future.running() or (self.future.done() and not self.future.cancelled()):
                return not self.future.done()
            return self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        """Cancel the future if that is still possible. The calling thread survives its callbacks."""
        _resolve(lambda _: self.future.cancel(), None)

    def notify_cancelled(self) -> None:
        """Wake those who wait for the cancelled future; `Future.cancel` alone leaves them waiting."""
        self.start()  # all that it does for a cancelled future

    def succeed(self, result: ImageResult) -> None:
        """Give the caller the result, after `start`."""
        self.on_done(self, None)
        _resolve(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        """Give the caller `error`, as one of the library's, after `start`."""
        ours = strip_tracebacks(as_ours(error))
        self.on_done(self, ours)
        _resolve(self.future.set_exception, ours)

    def fail_if_pending(self, error: BaseException) -> None:
        """Fail unless it was started or cancelled before."""
        if self.start():
            self.fail(error)


def _resolve(setter: Callable[[Any], object], value: Any) -> None:
    try:
        setter(value)
    except BaseException:
        # From a done-callback, where only plain Exceptions are caught: sys.exit() in it must not end
        # the engine's thread.
        logger.exception("a callback on a result failed")
