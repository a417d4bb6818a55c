"""How the threads of one engine start and stop: by `close`, by garbage collection, at interpreter exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from ..errors import EncoderClosedError
from .future import run_in_new_thread
from .scheduler import Scheduler
from .worker import is_owned_by, owned_thread

# Where locks are taken and jobs admitted.
_ENGINE = Path(__file__).parent
_CACHE, _PACKAGE = _ENGINE.parent / "cache", _ENGINE.parent
_OURS = tuple(f"{folder}{os.sep}" for folder in (_ENGINE, _CACHE))
_OURS += tuple(str(_PACKAGE / name) for name in ("encoder.py", "cached.py", "coalescer.py", "locks.py"))


class ThreadGroup:
    """The threads that work for one scheduler, until it is stopped and all of them have ended.

    Holds the scheduler and not the engine, so that an engine which nobody refers to can be collected.
    `on_stopped` are called whenever all threads have ended; they may be called more than once.
    """

    def __init__(self, scheduler: Scheduler, *on_stopped: Callable[[], None]) -> None:
        self._scheduler, self._on_stopped = scheduler, on_stopped
        self._pid = os.getpid()
        self._lock = threading.RLock()  # close() may come in a signal handler
        self._threads: list[threading.Thread] = []
        self._sealed = self._joining = self._exiting = False
        # Registered until all threads have ended, whichever way the group is stopped: the interpreter must
        # not go while one of them is in native code.
        atexit.register(self._at_exit)

    def start(self, thread: threading.Thread) -> None:
        """Start `thread`. Raises EncoderClosedError once the group is being stopped, as when the interpreter
        exits while another thread constructs an encoder.
        """
        with self._lock:
            if self._sealed:
                raise EncoderClosedError("the encoder was closed while it was being constructed")
            self._threads.append(thread)
            try:
                thread.start()
            except BaseException:
                if thread.ident is None:
                    self._threads.remove(thread)
                raise

    def threads(self) -> list[threading.Thread]:
        """Return the threads started so far."""
        with self._lock:
            return [thread for thread in self._threads if thread.ident is not None]

    def stop(self, *, drain: bool) -> None:
        """Stop admission, finish (`drain`) or cancel what waits, and join every thread.

        In one of the group's own threads, as from a future's callback, a new thread does the joining. So it
        does in a signal handler or finalizer that came while this thread was in a call of an encoder: it may
        hold locks and a slot there, which the others wait for.
        """
        if os.getpid() != self._pid:  # a forked child has neither the threads nor a lock it may wait for
            return
        with self._lock:
            self._sealed = True
        self._scheduler.close()
        if not drain:
            self._scheduler.cancel_waiting()
        if is_owned_by(self._scheduler):
            self._start_joiner()
        elif _interrupts_our_code():
            run_in_new_thread(partial(self.stop, drain=True))
        else:
            self._join(None)

    def stop_from_gc(self) -> None:
        """Stop in a new thread: the collector may run in any thread at any point, even one that holds the
        scheduler's lock.
        """
        if not self._scheduler.closed and os.getpid() == self._pid:
            run_in_new_thread(partial(self.stop, drain=True))

    def _start_joiner(self) -> None:
        """Have one thread join the others; two would wait for each other."""
        with self._lock:
            if not self._joining:
                joiner = owned_thread(self._scheduler, lambda: self._join(joiner), "mm-encoder-end")
                self._threads.append(joiner)
                joiner.start()
                self._joining = True

    def _join(self, joiner: threading.Thread | None) -> None:
        for thread in self.threads():
            if thread is not joiner:
                thread.join()
        for stopped in self._on_stopped:
            stopped()
        if not self._exiting:  # a callback that is running must not be taken away
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._exiting = True
        self.stop(drain=False)


def _interrupts_our_code() -> bool:
    """Return whether the calling thread was in our code already when it came to what calls this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_ours(frame) or frame.f_code.co_filename == contextlib.__file__):
        frame = frame.f_back  # the call of `close`, or of `__init__` that undoes itself
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return frame is not None


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)
