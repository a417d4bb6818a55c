"""Every script in examples/ runs as a user would run it, on the CPU with a tiny checkpoint."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_encoder import Encoder, MediaLimits
from mm_encoder.families.registry import FAMILIES

from .helpers.holding import hold_towers
from .helpers.waiting import HANG, until

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "golden"
CHECKPOINT = GOLDEN / "glm53" / "checkpoint"
IMAGES = CHECKPOINT.parent / "images"


def command(name: str, *arguments: object, checkpoint: Path = CHECKPOINT) -> list[str]:
    return [sys.executable, "-W", "error", str(EXAMPLES / name), str(checkpoint), *map(str, arguments)]


def environment() -> dict[str, str]:
    """This tree first, as the tests have it, however the package is installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def printed_by(name: str, *arguments: object, checkpoint: Path = CHECKPOINT) -> list[str]:
    run = subprocess.run(
        command(name, *arguments, checkpoint=checkpoint),
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


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_placeholders_become_as_many_tokens_as_there_are_rows(family: str) -> None:
    first, second = {"glm53": (80, 16), "kimi_k3": (63, 9), "deepseek41": (42, 32)}[family]
    assert printed_by("vllm_placeholder.py", checkpoint=GOLDEN / family / "checkpoint") == [
        f"6 tokens became {4 + first + second}",
        f"{first} rows go to positions 2 to {1 + first}",
        f"{second} rows go to positions {3 + first} to {2 + first + second}",
    ]


def test_a_config_without_a_known_placeholder_asks_for_the_token(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    del config["image_token_id"]
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    asking = command("vllm_placeholder.py", checkpoint=tmp_path / "checkpoint")
    run = subprocess.run(asking, env=environment(), capture_output=True, text=True, timeout=HANG, check=False)
    assert run.returncode == 1
    assert re.fullmatch(r"config.json has none of image_token_id, .*: pass --token ID\n", run.stderr)
    told = printed_by("vllm_placeholder.py", "--token", 7, checkpoint=tmp_path / "checkpoint")
    assert told[0] == "6 tokens became 100"


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
        command("asyncio_service.py", "--port", 0, "--receive", HANG, *arguments),
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
        with urllib.request.urlopen(f"{url}/metrics", timeout=HANG) as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            metrics = response.read().decode()
        for line in (
            'mm_encoder_responses_total{status="404"} 1',
            'mm_encoder_images_total{outcome="succeeded"} 1',
            'mm_encoder_errors_total{error="UnsupportedMediaError"} 1',
            "mm_encoder_images_in_flight 0",
        ):
            assert line in metrics.splitlines()
        assert_prometheus(metrics)
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


def assert_prometheus(text: str) -> None:
    """Check for the text format: each metric has its type first, and then all of its values."""
    assert text.endswith("\n")
    seen: list[str] = []
    for line in text.splitlines():
        if comment := re.fullmatch(r"# TYPE (mm_encoder_\w+) (counter|gauge)", line):
            assert (comment[2] == "counter") == comment[1].endswith("_total")
            assert comment[1] not in seen
            seen.append(comment[1])
            continue
        value = re.fullmatch(r'(mm_encoder_\w+)(\{[a-z]+="\w+"\})? ([0-9.e+-]+)', line)
        assert value is not None, line
        assert value[1] == seen[-1]
        float(value[3])


class Served:
    """The service of the example on a loop of this process, around a tower that a test can hold."""

    def __init__(self, encoder: Encoder, open_requests: int = 9) -> None:
        spec = importlib.util.spec_from_file_location("asyncio_service", EXAMPLES / "asyncio_service.py")
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        options = argparse.Namespace(patience=HANG, deadline=HANG, receive=HANG, open_requests=open_requests)
        self.service = module.Service(encoder, MediaLimits(), options)

    async def __aenter__(self) -> Served:
        self.server = await asyncio.start_server(self.service.handle, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        if self.service.handlers:
            await asyncio.wait(self.service.handlers)

    async def send(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Post an image, and do not wait for the answer."""
        reader, writer = await asyncio.open_connection(*self.server.sockets[0].getsockname())
        writer.write(b"POST /embed HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        return reader, writer


async def status_of(client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> tuple[int, str]:
    """Status and head of the answer."""
    reader, writer = client
    head = (await reader.read()).decode().partition("\r\n\r\n")[0]
    writer.close()
    return int(head.split()[1]), head


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half closed"])
def test_an_image_whose_client_has_gone_gives_its_slot_to_another(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (IMAGES / "a.png").read_bytes()

    async def main(encoder: Encoder) -> None:
        async with Served(encoder) as served:
            first = await served.send(body)
            await asyncio.to_thread(towers.wait)
            gone = await served.send(body)
            await asyncio.to_thread(until, lambda: encoder.health().queue_length == 1)
            waiting = await served.send(body)
            await asyncio.to_thread(until, lambda: encoder.health().waiting == 1)
            gone[1].write_eof() if half else gone[1].close()
            await asyncio.to_thread(until, lambda: encoder.stats().cancelled == 1)
            await asyncio.to_thread(until, lambda: encoder.health().waiting == 0)
            towers.release()
            assert [(await status_of(client))[0] for client in (first, waiting)] == [200, 200]
            gone[1].close()
            await asyncio.to_thread(until, lambda: not served.service.handlers)
            assert served.service.responses == {200: 2, 499: 1}

    with hold_towers(monkeypatch) as towers, Encoder(CHECKPOINT, device="cpu", queue_depth=1) as encoder:
        asyncio.run(asyncio.wait_for(main(encoder), HANG))
        assert (encoder.stats().succeeded, encoder.stats().cancelled) == (2, 1)


def test_a_running_image_whose_client_has_gone_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(encoder: Encoder) -> None:
        async with Served(encoder) as served:
            client = await served.send((IMAGES / "a.png").read_bytes())
            await asyncio.to_thread(towers.wait)
            client[1].close()
            await asyncio.to_thread(until, lambda: served.service.responses[499] == 1)
            assert encoder.stats().in_flight == 1
            towers.release()

    with hold_towers(monkeypatch) as towers, Encoder(CHECKPOINT, device="cpu") as encoder:
        asyncio.run(asyncio.wait_for(main(encoder), HANG))
    assert (encoder.stats().succeeded, encoder.stats().cancelled) == (1, 0)


def test_no_more_bodies_are_read_than_requests_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    body = (IMAGES / "a.png").read_bytes()

    async def main(encoder: Encoder) -> None:
        async with Served(encoder, open_requests=2) as served:
            accepted = [await served.send(body) for _ in range(2)]
            await asyncio.to_thread(until, lambda: len(served.service.handlers) == 2)
            status, head = await status_of(await served.send(b""))
            assert (status, "\r\nRetry-After: 1\r\n" in head) == (503, True)
            towers.release()
            assert [(await status_of(client))[0] for client in accepted] == [200, 200]
            assert (await status_of(await served.send(body)))[0] == 200  # the refused one has left no trace

    with hold_towers(monkeypatch) as towers, Encoder(CHECKPOINT, device="cpu") as encoder:
        asyncio.run(asyncio.wait_for(main(encoder), HANG))
        assert encoder.stats().requests == 3


def test_no_example_is_left_out() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text, path.name
