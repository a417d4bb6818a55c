"""An exception at any place of our code where CPython may deliver one, in turn.

CPython delivers signals, and exceptions set from other threads, as a function begins, after calls and at
jumps back; a MemoryError may come anywhere. `Interrupts` counts these places, and the beginnings of lines, in
the threads of one role, and raises at one of them, or calls something there as a signal handler would. It
leaves out the line events of leaving a `with` block: the interpreter leaves it right after the block, with
nothing in between.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import mm_encoder
from mm_encoder import MMEncoderError

from .threads import joined

PACKAGE = Path(mm_encoder.__file__).parent
AVAILABLE = sys.version_info >= (3, 12)

Place = tuple[str, str, int, str]
"""File, function, line and kind of event."""


class Interrupts:
    """Places in the code of `parts` (names of files and folders of the package), in the threads for which
    `role` is true.
    """

    def __init__(self, *parts: str, role: Callable[[], bool]) -> None:
        self._codes = [code for code in _codes() if any(_is_in(code, part) for part in parts)]
        assert self._codes, f"no code in {parts}"
        self._role = role
        self._visited: dict[Place, int] = {}
        self._target: tuple[Place, int] | None = None
        self._strike: Callable[[str], object] = _nothing
        self.struck = False

    @contextmanager
    def recording(self) -> Iterator[dict[Place, int]]:
        """Count the visits of each place in the block."""
        self._visited, self._target = {}, None
        with self._watched():
            yield self._visited

    @contextmanager
    def striking(self, place: Place, visit: int, error: type[BaseException]) -> Iterator[None]:
        """Raise `error` at the given visit of `place`, counted from 1, once; `struck` tells whether it was
        reached.
        """

        def strike(where: str) -> None:
            raise error(where)

        with self.calling(place, visit, strike):
            yield

    @contextmanager
    def calling(self, place: Place, visit: int, strike: Callable[[str], object]) -> Iterator[None]:
        """As `striking`, but call `strike` there."""
        self._visited, self._target, self._strike, self.struck = {}, (place, visit), strike, False
        with self._watched():
            yield

    @contextmanager
    def _watched(self) -> Iterator[None]:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        events, tool = monitoring.events, monitoring.DEBUGGER_ID
        monitoring.use_tool_id(tool, "interrupts")
        for event, name in (
            (events.PY_START, "start"),
            (events.LINE, "line"),
            (events.C_RETURN, "return"),
            (events.JUMP, "jump"),
        ):
            monitoring.register_callback(tool, event, self._callback(name))
        monitoring.register_callback(tool, events.CALL, lambda *_: None)  # C_RETURN comes with it
        wanted = events.PY_START | events.LINE | events.CALL | events.JUMP
        try:
            for code in self._codes:
                monitoring.set_local_events(tool, code, wanted)
            yield
        finally:
            for code in self._codes:
                monitoring.set_local_events(tool, code, 0)
            for event in (events.PY_START, events.LINE, events.C_RETURN, events.JUMP, events.CALL):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    def _callback(self, kind: str) -> Callable[..., Any]:
        def visited(code: CodeType, at: int, *rest: Any) -> None:
            if not self._role():
                return
            frame = sys._getframe(1)
            # What a monitor raises at a jump passes by every handler of the function (CPython 3.12 and 3.13),
            # which no real interrupt does: only functions that have none are struck there.
            if kind == "jump" and (rest[0] > at or code.co_exceptiontable):
                return
            if kind == "line" and frame.f_lasti in _leaving(code):
                return
            self._visit((Path(code.co_filename).name, code.co_qualname, _line(frame), kind))

        return visited

    def _visit(self, place: Place) -> None:
        visits = self._visited[place] = self._visited.get(place, 0) + 1
        if (place, visits) == self._target:
            self._target, self.struck = None, True
            self._strike(f"injected at {place}, visit {visits}")


CALLER = "the caller"


def as_caller(work: Callable[[], object]) -> None:
    """Do `work` in a thread of the caller's name; it may raise what a caller may see."""
    raised: list[BaseException] = []

    def noting() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=noting, name=CALLER, daemon=True)
    thread.start()
    joined([thread])
    for error in raised:
        assert isinstance(error, (KeyboardInterrupt, MemoryError, MMEncoderError, CancelledError)), error


def in_thread(prefix: str) -> Callable[[], bool]:
    """Return the role of the threads whose names begin with `prefix`."""
    return lambda: threading.current_thread().name.startswith(prefix)


def _nothing(where: str) -> None:
    pass


def _is_in(code: CodeType, part: str) -> bool:
    path = Path(code.co_filename)
    return path == PACKAGE / part or PACKAGE / part in path.parents


def _codes() -> list[CodeType]:
    found: dict[int, CodeType] = {}
    inside = f"{PACKAGE}{os.sep}"  # as text: a whole test run has a million functions
    waiting = [f.__code__ for f in gc.get_objects() if type(f) is FunctionType]
    while waiting:
        code = waiting.pop()
        if code.co_filename.startswith(inside) and id(code) not in found:
            found[id(code)] = code
            waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
    return list(found.values())


@cache
def _leaving(code: CodeType) -> frozenset[int]:
    """The offsets at which a `with` block is left without an exception: `__exit__(None, None, None)`."""
    steps = list(dis.get_instructions(code))
    found = set[int]()
    for index in range(len(steps) - 3):
        if (
            all(step.opname == "LOAD_CONST" and step.argval is None for step in steps[index : index + 3])
            and (steps[index + 3].opname, steps[index + 3].arg) == ("CALL", 2)
        ):  # fmt: skip
            found.add(steps[index].offset)
            if steps[index - 1].opname == "SWAP":  # below what the block returns
                found.add(steps[index - 1].offset)
    return frozenset(found)


def _line(frame: FrameType) -> int:
    return frame.f_lineno or 0
