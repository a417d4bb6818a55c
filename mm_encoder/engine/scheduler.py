"""The scheduler: two FIFO queues of jobs, and the slots and bytes that they hold.

A job holds a slot from its admission, and its bytes from when it is opened, until a replica takes it. So
what waits here is bounded whatever the number of callers. A job with a slot is accepted: close() finishes it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from bisect import insort
from collections.abc import Collection
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import count

from ..contract import ImageResult
from ..errors import EncoderClosedError, MMEncoderError
from .budget import Budget, Grant
from .deadlines import Deadlines
from .faults import copy_error, replica_error
from .job import Job, JobState
from .tally import Tally
from .worker import Worker

logger = logging.getLogger("mm_encoder")


class Scheduler:
    """Queues of at most `depth` jobs and `max_bytes` bytes, admitted and not yet running."""

    def __init__(self, depth: int, max_bytes: int, replicas: int) -> None:
        self.slots: Budget[Job] = Budget(depth)
        self.bytes: Budget[Job] = Budget(max_bytes)
        self.deadlines = Deadlines()
        self.tally = Tally()
        self.closed = False
        self._pid = os.getpid()
        self.replicas_left = replicas
        self._refusal: MMEncoderError | None = None
        self._numbers = count()
        lock = threading.Lock()
        self._to_prepare = threading.Condition(lock)
        self._to_run = threading.Condition(lock)
        self._queued: list[Job] = []
        self._preparing: set[Job] = set()
        self._ready: list[Job] = []
        self._idle_waiters: list[tuple[frozenset[Job], Future[None]]] = []

    # --- the callers' side (admission.py) --------------------------------------------------------

    def register(self, job: Job) -> None:
        """Count a new job, number it, and watch for its end."""
        self.tally.begun()
        job.number = next(self._numbers)
        job.on_done = self._on_done
        # A weak reference: a future that held its job would keep its own result alive in a cycle.
        job.future.add_done_callback(partial(self._on_cancelled, weakref.ref(job)))

    def enqueue(self, job: Job) -> None:
        """Queue a job for a preprocessing thread: it has its slot and, if it was opened, its bytes."""
        with self._to_prepare:
            finished = job.finished
            if not finished:
                job.move_to(JobState.QUEUED)
                insort(self._queued, job, key=_by_number)
                self._to_prepare.notify()
        if finished:
            self.retire(job)

    def require_open(self) -> None:
        """Raise EncoderClosedError after `close`, ReplicaError when no replica is left."""
        if self._refusal is not None:
            raise copy_error(self._refusal)

    def preparation_idle(self, futures: Collection[Future[ImageResult]]) -> Future[None] | None:
        """Return a future of the moment when no job of `futures` is in preparation any more; None: now. Only
        then is a cancelled one released.
        """
        with self._to_prepare:
            jobs = frozenset(job for job in self._preparing if (job.caller_future or job.future) in futures)
            if not jobs:
                return None
            idle: Future[None] = Future()
            self._idle_waiters.append((jobs, idle))
            return idle

    # --- the threads' side (preprocess.py, replica.py) -------------------------------------------

    def next_to_prepare(self, worker: Worker) -> Job | None:
        """Wait for a queued job; None once the encoder is closed and all accepted jobs were taken."""
        with self._to_prepare:
            while not self._queued:
                if self.closed and not self.slots.used:
                    return None
                self._to_prepare.wait()
            job = self._queued[0]
            worker.take(job)
            self._preparing.add(job)
            del self._queued[0]
            job.move_to(JobState.PREPARING)
            return job

    def finish_preparing(self, worker: Worker, grant: Grant | None = None) -> None:
        """Take back the job that `worker` prepared. It is ready, or finished, or waits for its `grant` of
        bytes and is then queued again.
        """
        job = worker.job
        if job is None:
            return
        with self._to_run:
            worker.take(None)
            self._preparing.discard(job)
            idle = [future for jobs, future in self._idle_waiters if self._preparing.isdisjoint(jobs)]
            self._idle_waiters = [entry for entry in self._idle_waiters if entry[1] not in idle]
            finished = job.finished
            if not finished and grant is not None:
                job.move_to(JobState.WAITING)
            elif not finished:
                job.move_to(JobState.READY)
                insort(self._ready, job, key=_by_number)
                self._to_run.notify()
        if finished:
            self.retire(job)
        elif grant is not None:
            grant.add_done_callback(lambda _: self.enqueue(job))
        for future in idle:
            future.set_result(None)

    def next_to_run(self, worker: Worker) -> Job | None:
        """Wait for a ready job and start it; None once the encoder is closed and all jobs were taken."""
        while True:
            with self._to_run:
                while not self._ready:
                    if self.closed and not self.slots.used:
                        return None
                    self._to_run.wait()
                job = self._ready[0]
                worker.take(job)
                started = job.start()
                del self._ready[0]
                if started:
                    job.move_to(JobState.RUNNING)
                else:
                    worker.take(None)
            if started:
                self._release(job)
                job.on_start()
                return job
            self.retire(job)

    def on_replica_lost(self, worker: Worker, cause: BaseException) -> None:
        """Fail the job of a replica whose thread ends for good, and with the last replica all that waits."""
        worker.lost = True
        error = replica_error(f"{worker.name} is lost", cause)
        logger.error("%s", error, extra={"mm_event": "replica_lost", "mm_worker": worker.name})
        self.tally.last_error = f"ReplicaError: {error}"
        with self._to_run:
            self.replicas_left -= 1
            left = self.replicas_left
            self._to_run.notify_all()  # it may have been woken for a job that it did not take
        if not left:
            if not self.closed:
                self._refuse(error)
            for job in self.slots.holders():
                job.fail_if_pending(copy_error(error))
        job_of = worker.job
        worker.take(None)
        if job_of is not None:
            job_of.start()
            job_of.fail(copy_error(error))

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop admission; accepted jobs continue."""
        self._refuse(EncoderClosedError("the encoder is closed"))
        # Set after the refusal: from here on the number of slots in use can only fall.
        self.closed = True
        self._wake_all()

    def cancel_waiting(self) -> None:
        """Cancel every accepted job that no replica has taken."""
        for job in self.slots.holders():
            job.cancel()

    def _refuse(self, error: MMEncoderError) -> None:
        self._refusal = error
        self.slots.close(partial(copy_error, error))

    # --- how a job ends: every way leads to `_on_done`, which acts once ----------------------------
    #
    # event            call                      in the thread          slot, bytes, buffers are released
    # result           Promise.succeed           of its replica         when the replica took it (next_to_run)
    # tower's error    Promise.fail              of its replica         the same
    # invalid image    Promise.fail_if_pending   that has the job       when that thread puts it down (retire)
    # cancelled        Future.cancel             any                    at once; if a thread opens or prepares
    # deadline passed  Promise.fail_if_pending   of the deadlines       the job, when that puts it down
    # last replica     on_replica_lost           of that replica        the same
    # close, no drain  cancel_waiting            that closes            the same

    def _on_done(self, job: Job, error: BaseException | None) -> None:
        """Account for a job's outcome; in the thread that gave it, or that noticed the cancelling first."""
        before = job.mark_done()
        if before is None:
            return
        self.tally.ended(job, error)
        with self._to_prepare:
            busy = job in self._preparing
            for queue in (self._queued, self._ready):
                if job in queue:
                    queue.remove(job)
        if not busy:
            self._release(job)
        if not busy and before is not JobState.OPENING:  # else the thread that has it does
            job.release_buffers()
        self.deadlines.forget(job)

    def _on_cancelled(self, watch: weakref.ref[Job], future: Future[ImageResult]) -> None:
        job = watch()  # None where a thread that had it noticed first
        if os.getpid() != self._pid:  # a forked child: the threads that held locks are not in it
            return
        if job is not None and future.cancelled():
            self._on_done(job, CancelledError())
            job.notify_cancelled()

    def retire(self, job: Job) -> None:
        """Release everything that a finished job holds. If it was cancelled a moment ago, account for that
        and notify its waiters first.
        """
        self._on_done(job, CancelledError())
        if job.future.cancelled():
            job.notify_cancelled()
        self._release(job)
        job.release_buffers()

    def _release(self, job: Job) -> None:
        self.bytes.release(job)
        self.slots.release(job)
        if self.closed:
            self._wake_all()

    def _wake_all(self) -> None:
        if not self.slots.used:  # closed, so no job with a deadline can follow
            self.deadlines.end()
        with self._to_prepare:
            self._to_prepare.notify_all()
            self._to_run.notify_all()


def _by_number(job: Job) -> int:
    return job.number
