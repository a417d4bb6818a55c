"""What stands before the engine where there is a cache: hits, and one flight for each image.

A caller holds an `Ask`. It is answered from the cache, or joins a flight, or becomes the first ask of a
flight of its own, whose job goes through the engine. A flight takes off, so that others can join it, when its
job is about to be decoded: it then has its room, and the key is that of the very snapshot that is decoded.
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
from .engine.job import Job, Joined, Promise, copy_error
from .engine.worker import run_in_new_thread
from .errors import PlanMismatchError

logger = logging.getLogger("mm_encoder")

Identify = Callable[[Job], str]
"""The `mm_hash` of a job's image; may raise."""


@dataclass(eq=False, slots=True)
class Ask(Promise):
    """What one caller waits for."""

    expected: int | None = None
    consumer: Any = None
    """The stream on which it will read the rows; None on the CPU."""
    flight: Flight[Ask] | None = None
    running: bool = False
    """Whether its flight's job is running, by which it was started."""

    def begin(self) -> None:
        """The job runs: no cancelling, no deadline any more."""
        self.running = self.start()

    def answer(self, result: ImageResult) -> None:
        """Give it its result, unless it has an outcome already."""
        if not self.running and not self.start():
            return
        rows = result.metadata.length
        if self.expected is None or self.expected == rows:
            self.succeed(result)
        else:
            self.fail(PlanMismatchError(f"expected {self.expected} tokens, but this image makes {rows}"))

    def refuse(self, error: BaseException) -> None:
        """Give it its error, unless it has an outcome already."""
        if self.running or self.start():
            self.fail(error)


class Front:
    """Which flights there are, and what becomes of their asks. Knows no engine: its callbacks live in futures
    and threads, which must not keep an encoder alive.

    results: as in CacheConfig. lookups: threads that look up for event loops.
    """

    def __init__(self, cache: Cache, transfers: Transfers, results: str, lookups: int) -> None:
        self.cache, self._transfers, self._results = cache, transfers, results
        self.lookups = ThreadPoolExecutor(lookups, "mm-encoder-lookup")
        self._flights: Flights[Ask] = Flights()

    def close(self) -> None:
        """Close the cache; flights have landed by then."""
        self.lookups.shutdown(wait=False)  # one may hang in a file system, and nobody waits for it
        self.cache.close()

    def find(self, ask: Ask, mm_hash: str, job: Job) -> bool:
        """Answer `ask` from the cache, or have it join a flight; whether either was possible."""
        key = self.cache.keys.key(mm_hash, job.options)
        entry = self.cache.get(key)
        if entry is not None:
            _answer(ask, partial(self._result, entry, ask))
            return True
        flight = self._flights.join(key, ask)
        if flight is None:
            return False
        self.cache.count("joined")
        self._seat(ask, flight)
        return True

    def board(self, ask: Ask, job: Job) -> None:
        """A flight of its own for `ask`, which waits on the ground for the job to get its room."""
        flight = job.flight = Flight(ask, job.abandon)
        job.caller_future = ask.future
        job.on_start = flight.begin
        job.future.add_done_callback(partial(self._landed, flight))
        self._seat(ask, flight)

    def take_off(self, job: Job) -> Callable[[], None] | None:
        """What is to be done instead of encoding `job`, whose `mm_hash` is known: its result may have come to
        memory, another flight may have taken off for it, or nobody waits any more.
        """
        flight: Flight[Ask] = job.flight
        key = self.cache.keys.key(job.mm_hash, job.options)
        while True:
            if self._flights.take_off(key, flight):
                if not flight.join():  # given up while the image was hashed
                    self._flights.end(flight)
                    return lambda: None
                # Results are kept before flights end, so what ended before this one began is there.
                entry = self.cache.memory(key)
                if entry is None:
                    flight.tag = job.mm_hash, job.options, job.consumer
                    self.cache.count("misses")
                    return None
                self.cache.count("memory_hits")
                return partial(self._give, flight, job, entry)
            asks = flight.asks()
            other = self._flights.join(key, *asks)
            if other is not None:
                self.cache.count("joined")
                flight.land()
                for ask in asks:
                    self._seat(ask, other)
                return partial(job.fail_if_pending, Joined())

    def _give(self, flight: Flight[Ask], job: Job, entry: Entry) -> None:
        for ask in self._flights.end(flight):
            _answer(ask, partial(self._result, entry, ask))
        job.fail_if_pending(Joined())

    def _seat(self, ask: Ask, flight: Flight[Ask]) -> None:
        ask.flight = flight
        if ask.future.done():  # it came to its end meanwhile, and found no flight to leave
            flight.leave(ask)

    def _landed(self, flight: Flight[Ask], future: Future[ImageResult]) -> None:
        """A job is done, in whatever thread: its asks get what it got, and nothing may come between."""
        if future.cancelled():
            for ask in self._flights.end(flight):
                ask.cancel()
            return
        error = future.exception()
        if error is not None:
            for ask in self._flights.end(flight):
                ask.refuse(copy_error(error))
            return
        result = future.result()
        try:
            self._keep(flight, result)
        except Exception:
            self.cache.count("errors")
            logger.exception("a result was not kept", extra={"mm_event": "cache_error"})
        for ask in self._flights.end(flight):
            _answer(ask, partial(self._shared, result, flight, ask))

    def _shared(self, result: ImageResult, flight: Flight[Ask], ask: Ask) -> ImageResult:
        if result.tensor.device.type != "cpu":
            _, _, first = flight.tag
            self._transfers.share(result.tensor, first, ask.consumer)
        return result

    def _keep(self, flight: Flight[Ask], result: ImageResult) -> None:
        mm_hash, options, consumer = flight.tag
        rows, metadata = result
        if self.cache.keys.key(mm_hash, options) != flight.key:
            return  # the weights were changed meanwhile
        if rows.device.type == "cpu":
            self.cache.put(flight.key, rows, metadata)
        else:
            download = partial(self._transfers.download, rows, self._transfers.mark(consumer))
            self.cache.put_behind(flight.key, download, metadata, rows.nbytes)

    def _result(self, entry: Entry, ask: Ask) -> ImageResult:
        rows, metadata = entry
        if self._results == "device":
            return self._transfers.upload(ImageResult(rows, metadata), ask.consumer)
        return ImageResult(rows, metadata)


class CachedEngine:
    """Admits jobs as the engine does, but asks the cache first."""

    def __init__(self, engine: Engine, front: Front, identify: Identify) -> None:
        self._engine, self._front, self._identify = engine, front, identify

    def admit(self, job: Job, timeout: float | None) -> Future[ImageResult]:
        """A future for `job`'s image. Waits for room if it has to be encoded; raises as `admission.admit`."""
        ask = self._ask(job)
        if not self._look_up(ask, job):
            self._front.board(ask, job)
            self._engine.admit(job, timeout)
        return ask.future

    async def admit_async(self, job: Job, timeout: float | None) -> Future[ImageResult]:
        """The same on the running loop; hashing and reading are done in threads for lookups."""
        ask = self._ask(job)
        try:
            try:
                looking = self._front.lookups.submit(self._look_up, ask, job)
            except RuntimeError:  # its threads have ended, since the encoder was closed meanwhile
                self._engine.require_usable()
                raise
            await wait_for_future(looking)
            found = looking.result()
        except BaseException as error:
            # A coroutine that is collected may be so inside a lock that cancelling takes.
            run_in_new_thread(ask.cancel) if isinstance(error, GeneratorExit) else ask.cancel()
            raise
        if not found:
            self._front.board(ask, job)
            await self._engine.admit_async(job, timeout)
        return ask.future

    def _ask(self, job: Job) -> Ask:
        deadlines = self._engine.scheduler.deadlines
        ask = Ask(job.expected, job.consumer, deadline=job.deadline)
        job.deadline = None
        ask.on_done = partial(_ended, deadlines)
        ask.future.add_done_callback(partial(_cancelled, weakref.ref(ask), deadlines, os.getpid()))
        deadlines.watch(ask)
        return ask

    def _look_up(self, ask: Ask, job: Job) -> bool:
        """Whether `ask` needs no job: it was found, is under way, or is at fault."""
        try:
            mm_hash = self._identify(job)
            found = self._front.find(ask, mm_hash, job)
        except Exception as error:
            ask.fail_if_pending(error)
            return True
        if type(job.image) is bytes:
            job.mm_hash = mm_hash  # anything else may be another when it is opened for good
        return found or ask.future.done()


def _answer(ask: Ask, result: Callable[[], ImageResult]) -> None:
    """Give an ask its result, or what came of making it: no ask may be left without an outcome."""
    try:
        ask.answer(result())
    except Exception as error:
        ask.refuse(error)


def _ended(deadlines: Deadlines, ask: Ask, error: BaseException | None) -> None:
    deadlines.forget(ask)
    if ask.flight is not None:
        ask.flight.leave(ask, error)


def _cancelled(watch: weakref.ref[Ask], deadlines: Deadlines, pid: int, future: Future[ImageResult]) -> None:
    ask = watch()
    if ask is not None and future.cancelled() and os.getpid() == pid:  # not in a forked child
        _ended(deadlines, ask, None)
        ask.notify_cancelled()
