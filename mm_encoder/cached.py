"""The cache in front of the engine: looks up, joins, and only then admits a job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from .cache.entry import Entry
from .coalescer import Coalescer, LookUp, NoCache, Waiter
from .contract import ImageResult
from .daemons import DaemonPool
from .engine.admission import Admission, wait_for_future
from .engine.deadlines import Deadlines
from .engine.engine import Engine
from .engine.faults import as_ours, is_of_image
from .engine.future import run_in_new_thread
from .engine.job import Job
from .media.source import may_stall
from .pipeline import ImagePipeline

T = TypeVar("T")

# A disk that is well answers in milliseconds: timeout=0 is to have its hits, too.
_LEAST_DISK_WAIT_S = 0.1


def admission_of(engine: Engine, coalescer: Coalescer | NoCache, pipeline: ImagePipeline) -> Admission:
    """Return where submissions enter: the engine itself, or the cache in front of it."""
    return CachedEngine(engine, coalescer, pipeline) if isinstance(coalescer, Coalescer) else engine


class CachedEngine:
    """An admission that looks in the cache and among the flights before the engine."""

    def __init__(self, engine: Engine, coalescer: Coalescer, pipeline: ImagePipeline) -> None:
        self._engine, self._coalescer, self._pipeline = engine, coalescer, pipeline

    def admit(self, job: Job) -> Future[ImageResult]:
        """See `Admission`. Hits and joined flights need no slot."""
        limits, waiter = _Limits(job), _waiter_of(job)
        try:
            self._watch(waiter, job)
            found, key = self._look_up(waiter, job)
            if found is LookUp.NOT_IN_MEMORY:
                entry = self._coalescer.cache.get_disk(key, limits.disk_until)
                found = self._coalescer.finish_find(waiter, key, entry)
            if self._is_to_encode(found, waiter):
                job.timeout = limits.timeout_left()
                self._coalescer.start_leader(waiter, job)
                self._engine.admit(job)
            return waiter.future
        except BaseException:
            self._engine.scheduler.insist(waiter.cancel)
            raise

    async def admit_async(self, job: Job) -> Future[ImageResult]:
        """See `Admission`. Other threads hash the image and read the disk."""
        limits, waiter = _Limits(job), _waiter_of(job)
        coalescer = self._coalescer
        try:
            self._watch(waiter, job)
            pool = coalescer.file_lookups if may_stall(job.image) else coalescer.lookups
            look_up = partial(self._look_up, waiter, job)
            found, key = await self._elsewhere(pool, look_up, waiter) or (LookUp.DONE, b"")
            if found is LookUp.NOT_IN_MEMORY:
                entry = await self._read_disk(key, limits.disk_until)
                finish = partial(coalescer.finish_find, waiter, key, entry)
                # The rows of a hit may have to be copied to a device.
                if entry is not None:
                    found = await self._elsewhere(coalescer.lookups, finish, waiter) or LookUp.DONE
                else:
                    found = finish()
            if self._is_to_encode(found, waiter):
                job.timeout = limits.timeout_left()
                coalescer.start_leader(waiter, job)
                await self._engine.admit_async(job)
            return waiter.future
        except BaseException as error:
            # A coroutine may be collected inside a lock that cancelling takes.
            leave = run_in_new_thread if isinstance(error, GeneratorExit) else self._engine.scheduler.insist
            leave(waiter.cancel)
            raise

    def _is_to_encode(self, found: LookUp, waiter: Waiter) -> bool:
        if found is LookUp.MISS:
            self._engine.scheduler.deadlines.watch(waiter)  # again: fails it at once if it is late by now
        return found is LookUp.MISS and not waiter.future.done()

    async def _elsewhere(self, pool: DaemonPool, work: Callable[[], T], waiter: Waiter) -> T | None:
        """Have a thread of `pool` do `work`, and wait for it on the running loop; None if `waiter` has its
        outcome first, such as that it is late.
        """
        try:
            done = pool.submit(work)
        except RuntimeError:  # its threads have ended, since the encoder was closed meanwhile
            self._engine.require_usable()
            raise
        await wait_for_future(done, waiter.future)
        if not done.done():
            return None
        error = done.exception()
        if error is not None:
            raise as_ours(error)
        return done.result()

    async def _read_disk(self, key: bytes, until: float | None) -> Entry | None:
        cache = self._coalescer.cache
        read = cache.start_read(key)
        if read is not None:
            with suppress(TimeoutError):
                # Bounded, as not every loop takes an infinite time.
                async with asyncio.timeout(None if until is None else min(until - time.monotonic(), 1e6)):
                    await wait_for_future(read)
        found = read is not None and read.done() and read.exception() is None
        return cache.served(read.result() if read is not None and found else None)

    def _watch(self, waiter: Waiter, job: Job) -> None:
        """Have the waiter of the job's caller take over the job's deadline, and notice its cancelling."""
        deadlines = self._engine.scheduler.deadlines
        job.deadline = None
        waiter.on_done = partial(_on_done, deadlines)
        waiter.watch()
        deadlines.watch(waiter)

    def _look_up(self, waiter: Waiter, job: Job) -> tuple[LookUp, bytes]:
        """Hash the image and look into memory; return what was found, and the key."""
        try:
            mm_hash = self._pipeline.content_hash(job)
            key = self._coalescer.keys.key(mm_hash, job.options)
            found = self._coalescer.find(waiter, key)
        except Exception as error:
            if not is_of_image(error):
                raise
            waiter.fail_if_pending(error)
            return LookUp.DONE, b""
        if type(job.image) is bytes:
            job.mm_hash = mm_hash  # other images may have changed by the time they are opened for good
        return found, key


def _waiter_of(job: Job) -> Waiter:
    """Return the waiter of the job's caller. It takes the job's future: most jobs end here and need none."""
    return Waiter(job.expected, job.consumer, future=job.future, deadline=job.deadline)


class _Limits:
    """How long a lookup may take, by the job's limits as it came."""

    __slots__ = "_begun", "_deadline", "_timeout"

    def __init__(self, job: Job) -> None:
        self._begun, self._timeout, self._deadline = time.monotonic(), job.timeout, job.deadline

    @property
    def disk_until(self) -> float | None:
        """Until when the disk is waited for; after that it counts as a miss."""
        limits = [] if self._deadline is None else [self._deadline]
        if self._timeout is not None:
            limits.append(self._begun + max(self._timeout, _LEAST_DISK_WAIT_S))
        return min(limits, default=None)

    def timeout_left(self) -> float | None:
        """Return what is left of the job's timeout for its slot."""
        if self._timeout is None:
            return None
        return max(0.0, self._timeout - (time.monotonic() - self._begun))


def _on_done(deadlines: Deadlines, waiter: Waiter, error: BaseException | None) -> None:
    try:
        deadlines.forget(waiter)
    finally:
        if waiter.flight is not None:
            waiter.flight.leave(waiter, None if isinstance(error, CancelledError) else error)
