"""Deadlines: one thread fails the jobs that no replica took in time."""

from __future__ import annotations

import threading
import time

from ..errors import DeadlineExceededError
from .promise import Promise


class Deadlines:
    """Watches jobs, and callers' waiters, until they are done. The thread executes `run`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: dict[Promise, float] = {}
        self._next: float | None = None
        self._ended = False

    def watch(self, job: Promise) -> None:
        """Fail `job` at its deadline, if it has one and is pending by then."""
        if job.deadline is None:
            return
        with self._changed:
            self._watched[job] = job.deadline
            if self._next is None or job.deadline < self._next:
                self._changed.notify()
        if job.deadline <= time.monotonic():
            job.fail_if_pending(_late())

    def forget(self, job: Promise) -> None:
        """Watch `job` no longer."""
        if job.deadline is not None:
            with self._changed:
                self._watched.pop(job, None)

    def run(self) -> None:
        """Fail what is late, until `end`."""
        while True:
            with self._changed:
                if self._ended:
                    return
                now = time.monotonic()
                late = [job for job, moment in self._watched.items() if moment <= now]
                for job in late:
                    del self._watched[job]
                if not late:
                    self._next = min(self._watched.values(), default=None)
                    # A wait takes no more than threading.TIMEOUT_MAX, which a far deadline may exceed.
                    self._changed.wait(None if self._next is None else min(self._next - now, 3600.0))
                    continue
            for job in late:
                job.fail_if_pending(_late())
            del late, job  # nothing is kept alive while waiting

    def end(self) -> None:
        """End the thread; jobs still watched lose their deadlines."""
        with self._changed:
            self._ended = True
            self._changed.notify()


def _late() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before a replica took the image")
