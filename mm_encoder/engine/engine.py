"""The engine room: one scheduler, the threads that work for it, and how they begin and end."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..contract import EncoderState, EncoderStats, Health, ImageResult, WorkerHealth
from ..errors import ForkedProcessError
from .admission import OpenImage, admit, admit_async
from .job import Job
from .lifecycle import ThreadGroup
from .preprocess import Prepare, Preprocessor
from .replica import Replica, ReplicaSettings
from .scheduler import Scheduler
from .worker import Worker, is_owned_by, owned_thread

logger = logging.getLogger("mm_encoder")


class Engine:
    """Starts its threads at once and returns when every replica has loaded.

    If a replica fails to load or a thread to start, those begun are stopped and the first cause is raised.
    `on_stopped` is called whenever all threads have ended; it may be called more than once.
    The threads hold the scheduler and not the engine, so an engine that is dropped ends them; so does one
    that is alive at interpreter exit.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        open_image: OpenImage,
        prepare: Prepare,
        *,
        replicas: int,
        workers: int,
        depth: int,
        max_bytes: int,
        wedged_after: float,
        on_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = Scheduler(depth, max_bytes, replicas)
        self._open_image, self._wedged_after = open_image, wedged_after
        self._replicas = [Replica(index, settings, self.scheduler) for index in range(replicas)]
        self._preprocessors = [
            Preprocessor(index, self.scheduler, open_image, prepare) for index in range(workers)
        ]
        self._threads = ThreadGroup(self.scheduler, on_stopped)
        self._pid = os.getpid()
        weakref.finalize(self, self._threads.stop_from_gc).atexit = False
        try:
            deadlines = owned_thread(self.scheduler, self.scheduler.deadlines.run, "mm-encoder-deadlines")
            for thread in (deadlines, *(replica.thread for replica in self._replicas)):
                self._threads.start(thread)
            self.stream_priority = [replica.loaded.result() for replica in self._replicas].pop()
            for preprocessor in self._preprocessors:
                self._threads.start(preprocessor.thread)
        except BaseException:
            self.close(drain=False)
            raise

    def admit(self, job: Job, timeout: float | None) -> Future[ImageResult]:
        """The job's future, once it is admitted; see `admission.admit`."""
        admit(self.scheduler, job, self._open_image, timeout)
        return job.future

    async def admit_async(self, job: Job, timeout: float | None) -> Future[ImageResult]:
        """The same on the running loop; see `admission.admit_async`."""
        await admit_async(self.scheduler, job, timeout)
        return job.future

    def require_usable(self) -> None:
        """Raise ForkedProcessError in a forked child, RuntimeError in one of the engine's own threads, where
        waiting would be waiting for oneself, EncoderClosedError after `close`, and ReplicaError when no
        replica is left.
        """
        self.require_own_process()
        if self.is_own_thread():
            raise RuntimeError("a result's callback must not call the encoder; hand the work to a thread")
        self.scheduler.require_open()

    def is_own_thread(self) -> bool:
        """Whether this is called in one of the engine's threads, as from a result's callback."""
        return is_owned_by(self.scheduler)

    def require_own_process(self) -> None:
        """Raise ForkedProcessError in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this encoder was made before the process was forked; make one in the child, or spawn it"
            )

    def health(self) -> Health:
        """How the threads and the queue are at this moment."""
        waiting = self.scheduler.slots.holders()
        replicas = self._health_of(self._replicas)
        preprocessing = self._health_of(self._preprocessors)
        return Health(
            state=self._state(all(w.alive and not w.wedged for w in (*replicas, *preprocessing))),
            replicas=replicas,
            preprocessing=preprocessing,
            queue_length=len(waiting),
            queue_bytes=self.scheduler.bytes.used,
            waiting=self.scheduler.slots.waiting,
            oldest_s=max((time.monotonic() - job.created_at for job in waiting), default=None),
            last_error=self.scheduler.tally.last_error,
        )

    def stats(self) -> EncoderStats:
        """Counts and times since construction."""
        return self.scheduler.tally.snapshot()

    def close(self, *, drain: bool) -> None:
        """Stop admission, finish (`drain`) or cancel what waits, and join every thread.

        In one of the engine's own threads, as from a result's callback, nothing is waited for.
        """
        if os.getpid() != self._pid:  # in a forked child there is nothing to close
            return
        first = not self.scheduler.closed
        self._threads.stop(drain=drain)
        if first:
            stats = self.stats()
            logger.info(
                "closed: %d of %d images encoded",
                stats.succeeded,
                stats.requests,
                extra={"mm_event": "closed"},
            )

    def _health_of(self, workers: Sequence[Worker]) -> tuple[WorkerHealth, ...]:
        return tuple(worker.health(self._wedged_after) for worker in workers)

    def _state(self, all_well: bool) -> EncoderState:
        if self.scheduler.closed:
            alive = any(thread.is_alive() for thread in self._threads.threads())
            return EncoderState.DRAINING if alive else EncoderState.CLOSED
        if not all(replica.loaded.done() for replica in self._replicas):
            return EncoderState.STARTING
        if not self.scheduler.replicas_left:
            return EncoderState.FAILED
        return EncoderState.READY if all_well else EncoderState.DEGRADED
