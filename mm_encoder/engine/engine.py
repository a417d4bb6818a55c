"""The engine room: one scheduler, the threads that work for it, and how they begin and end."""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial

from ..errors import ForkedProcessError
from .preprocess import Prepare, preprocessing_thread
from .replica import Replica, ReplicaSettings
from .scheduler import Scheduler


class Engine:
    """Starts its threads at once and returns when every replica has loaded.

    If a replica fails to load or a thread to start, those begun are stopped and the first cause is raised.
    The threads hold the scheduler and not the engine, so an engine that is dropped ends them; so does one
    that is alive at interpreter exit.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        prepare: Prepare,
        *,
        replicas: int,
        workers: int,
        depth: int,
        max_bytes: int,
    ) -> None:
        self.scheduler = Scheduler(depth, max_bytes)
        self._threads: list[threading.Thread] = []  # those that were started
        self._pid = os.getpid()
        self._at_exit = partial(_end, self.scheduler, self._threads, self._pid, drain=False)
        atexit.register(self._at_exit)
        weakref.finalize(self, _abandon, self.scheduler, self._at_exit, self._pid).atexit = False
        try:
            loading = [Replica(index, settings, self.scheduler) for index in range(replicas)]
            for replica in loading:
                self._start(replica.thread)
            self.stream_priority = [replica.loaded.result() for replica in loading].pop()
            for index in range(workers):
                self._start(preprocessing_thread(index, self.scheduler, prepare))
        except BaseException:
            self.close(drain=False)
            raise

    def require_usable(self) -> None:
        """Raise ForkedProcessError in a forked child, RuntimeError in one of the engine's own threads, where
        waiting would be waiting for oneself, and EncoderClosedError after `close`.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this encoder was made before the process was forked; make one in the child, or spawn it"
            )
        if threading.current_thread() in self._threads:
            raise RuntimeError("a result's callback must not call the encoder; hand the work to a thread")
        self.scheduler.require_open()

    def close(self, *, drain: bool) -> None:
        """Stop admission, finish (`drain`) or cancel what waits, and join every thread.

        In one of the engine's own threads, as from a result's callback, nothing is waited for.
        """
        atexit.unregister(self._at_exit)
        _end(self.scheduler, self._threads, self._pid, drain=drain)

    def _start(self, thread: threading.Thread) -> None:
        thread.start()
        self._threads.append(thread)


def _end(scheduler: Scheduler, threads: list[threading.Thread], pid: int, *, drain: bool) -> None:
    if os.getpid() != pid:  # a forked child has neither the threads nor a lock it may wait for
        return
    scheduler.close()
    if not drain:
        scheduler.cancel_waiting()
    if threading.current_thread() not in threads:  # two callbacks that close would wait for each other
        for thread in threads:
            thread.join()


def _abandon(scheduler: Scheduler, at_exit: Callable[[], None], pid: int) -> None:
    """End an engine that was dropped. Garbage collection may run in any thread at any point, inside the
    scheduler's lock too, so the lock is taken in a thread of its own.
    """
    atexit.unregister(at_exit)
    if not scheduler.closed and os.getpid() == pid:
        _thread.start_new_thread(scheduler.close, ())
