"""The first Python block of README.md runs as written, after the demo; so does that of integration.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mm_encoder import Encoder

README = Path(__file__).parent.parent / "README.md"
INTEGRATION = README.parent / "docs" / "integration.md"


def test_the_first_block_runs_as_written(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 10
    environment = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"} | {"HOME": str(tmp_path)}
    demo = [sys.executable, "-c", "from mm_encoder import demo; demo.prepare(demo.default_folder())"]
    subprocess.run(demo, env=environment, check=True)
    run = subprocess.run(
        [sys.executable, "-c", block[1]], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert len(run.stdout.splitlines()) == 6
    assert run.stdout.splitlines()[-1] == "rocket.jpg (925, 512) ((1, 50, 74),)"


def test_the_serving_block_runs_with_the_names_it_assumes(
    encoder: Encoder, glm53_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.findall(r"```python\n(.*?)```", INTEGRATION.read_text(encoding="utf-8"), re.DOTALL)[0]
    jpeg = (glm53_checkpoint.parent / "images" / "a.png").read_bytes()
    names: dict[str, Any] = {"checkpoint": glm53_checkpoint, "encoder": encoder, "jpeg": jpeg}
    exec(block, names)
    assert len(names["embeddings"]) == names["rows"]
    assert capsys.readouterr().out == ""
    exec(block, names | {"jpeg": jpeg[:-40]})
    assert "truncated" in capsys.readouterr().out


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", README.read_text(encoding="utf-8"))
    assert links
    assert all((README.parent / link).exists() for link in links)
