"""The one queue: who may enter, what is prepared next, what runs next.

Both waiting rooms, and the line before them, are first come, first served under one lock. A job holds a
slot and its bytes from admission until a replica takes it, so the number of decoded pictures in memory
follows the bounds, not the number of callers.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from ..contract import ImageResult
from ..errors import EncoderClosedError
from .job import Job


class Scheduler:
    """Bounded by `depth` jobs and `max_bytes` bytes admitted and not yet running."""

    def __init__(self, depth: int, max_bytes: int) -> None:
        self._depth, self._max_bytes = depth, max_bytes
        lock = threading.Lock()
        self._space = threading.Condition(lock)
        self._to_prepare = threading.Condition(lock)
        self._to_run = threading.Condition(lock)
        self._line: deque[Job] = deque()
        self._queued: deque[Job] = deque()
        self._preparing: set[Job] = set()
        self._ready: deque[Job] = deque()
        self._jobs = self._bytes = 0
        self.closed = False

    def admit(self, job: Job) -> None:
        """Wait in line for room and queue `job`. Raises EncoderClosedError.

        A job larger than the byte bound is admitted once nothing else is held.
        """
        with self._space:
            self._line.append(job)
            try:
                while not self.closed and not (self._line[0] is job and self._fits(job)):
                    self._space.wait()
            finally:
                self._line.remove(job)
                self._space.notify_all()
            self._require_open()
            self._jobs += 1
            self._bytes += job.nbytes
            job.held = True
            self._queued.append(job)
            self._to_prepare.notify()
        # By weak reference: a future that held its job would keep its own result alive in a cycle.
        job.future.add_done_callback(partial(self._drop_cancelled, weakref.ref(job)))

    def require_open(self) -> None:
        """Raise EncoderClosedError once `close` was called."""
        with self._space:
            self._require_open()

    def next_to_prepare(self) -> Job | None:
        """Wait for a queued job; None once the encoder is closed and the queue is empty."""
        with self._to_prepare:
            while not self._queued and not self.closed:
                self._to_prepare.wait()
            if not self._queued:
                return None
            job = self._queued.popleft()
            self._preparing.add(job)
            return job

    def prepared(self, job: Job) -> None:
        """Take a job back from preprocessing: it is ready, or over if its future is done."""
        with self._to_run:
            self._preparing.remove(job)
            if job.future.done():
                self._release(job)
            else:
                self._ready.append(job)
                self._to_run.notify()
            self._space.notify_all()
            if self.closed:
                self._to_run.notify_all()

    def next_to_run(self) -> Job | None:
        """Wait for a ready job; None once the encoder is closed and all accepted work has been taken."""
        with self._to_run:
            while not self._ready:
                if self.closed and not self._queued and not self._preparing:
                    return None
                self._to_run.wait()
            job = self._ready.popleft()
            self._release(job)
            return job

    def wait_prepared(self, jobs: Sequence[Job]) -> None:
        """Wait until none of `jobs` is being prepared: a cancelled one is let go of only then."""
        with self._space:
            while not self._preparing.isdisjoint(jobs):
                self._space.wait()

    def close(self) -> None:
        """Stop admission; accepted jobs go on."""
        with self._space:
            self.closed = True
            self._wake_all()

    def cancel_waiting(self) -> None:
        """Cancel every job that no replica has taken."""
        with self._space:
            waiting = [*self._queued, *self._preparing, *self._ready]
        for job in waiting:
            job.future.cancel()

    @property
    def held(self) -> tuple[int, int]:
        """(jobs, bytes) admitted and not yet running."""
        with self._space:
            return self._jobs, self._bytes

    def _drop_cancelled(self, waiting: weakref.ref[Job], future: Future[ImageResult]) -> None:
        job = waiting()
        if job is None or not future.cancelled():
            return
        with self._space:
            for room in (self._queued, self._ready):
                if job in room:
                    room.remove(job)
                    self._release(job)
            if self.closed:
                self._wake_all()
        job.tell_cancelled()

    # The rest is called with the lock held.

    def _fits(self, job: Job) -> bool:
        room = self._jobs < self._depth and self._bytes + job.nbytes <= self._max_bytes
        return room or self._jobs == 0

    def _release(self, job: Job) -> None:
        if job.held:
            job.held = False
            self._jobs -= 1
            self._bytes -= job.nbytes
            self._space.notify_all()

    def _require_open(self) -> None:
        if self.closed:
            raise EncoderClosedError("the encoder is closed")

    def _wake_all(self) -> None:
        for condition in (self._space, self._to_prepare, self._to_run):
            condition.notify_all()
