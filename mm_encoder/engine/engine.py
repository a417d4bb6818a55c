"""The engine: one scheduler and the threads that work for it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

from ..contract import EncoderState, EncoderStats, Health, ImageResult, WorkerHealth
from ..errors import ForkedProcessError
from ..logs import logger
from ..settings import EncoderSettings
from .admission import admit, admit_async, wait_for_future
from .job import Job
from .lifecycle import ThreadGroup
from .opening import Opener
from .preprocess import Preprocessor
from .protocols import Coalescing, Pipeline
from .replica import Replica, build_once
from .scheduler import Scheduler
from .worker import Worker, is_owned_by, owned_thread


class Engine:
    """Starts its threads, and returns when every replica has loaded.

    If a replica fails to load, or a thread to start, the others are stopped and the first cause is raised.
    The coalescer is closed when all threads have ended. The threads hold the scheduler and not the engine, so
    an engine that nobody refers to stops them.
    """

    def __init__(self, pipeline: Pipeline, coalescer: Coalescing, settings: EncoderSettings) -> None:
        self._pipeline, self._wedged_after = pipeline, settings.wedged_after
        self.scheduler = Scheduler(
            settings.depth, settings.queue_bytes, settings.replicas_per_gpu, settings.batching
        )
        build = build_once(pipeline.build_tower) if settings.share_weights else pipeline.build_tower
        self._replicas = [
            Replica(index, settings, pipeline.model, build, self.scheduler)
            for index in range(settings.replicas_per_gpu)
        ]
        opener = Opener(self.scheduler, pipeline)
        self._preprocessors = [
            Preprocessor(index, self.scheduler, pipeline, coalescer, opener)
            for index in range(settings.preprocess_workers)
        ]
        self._pid = os.getpid()
        self._threads = ThreadGroup(self.scheduler, opener.close, coalescer.close)
        try:
            weakref.finalize(self, self._threads.stop_from_gc).atexit = False
            deadlines = owned_thread(self.scheduler, self.scheduler.deadlines.run, "mm-encoder-deadlines")
            for thread in (deadlines, *(replica.thread for replica in self._replicas)):
                self._threads.start(thread)
            self.stream_priority = [replica.loaded.result() for replica in self._replicas].pop()
            # A replica for which the host has changed the number meanwhile makes results that are not kept.
            self.torch_threads = self._replicas[0].torch_threads
            for preprocessor in self._preprocessors:
                self._threads.start(preprocessor.thread)
        except BaseException:
            self.close(drain=False)
            raise

    def admit(self, job: Job) -> Future[ImageResult]:
        """See `Admission`."""
        admit(self.scheduler, job, self._pipeline.open)
        return job.future

    async def admit_async(self, job: Job) -> Future[ImageResult]:
        """See `Admission`."""
        await admit_async(self.scheduler, job)
        return job.future

    def require_usable(self) -> None:
        """Raise ForkedProcessError in a forked child, RuntimeError in one of the engine's own threads, where
        waiting would deadlock, EncoderClosedError after `close`, and ReplicaError when no replica is left.
        """
        self.require_own_process()
        if self.is_own_thread():
            raise RuntimeError(
                "the encoder cannot be called from a future's callback, which runs in an engine thread and "
                "would deadlock; call it from another thread"
            )
        self.scheduler.require_open()

    def is_own_thread(self) -> bool:
        """Whether the calling thread is one of the engine's, as in a future's callback."""
        return is_owned_by(self.scheduler)

    def require_own_process(self) -> None:
        """Raise ForkedProcessError in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this Encoder was created before fork(); create it in the child process, or start the "
                "process with the 'spawn' method"
            )

    def health(self) -> Health:
        """Report on the threads and the queue at this moment."""
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
        """Return counts and times since construction."""
        return self.scheduler.tally.snapshot()

    def close(self, *, drain: bool) -> None:
        """Stop admission, finish (`drain`) or cancel what waits, and join every thread. In one of the
        engine's own threads, as in a future's callback, returns at once.
        """
        if os.getpid() != self._pid:  # a forked child has nothing to close
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

    async def close_async(self, *, drain: bool) -> None:
        """`close` in a new thread, for which the running loop waits."""
        if self.is_own_thread():  # a future's callback, where nothing is waited for
            self.close(drain=drain)
            return
        closed: Future[None] = Future()

        def close() -> None:
            try:
                self.close(drain=drain)
            except BaseException as error:
                closed.set_exception(error)
            else:
                closed.set_result(None)

        threading.Thread(target=close, name="mm-encoder-close", daemon=True).start()
        await wait_for_future(closed)
        closed.result()

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
