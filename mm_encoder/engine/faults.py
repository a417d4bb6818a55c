"""Errors that outlive the frames they were raised in: translated, copied, and free of tracebacks."""

from __future__ import annotations

import sys
import traceback
from types import FrameType
from typing import TypeVar

from ..device import out_of_memory
from ..errors import MMEncoderError, ReplicaError
from ..media.faults import is_foreign

_OF_IMAGE = MMEncoderError, OSError, MemoryError, TypeError, ValueError
E = TypeVar("E", bound=BaseException)
_PACKAGE = __name__.split(".")[0]


class Joined(MMEncoderError):
    """The outcome of a job whose image another job, or memory, has the result of. No caller sees it."""


def strip_tracebacks(error: E) -> E:
    """Clear the tracebacks of `error` and its cause chain, and return it. A stored exception would otherwise
    keep images and weights alive, and itself. An exception that the host handles, around its call of the
    library, keeps its traceback and is cut off the chain.
    """
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        link = waiting.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            if link.__cause__ is not None:
                waiting.append(link.__cause__)
            if _is_handled_by_host(link.__context__):
                link.__context__ = None
            elif link.__context__ is not None:
                waiting.append(link.__context__)
    return error


def _is_handled_by_host(context: BaseException | None) -> bool:
    """Whether `context` has been caught in a frame that is still running and is none of the library's."""
    if context is None or context.__traceback__ is None:
        return False
    handler = context.__traceback__.tb_frame
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not handler:
        frame = frame.f_back
    return frame is not None and not handler.f_globals.get("__name__", "").startswith(f"{_PACKAGE}.")


def copy_error(error: E, message: str | None = None) -> E:
    """Return a copy to raise. Raising one instance in several threads would mix their tracebacks."""
    copy = type(error)(*error.args) if message is None else type(error)(message)
    copy.__cause__ = error.__cause__
    copy.__notes__ = list(getattr(error, "__notes__", ()))
    return copy


def is_of_image(error: BaseException) -> bool:
    """Return whether an error of reading an image, in its caller's thread, is the outcome for this image.
    What else is raised there is for the caller: a signal handler of the host's may have raised it.
    """
    return isinstance(error, _OF_IMAGE) and not is_foreign(error)


def as_ours(error: BaseException) -> MMEncoderError | OSError:
    """Return `error` as one of the library's: out of memory, or else a fault of the engine. What the system
    refused (a descriptor, a read) stays as it gave it.
    """
    if isinstance(error, (MMEncoderError, OSError)):
        return error
    full = out_of_memory(error, "this image; the encoder goes on with the next")
    if full is not None:
        return full
    return replica_error("encoding failed", error)


def replica_error(what: str, cause: BaseException) -> ReplicaError:
    """Return an engine fault chained to its cause, whose traceback it keeps as text."""
    error = ReplicaError(f"{what}: {type(cause).__name__}: {cause}")
    error.add_note("".join(traceback.format_tb(cause.__traceback__)).rstrip())
    error.__cause__ = strip_tracebacks(cause)
    return error
