"""Opening images that may stall, for event loops: nobody else waits for a file that does not answer."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from ..daemons import DaemonPool
from .faults import strip_tracebacks
from .job import Job, JobState
from .protocols import Pipeline
from .scheduler import Scheduler
from .worker import Worker

_MAX_THREADS = 64  # as many images may stall before the others have to wait


class Opener:
    """Threads that take a job from a preprocessing thread, open it, get it its bytes, and queue it again.

    They have no CPU permit, and neither `close` nor the interpreter's exit waits for them.
    """

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline) -> None:
        self._scheduler, self._pipeline = scheduler, pipeline
        self._pool = DaemonPool(_MAX_THREADS, "mm-encoder-open")

    def open(self, job: Job, worker: Worker) -> None:
        """Have the job that `worker` has opened. Raises RuntimeError if there is no thread to be had."""
        self._scheduler.hand_to_opener(worker, job)
        opened = self._pool.submit(partial(self._open, job))
        opened.add_done_callback(partial(self._check, job))

    def close(self) -> None:
        """End the threads that are idle, and the others when they have opened what they are at."""
        self._pool.close()

    def _open(self, job: Job) -> None:
        if not job.finished:
            self._pipeline.open(job)
            job.stage_done("open")
            grant = self._scheduler.bytes.acquire(job, job.nbytes)
            if grant is not None and not job.finished:
                job.move_to(JobState.WAITING)
                grant.add_done_callback(lambda _: self._scheduler.enqueue(job))
                return
        self._scheduler.enqueue(job)  # or retire it, if it has finished meanwhile

    def _check(self, job: Job, opened: Future[None]) -> None:
        error = opened.exception()
        if error is None:
            return
        try:
            self._fail(job, error)
        except BaseException:
            self._fail(job, error)  # does what the first attempt has left undone
            raise

    def _fail(self, job: Job, error: BaseException) -> None:
        job.fail_if_pending(error)
        self._scheduler.drop(job)
        strip_tracebacks(error)  # or it would keep the image alive, if the job had its outcome before
