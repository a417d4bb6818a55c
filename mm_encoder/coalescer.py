"""Request coalescing in front of the engine, when a cache is configured.

Each caller holds a waiter. It is resolved from the cache (memory, then disk), or joins the flight of the
same key, or becomes the leader of a new flight, whose job goes through the engine. A flight claims its key,
and can be joined, right before its job is decoded: the job then has its slot and bytes, and the key is that
of the very snapshot that is decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from .cache.entry import Entry
from .cache.inflight import Flight, Flights
from .cache.key import Keys
from .cache.tiered import Cache
from .config import CacheConfig, ImageOptions
from .contract import CacheStats, ImageResult
from .device import Transfers, open_transfers
from .engine.faults import Joined, copy_error
from .engine.job import Job
from .engine.promise import Promise
from .errors import PlanMismatchError
from .numerics import Settings
from .pipeline import ImagePipeline
from .settings import EncoderSettings

logger = logging.getLogger("mm_encoder")


@dataclass(eq=False, slots=True)
class Waiter(Promise):
    """One caller's promise of a result, and the flight that it waits for."""

    expected: int | None = None
    consumer: Any = None
    """The stream on which the caller will read the rows; None on the CPU."""
    flight: Flight[Waiter] | None = None
    running: bool = False
    """Whether the flight's job runs, which started this promise too."""

    def mark_running(self) -> None:
        """Rule out cancelling and deadlines from now on: the job runs."""
        self.running = self.start()

    def resolve(self, make_result: Callable[[], ImageResult]) -> None:
        """Give the caller the result, or the error of making it, unless there is an outcome already."""
        try:
            result = make_result()
        except Exception as error:  # no waiter may be left without an outcome
            self.reject(error)
            return
        rows = result.metadata.length
        if self.expected not in (None, rows):
            self.reject(PlanMismatchError(f"expected {self.expected} tokens, but this image makes {rows}"))
        elif self.running or self.start():
            self.succeed(result)

    def reject(self, error: BaseException) -> None:
        """Give the caller the error, unless there is an outcome already."""
        if self.running or self.start():
            self.fail(error)


class JobFlight(Flight[Waiter]):
    """A flight whose computation is a job of the engine. The fields are set when it claims its key."""

    mm_hash: str
    options: ImageOptions | None
    consumer: Any
    """The stream that the job's rows are handed to."""
    settings: Settings | None = None
    """What the tower ran under; None until then, and if it was switched meanwhile."""
    done: Any = None
    """The event at which the job's rows are complete; None if they are."""

    def note_run(self, settings: Settings | None, done: Any) -> None:
        """Note how the tower ran."""
        self.settings, self.done = settings, done


class LookUp(Enum):
    """How looking up an image ended."""

    HIT = "resolved from memory or disk"
    JOINED = "joined the flight of the same key"
    MISS = "neither: it must be encoded"
    DONE = "the waiter has failed, or was cancelled meanwhile"


class Coalescer:
    """The flights of one encoder, and the delivery of their results. Holds no engine: its callbacks live in
    futures and threads, which must not keep an encoder alive.

    lookups: number of lookup threads for event loops.
    """

    @classmethod
    def open(cls, config: CacheConfig, settings: EncoderSettings, pipeline: ImagePipeline) -> Coalescer:
        """Open the cache. Raises CacheError."""
        transfers = open_transfers(settings.device, settings.handoff)
        keys = partial(pipeline.cache_keys, settings.device)
        cache = Cache(config)
        try:
            return cls(cache, keys, transfers, config.results, settings.preprocess_workers)
        except BaseException:
            cache.close()
            raise

    def __init__(
        self, cache: Cache, keys: Callable[[], Keys], transfers: Transfers, results: str, lookups: int
    ) -> None:
        self.cache, self._transfers, self._results = cache, transfers, results
        self._keys_of_loaded = keys
        self.lookups = ThreadPoolExecutor(lookups, "mm-encoder-lookup")
        self._flights: Flights[Waiter] = Flights()

    def make_keys(self) -> None:
        """Fix what keys cover, once the weights are loaded and before anything is looked up."""
        self.keys = self._keys_of_loaded()

    def close(self) -> None:
        """Close the cache; all flights are closed by then."""
        self.lookups.shutdown(wait=False)  # one may hang in a file system, and nobody waits for it
        self.cache.close()

    def stats(self) -> CacheStats:
        """Return the cache's counts."""
        return self.cache.stats()

    def bump_weights(self) -> None:
        """Start a new epoch of keys: nothing stored so far is served any more."""
        self.keys.bump()

    def find(self, waiter: Waiter, mm_hash: str, job: Job) -> LookUp:
        """Resolve `waiter` from the cache, or have it join the flight of the same key."""
        key = self.keys.key(mm_hash, job.options)
        entry = self.cache.get(key)
        if entry is not None:
            waiter.resolve(partial(self._result, entry, waiter))
            return LookUp.HIT
        flight = self._flights.join(key, waiter)
        if flight is None:
            return LookUp.MISS
        self.cache.count("joined")
        self._attach(waiter, flight)
        return LookUp.JOINED

    def start_leader(self, waiter: Waiter, job: Job) -> None:
        """Start a flight for `waiter` whose computation is `job`.

            caller ──▶ waiter.future ┄┄▶ waiter ──▶ flight ──▶ its waiters
                                                    │    ▲
                                       job.abandon ◀┘    └── job, job.future (done-callback)

        ┄┄▶ is weak, and `flight ──▶ job.abandon` is cut when the flight closes, so neither a result nor an
        error that a caller keeps holds a job.
        """
        flight = job.flight = JobFlight(waiter, job.abandon)
        job.caller_future = waiter.future
        job.on_start, job.on_computed = flight.mark_running, flight.note_run
        job.future.add_done_callback(partial(self._on_job_done, flight))
        self._attach(waiter, flight)

    def before_decode(self, job: Job) -> Callable[[], None] | None:
        """Check right before decoding whether the work is still needed.

        Returns None if `job` must be decoded; otherwise a callable that delivers the cached result, or that
        ends a job whose waiters have joined another flight or have left.
        """
        flight: JobFlight = job.flight
        key = self.keys.key(job.mm_hash, job.options)
        while True:
            if self._flights.claim_key(key, flight):
                if not flight.join():  # its last waiter left while the image was hashed
                    self._flights.finish(flight)
                    return lambda: None
                # Results are stored before flights finish: what finished before this one claimed is there.
                entry = self.cache.memory(key)
                if entry is not None:
                    self.cache.count("memory_hits")
                    return partial(self._deliver_cached, flight, job, entry)
                flight.mm_hash, flight.options, flight.consumer = job.mm_hash, job.options, job.consumer
                self.cache.count("misses")
                return None
            waiters = flight.waiters()
            other = self._flights.join(key, *waiters)
            if other is not None:
                self.cache.count("joined")
                flight.close()
                for waiter in waiters:
                    self._attach(waiter, other)
                return partial(job.fail_if_pending, Joined())

    def _deliver_cached(self, flight: JobFlight, job: Job, entry: Entry) -> None:
        for waiter in self._flights.finish(flight):
            waiter.resolve(partial(self._result, entry, waiter))
        job.fail_if_pending(Joined())

    def _attach(self, waiter: Waiter, flight: Flight[Waiter]) -> None:
        waiter.flight = flight
        if waiter.future.done():  # before it was attached, so that it found no flight to leave
            flight.leave(waiter)

    def _on_job_done(self, flight: JobFlight, future: Future[ImageResult]) -> None:
        """Give every waiter the job's outcome; in whatever thread gave it, and nothing may come between."""
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
            logger.exception("a result could not be cached", extra={"mm_event": "cache_error"})
        for waiter in self._flights.finish(flight):
            waiter.resolve(partial(self._for_consumer, result, flight, waiter))

    def _for_consumer(self, result: ImageResult, flight: JobFlight, waiter: Waiter) -> ImageResult:
        if result.tensor.device.type != "cpu" and waiter.consumer != flight.consumer:
            self._transfers.share(result.tensor, flight.done, waiter.consumer)
        return result

    def _store(self, flight: JobFlight, result: ImageResult) -> None:
        rows, metadata = result
        under = flight.settings
        if under is None or self.keys.key(flight.mm_hash, flight.options, under) != flight.key:
            return  # the host has changed the weights or a setting meanwhile
        if rows.device.type == "cpu":
            self.cache.put(flight.key, rows, metadata)
        else:
            download = partial(self._transfers.download, rows, flight.done)
            self.cache.put_behind(flight.key, download, metadata, rows.nbytes)

    def _result(self, entry: Entry, waiter: Waiter) -> ImageResult:
        result = ImageResult(*entry)
        return self._transfers.upload(result, waiter.consumer) if self._results == "device" else result


class NoCache:
    """The coalescer where no cache is configured: every job is decoded, nothing is stored."""

    def before_decode(self, job: Job) -> None:
        """Have `job` decoded."""

    def close(self) -> None:
        """Do nothing."""

    def stats(self) -> CacheStats:
        """Return zeros."""
        return CacheStats()

    def make_keys(self) -> None:
        """Do nothing."""

    def bump_weights(self) -> None:
        """Do nothing."""
