"""What the commands print, and how they end. Needs Typer and Rich."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from .files import EXPECTED_ERRORS


def exit_with_code(command: Callable[..., int]) -> Callable[..., None]:
    """`command`, ending in its exit code; what is at fault is said in one line."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever read the output has left; Typer ends quietly
        except EXPECTED_ERRORS as error:
            report_error("mm-encoder", error)
            code = 2
        except KeyboardInterrupt:
            print("mm-encoder: interrupted; files are written whole or not at all", file=sys.stderr)
            code = 130
        raise typer.Exit(code)

    return run


def report_error(name: str, what: object) -> None:
    """Say on stderr what is wrong with `name`."""
    print(f"{printable(name)}: {printable(str(what))}", file=sys.stderr)


def printable(text: str) -> str:
    """`text` on one line and harmless to a terminal: what does not print is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shape_of(planned: Any) -> tuple[str, str]:
    """Size and grid of a plan or metadata, as text."""
    (width, height), (grid, *_) = planned.original_size, planned.grid_thws
    return f"{width}x{height}", "·".join(map(str, grid))


def bytes_of(count: int) -> str:
    """A number of bytes for people, exact as well where that is not the same."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB ({count} bytes)"


def open_console(*, stderr: bool = False) -> Console:
    """Prints text as it is; uncut where it is not a terminal that reads it."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def table_of(*columns: str, numbers: bool = True) -> Table:
    """A table without lines, columns after the first to the right if they are numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and index else "left", overflow="fold")
    return table
