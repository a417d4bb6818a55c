"""Admission: how a job gets its slot, is opened and gets room for its bytes, in a thread or on a loop.

Raised are refusals: EncoderBusyError, EncoderClosedError, and ReplicaError when no replica is left. What
is wrong with the image is in the job's future.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from ..errors import EncoderBusyError, MMEncoderError
from .budget import Budget, Grant
from .job import Job, JobState
from .scheduler import Scheduler
from .worker import run_in_new_thread

OpenImage = Callable[[Job], None]
"""Takes the snapshot and plans: fills in `source` and `plan` from `image`, and may raise."""


def admit(scheduler: Scheduler, job: Job, open_image: OpenImage, timeout: float | None) -> None:
    """Wait for room, at most `timeout` seconds in all, and queue `job`."""
    until = None if timeout is None else time.monotonic() + timeout
    with _refusals(job):
        scheduler.register(job)
        if job.finished:
            return
        grant = scheduler.slots.acquire(job, 1)
        scheduler.deadlines.watch(job)
        if job.finished:  # it came to its end meanwhile, and had no place in the line to leave
            scheduler.enqueue(job)
            return
        _wait(scheduler.slots, job, grant, until)
        if job.finished:  # its deadline passed in the line
            scheduler.enqueue(job)
            return
        job.stage_done("admission_wait")
        job.move_to(JobState.OPENING)
        try:
            open_image(job)
        except Exception as error:
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


async def admit_async(scheduler: Scheduler, job: Job, timeout: float | None) -> None:
    """The same on the running loop, where nothing may take long: a preprocessing thread opens the image
    and asks for room for its bytes.
    """

    def queue(grant: Grant | None) -> None:
        if grant is None or grant.exception() is None:
            job.stage_done("admission_wait")
            scheduler.enqueue(job)

    with _refusals(job):
        scheduler.register(job)
        if job.finished:
            return
        grant = scheduler.slots.acquire(job, 1)
        scheduler.deadlines.watch(job)
        if grant is None or job.finished:
            queue(None)
            return
        # By whoever gives the slot: it must not lie idle for as long as the loop is busy elsewhere.
        grant.add_done_callback(queue)
        try:
            async with asyncio.timeout(timeout):
                await wait_for_future(grant)
        except TimeoutError:
            _raise_if_busy(scheduler.slots, job)
            await wait_for_future(grant)
        grant.result()


async def wait_for_future(future: Future[Any]) -> None:
    """Wait on the running loop until `future` is done. Cancelling the waiting leaves the future alone, and
    a loop that was closed meanwhile is left alone.
    """
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def wake() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def tell(_: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            pass  # closed, with this in flight

    future.add_done_callback(tell)
    await arrived


@contextmanager
def _refusals(job: Job) -> Iterator[None]:
    """Give a job that is refused, or whose caller is interrupted, its outcome; that frees what it holds."""
    try:
        yield
    except MMEncoderError as error:
        job.fail_if_pending(error)
        raise
    except GeneratorExit:  # by garbage collection, maybe inside a lock that cancelling takes
        run_in_new_thread(job.cancel)
        raise
    except BaseException:
        job.future.cancel()
        raise


def _wait(budget: Budget[Job], job: Job, grant: Grant | None, until: float | None) -> None:
    if grant is None:
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
    if budget.cancel_wait(job):  # else it came, or was refused, in the last moment
        raise EncoderBusyError("the queue is full and no room came free within the timeout")
