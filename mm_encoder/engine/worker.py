"""The threads of an engine: which scheduler they belong to, and which jobs each one has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..contract import WorkerHealth
from .job import Job

_here = threading.local()


def owned_thread(owner: object, work: Callable[[], object], name: str) -> threading.Thread:
    """Make a thread that does `work`, which may be called again if it raises, and is marked as belonging to
    `owner`.
    """

    def run() -> None:
        _here.owner = owner
        try:
            work()
        except BaseException:  # interrupted in its first line or its last: what is between handles everything
            work()

    return threading.Thread(target=run, name=name, daemon=True)


def is_owned_by(owner: object) -> bool:
    """Return whether the calling thread belongs to `owner`. Its thread id would not tell: the system gives
    the id of a dead thread to a new one.
    """
    return getattr(_here, "owner", None) is owner


class Worker:
    """A thread that takes jobs from the scheduler, which records here those that it has."""

    def __init__(self, name: str, owner: object) -> None:
        self.name = name
        self.thread = owned_thread(owner, self.run, name)
        self.lost = False
        """Whether it has failed for good; its thread may be about to end."""
        self._at: tuple[tuple[Job, ...], float] | None = None

    def run(self) -> None:
        """Run in the thread."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether the thread can take jobs."""
        return self.thread.is_alive() and not self.lost

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that the thread has: one at most, or a batch."""
        return self._at[0] if self._at else ()

    @property
    def job(self) -> Job | None:
        """The first of them."""
        return self._at[0][0] if self._at else None

    def take(self, *jobs: Job) -> None:
        """Record the jobs that the thread has from now on."""
        self._at = (jobs, time.monotonic()) if jobs else None

    def health(self, wedged_after: float) -> WorkerHealth:
        """Report on the thread; it is wedged if it has had its jobs for longer than `wedged_after`."""
        at = self._at
        busy = None if at is None else time.monotonic() - at[1]
        return WorkerHealth(self.name, self.alive, busy, wedged=busy is not None and busy > wedged_after)
