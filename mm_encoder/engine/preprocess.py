"""Preprocessing threads: hash, decode and cut into patches, outside the GIL where it takes time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from ..runtime import usable_cpus
from .admission import OpenImage
from .budget import Grant
from .job import Job
from .scheduler import Scheduler
from .worker import Worker

logger = logging.getLogger("mm_encoder")

Prepare = Callable[[Job], Callable[[], None] | None]
"""Fills in `patches` and `mm_hash` and may raise; runs in a preprocessing thread. Where the result is there
already it returns what gives it to those who wait, to be called once the CPU is given back.
"""

# All encoders of the process together prepare no more images at a time than it may use CPUs.
_CPUS = threading.BoundedSemaphore(usable_cpus())


def _renew_cpus() -> None:
    global _CPUS
    _CPUS = threading.BoundedSemaphore(usable_cpus())


os.register_at_fork(after_in_child=_renew_cpus)  # the threads that held them are not in the child


class Preprocessor(Worker):
    """Prepares queued jobs until the scheduler is closed and empty."""

    def __init__(self, index: int, scheduler: Scheduler, open_image: OpenImage, prepare: Prepare) -> None:
        super().__init__(f"mm-encoder-prep-{index}", scheduler)
        self._scheduler, self._open_image, self._prepare = scheduler, open_image, prepare

    def run(self) -> None:
        """Go on whatever happens to the thread: it has no state of its own to lose."""
        while True:
            try:
                self._work()
                return
            except BaseException as error:  # no job's fault: those are caught at the job
                logger.exception("%s was interrupted and goes on", self.name)
                if self.job is not None:
                    self.job.fail_if_pending(error)
                self._scheduler.finish_preparing(self)

    def _work(self) -> None:
        while (job := self._scheduler.next_to_prepare(self)) is not None:
            grant = instead = None
            job.stage_done("queue_wait")
            try:
                with _CPUS:
                    grant, instead = self._prepare_one(job)
                if instead is not None:
                    instead()  # callbacks may take long, or need a CPU of another encoder's
            except BaseException as error:
                job.fail_if_pending(error)
            finally:
                del job  # an idle thread keeps no picture alive, nor does a grant's callback
                self._scheduler.finish_preparing(self, grant)
                grant = instead = None

    def _prepare_one(self, job: Job) -> tuple[Grant | None, Callable[[], None] | None]:
        """Prepare `job`; or return its grant at room for its bytes, if it was opened here and has none; or
        what is to be done instead.
        """
        if job.finished:
            return None, None
        if job.plan is None:
            self._open_image(job)
            job.stage_done("open")
            grant = self._scheduler.bytes.acquire(job, job.nbytes)
            if grant is not None:
                return grant, None
        return None, self._prepare(job)
