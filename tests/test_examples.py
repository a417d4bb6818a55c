"""Every script in examples/ runs as a user would run it, on the CPU with a tiny checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from .helpers.waiting import HANG

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
CHECKPOINT = ROOT / "tests" / "golden" / "glm53" / "checkpoint"
IMAGES = CHECKPOINT.parent / "images"


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "error", str(EXAMPLES / name), str(CHECKPOINT), *map(str, arguments)]


def environment() -> dict[str, str]:
    """This tree first, as the tests have it, however the package is installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def printed_by(name: str, *arguments: object) -> list[str]:
    run = subprocess.run(
        command(name, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def test_quickstart_without_images_encodes_two_arrays() -> None:
    assert printed_by("quickstart.py") == [
        "image 0: 640x480, 80 rows of 48, grid (1, 16, 20)",
        "image 1: 64x64, 16 rows of 48, grid (1, 8, 8)",
    ]


def test_quickstart_reports_a_bad_image_and_encodes_the_rest(tmp_path: Path) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes((IMAGES / "a.png").read_bytes()[:-40])
    bad, good = printed_by("quickstart.py", cut, IMAGES / "a.png")
    assert "truncated" in bad
    assert re.fullmatch(r"image 1: \d+x\d+, \d+ rows of 48, grid \(1, \d+, \d+\)", good)


def test_planner_only_prints_plans_and_inputs() -> None:
    assert printed_by("planner_only.py") == [
        "640x480: 80 rows, grid (1, 16, 20)",
        "1920x1080: 77 rows, grid (1, 14, 22)",
        "pixel_values of a 640x480 array: (320, 1176) torch.float32 for 80 rows",
    ]
    planned = printed_by("planner_only.py", IMAGES / "a.png")
    assert planned[0].startswith(f"{IMAGES / 'a.png'}: ")


def test_placeholders_become_as_many_tokens_as_there_are_rows() -> None:
    assert printed_by("vllm_placeholder.py") == [
        "6 tokens became 100",
        "80 rows go to positions 2 to 81",
        "16 rows go to positions 83 to 98",
    ]


def test_the_second_process_reads_what_the_first_has_written(tmp_path: Path) -> None:
    directory = tmp_path / "rows"
    assert printed_by("shared_cache.py", directory) == [
        "first: 3 computed, 0 from disk",
        "second: 0 computed, 3 from disk",
    ]
    assert printed_by("shared_cache.py", directory)[0] == "first: 0 computed, 3 from disk"


@contextmanager
def service(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    run = subprocess.Popen(
        command("asyncio_service.py", "--port", 0, *arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        found = re.fullmatch(r"listening on port (\d+)\n", run.stdout.readline())
        assert found is not None
        yield run, f"http://127.0.0.1:{found[1]}"
    finally:
        run.kill()
        run.communicate()


def answer(url: str, body: bytes | None = None) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url, body, timeout=HANG) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_service_answers_and_closes_cleanly() -> None:
    png = (IMAGES / "a.png").read_bytes()
    with service() as (run, url):
        assert answer(f"{url}/ready") == (200, {"state": "ready"})
        assert answer(f"{url}/live") == (200, {"last_error": None})
        status, content = answer(f"{url}/embed", png)
        assert (status, content["grid_thw"], len(str(content["mm_hash"]))) == (200, [1, 14, 22], 64)
        assert answer(f"{url}/embed", png[:-40])[0] == 400
        assert answer(f"{url}/embed", b"%PDF-1.7")[0] == 415
        assert answer(f"{url}/elsewhere")[0] == 404
        run.send_signal(signal.SIGTERM)
        printed, errors = run.communicate(timeout=HANG)
        assert (run.returncode, errors) == (0, "")
        assert printed == "closed: 1 encoded, 0 refused, 2 failed\n"


def test_an_overloaded_service_answers_429_and_loses_nothing_that_it_accepted(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3000, 3000, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png", compress_level=1)
    body = (tmp_path / "large.png").read_bytes()
    with (
        service("--queue-depth", 1, "--patience", 0, "--deadline", 3600) as (run, url),
        ThreadPoolExecutor(12) as pool,
    ):
        statuses = [status for status, _ in pool.map(lambda _: answer(f"{url}/embed", body), range(12))]
        assert set(statuses) == {200, 429}
        run.send_signal(signal.SIGTERM)
        printed, _ = run.communicate(timeout=HANG)
        refused = statuses.count(429)
        assert printed == f"closed: {12 - refused} encoded, {refused} refused, 0 failed\n"


def test_an_image_that_is_late_gets_504() -> None:
    with service("--deadline", 0) as (_, url):
        assert answer(f"{url}/embed", (IMAGES / "a.png").read_bytes())[0] == 504


def test_no_example_is_left_out() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text, path.name
