"""Preprocessing threads: open, hash, decode and patches, without the GIL where it takes time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from ..logs import logger
from ..media.source import may_stall
from ..runtime import usable_cpus
from .future import Grant
from .job import Job
from .opening import Opener
from .protocols import Coalescing, Pipeline
from .scheduler import Scheduler
from .worker import Worker

# CPU permits: all encoders of the process together prepare no more images at a time than it may use CPUs.
_CPUS = threading.BoundedSemaphore(usable_cpus())


def _renew_cpus() -> None:
    global _CPUS
    _CPUS = threading.BoundedSemaphore(usable_cpus())


os.register_at_fork(after_in_child=_renew_cpus)  # the threads that held permits are not in the child


class Ready(NamedTuple):
    """The job's patches are made, or it needs none any more."""


class WaitForBytes(NamedTuple):
    """The job was opened here, and its bytes do not fit yet."""

    grant: Grant


class Deliver(NamedTuple):
    """The job need not be decoded: `call` gives its waiters what they wait for."""

    call: Callable[[], None]


class Preprocessor(Worker):
    """Prepares queued jobs until the scheduler is closed and empty."""

    def __init__(
        self, index: int, scheduler: Scheduler, pipeline: Pipeline, coalescer: Coalescing, opener: Opener
    ) -> None:
        super().__init__(f"mm-encoder-prep-{index}", scheduler)
        self._scheduler, self._pipeline = scheduler, pipeline
        self._coalescer, self._opener = coalescer, opener

    def run(self) -> None:
        """Prepare jobs, and go on whatever is raised in the thread: it has no state of its own to lose."""
        interruption: BaseException | None = None
        while True:
            try:
                if interruption is not None:  # no job's failure: those are caught per job
                    self._put_down(interruption)
                    interruption = None
                self._work()
                return
            except BaseException as error:
                interruption = error

    def _put_down(self, interruption: BaseException) -> None:
        """End the job that an interruption has left here; its traceback is logged and not kept."""
        self._scheduler.wake_again()
        if self.job is not None:
            self.job.fail_if_pending(interruption)
            self.job.complete()
        self._scheduler.finish_preparing(self)
        logger.error("%s was interrupted and goes on", self.name, exc_info=interruption)

    def _work(self) -> None:
        while (job := self._scheduler.next_to_prepare(self)) is not None:
            outcome: Ready | WaitForBytes | Deliver = Ready()
            job.stage_done("queue_wait")
            try:
                if not job.finished and job.plan is None and may_stall(job.image):
                    self._opener.open(job, self)
                else:
                    with _CPUS:
                        outcome = self._prepare(job)
                if isinstance(outcome, Deliver):
                    # Only now: callbacks may take long, or need another encoder's CPU permit.
                    outcome.call()
            except BaseException as error:
                job.fail_if_pending(error)
            finally:
                del job  # an idle thread keeps no image alive, nor does a grant's callback
                grant = outcome.grant if isinstance(outcome, WaitForBytes) else None
                self._scheduler.finish_preparing(self, grant)
                del outcome, grant

    def _prepare(self, job: Job) -> Ready | WaitForBytes | Deliver:
        """Take `job` through open, hash, "is it still needed?" and decode, as far as it goes."""
        if job.finished:
            return Ready()
        if job.plan is None:
            self._pipeline.open(job)
            job.stage_done("open")
            grant = self._scheduler.bytes.acquire(job, job.nbytes)
            if grant is not None:
                return WaitForBytes(grant)
        self._pipeline.hash(job)
        deliver = self._coalescer.before_decode(job)
        if deliver is not None:
            job.source = None  # delivering may take long
            return Deliver(deliver)
        self._pipeline.decode(job)
        return Ready()
