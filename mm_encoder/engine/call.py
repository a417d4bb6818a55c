"""One call of `generate`: its images in input order, and what becomes of the others when one fails."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

from ..config import require_count
from ..contract import ImageResult
from ..errors import EncoderClosedError, MMEncoderError
from ..media.source import is_image
from .admission import wait_for_future
from .faults import copy_error
from .future import run_in_new_thread
from .scheduler import Scheduler


class Call:
    """The images and futures of one call of `generate` or `generate_async`."""

    def __init__(self, images: Any, expected_tokens: Iterable[int] | None, scheduler: Scheduler) -> None:
        # An open file is not an iterable of images, though Python can iterate it.
        self._single = is_image(images) or hasattr(images, "read")
        if not self._single and not isinstance(images, Iterable):
            raise TypeError(f"images must be an image or an iterable of images, got {type(images).__name__}")
        self.items = _with_expected([images] if self._single else images, expected_tokens)
        self.futures: list[Future[ImageResult]] = []
        self._fault = threading.Event()
        self._scheduler = scheduler

    @property
    def failed(self) -> bool:
        """Whether an image has failed, so that no further one needs to be submitted."""
        return self._fault.is_set()

    def add(self, future: Future[ImageResult]) -> None:
        """Add the future of the next image, which was admitted."""
        self.futures.append(future)
        # Not a bound method: a future that held the call would hold the other results.
        future.add_done_callback(partial(_note_fault, self._fault))

    def result(self, index: int) -> ImageResult:
        """Wait for the result of an image, or raise its error with its index in the message."""
        with self.naming(index):
            return self.futures[index].result()

    async def results_async(self) -> list[ImageResult]:
        """Wait on the running loop for every image; raise the first error as soon as it is known."""
        for index in range(len(self.futures)):
            await wait_for_future(self.futures[index])
            self.result(index)
        return [self.result(index) for index in range(len(self.futures))]

    def cancel(self) -> list[Future[ImageResult]]:
        """Cancel what can be cancelled; return the futures of the rest."""
        return _cancel_all(self.futures)

    def cancel_elsewhere(self) -> None:
        """Cancel in a new thread, for a caller that may hold a lock which cancelling takes."""
        run_in_new_thread(partial(_cancel_all, list(self.futures)))

    def settle(self) -> None:
        """Leave nothing running: cancel what can be cancelled, and wait for the rest.

        Then let go of the futures: the traceback of what is raised keeps the caller's frame alive, and must
        not keep the other results alive through it.
        """
        wait(self.cancel())
        if idle := self._scheduler.preparation_idle(self.futures):
            idle.result()
        self.futures.clear()

    async def settle_async(self) -> None:
        """`settle` on the running loop."""
        for future in self.cancel():
            await wait_for_future(future)
        if idle := self._scheduler.preparation_idle(self.futures):
            await wait_for_future(idle)
        self.futures.clear()

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Put the image's index before the message of what is raised in the block."""
        try:
            yield
        except CancelledError:  # only an encoder whose `with` block is left by an exception cancels these
            place = "" if self._single else f"images[{index}]: "
            raise EncoderClosedError(f"{place}the encoder was closed before this image was encoded") from None
        except (MMEncoderError, TypeError) as error:
            if self._single:
                raise
            raise copy_error(error, f"images[{index}]: {error}") from error.__cause__ or error


def _cancel_all(futures: list[Future[ImageResult]]) -> list[Future[ImageResult]]:
    """Cancel what can be cancelled; return the rest."""
    return [future for future in futures if not future.cancel()]


def _note_fault(fault: threading.Event, done: Future[ImageResult]) -> None:
    if not done.cancelled() and done.exception() is not None:
        fault.set()


def _with_expected(items: Any, expected: Iterable[int] | None) -> Iterator[tuple[Any, int | None]]:
    if expected is None:
        return zip(items, repeat(None))
    if not isinstance(expected, Iterable):
        raise TypeError(f"expected_tokens must be an iterable of ints, got {type(expected).__name__}")
    items, counts = list(items), list(expected)
    if len(items) != len(counts):
        raise ValueError(
            f"expected_tokens must have one count per image: got {len(counts)} for {len(items)} images"
        )
    return zip(items, [require_count("expected_tokens", count) for count in counts], strict=True)
