"""The command line, called in this process or in a new one, and files for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner, Result

from mm_encoder.cli import build_app

from ..conftest import GOLDEN
from .forks import run_source
from .waiting import HANG

GOLDEN_IMAGES = GOLDEN / "glm53" / "images"
MAIN = "from mm_encoder.cli import main; main()"
COMMAND = [sys.executable, "-c", MAIN]


def call(*arguments: object) -> Result:
    """Run the command in this process; an exception fails the test."""
    result = CliRunner().invoke(build_app(), [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    words = list(map(str, arguments))
    return subprocess.CompletedProcess(words, *run_source(MAIN, *words, limit=2 * HANG, folder=cwd))


def picture(path: Path, width: int = 61, height: int = 37, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="PNG")
    return path
