"""Cancellation at every stage, at random and in races; and one bad image among good ones."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, as_completed, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder import (
    DeadlineExceededError,
    Encoder,
    EncoderClosedError,
    ImageResult,
    MediaDecodeError,
)
from mm_encoder.engine.job import Job
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.families.glm53 import Glm53

from ..helpers.abuse import case
from ..helpers.holding import STAGES, Hold, Scene, hold_towers
from ..helpers.images import mixed, png
from ..helpers.threads import joined, started
from ..helpers.waiting import HANG, in_flight, nothing_left, until

pytestmark = pytest.mark.usefixtures("one_compute_thread")
threads = pytest.mark.threads

HELD = tuple(stage for stage in STAGES if stage not in ("waiting", "opening"))
"""Stages at which submit() has returned the future; test_async.py cancels at the others."""


def same(result: ImageResult, wanted: ImageResult) -> bool:
    return torch.equal(result.tensor, wanted.tensor) and result.metadata == wanted.metadata


@pytest.fixture(autouse=True)
def nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that nothing is logged: a second outcome for a future would be, by us or concurrent.futures."""
    yield
    for when in ("setup", "call"):
        assert [r.getMessage() for r in caplog.get_records(when) if r.levelno >= logging.WARNING] == []


# --- at every stage ----------------------------------------------------------------------------------


@threads
@pytest.mark.parametrize("stage", HELD)
def test_cancelling_at_every_stage_before_running(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    with Scene(stage, glm53_checkpoint, monkeypatch) as scene:
        outcomes: list[Future[ImageResult]] = []
        future = scene.encoder.submit(scene.victim)
        future.add_done_callback(outcomes.append)
        scene.reached()
        length = scene.encoder.health().queue_length
        can = stage != "running"
        assert future.cancel() == can
        assert future.cancelled() == can
        assert future.cancel() == can  # a second call returns the same and changes nothing
        # If a thread is working on the job, its slot is released when that thread is done.
        assert scene.encoder.health().queue_length == length - (stage in ("queued", "ready"))
        assert scene.encoder.stats().cancelled == can
        scene.check_others()
        if not can:
            assert future.result(timeout=HANG).metadata.length
        assert outcomes == [future]
        assert future.cancel() == can
        nothing_left(scene.encoder)


@threads
@pytest.mark.parametrize("stage", [stage for stage in HELD if stage != "running"])
def test_cancelling_an_image_wakes_every_waiter_of_its_future(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    with Scene(stage, glm53_checkpoint, monkeypatch) as scene:
        future = scene.encoder.submit(scene.victim)
        scene.reached()
        released: list[str] = []

        def by_result() -> None:
            with pytest.raises(CancelledError):
                future.result()
            released.append("result")

        def by_exception() -> None:
            with pytest.raises(CancelledError):
                future.exception()
            released.append("exception")

        def by_wait() -> None:
            assert wait([future]).done == {future}
            released.append("wait")

        def by_as_completed() -> None:
            assert list(as_completed([future])) == [future]
            released.append("as_completed")

        callers = [started(work) for work in (by_result, by_exception, by_wait, by_as_completed)]
        until(lambda: len(future._waiters) == 2)
        future.cancel()
        joined(callers)  # while the stage is still held
        assert sorted(released) == ["as_completed", "exception", "result", "wait"]
        scene.check_others()


@threads
def test_control_waiters_block_without_the_notification(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control of the test above: without the notification, the waiters block.
    with Scene("queued", glm53_checkpoint, monkeypatch) as scene:
        future = scene.encoder.submit(scene.victim)
        scene.reached()
        monkeypatch.setattr(Job, "notify_cancelled", lambda _: None)
        future.cancel()
        assert wait([future], timeout=0.1).not_done == {future}


@threads
@pytest.mark.parametrize("stage", HELD)
def test_control_slots_and_bytes_leak_without_release(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    # The control of test_cancelling_at_every_stage_before_running: in_flight() shows a leak.
    with Scene(stage, glm53_checkpoint, monkeypatch) as scene:
        future = scene.encoder.submit(scene.victim)
        kept: list[Job] = []
        release = Scheduler._release
        monkeypatch.setattr(Scheduler, "_release", lambda _, job: kept.append(job))
        scene.reached()
        future.cancel()
        scene.release()
        until(lambda: scene.encoder.stats().in_flight == 0)
        assert all(in_flight(scene.encoder)[2:])
        monkeypatch.setattr(Scheduler, "_release", release)
        for job in kept:
            scene.encoder._engine.scheduler._release(job)
        scene.check_others()


@threads
def test_cancelling_a_finished_future_changes_nothing(encoder: Encoder) -> None:
    good, bad = encoder.submit(png()), encoder.submit(b"nothing")
    result = good.result(timeout=HANG)
    assert not good.cancel()
    assert not bad.cancel()
    assert good.result() is result
    assert isinstance(bad.exception(), MediaDecodeError)
    nothing_left(encoder)
    assert encoder.stats().cancelled == 0


@threads
def test_a_callback_of_one_future_can_cancel_others(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Encoder(glm53_checkpoint, device="cpu", queue_depth=9) as encoder,
        hold_towers(monkeypatch) as towers,
    ):
        first = encoder.submit(png())
        towers.wait()
        rest = [encoder.submit(image) for image in mixed(5)]
        first.add_done_callback(lambda _: [future.cancel() for future in rest])
        towers.release()
        assert first.result(timeout=HANG)
        wait(rest, timeout=HANG)
        assert all(future.cancelled() for future in rest)
        nothing_left(encoder)


@threads
def test_leaving_by_an_exception_cancels_an_image_that_is_being_opened(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # submit() has not returned the future yet; leaving the block by an exception cancels it all the same.
    image = png()
    encoder = Encoder(glm53_checkpoint, device="cpu")
    with Hold(monkeypatch, Glm53, "open") as opening:
        received: list[Future[ImageResult]] = []
        caller = started(lambda: received.append(encoder.submit(image)))
        opening.wait()

        def interrupted() -> None:
            with encoder:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert encoder.health().state == "closed"  # it did not wait for the opening
        assert in_flight(encoder) == (0, 0, 0, 0)
    joined([caller])
    assert received[0].cancelled()
    nothing_left(encoder)
    assert encoder.stats().cancelled == 1


@threads
@pytest.mark.parametrize("stage", ["decoding", "patches"])
def test_cancelling_while_the_engine_releases_the_job(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    # Between the cancellation and its callbacks, the thread that has the job finishes with it.
    with Scene(stage, glm53_checkpoint, monkeypatch) as scene:
        future = scene.encoder.submit(scene.victim)
        scene.reached()
        call_back = Future._invoke_callbacks  # type: ignore[attr-defined]

        def late(one: Future[Any]) -> None:
            if one is future:
                scene.release()
                until(lambda: scene.encoder.health().queue_length == 0)
            call_back(one)

        monkeypatch.setattr(Future, "_invoke_callbacks", late)
        assert future.cancel()
        assert wait([future], timeout=HANG).not_done == set()
        scene.check_others()
        assert scene.encoder.stats().cancelled == 1


@threads
@pytest.mark.parametrize("call", ["generate", "encode_image", "generate_async", "encode_image_async"])
def test_a_waiting_caller_gets_encoder_closed_when_the_block_is_left(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    with hold_towers(monkeypatch) as towers:
        running = encoder.submit(png())
        towers.wait()
        received: list[EncoderClosedError] = []

        def waits() -> None:
            try:
                result = getattr(encoder, call)(png())
                if call.endswith("_async"):
                    asyncio.run(result)
            except EncoderClosedError as error:
                received.append(error)

        caller = started(waits)
        until(lambda: encoder.health().queue_length == 1)
        leaving = started(lambda: encoder.__exit__(KeyboardInterrupt))
        joined([caller])
        assert "the encoder was closed before this image was encoded" in str(received[0])
    joined([leaving])
    assert running.result(timeout=0)
    nothing_left(encoder)


@threads
@pytest.mark.parametrize("call", ["generate", "encode_image"])
def test_an_interrupted_caller_leaves_nothing_behind(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    # Ctrl-C interrupts a caller that waits for its result.
    with (
        Encoder(glm53_checkpoint, device="cpu", queue_depth=9) as encoder,
        hold_towers(monkeypatch) as towers,
    ):
        result = Future.result

        def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
            if threading.current_thread() is not threading.main_thread() or future.done():
                return result(future, timeout)
            monkeypatch.setattr(Future, "result", result)
            towers.wait()
            towers.release()
            raise KeyboardInterrupt

        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(encoder, call)(mixed(4) if call == "generate" else png())
        nothing_left(encoder)


# --- under load --------------------------------------------------------------------------------------


@threads
def test_random_cancellations_under_load(glm53_checkpoint: Path) -> None:
    images = mixed(8)
    submitted: list[tuple[int, Future[ImageResult]]] = []
    got: list[tuple[int, ImageResult]] = []
    left: list[int] = []
    with Encoder(
        glm53_checkpoint, device="cpu", replicas_per_gpu=2, queue_depth=6, queue_bytes=600_000
    ) as encoder:
        wanted = [encoder.generate(image)[0] for image in images]

        def submits(seed: int) -> None:
            chance = random.Random(seed)
            mine = []
            for _ in range(125):
                number = chance.randrange(len(images))
                mine.append((number, encoder.submit(images[number])))
                if chance.random() < 0.7:
                    chance.choice(mine[-4:])[1].cancel()
            submitted.extend(mine)

        async def awaits(seed: int) -> None:
            chance = random.Random(seed)

            async def call(number: int) -> None:
                got.append((number, (await encoder.generate_async([images[number]]))[0]))

            tasks = []
            for _ in range(125):
                tasks.append(asyncio.create_task(call(chance.randrange(len(images)))))
                if chance.random() < 0.7:
                    chance.choice(tasks[-4:]).cancel()
                await asyncio.sleep(chance.choice((0, 0, 0.002)))
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
            left.extend(end is not None for end in ends)

        callers = [started(lambda seed=seed: submits(seed)) for seed in (1, 2)]  # type: ignore[misc]
        callers += [started(lambda seed=seed: asyncio.run(awaits(seed))) for seed in (3, 4)]  # type: ignore[misc]
        joined(callers)
        futures = [future for _, future in submitted]
        assert wait(futures, timeout=HANG).not_done == set()
        nothing_left(encoder)
        stats = encoder.stats()
    assert len(submitted) == len(left) == 250
    done = [(number, future.result()) for number, future in submitted if not future.cancelled()]
    assert all(same(result, wanted[number]) for number, result in [*done, *got])
    # A task that is cancelled before it starts submits nothing; a running image counts as a success although
    # its task was cancelled.
    cancelled = sum(future.cancelled() for future in futures)
    assert cancelled
    assert sum(left)
    assert cancelled <= stats.cancelled <= cancelled + sum(left)
    assert stats.succeeded >= len(done) + len(got) + len(images)
    assert stats.failed == stats.late == stats.refused == 0


@threads
def test_exactly_one_of_cancel_deadline_and_result_wins(glm53_checkpoint: Path) -> None:
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=4) as encoder:
        wanted = encoder.generate(png())[0]
        chance = random.Random(5)
        futures: list[Future[ImageResult]] = []
        received: list[bool] = []
        outcomes: list[Future[ImageResult]] = []
        for _ in range(200):
            future = encoder.submit(png(), deadline=time.monotonic() + chance.random() * 0.01)
            future.add_done_callback(outcomes.append)
            futures.append(future)
            if chance.random() < 0.5:
                received.append(chance.choice(futures[-4:]).cancel())
        assert wait(futures, timeout=HANG).not_done == set()
        nothing_left(encoder)
        late = succeeded = 0
        for future in futures:
            if future.cancelled():
                continue
            error = future.exception(timeout=0)
            late += isinstance(error, DeadlineExceededError)
            if error is None:
                succeeded += 1
                assert same(future.result(), wanted)
        assert len(outcomes) == len(set(map(id, outcomes))) == 200
        stats = encoder.stats()
        cancelled = sum(future.cancelled() for future in futures)
        assert (stats.cancelled, stats.late, stats.succeeded) == (cancelled, late, succeeded + 1)
        assert cancelled + late + succeeded == 200
        assert sum(received) >= cancelled


@threads
def test_cancelling_and_closing_at_once_leaves_nothing(glm53_checkpoint: Path) -> None:
    chance = random.Random(6)
    for round_ in range(10):
        encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=4)
        futures: list[Future[ImageResult]] = []
        refused: list[EncoderClosedError] = []

        def submits(
            encoder: Encoder = encoder,
            futures: list[Future[ImageResult]] = futures,
            refused: list[EncoderClosedError] = refused,
        ) -> None:
            try:
                while True:
                    futures.append(encoder.submit(png()))
                    futures[chance.randrange(len(futures))].cancel()
            except EncoderClosedError as error:
                refused.append(error)

        callers = [started(submits) for _ in range(3)]
        until(lambda futures=futures: len(futures) > 10)  # type: ignore[misc]
        if round_ % 2:
            encoder.close()
        else:
            encoder.__exit__(KeyboardInterrupt)
        joined(callers)
        assert len(refused) == 3
        assert wait(futures, timeout=0).not_done == set()
        assert all(future.cancelled() or future.result() for future in futures)
        nothing_left(encoder)


# --- one bad image among good ones -------------------------------------------------------------------

POISON = case("D18_poison_idat.png")
PLACES = [(0,), (4,), (7,), (2, 5), (0, 8)]


def poisoned(good: list[bytes], places: tuple[int, ...]) -> list[bytes]:
    images = list(good)
    for place in places:
        images.insert(place, POISON)
    return images


@threads
@pytest.mark.parametrize("places", PLACES)
def test_one_bad_image_fails_only_itself(glm53_checkpoint: Path, places: tuple[int, ...]) -> None:
    good = mixed(7)
    images = poisoned(good, places)
    where = "|".join(map(str, places))
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        wanted = encoder.generate(good)
        for _ in range(20):
            futures = [encoder.submit(image) for image in images]
            bad = [futures.pop(place) for place in reversed(places)]
            for future in bad:
                assert isinstance(future.exception(timeout=HANG), MediaDecodeError)
            for future, other in zip(futures, wanted, strict=True):
                assert same(future.result(timeout=HANG), other)
            with pytest.raises(MediaDecodeError, match=rf"^images\[({where})\]: "):
                encoder.generate(images)
            nothing_left(encoder)
            with pytest.raises(MediaDecodeError, match=rf"^images\[({where})\]: "):
                asyncio.run(encoder.generate_async(images))
            nothing_left(encoder)
        assert all(map(same, encoder.generate(good), wanted))
        health = encoder.health()
        assert (health.state, health.last_error) == ("ready", None)
        assert all(worker.alive and not worker.wedged for worker in (*health.replicas, *health.preprocessing))
        assert dict(encoder.stats().errors).keys() == {"MediaDecodeError"}
