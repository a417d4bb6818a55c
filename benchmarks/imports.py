"""The time of `import mm_encoder` in addition to `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys

from .timing import table

PROGRAM = "import time; s = time.perf_counter(); {}; print((time.perf_counter() - s) * 1e3)"


def main() -> None:
    times: dict[str, list[float]] = {"import torch": [], "import torch, mm_encoder": []}
    for _ in range(8):
        for statement, taken in times.items():
            run = subprocess.run(
                [sys.executable, "-c", PROGRAM.format(statement)], capture_output=True, text=True, check=True
            )
            taken.append(float(run.stdout))
    plain, ours = (statistics.median(taken[1:]) for taken in times.values())
    table(
        "Imports, ms (median of 7 processes)",
        ["torch", "torch and mm_encoder", "difference"],
        [[plain, ours, ours - plain]],
    )
