"""The one queue: which job is prepared next, which runs next, and when a job's room is given back.

A job holds a slot from admission, and room for its bytes from when it was opened, until a replica takes
it; so what waits here follows the bounds and not the number of callers. In the line and in both waiting
rooms the first to come is the first to go. A job that has a slot is accepted: closing finishes it.
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
    """Bounded by `depth` jobs and `max_bytes` bytes admitted and not yet running."""

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
        self._idle_waiters: list[tuple[frozenset[Job], Grant]] = []

    # --- the callers' side (admission.py) --------------------------------------------------------

    def register(self, job: Job) -> None:
        """Take note of a new job, and from here on of its end."""
        self.tally.begun()
        job.number = next(self._numbers)
        job.on_done = self._on_done
        # By weak reference: a future that held its job would keep its own result alive in a cycle.
        job.future.add_done_callback(partial(self._on_cancelled, weakref.ref(job)))

    def enqueue(self, job: Job) -> None:
        """Let a job be prepared: one with a slot and, if it was opened, with room for its bytes."""
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

    def preparation_idle(self, futures: Collection[Future[ImageResult]]) -> Grant | None:
        """When no job of these futures is in preparation any more: a cancelled one is let go of only then."""
        with self._to_prepare:
            jobs = frozenset(job for job in self._preparing if (job.caller_future or job.future) in futures)
            if not jobs:
                return None
            grant = Grant()
            self._idle_waiters.append((jobs, grant))
            return grant

    # --- the threads' side (preprocess.py, replica.py) -------------------------------------------

    def next_to_prepare(self, worker: Worker) -> Job | None:
        """Wait for a queued job; None once the encoder is closed and all that it accepted was taken."""
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
        """Take back what `worker` prepared: it is ready, or over as its future is, or waits for its `grant`
        at room for its bytes, after which it is queued again.
        """
        job = worker.job
        if job is None:
            return
        with self._to_run:
            worker.take(None)
            self._preparing.discard(job)
            idle = [grant for jobs, grant in self._idle_waiters if self._preparing.isdisjoint(jobs)]
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
        for waiting in idle:
            waiting.set_result(None)

    def next_to_run(self, worker: Worker) -> Job | None:
        """Wait for a ready job and start it; None once the encoder is closed and all work was taken."""
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
        """A replica's thread ends for good: its job fails, and with the last replica all that waits."""
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
        """Stop admission; accepted jobs go on."""
        self._refuse(EncoderClosedError("the encoder is closed"))
        # Only now: from here on the number of slots in use can only fall.
        self.closed = True
        self._wake_all()

    def cancel_waiting(self) -> None:
        """Cancel every accepted job that no replica has taken."""
        for job in self.slots.holders():
            job.cancel()

    def _refuse(self, error: MMEncoderError) -> None:
        self._refusal = error
        self.slots.close(partial(copy_error, error))

    def _on_done(self, job: Job, error: BaseException | None) -> None:
        """A job has its outcome, in whatever thread gave it that, or noticed first that it was cancelled."""
        before = job.mark_done()
        if before is None:
            return
        self.tally.ended(job, error)
        with self._to_prepare:
            busy = job in self._preparing
            for room in (self._queued, self._ready):
                if job in room:
                    room.remove(job)
        if not busy:
            self._release(job)
        if not busy and before is not JobState.OPENING:  # else it is let go of by the thread that has it
            job.release_buffers()
        self.deadlines.forget(job)

    def _on_cancelled(self, watch: weakref.ref[Job], future: Future[ImageResult]) -> None:
        job = watch()  # None where a thread that had it noticed first
        if os.getpid() != self._pid:  # a forked child's copy: whoever held a lock then is not in the child
            return
        if job is not None and future.cancelled():
            self._on_done(job, CancelledError())
            job.notify_cancelled()

    def retire(self, job: Job) -> None:
        """Let go of a job that is over. It may be so since just now, and nobody been told yet."""
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
        if not self.slots.used:  # closed, so nothing comes that could have a deadline
            self.deadlines.end()
        with self._to_prepare:
            self._to_prepare.notify_all()
            self._to_run.notify_all()


def _by_number(job: Job) -> int:
    return job.number
