"""Deadlines: the one thread that drops jobs which no replica took in time."""

from __future__ import annotations

import threading
import time

from ..errors import DeadlineExceededError
from .promise import Promise


class Deadlines:
    """Watches jobs until they are done; `run` is what the thread does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: dict[Promise, float] = {}
        self._next: float | None = None
        self._ended = False

    def watch(self, job: Promise) -> None:
        """Have `job` dropped at its deadline, if it has one."""
        if job.deadline is None:
            return
        with self._changed:
            self._watched[job] = job.deadline
            if self._next is None or job.deadline < self._next:
                self._changed.notify()
        if job.deadline <= time.monotonic():
            job.fail_if_pending(_late())

    def forget(self, job: Promise) -> None:
        """`job` is done."""
        if job.deadline is not None:
            with self._changed:
                self._watched.pop(job, None)

    def run(self) -> None:
        """Drop what is late, until `end`."""
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
            del late, job  # nothing is kept while waiting

    def end(self) -> None:
        """Let the thread go; jobs that are still watched have no deadline any more."""
        with self._changed:
            self._ended = True
            self._changed.notify()


def _late() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before a replica took the image")
