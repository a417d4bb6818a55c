"""The cache in front of the engine: looks up, joins, and only then admits a job."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from functools import partial

from .coalescer import Coalescer, LookUp, NoCache, Waiter
from .contract import ImageResult
from .engine.admission import Admission, wait_for_future
from .engine.deadlines import Deadlines
from .engine.engine import Engine
from .engine.future import run_in_new_thread
from .engine.job import Job
from .pipeline import ImagePipeline


def admission_of(engine: Engine, coalescer: Coalescer | NoCache, pipeline: ImagePipeline) -> Admission:
    """Return where submissions enter: the engine itself, or the cache in front of it."""
    return CachedEngine(engine, coalescer, pipeline) if isinstance(coalescer, Coalescer) else engine


class CachedEngine:
    """An admission that looks in the cache and among the flights before the engine."""

    def __init__(self, engine: Engine, coalescer: Coalescer, pipeline: ImagePipeline) -> None:
        self._engine, self._coalescer, self._pipeline = engine, coalescer, pipeline

    def admit(self, job: Job) -> Future[ImageResult]:
        """See `Admission`. Hits and joined flights need no slot."""
        waiter = self._waiter(job)
        if self._look_up(waiter, job) is LookUp.MISS:
            self._coalescer.start_leader(waiter, job)
            self._engine.admit(job)
        return waiter.future

    async def admit_async(self, job: Job) -> Future[ImageResult]:
        """See `Admission`. A lookup thread hashes and reads the disk."""
        waiter = self._waiter(job)
        try:
            try:
                looking = self._coalescer.lookups.submit(self._look_up, waiter, job)
            except RuntimeError:  # its threads have ended, since the encoder was closed meanwhile
                self._engine.require_usable()
                raise
            await wait_for_future(looking)
            found = looking.result()
        except BaseException as error:
            # A coroutine may be collected inside a lock that cancelling takes.
            run_in_new_thread(waiter.cancel) if isinstance(error, GeneratorExit) else waiter.cancel()
            raise
        if found is LookUp.MISS:
            self._coalescer.start_leader(waiter, job)
            await self._engine.admit_async(job)
        return waiter.future

    def _waiter(self, job: Job) -> Waiter:
        """Make the waiter of the job's caller, which takes over the job's deadline."""
        deadlines = self._engine.scheduler.deadlines
        waiter = Waiter(job.expected, job.consumer, deadline=job.deadline)
        job.deadline = None
        waiter.on_done = partial(_on_done, deadlines)
        waiter.watch()
        deadlines.watch(waiter)
        return waiter

    def _look_up(self, waiter: Waiter, job: Job) -> LookUp:
        try:
            mm_hash = self._pipeline.content_hash(job)
            found = self._coalescer.find(waiter, mm_hash, job)
        except Exception as error:
            waiter.fail_if_pending(error)
            return LookUp.DONE
        if type(job.image) is bytes:
            job.mm_hash = mm_hash  # other images may have changed by the time they are opened for good
        return LookUp.DONE if found is LookUp.MISS and waiter.future.done() else found


def _on_done(deadlines: Deadlines, waiter: Waiter, error: BaseException | None) -> None:
    deadlines.forget(waiter)
    if waiter.flight is not None:
        waiter.flight.leave(waiter, None if isinstance(error, CancelledError) else error)
