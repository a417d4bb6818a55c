"""Admission: how a job gets its slot, is opened and gets its bytes, in a thread or on an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from ..contract import ImageResult
from ..errors import EncoderBusyError, MMEncoderError
from .budget import Budget
from .faults import is_of_image
from .future import Grant, run_in_new_thread
from .job import Job, JobState
from .scheduler import Scheduler

OpenImage = Callable[[Job], None]
"""Replaces a job's `image` by `source` and `plan`; may raise."""


class Admission(Protocol):
    """Where jobs enter: the engine, or the cache in front of it."""

    def admit(self, job: Job) -> Future[ImageResult]:
        """Return a future for the job's image, waiting for a slot and bytes where it must be encoded.

        Raises EncoderBusyError, EncoderClosedError, and ReplicaError when no replica is left. What is wrong
        with the image is in the future.
        """

    async def admit_async(self, job: Job) -> Future[ImageResult]:
        """`admit` on the running loop, which is never blocked."""


def admit(scheduler: Scheduler, job: Job, open_image: OpenImage) -> None:
    """Get `job` its slot, open it, get it its bytes, and enqueue it; waits `job.timeout` seconds in all."""
    try:
        try:
            _admit(scheduler, job, open_image)
        except MMEncoderError as error:
            job.fail_if_pending(error)
            raise
    except BaseException:  # refused, or its caller interrupted, be it a line above
        scheduler.drop(job)
        raise


def _admit(scheduler: Scheduler, job: Job, open_image: OpenImage) -> None:
    until = None if job.timeout is None else time.monotonic() + job.timeout
    scheduler.register(job)
    if job.finished:
        return
    grant = scheduler.slots.acquire(job, 1)
    scheduler.deadlines.watch(job)
    _wait(scheduler.slots, job, grant, until)
    if job.finished:  # cancelled, or late, while it waited or just before: its callback released nothing
        scheduler.retire(job)
        return
    job.stage_done("admission_wait")
    job.move_to(JobState.OPENING)
    try:
        open_image(job)
    except Exception as error:
        if not is_of_image(error):
            raise
        job.fail_if_pending(error)
        job.release_buffers()
        return
    job.stage_done("open")
    grant = scheduler.bytes.acquire(job, job.nbytes)
    if grant is not None and not job.finished:
        job.move_to(JobState.WAITING)
    _wait(scheduler.bytes, job, grant, until)
    job.stage_done("admission_wait")
    scheduler.enqueue(job)


async def admit_async(scheduler: Scheduler, job: Job) -> None:
    """Get `job` its slot on the running loop, and enqueue it. Nothing may take long there, so a preprocessing
    thread opens the image and gets it its bytes.
    """

    try:
        try:
            await _admit_async(scheduler, job)
        except MMEncoderError as error:
            job.fail_if_pending(error)
            raise
    except GeneratorExit:  # by garbage collection, maybe where locks of the host's are held
        run_in_new_thread(partial(scheduler.drop, job))
        raise
    except BaseException:
        scheduler.drop(job)
        raise


async def _admit_async(scheduler: Scheduler, job: Job) -> None:
    def enqueue(grant: Future[None]) -> None:
        if grant.exception() is None:
            if not job.finished and job.stage is JobState.WAITING:
                job.stage_done("admission_wait")
            scheduler.enqueue(job)

    scheduler.register(job)
    if job.finished:
        return
    grant = scheduler.slots.acquire(job, 1)
    scheduler.deadlines.watch(job)
    if job.finished:
        scheduler.retire(job)
        return
    if grant is None:
        job.stage_done("admission_wait")
        scheduler.enqueue(job)
        return
    # Enqueued by the thread that frees the slot, so that a busy event loop does not leave it unused.
    grant.add_done_callback(enqueue)
    try:
        async with asyncio.timeout(job.timeout):
            await wait_for_future(grant)
    except TimeoutError:
        _raise_if_busy(scheduler.slots, job)
        await wait_for_future(grant)
    grant.result()


async def wait_for_future(*futures: Future[Any] | Grant) -> None:
    """Wait on the running loop until one of `futures` is done. Cancelling this does not cancel it, and a loop
    that was closed meanwhile is left alone.
    """
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def wake() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def tell(_: object) -> None:
        if arrived.done():
            return
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            pass  # closed, with this in flight

    for future in futures:
        future.add_done_callback(tell)
    await arrived


def _wait(budget: Budget[Job], job: Job, grant: Grant | None, until: float | None) -> None:
    if grant is None or job.finished:
        return
    try:
        if until is None:
            grant.result()
        else:
            grant.result(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
    except TimeoutError:
        _raise_if_busy(budget, job)
        grant.result()


def _raise_if_busy(budget: Budget[Job], job: Job) -> None:
    used = budget.used
    wanted = budget.cancel_wait(job)
    if not wanted:  # it was granted, or refused, a moment ago
        return
    of_slots = job.plan is None
    setting, things = ("queue_depth", "slots") if of_slots else ("queue_bytes", "bytes")
    missing = "no slot" if of_slots else f"no room for the image's {wanted} bytes"
    raise EncoderBusyError(
        f"the queue is full: {missing} within timeout={job.timeout:.3g} s; {used} of "
        f"{setting}={budget.limit} {things} are in use. Retry later, or raise timeout= or {setting}="
    )
