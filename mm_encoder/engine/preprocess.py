"""Preprocessing threads: hash, decode and cut into patches, outside the GIL where it takes time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .job import Job
from .scheduler import Scheduler

Prepare = Callable[[Job], None]
"""Fills in `patches` and `mm_hash` and may raise; runs in a preprocessing thread."""


def preprocessing_thread(index: int, scheduler: Scheduler, prepare: Prepare) -> threading.Thread:
    """A thread, not yet started, that prepares queued jobs until the scheduler is closed and empty."""
    name = f"mm-encoder-prep-{index}"
    return threading.Thread(target=_run, args=(scheduler, prepare), name=name, daemon=True)


def _run(scheduler: Scheduler, prepare: Prepare) -> None:
    while (job := scheduler.next_to_prepare()) is not None:
        job.stage_done("queue")
        try:
            if not job.future.cancelled():
                prepare(job)
        except BaseException as error:
            job.fail(error)
        finally:
            scheduler.prepared(job)
        del job  # an idle thread keeps no picture alive
