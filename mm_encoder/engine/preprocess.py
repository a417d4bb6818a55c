"""Preprocessing threads: decode, cut into patches, hash; all of it outside the GIL where it takes time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .job import Job
from .scheduler import Scheduler

Prepare = Callable[[Job], None]
"""Fills in `patches` and `mm_hash` and may raise; runs in a preprocessing thread."""


def start_preprocessing(count: int, scheduler: Scheduler, prepare: Prepare) -> list[threading.Thread]:
    """Start `count` threads that prepare queued jobs until the scheduler is closed and empty."""
    threads = [
        threading.Thread(target=_run, args=(scheduler, prepare), name=f"mm-encoder-prep-{i}", daemon=True)
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads


def _run(scheduler: Scheduler, prepare: Prepare) -> None:
    while (job := scheduler.next_to_prepare()) is not None:
        job.stage_done("queue")
        try:
            if not job.future.cancelled():
                prepare(job)
        except BaseException as error:
            job.fail(error)
        scheduler.prepared(job)
        del job  # an idle thread keeps no picture alive
