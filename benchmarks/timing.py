"""Interleaved medians and plain tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def medians(work: Mapping[str, Callable[[], object] | None], rounds: int = 9) -> dict[str, float | None]:
    """Return the median milliseconds of each function over `rounds`, each called once per round, after a
    warm-up round. None (a peer that is not installed) stays None.
    """
    times: dict[str, list[float]] = {name: [] for name, function in work.items() if function}
    for turn in range(rounds + 1):
        for name, function in work.items():
            if function is not None:
                start = time.perf_counter()
                function()
                if turn:
                    times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times[name]) if name in times else None for name in work}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table. None is a blank cell; floats have up to three digits."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        print("| " + " | ".join(map(_cell, row)) + " |")


def ratio(theirs: float | None, ours: float | None) -> str | None:
    """Return `theirs / ours`, None if either is missing."""
    return None if theirs is None or not ours else f"{theirs / ours:.2f}x"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"
