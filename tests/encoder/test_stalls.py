"""Images on an event loop whose file stalls while they are opened: they hold up nobody else."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_encoder import CacheConfig, DeadlineExceededError, Encoder, MediaDecodeError
from mm_encoder.daemons import DaemonPool
from mm_encoder.engine import preprocess
from mm_encoder.errors import ReplicaError
from mm_encoder.families.glm53 import Glm53
from mm_encoder.media.source import may_stall

from ..helpers.holding import Hold
from ..helpers.images import png
from ..helpers.waiting import nothing_left, until

pytestmark = [pytest.mark.usefixtures("one_compute_thread"), pytest.mark.threads]

Make = Callable[..., Encoder]
GOOD = png(60, 40)
CACHES = [None, CacheConfig()]


@pytest.fixture(params=[Path, Image.Image])
def stalling(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An image that is read from a file when it is opened."""
    data, path = png(50, 70), tmp_path / "image"
    path.write_bytes(data)
    return path if request.param is Path else Image.open(io.BytesIO(data))


@pytest.fixture
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "_CPUS", threading.BoundedSemaphore(1))


def hold_opening(monkeypatch: pytest.MonkeyPatch, image: Any) -> Hold:
    return Hold(monkeypatch, Glm53, "open", lambda _, opened, *__: opened is image)


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize("cache", CACHES)
def test_others_pass_an_image_that_stalls(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stalling: Any, cache: CacheConfig | None
) -> None:
    """With one preprocessing thread, and one CPU permit for both encoders."""
    one = Encoder(glm53_checkpoint, device="cpu", preprocess_workers=1, queue_depth=3, cache=cache)
    other = Encoder(glm53_checkpoint, device="cpu")

    async def main(hold: Hold) -> None:
        slow = asyncio.create_task(one.generate_async(stalling))
        await asyncio.to_thread(hold.wait)
        assert await other.generate_async(GOOD)
        assert await one.generate_async(GOOD)
        assert not slow.done()
        hold.release()
        assert await slow

    with one, other, hold_opening(monkeypatch, stalling) as hold:
        asyncio.run(main(hold))
        nothing_left(one)
        nothing_left(other)


@pytest.mark.usefixtures("one_cpu")
def test_control_an_image_that_is_opened_by_a_preprocessing_thread_holds_up_the_others(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stalling: Any
) -> None:
    monkeypatch.setattr(preprocess, "may_stall", lambda _: False)

    async def main(hold: Hold) -> None:
        slow = asyncio.create_task(encoder.generate_async(stalling))
        await asyncio.to_thread(hold.wait)
        quick = asyncio.create_task(encoder.generate_async(GOOD))
        done, _ = await asyncio.wait([slow, quick], timeout=0.1)
        assert not done
        hold.release()
        assert await quick
        assert await slow

    with (
        Encoder(glm53_checkpoint, device="cpu", preprocess_workers=2, queue_depth=3) as encoder,
        hold_opening(monkeypatch, stalling) as hold,
    ):
        asyncio.run(main(hold))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("end", ["deadline", "cancelling"])
def test_a_call_whose_image_stalls_ends_and_frees_its_slot(
    glm53_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    stalling: Any,
    end: str,
    cache: CacheConfig | None,
) -> None:
    async def main(hold: Hold) -> None:
        late = time.monotonic() + (0.05 if end == "deadline" else 1e6)
        slow = asyncio.create_task(encoder.generate_async(stalling, timeout=0, deadline=late))
        await asyncio.to_thread(hold.wait)
        if end == "cancelling":
            slow.cancel()
        with pytest.raises(DeadlineExceededError if end == "deadline" else asyncio.CancelledError):
            await slow
        assert (encoder.health().queue_length, encoder.health().queue_bytes) == (0, 0)
        assert await encoder.generate_async(GOOD)

    with (
        Encoder(glm53_checkpoint, device="cpu", preprocess_workers=1, queue_depth=1, cache=cache) as encoder,
        hold_opening(monkeypatch, stalling) as hold,
    ):
        asyncio.run(main(hold))
        hold.release()
        nothing_left(encoder)


@pytest.mark.parametrize("budget", [1, 2**30])
def test_an_opened_image_waits_for_its_bytes(glm53_checkpoint: Path, stalling: Any, budget: int) -> None:
    with Encoder(glm53_checkpoint, device="cpu", queue_bytes=budget, queue_depth=4) as encoder:
        wanted = encoder.generate(stalling)[0].tensor
        results = asyncio.run(encoder.generate_async([stalling] * 6))
        assert all(np.array_equal(result.tensor, wanted) for result in results)
        stages = [stage for stage, _ in results[0].metadata.timings]
        assert stages[:4] == ["admission_wait", "queue_wait", "open", "hash"]
        nothing_left(encoder)


def test_what_cannot_be_opened_fails_alone(glm53_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(GOOD[:30])
    broken = Image.open(io.BytesIO(png(400, 400)[:3000]))
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        for image in (tmp_path / "none", tmp_path / "broken", broken):
            with pytest.raises(MediaDecodeError):
                asyncio.run(encoder.generate_async(image))
        assert encoder.generate(GOOD)
        nothing_left(encoder)


def test_without_a_thread_to_open_it_an_image_fails(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stalling: Any
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        monkeypatch.setattr(DaemonPool, "_start_thread", none_left)
        with pytest.raises(ReplicaError, match="can't start new thread"):
            asyncio.run(encoder.generate_async(stalling))
        assert encoder.generate(GOOD)
        nothing_left(encoder)


def test_closing_ends_the_threads_that_open(glm53_checkpoint: Path, stalling: Any) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("mm-encoder-open")]

    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        asyncio.run(encoder.generate_async(stalling))
        assert threads()
    until(lambda: not threads())


def test_what_is_in_memory_is_not_taken_for_a_file(stalling: Any) -> None:
    array = np.zeros((3, 3, 3), np.uint8)
    loaded = [GOOD, bytearray(GOOD), memoryview(GOOD), array, Image.fromarray(array), "data:,"]
    assert not any(map(may_stall, loaded))
    assert may_stall(stalling)
