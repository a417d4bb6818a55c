"""What is known of one of the engine's threads: whether it lives, and what it is at."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..contract import WorkerHealth
from .job import Job

_here = threading.local()


def owned_thread(owner: object, work: Callable[[], object], name: str) -> threading.Thread:
    """Make a thread that does `work` and is marked as belonging to `owner`."""

    def run() -> None:
        _here.owner = owner
        work()

    return threading.Thread(target=run, name=name, daemon=True)


def is_owned_by(owner: object) -> bool:
    """Return whether the calling thread belongs to `owner`. Its thread id would not tell: the system gives
    the id of a dead thread to a new one.
    """
    return getattr(_here, "owner", None) is owner


def run_in_new_thread(work: Callable[[], object]) -> None:
    """Do `work` in a thread of its own; from anywhere, also where garbage collection has interrupted a thread
    that holds locks, of `threading` too. So a bare thread starts the one that does it.
    """
    _thread.start_new_thread(_begin, (threading.Thread(target=work, name="mm-encoder-end", daemon=True),))


def _begin(thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # the interpreter ends, and with it what was to be ended
        thread.start()


class Worker:
    """A thread that takes one job after another from the scheduler, which notes here what it took."""

    def __init__(self, name: str, owner: object) -> None:
        self.name = name
        self.thread = owned_thread(owner, self.run, name)
        self.lost = False
        """Whether it has met its end by a fault; its thread may still be about to go."""
        self._at: tuple[Job, float] | None = None

    def run(self) -> None:
        """What the thread does."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether it can take jobs."""
        return self.thread.is_alive() and not self.lost

    @property
    def job(self) -> Job | None:
        """The job that it holds."""
        return self._at[0] if self._at else None

    def take(self, job: Job | None) -> None:
        """Note the job that it holds from now on."""
        self._at = None if job is None else (job, time.monotonic())

    def health(self, wedged_after: float) -> WorkerHealth:
        """How it is doing."""
        at = self._at
        busy = None if at is None else time.monotonic() - at[1]
        return WorkerHealth(self.name, self.alive, busy, wedged=busy is not None and busy > wedged_after)
