"""Request coalescing in front of the engine, when a cache is configured.

Each caller holds a `Waiter`. It is resolved from the cache (memory, then disk), or joins the flight of the
same key, or becomes the leader of a new flight, whose job goes through the engine. A flight claims its key,
and can be joined, right before its job is decoded: the job then has its slot and bytes, and the key is that
of the very snapshot that is decoded.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from .cache.entry import Entry
from .cache.inflight import Flight, Flights
from .cache.tiered import Cache
from .contract import ImageResult
from .device import Transfers
from .engine.admission import wait_for_future
from .engine.deadlines import Deadlines
from .engine.engine import Engine
from .engine.faults import Joined, copy_error
from .engine.job import Job
from .engine.promise import Promise
from .engine.worker import run_in_new_thread
from .errors import PlanMismatchError

logger = logging.getLogger("mm_encoder")

Identify = Callable[[Job], str]
"""The `mm_hash` of a job's image; may raise."""


@dataclass(eq=False, slots=True)
class Waiter(Promise):
    """What one caller waits for."""

    expected: int | None = None
    consumer: Any = None
    """The stream on which it will read the rows; None on the CPU."""
    flight: Flight[Waiter] | None = None
    running: bool = False
    """Whether its flight's job is running, by which it was started."""

    def mark_running(self) -> None:
        """The job runs: no cancelling, no deadline any more."""
        self.running = self.start()

    def resolve(self, result: ImageResult) -> None:
        """Give it its result, unless it has an outcome already."""
        if not self.running and not self.start():
            return
        rows = result.metadata.length
        if self.expected is None or self.expected == rows:
            self.succeed(result)
        else:
            self.fail(PlanMismatchError(f"expected {self.expected} tokens, but this image makes {rows}"))

    def reject(self, error: BaseException) -> None:
        """Give it its error, unless it has an outcome already."""
        if self.running or self.start():
            self.fail(error)


class Coalescer:
    """The flights of one encoder, and the delivery of their results. Knows no engine: its callbacks live in
    futures and threads, which must not keep an encoder alive.

    results: as in CacheConfig. lookups: number of lookup threads for event loops.
    """

    def __init__(self, cache: Cache, transfers: Transfers, results: str, lookups: int) -> None:
        self.cache, self._transfers, self._results = cache, transfers, results
        self.lookups = ThreadPoolExecutor(lookups, "mm-encoder-lookup")
        self._flights: Flights[Waiter] = Flights()

    def close(self) -> None:
        """Close the cache; all flights are closed by then."""
        self.lookups.shutdown(wait=False)  # one may hang in a file system, and nobody waits for it
        self.cache.close()

    def find(self, waiter: Waiter, mm_hash: str, job: Job) -> bool:
        """Answer `waiter` from the cache, or have it join a flight; whether either was possible."""
        key = self.cache.keys.key(mm_hash, job.options)
        entry = self.cache.get(key)
        if entry is not None:
            _resolve(waiter, partial(self._result, entry, waiter))
            return True
        flight = self._flights.join(key, waiter)
        if flight is None:
            return False
        self.cache.count("joined")
        self._attach(waiter, flight)
        return True

    def start_leader(self, waiter: Waiter, job: Job) -> None:
        """Start a flight for `waiter`, which can be joined once the job has its slot and bytes."""
        flight = job.flight = Flight(waiter, job.abandon)
        job.caller_future = waiter.future
        job.on_start = flight.mark_running
        job.future.add_done_callback(partial(self._on_job_done, flight))
        self._attach(waiter, flight)

    def before_decode(self, job: Job) -> Callable[[], None] | None:
        """What is to be done instead of encoding `job`, whose `mm_hash` is known: its result may have come to
        memory, another flight may have taken off for it, or nobody waits any more.
        """
        flight: Flight[Waiter] = job.flight
        key = self.cache.keys.key(job.mm_hash, job.options)
        while True:
            if self._flights.claim_key(key, flight):
                if not flight.join():  # given up while the image was hashed
                    self._flights.finish(flight)
                    return lambda: None
                # Results are kept before flights end, so what ended before this one began is there.
                entry = self.cache.memory(key)
                if entry is None:
                    flight.tag = job.mm_hash, job.options, job.consumer
                    self.cache.count("misses")
                    return None
                self.cache.count("memory_hits")
                return partial(self._deliver_cached, flight, job, entry)
            waiters = flight.waiters()
            other = self._flights.join(key, *waiters)
            if other is not None:
                self.cache.count("joined")
                flight.close()
                for waiter in waiters:
                    self._attach(waiter, other)
                return partial(job.fail_if_pending, Joined())

    def _deliver_cached(self, flight: Flight[Waiter], job: Job, entry: Entry) -> None:
        for waiter in self._flights.finish(flight):
            _resolve(waiter, partial(self._result, entry, waiter))
        job.fail_if_pending(Joined())

    def _attach(self, waiter: Waiter, flight: Flight[Waiter]) -> None:
        waiter.flight = flight
        if waiter.future.done():  # it came to its end meanwhile, and found no flight to leave
            flight.leave(waiter)

    def _on_job_done(self, flight: Flight[Waiter], future: Future[ImageResult]) -> None:
        """A job is done, in whatever thread: its waiters get what it got, and nothing may come between."""
        if future.cancelled():
            for waiter in self._flights.finish(flight):
                waiter.cancel()
            return
        error = future.exception()
        if error is not None:
            for waiter in self._flights.finish(flight):
                waiter.reject(copy_error(error))
            return
        result = future.result()
        try:
            self._store(flight, result)
        except Exception:
            self.cache.count("errors")
            logger.exception("a result was not kept", extra={"mm_event": "cache_error"})
        for waiter in self._flights.finish(flight):
            _resolve(waiter, partial(self._for_consumer, result, flight, waiter))

    def _for_consumer(self, result: ImageResult, flight: Flight[Waiter], waiter: Waiter) -> ImageResult:
        if result.tensor.device.type != "cpu":
            _, _, first = flight.tag
            self._transfers.share(result.tensor, first, waiter.consumer)
        return result

    def _store(self, flight: Flight[Waiter], result: ImageResult) -> None:
        mm_hash, options, consumer = flight.tag
        rows, metadata = result
        if self.cache.keys.key(mm_hash, options) != flight.key:
            return  # the weights were changed meanwhile
        if rows.device.type == "cpu":
            self.cache.put(flight.key, rows, metadata)
        else:
            download = partial(self._transfers.download, rows, self._transfers.mark(consumer))
            self.cache.put_behind(flight.key, download, metadata, rows.nbytes)

    def _result(self, entry: Entry, waiter: Waiter) -> ImageResult:
        rows, metadata = entry
        if self._results == "device":
            return self._transfers.upload(ImageResult(rows, metadata), waiter.consumer)
        return ImageResult(rows, metadata)


class CachedEngine:
    """Admits jobs as the engine does, but waiters the cache first."""

    def __init__(self, engine: Engine, coalescer: Coalescer, identify: Identify) -> None:
        self._engine, self._coalescer, self._identify = engine, coalescer, identify

    def admit(self, job: Job, timeout: float | None) -> Future[ImageResult]:
        """A future for `job`'s image. Waits for room if it has to be encoded; raises as `admission.admit`."""
        waiter = self._waiter(job)
        if not self._look_up(waiter, job):
            self._coalescer.start_leader(waiter, job)
            self._engine.admit(job, timeout)
        return waiter.future

    async def admit_async(self, job: Job, timeout: float | None) -> Future[ImageResult]:
        """The same on the running loop; hashing and reading are done in threads for lookups."""
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
            # A coroutine that is collected may be so inside a lock that cancelling takes.
            run_in_new_thread(waiter.cancel) if isinstance(error, GeneratorExit) else waiter.cancel()
            raise
        if not found:
            self._coalescer.start_leader(waiter, job)
            await self._engine.admit_async(job, timeout)
        return waiter.future

    def _waiter(self, job: Job) -> Waiter:
        deadlines = self._engine.scheduler.deadlines
        waiter = Waiter(job.expected, job.consumer, deadline=job.deadline)
        job.deadline = None
        waiter.on_done = partial(_on_waiter_done, deadlines)
        waiter.future.add_done_callback(
            partial(_on_waiter_cancelled, weakref.ref(waiter), deadlines, os.getpid())
        )
        deadlines.watch(waiter)
        return waiter

    def _look_up(self, waiter: Waiter, job: Job) -> bool:
        """Whether `waiter` needs no job: it was found, is under way, or is at fault."""
        try:
            mm_hash = self._identify(job)
            found = self._coalescer.find(waiter, mm_hash, job)
        except Exception as error:
            waiter.fail_if_pending(error)
            return True
        if type(job.image) is bytes:
            job.mm_hash = mm_hash  # anything else may be another when it is opened for good
        return found or waiter.future.done()


def _resolve(waiter: Waiter, result: Callable[[], ImageResult]) -> None:
    """Give an waiter its result, or what came of making it: no waiter may be left without an outcome."""
    try:
        waiter.resolve(result())
    except Exception as error:
        waiter.reject(error)


def _on_waiter_done(deadlines: Deadlines, waiter: Waiter, error: BaseException | None) -> None:
    deadlines.forget(waiter)
    if waiter.flight is not None:
        waiter.flight.leave(waiter, error)


def _on_waiter_cancelled(
    watch: weakref.ref[Waiter], deadlines: Deadlines, pid: int, future: Future[ImageResult]
) -> None:
    waiter = watch()
    if waiter is not None and future.cancelled() and os.getpid() == pid:  # not in a forked child
        _on_waiter_done(deadlines, waiter, None)
        waiter.notify_cancelled()
