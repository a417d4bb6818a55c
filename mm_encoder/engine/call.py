"""One call of generate: its images in input order, and what becomes of them when one is at fault."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

from ..config import require_int
from ..contract import ImageResult
from ..errors import EncoderClosedError, MMEncoderError
from ..media.source import is_image
from .faults import copy_error


class Call:
    """What `generate` and `generate_async` have in common."""

    def __init__(self, images: Any, expected_tokens: Iterable[int] | None) -> None:
        # An open file is no iterable of images, though Python can iterate it.
        self._single = is_image(images) or hasattr(images, "read")
        if not self._single and not isinstance(images, Iterable):
            raise TypeError(f"images must be an image or an iterable of images, got {type(images).__name__}")
        self.items = _with_expected([images] if self._single else images, expected_tokens)
        self.futures: list[Future[ImageResult]] = []
        self._fault = threading.Event()

    @property
    def faulty(self) -> bool:
        """Whether an image is known to be at fault: nothing more needs to begin."""
        return self._fault.is_set()

    def add(self, future: Future[ImageResult]) -> None:
        """The next image's future, admitted."""
        self.futures.append(future)
        # Not a method: a future that held the call would hold the other results.
        future.add_done_callback(partial(_note_fault, self._fault))

    def result(self, index: int) -> ImageResult:
        """Wait for an image's result, or raise its error with its index in the message."""
        with self.naming(index):
            return self.futures[index].result()

    def cancel(self) -> list[Future[ImageResult]]:
        """Cancel what can be cancelled; returns the futures of the rest."""
        return cancel_all(self.futures)

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Put an image's index before the message of what is raised for it."""
        try:
            yield
        except CancelledError:  # nobody but an encoder that is being left by an exception cancels these
            place = "" if self._single else f"images[{index}]: "
            raise EncoderClosedError(f"{place}the encoder was closed before it came to this image") from None
        except (MMEncoderError, TypeError) as error:
            if self._single:
                raise
            raise copy_error(error, f"images[{index}]: {error}") from error.__cause__ or error


def cancel_all(futures: list[Future[ImageResult]]) -> list[Future[ImageResult]]:
    """Cancel what can be cancelled; returns the rest."""
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
            f"expected_tokens must have one count an image: got {len(counts)} for {len(items)} images"
        )
    for count in counts:
        require_int("expected_tokens", count, 1)
    return zip(items, counts, strict=True)
