"""Deadlines: one thread fails the jobs that no replica took in time."""

from __future__ import annotations

import queue
import time

from ..errors import DeadlineExceededError
from ..logs import logger
from .promise import Promise


class Deadlines:
    """Watches jobs, and callers' waiters, until they are done. The thread executes `run`.

    There is no lock: single operations of a dict, and a queue that a finalizer may put into.
    """

    def __init__(self) -> None:
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._watched: dict[Promise, float] = {}
        self._next: float | None = None
        """The moment until which the thread sleeps; None: it is awake, or sleeps until it is woken."""
        self._ended = False

    def watch(self, job: Promise) -> None:
        """Fail `job` at its deadline, if it has one and is pending by then."""
        if job.deadline is None:
            return
        again = job in self._watched
        self._watched[job] = job.deadline
        if self._next is None or job.deadline < self._next:
            self._changed.put(None)
        if job.future.done():  # `forget` may have come before
            self.forget(job)
        past = time.monotonic() - job.deadline
        if past >= 0:
            job.fail_if_pending(_late() if again else _never_in_time(past))

    def forget(self, job: Promise) -> None:
        """Watch `job` no longer."""
        if job.deadline is not None:
            self._watched.pop(job, None)

    def run(self) -> None:
        """Fail what is late, until `end`."""
        while not self._ended:
            try:
                self._next = None
                self._fail_late()  # in a frame of its own: nothing is kept alive while waiting
                self._next = min(self._watched.copy().values(), default=None)
                self._sleep()
            except BaseException:
                logger.exception("the thread of deadlines was interrupted and goes on")

    def end(self) -> None:
        """End the thread; jobs still watched lose their deadlines."""
        self._ended = True
        self._changed.put(None)

    def _fail_late(self) -> None:
        now = time.monotonic()
        for job, moment in self._watched.copy().items():
            if moment <= now:
                job.fail_if_pending(_late())
                job.complete_failing()
                self._watched.pop(job, None)

    def _sleep(self) -> None:
        # A wait takes no more than threading.TIMEOUT_MAX, which a far deadline may exceed.
        timeout = None if self._next is None else min(max(0.0, self._next - time.monotonic()), 3600.0)
        try:
            self._changed.get(timeout=timeout)
        except queue.Empty:
            pass


def _late() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before a replica took the image")


def _never_in_time(past: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"the deadline was {past:.3f} s in the past when the image was submitted; it is a moment on the "
        "monotonic clock: pass time.monotonic() + seconds"
    )
