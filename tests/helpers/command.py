"""The command line, called in this process or in a new one, and files for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from typer.testing import CliRunner, Result

from mm_encoder.cli import build_app

from ..conftest import GOLDEN

GOLDEN_IMAGES = GOLDEN / "glm53" / "images"
COMMAND = [sys.executable, "-c", "from mm_encoder.cli import main; main()"]


def call(*arguments: object) -> Result:
    """Run the command in this process; an exception fails the test."""
    result = CliRunner().invoke(build_app(), [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, **options
    )


def picture(path: Path, width: int = 61, height: int = 37, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="PNG")
    return path
