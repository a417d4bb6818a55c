"""Threads for work that may hang in a file system: nobody waits for them at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Queue = SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class DaemonPool:
    """At most `limit` threads, started as they are needed, that do work in the order of its submission.

    Neither `close` nor the interpreter's exit waits for them; it would for those of ThreadPoolExecutor.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._queue: _Queue = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done. Raises RuntimeError after `close`, or if no thread can be started."""
        if self._closed:
            raise RuntimeError("the pool is closed")
        future: Future[T] = Future()
        self._queue.put((future, work))
        # After the work: a thread that starts and finds none says that it is idle, and may take this work as
        # well before the next is submitted, which would then wait for it.
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._limit:
            self._start_thread()
        if self._closed and future.cancel():  # meanwhile, so that no thread may be left
            raise RuntimeError("the pool is closed")
        return future

    def close(self) -> None:
        """End the threads that are idle, and the others when they have done what was submitted."""
        self._closed = True
        self._queue.put(None)

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=_run, args=(self._queue, self._idle), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more: those there are do the work
            if not self._threads:
                raise
        else:
            self._threads.append(thread)


def _run(queue: _Queue, idle: threading.Semaphore) -> None:
    while True:
        try:
            item = queue.get_nowait()
        except Empty:
            idle.release()
            item = queue.get()
        if item is None:
            queue.put(None)  # for the next
            return
        try:
            _do(*item)
        except BaseException as error:  # whatever strikes there ends no thread and loses no work
            with suppress(BaseException):
                item[0].set_exception(error)
        del item  # an idle thread keeps nothing alive


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(work())
    except BaseException as error:
        with suppress(BaseException):  # it has its outcome, and one of its callbacks raised
            future.set_exception(error)
