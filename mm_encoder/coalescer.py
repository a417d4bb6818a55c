"""Request coalescing in front of the engine, when a cache is configured.

Each caller holds a waiter. It is resolved from the cache (memory, then disk), or joins the flight of the
same key, or starts a new flight, whose job goes through the engine. A flight claims its key,
and can be joined, right before its job is decoded: the job then has its slot and bytes, and the key is that
of the very snapshot that is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
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
from .daemons import DaemonPool
from .device import Transfers, open_transfers
from .engine.faults import Joined, copy_error
from .engine.future import Future
from .engine.job import Job
from .engine.promise import Promise
from .errors import PlanMismatchError
from .numerics import Settings
from .pipeline import ImagePipeline
from .settings import EncoderSettings

_MAX_FILE_LOOKUPS = 64


@dataclass(eq=False, slots=True)
class Waiter(Promise):
    """One caller's promise of a result, and the flight that it waits for."""

    expected: int | None = None
    consumer: Any = None
    """The stream on which the caller will read the rows; None on the CPU."""
    flight: Flight[Waiter] | None = None
    running: bool = False
    """Whether the flight gives the outcome, and nothing else can any more: its job runs, or has ended."""

    def mark_running(self) -> None:
        """Rule out cancelling and deadlines from now on."""
        if not self.running:
            self.running = True  # first: an interrupt in between loses no outcome
            self.running = self.start()

    def resolve(self, make_result: Callable[[], ImageResult]) -> None:
        """Give the caller the result, or the error of making it, unless there is an outcome already."""
        if self.future.done():
            return
        try:
            result = make_result()
            rows = result.metadata.length
            if self.expected not in (None, rows):
                raise PlanMismatchError(f"expected {self.expected} tokens, but this image makes {rows}")
            self.mark_running()
            if self.running:
                self.succeed(result)
        except Exception as error:  # no waiter may be left without an outcome
            self.reject(error)

    def reject(self, error: BaseException) -> None:
        """Give the caller the error, unless there is an outcome already."""
        if self.future.done():
            return
        self.mark_running()
        if self.running:
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
    NOT_IN_MEMORY = "it may be on disk"
    DONE = "the waiter has failed, or was cancelled meanwhile"


class Coalescer:
    """The flights of one encoder, and the delivery of their results. Holds no engine: its callbacks live in
    futures and threads, which must not keep an encoder alive.

    lookups: number of threads that hash images and look into memory for event loops.
    """

    @classmethod
    def open(cls, config: CacheConfig, settings: EncoderSettings, pipeline: ImagePipeline) -> Coalescer:
        """Open the cache. Raises CacheError."""
        transfers = open_transfers(settings.device, settings.handoff)  # first: its failure leaves no lock
        keys = partial(pipeline.cache_keys, settings.device)
        cache = Cache(config)
        try:
            return cls(cache, keys, transfers, config.results, settings.preprocess_workers)
        except BaseException:
            cache.close()
            raise

    def __init__(
        self, cache: Cache, keys: Callable[[int], Keys], transfers: Transfers, results: str, lookups: int
    ) -> None:
        self.cache, self._transfers, self._results = cache, transfers, results
        self._keys_of_loaded = keys
        # Images that are read from a file or by Pillow may stall: they have threads of their own.
        self.lookups = DaemonPool(lookups, "mm-encoder-lookup")
        self.file_lookups = DaemonPool(_MAX_FILE_LOOKUPS, "mm-encoder-lookup-file")
        self._flights: Flights[Waiter] = Flights()

    def make_keys(self, threads: int) -> None:
        """Fix what keys cover, once the weights are loaded and before anything is looked up. `threads` is
        Torch's number of threads where the towers run.
        """
        self.keys = self._keys_of_loaded(threads)

    def close(self) -> None:
        """Close the cache; all flights are closed by then."""
        self.lookups.close()
        self.file_lookups.close()
        self.cache.close()

    def stats(self) -> CacheStats:
        """Return the cache's counts."""
        return self.cache.stats()

    def bump_weights(self) -> None:
        """Start a new epoch of keys: nothing stored so far is served any more."""
        self.keys.bump()

    def find(self, waiter: Waiter, key: bytes) -> LookUp:
        """Resolve `waiter` from memory or, if no disk tier may have the entry, join the flight of its key."""
        entry = self.cache.get_memory(key)
        if entry is None and self.cache.has_disk:
            return LookUp.NOT_IN_MEMORY
        return self.finish_find(waiter, key, entry)

    def finish_find(self, waiter: Waiter, key: bytes, entry: Entry | None) -> LookUp:
        """Resolve `waiter` with the entry, if there is one, or have it join the flight of the same key."""
        if entry is not None:
            waiter.resolve(partial(self._result, entry, waiter))
            return LookUp.HIT
        flight = self._flights.find(key)
        waiter.flight = flight  # before it joins: a caller that cancels from now on leaves it
        if flight is None or not flight.join(waiter):
            waiter.flight = None
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
        job.caller_future, job.future = waiter.future, Future()
        job.on_start, job.on_computed = flight.mark_running, flight.note_run
        job.on_outcome = partial(self._on_job_done, flight)
        job.future.add_done_callback(job.on_outcome)
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
                if not flight.is_open:  # its last waiter left while the image was hashed
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
                flight.forget()
                for waiter in waiters:
                    self._attach(waiter, other)
                return partial(job.fail_if_pending, Joined())

    def _deliver_cached(self, flight: JobFlight, job: Job, entry: Entry) -> None:
        self._finish_flight(flight, lambda waiter: waiter.resolve(partial(self._result, entry, waiter)))
        job.fail_if_pending(Joined())

    def _finish_flight(self, flight: Flight[Waiter], give: Callable[[Waiter], object]) -> None:
        """End a flight and `give` each of its waiters the outcome, the rest also after an exception. It may
        be called again: a waiter with an outcome keeps it.
        """
        try:
            for waiter in self._flights.finish(flight):
                give(waiter)
        except BaseException:
            for waiter in self._flights.finish(flight):
                give(waiter)
            raise
        flight.forget()  # or it would refer in a cycle to the results

    def _attach(self, waiter: Waiter, flight: Flight[Waiter]) -> None:
        waiter.flight = flight
        if waiter.future.done():  # before it was attached, so that it found no flight to leave
            flight.leave(waiter)

    def _on_job_done(self, flight: JobFlight, future: Future[ImageResult]) -> None:
        """Give every waiter the job's outcome; in whatever thread gave it, and nothing may come between."""
        try:
            self._deliver(flight, future)
        except BaseException as error:
            # An interrupt of this thread, which is not the waiters' own.
            self._finish_flight(flight, lambda waiter, cause=error: waiter.reject(cause))  # type: ignore[misc]
            raise

    def _deliver(self, flight: JobFlight, future: Future[ImageResult]) -> None:
        if future.cancelled():
            self._finish_flight(flight, Waiter.cancel)
            return
        error = future.exception()
        if error is not None:
            self._finish_flight(flight, lambda waiter: waiter.reject(copy_error(error)))
            return
        result = future.result()
        try:
            self._store(flight, result)
        except Exception:
            self.cache.log_error("a result could not be cached")
        self._finish_flight(
            flight, lambda waiter: waiter.resolve(partial(self._for_consumer, result, flight, waiter))
        )

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

    def make_keys(self, threads: int) -> None:
        """Do nothing."""

    def bump_weights(self) -> None:
        """Do nothing."""
