"""Terminal output and exit codes of the commands. Needs Typer and Rich."""

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
    """Wrap `command` so that it exits with the code it returns, and reports expected errors in one line."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of the output has closed it; Typer exits quietly
        except EXPECTED_ERRORS as error:
            report_error("mm-encoder", error)
            code = 2
        except KeyboardInterrupt:
            print("mm-encoder: interrupted; files are written whole or not at all", file=sys.stderr)
            code = 130
        raise typer.Exit(code)

    return run


def report_error(name: str, error: object) -> None:
    """Print an error about `name` on stderr."""
    print(f"{printable(name)}: {printable(str(error))}", file=sys.stderr)


def report_skipped(count: int) -> None:
    """Say on stderr how many files of searched folders were left out for their names; nothing if none."""
    if count:
        files = "1 other file" if count == 1 else f"{count} other files"
        print(f"mm-encoder: {files} skipped (no name of an image: see --help)", file=sys.stderr)


def printable(text: str) -> str:
    """Escape every unprintable character, so that `text` takes one line and cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shape_of(planned: Any) -> tuple[str, str]:
    """Format size and grid of a plan or metadata."""
    (width, height), (grid, *_) = planned.original_size, planned.grid_thws
    return f"{width}x{height}", "·".join(map(str, grid))


def bytes_of(count: int) -> str:
    """Format a number of bytes: rounded, with the exact number behind it."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB ({count} bytes)"


def open_console(*, stderr: bool = False) -> Console:
    """Return a console without markup. If the output is not a terminal, lines are not cut."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def table_of(*columns: str, numbers: bool = True) -> Table:
    """Create a table without lines. With `numbers`, all columns but the first are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and index else "left", overflow="fold")
    return table
