"""The scheduler: two FIFO queues of jobs, and the slots and bytes that they hold.

A job holds a slot from its admission, and its bytes from when it is opened, until a replica takes it. So
what waits here is bounded whatever the number of callers. A job with a slot is accepted: close() finishes it.
"""

from __future__ import annotations

import queue
from bisect import insort
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import count

from ..config import BatchConfig
from ..contract import ImageResult
from ..errors import EncoderClosedError, MMEncoderError
from ..locks import AskableLock, guarded
from ..logs import logger
from .batch import fitting
from .budget import Budget
from .deadlines import Deadlines
from .faults import copy_error, replica_error
from .future import Grant
from .job import Job, JobState
from .tally import Tally
from .worker import Worker


class Scheduler:
    """Queues of at most `depth` jobs and `max_bytes` bytes, admitted and not yet running.

    One lock guards the queues, the slots, the bytes and the counts. Under it nothing waits, no other lock is
    taken and no callback runs. Every change may be repeated: it is, if an interrupt came in between.
    """

    def __init__(
        self, depth: int, max_bytes: int, replicas: int, batching: BatchConfig | None = None
    ) -> None:
        self._lock = AskableLock()
        self.slots: Budget[Job] = Budget(depth, self._lock)
        self.bytes: Budget[Job] = Budget(max_bytes, self._lock)
        self.deadlines = Deadlines()
        self.tally = Tally(self._lock)
        self.closed = False
        self._replicas, self._batching = replicas, batching
        self._lost: set[Worker] = set()
        self._refusal: MMEncoderError | None = None
        self._numbers = count()
        self._queued: list[Job] = []
        self._preparing: dict[Job, Worker] = {}
        self._ready: list[Job] = []
        # A token for each job that was put into the queue, at least; a thread takes one, then looks.
        self._to_prepare: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._to_run: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._idle_waiters: list[tuple[frozenset[Job], Grant]] = []

    @property
    def replicas_left(self) -> int:
        """The replicas that are not lost."""
        return self._replicas - len(self._lost)

    # --- the callers' side (admission.py) --------------------------------------------------------

    def register(self, job: Job) -> None:
        """Count a new job, number it, and watch for its end."""
        job.on_done = self._on_done
        job.number = next(self._numbers)
        self.tally.begun(job)
        job.watch()

    def enqueue(self, job: Job) -> None:
        """Queue a job for a preprocessing thread: it has its slot and, if it was opened, its bytes. Does
        nothing for one that was queued before.
        """
        if not self._enqueue(job):
            self.retire(job)

    @guarded
    def _enqueue(self, job: Job) -> bool:
        if not job.finished and job.stage in (JobState.WAITING, JobState.OPENING):
            # First: one waking too many does no harm, and for want of one the next job would be left waiting.
            self._to_prepare.put(None)
            if job not in self._queued:
                insort(self._queued, job, key=_by_number)
            job.move_to(JobState.QUEUED)
        return not job.finished

    def drop(self, job: Job) -> None:
        """End a job whose caller was refused or interrupted, wherever that was, and release what it holds."""
        self.insist(partial(self._drop, job))

    def _drop(self, job: Job) -> None:
        try:
            job.complete()
        finally:
            if job.future.cancelled() or job.future.done():
                self.retire(job)

    def insist(self, work: Callable[[], object]) -> None:
        """Do `work`; if it is cut off, as where the stack ends, a preprocessing thread does it again. To note
        that takes less stack than getting a slot did, while giving it back may take more.
        """
        try:
            work()
        except BaseException:
            self._lock.after(work)
            self._to_prepare.put(None)  # whose taker uses the lock
            raise

    def require_open(self) -> None:
        """Raise EncoderClosedError after `close`, ReplicaError when no replica is left."""
        if self._refusal is not None:
            raise copy_error(self._refusal)

    @guarded
    def preparation_idle(self, futures: Collection[Future[ImageResult]]) -> Grant | None:
        """Return a grant of the moment when no job of `futures` is in preparation any more; None: now. Only
        then is a cancelled one released.
        """
        jobs = frozenset(job for job in self._preparing if (job.caller_future or job.future) in futures)
        if not jobs:
            return None
        idle = Grant()
        self._idle_waiters.append((jobs, idle))
        return idle

    # --- the threads' side (preprocess.py, replica.py) -------------------------------------------

    def next_to_prepare(self, worker: Worker) -> Job | None:
        """Wait for a queued job; None once the encoder is closed and all accepted jobs were taken."""
        while True:
            self._to_prepare.get()
            if self._take(worker, self._queued):
                return worker.job
            if self.closed and not self.slots.used:
                self._to_prepare.put(None)  # for the next thread
                return None

    @guarded
    def _take(self, worker: Worker, line: list[Job]) -> bool:
        if not line:
            return False
        jobs = line[:1] if line is self._queued else line[: fitting(line, self._batching)]
        worker.take(*jobs)
        if line is self._queued:
            self._preparing[jobs[0]] = worker
            jobs[0].move_to(JobState.PREPARING)
        del line[: len(jobs)]
        return True

    def finish_preparing(self, worker: Worker, grant: Grant | None = None) -> None:
        """Take back the job that `worker` prepared. It is ready, or finished, or waits for its `grant` of
        bytes and is then queued again; or another thread opens it, and `worker` has nothing more to do.
        """
        job = worker.job
        if job is not None:
            self._put_down(worker, job, grant)
            if job.finished:
                self.retire(job)
            elif grant is not None:
                grant.add_done_callback(lambda _: self.enqueue(job))
            worker.take()
        self._resolve_idle()  # last, so that a caller that waits for it finds everything released

    @guarded
    def _put_down(self, worker: Worker, job: Job, grant: Grant | None) -> None:
        if self._preparing.get(job) is not worker:
            return
        del self._preparing[job]
        if job.finished:
            return
        if grant is not None:
            job.move_to(JobState.WAITING)
        elif job.stage in (JobState.PREPARING, JobState.READY):
            self._to_run.put(None)  # first, as in `_enqueue`
            if job not in self._ready:
                insort(self._ready, job, key=_by_number)
            job.move_to(JobState.READY)
            worker.take()

    @guarded
    def hand_to_opener(self, worker: Worker, job: Job) -> None:
        """Leave to another thread a job that `worker` has: it opens the image, and queues the job again."""
        if self._preparing.pop(job, None) is worker:
            job.move_to(JobState.OPENING)

    @guarded
    def _resolve_idle(self) -> None:
        for entry in self._idle_waiters[:]:
            if entry[0].isdisjoint(self._preparing):
                self._lock.after(entry[1].resolve)
                self._idle_waiters.remove(entry)

    def next_to_run(self, worker: Worker) -> tuple[Job, ...]:
        """Wait for ready jobs and start those that make a batch; none once the encoder is closed and all jobs
        were taken.
        """
        while True:
            self._to_run.get()
            if self._take(worker, self._ready):
                worker.take(*[job for job in worker.jobs if self._start(job)])
                if worker.jobs:
                    return worker.jobs
            elif self.closed and not self.slots.used:
                self._to_run.put(None)  # for the next thread
                return ()

    def _start(self, job: Job) -> bool:
        """Start a job that a replica has taken; False, and it is retired, if its caller has left."""
        if not job.start():
            self.retire(job)
            return False
        job.move_to(JobState.RUNNING)
        self._release(job)
        job.on_start()
        return True

    def wake_again(self) -> None:
        """Let a thread of each kind look again, for one that was woken and then interrupted."""
        self._to_prepare.put(None)
        self._to_run.put(None)

    def on_replica_lost(self, worker: Worker, cause: BaseException) -> None:
        """Fail the jobs of a replica whose thread ends for good, and with the last replica all that waits.
        May be called again if it was interrupted.
        """
        worker.lost = True
        error = replica_error(f"{worker.name} is lost", cause)
        self.tally.last_error = f"ReplicaError: {error}"
        self._lost.add(worker)
        self.wake_again()  # it may have been woken for a job that it did not take
        try:
            if not self.replicas_left:
                if not self.closed:
                    self._refuse(error)
                for job in self.slots.holders():
                    job.fail_if_pending(copy_error(error))
            for job in worker.jobs:
                job.start()
                job.fail(copy_error(error))
            worker.take()
        finally:
            logger.error("%s", error, extra={"mm_event": "replica_lost", "mm_worker": worker.name})

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
    # event                call                      thread         slot, bytes and buffers are released
    # result               Promise.succeed           its replica    by the replica, when it took the job
    # tower's error        Promise.fail              its replica    the same
    # invalid image        Promise.fail_if_pending   that has it    by that thread, when it puts it down
    # hit before decoding  fail_if_pending(Joined)   preprocessing  the same
    # refused, interrupted Scheduler.drop            the caller's   at once by `_account` or `drop`; of a job
    # cancelled            Future.cancel             any            in preparation by its thread, when it
    # late                 fail_if_pending           deadlines      puts it down; of one that is being
    # last replica lost    on_replica_lost           that replica   opened only the buffers are left to its
    # close, no drain      cancel_waiting            that closes    thread

    def _on_done(self, job: Job, error: BaseException | None) -> None:
        """Account for a job's outcome, the first of those that it is called with. Cancelling may happen in
        any thread at any point, and does not wait for the lock.
        """
        if isinstance(error, CancelledError):
            self._lock.ask(partial(self._account, job, error))
        else:
            self._account(job, error)
        self.deadlines.forget(job)

    @guarded
    def _account(self, job: Job, error: BaseException | None) -> None:
        job.mark_done()
        self.tally.ended(job, error)
        for line in (self._queued, self._ready):
            if job in line:
                line.remove(job)
        if self._release_unless_preparing(job) and job.stage is not JobState.OPENING:
            job.release_buffers()

    def retire(self, job: Job) -> None:
        """Release everything that a finished job holds, unless a preprocessing thread has it, which does so
        when it puts it down. If it was cancelled a moment ago, account for that and notify its waiters first;
        give it the error that a thread which was interrupted had decided.
        """
        job.complete_failing()
        if not job.begun:  # else the thread that began to give the outcome accounts for it
            self._on_done(job, CancelledError())
        if job.future.cancelled():
            job.notify_cancelled()
        if self._release_unless_preparing(job):
            job.release_buffers()

    @guarded
    def _release_unless_preparing(self, job: Job) -> bool:
        if job in self._preparing:
            return False
        self._release(job)
        return True

    def _release(self, job: Job) -> None:
        self.bytes.release(job)
        self.slots.release(job)
        if self.closed:
            self._wake_all()

    def _wake_all(self) -> None:
        if not self.slots.used:  # closed, so no job with a deadline can follow
            self.deadlines.end()
        self.wake_again()


def _by_number(job: Job) -> int:
    return job.number
