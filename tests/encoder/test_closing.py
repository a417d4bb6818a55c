"""Closing an encoder: from threads, from callbacks and by leaving its `with` block."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from mm_encoder import (
    Encoder,
    EncoderClosedError,
    ImageResult,
)

from ..helpers.holding import Hold
from ..helpers.images import mixed, png
from ..helpers.threads import library_threads
from ..helpers.waiting import HANG, in_flight, nothing_left, until


def test_close_finishes_accepted_work_and_joins_every_thread(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2, queue_depth=8)
    assert len(library_threads()) > 2
    futures = [encoder.submit(image) for image in mixed(8)]
    encoder.close()
    assert all(future.result(timeout=0).metadata.length for future in futures)
    assert library_threads() == []
    encoder.close()
    for call in (encoder.generate, encoder.submit, encoder.encode_image):
        for image in (png(10, 10), b"nothing"):
            with pytest.raises(EncoderClosedError):
                call(image)
    with pytest.raises(EncoderClosedError):
        encoder.generate([])


def test_close_from_a_result_callback(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    closed = threading.Event()

    def on_result(_: Future[ImageResult]) -> None:
        encoder.close()
        closed.set()

    encoder.submit(png(20, 20)).add_done_callback(on_result)
    assert closed.wait(HANG)
    encoder.close()
    assert library_threads() == []


def test_a_callback_may_not_call_the_encoder(encoder: Encoder) -> None:
    raised: list[BaseException] = []
    done = threading.Semaphore(0)

    def call(_: Future[ImageResult]) -> None:
        for function in (encoder.submit, encoder.generate, encoder.encode_image):
            try:
                function(png(10, 10))
            except RuntimeError as error:
                raised.append(error)
        done.release()

    encoder.submit(png(20, 20)).add_done_callback(call)
    assert done.acquire(timeout=HANG)
    if not raised:  # the future was done before the callback was added, so the callback ran in this thread
        return
    assert len(raised) == 3
    assert "cannot be called from a future's callback" in str(raised[0])


@pytest.mark.parametrize("way", ["with", "async with"])
def test_a_closed_encoder_is_not_entered_again(glm53_checkpoint: Path, way: str) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    encoder.close()

    async def enter() -> None:
        async with encoder:
            pytest.fail("the block was entered")

    def enter_by_with() -> None:
        with encoder:
            pytest.fail("the block was entered")

    with pytest.raises(EncoderClosedError, match="create a new Encoder"):
        asyncio.run(enter()) if way == "async with" else enter_by_with()


def leave_by_an_exception(encoder: Encoder, towers: Hold) -> None:
    """Leave the `with` block by an exception while a tower is held, and release it shortly after."""

    def interrupted() -> None:
        with encoder:
            threading.Timer(0.1, towers.release).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_leaving_the_block_by_an_exception_cancels_waiting_jobs(glm53_checkpoint: Path, towers: Hold) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=9)
    running = encoder.submit(png(20, 20))
    towers.wait()
    waiting = [encoder.submit(png(20, 20)) for _ in range(5)]

    leave_by_an_exception(encoder, towers)
    assert running.result(timeout=0)
    assert all(future.cancelled() for future in waiting)
    assert in_flight(encoder) == (0, 0, 0, 0)


def test_generate_in_another_thread_gets_encoder_closed(glm53_checkpoint: Path, towers: Hold) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=9)
    raised = threading.Semaphore(0)

    def elsewhere() -> None:
        with pytest.raises(EncoderClosedError, match="closed before this image was encoded"):
            encoder.generate([png(20, 20)] * 4)
        raised.release()

    caller = threading.Thread(target=elsewhere)
    caller.start()
    towers.wait()
    while encoder.health().queue_length < 3:
        caller.join(0.01)

    leave_by_an_exception(encoder, towers)
    assert raised.acquire(timeout=HANG)


def test_leaving_the_block_by_an_exception_refuses_waiting_callers(
    glm53_checkpoint: Path, towers: Hold
) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=1)
    running, waiting = encoder.submit(png(20, 20)), None
    towers.wait()
    waiting = encoder.submit(png(20, 20))
    refused = threading.Semaphore(0)

    def late() -> None:
        with pytest.raises(EncoderClosedError):
            encoder.submit(png(20, 20))
        refused.release()

    callers = [threading.Thread(target=late) for _ in range(5)]
    for caller in callers:
        caller.start()
        caller.join(0.02)

    leave_by_an_exception(encoder, towers)
    for _ in callers:
        assert refused.acquire(timeout=HANG)
    assert running.result(timeout=0)
    assert waiting.cancelled()


def test_two_callbacks_that_close_do_not_wait_for_each_other(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2)
    both = threading.Barrier(2, timeout=HANG)
    closed = threading.Semaphore(0)

    def on_result(_: Future[ImageResult]) -> None:
        both.wait()
        encoder.close()
        closed.release()

    for _ in range(2):
        encoder.submit(png(20, 20)).add_done_callback(on_result)
    assert closed.acquire(timeout=HANG)
    assert closed.acquire(timeout=HANG)
    encoder.close()
    assert library_threads() == []


@pytest.mark.parametrize("data", [png(20, 20), png(20, 20)[:-20]])
def test_a_callback_that_exits_ends_no_thread_of_the_engine(
    encoder: Encoder, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: Future[ImageResult]) -> None:
        sys.exit(3)

    for _ in range(5):
        future = encoder.submit(data)
        future.add_done_callback(leave)
        future.exception(timeout=HANG)
    assert encoder.generate(png(20, 20))
    assert "a callback on a result failed" in caplog.text


def test_close_waits_in_every_thread_that_calls_it(glm53_checkpoint: Path, towers: Hold) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    future = encoder.submit(png(20, 20))
    towers.wait()
    closers = [threading.Thread(target=encoder.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(0.05)
        assert closer.is_alive()
    towers.release()
    for closer in closers:
        closer.join(HANG)
        assert not closer.is_alive()
    assert future.done()


@pytest.mark.threads
def test_closing_a_full_queue_refuses_waiting_callers_and_finishes_accepted_jobs(
    glm53_checkpoint: Path, towers: Hold
) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=2)
    with towers:
        accepted = [encoder.submit(png())]
        towers.wait()
        accepted += [encoder.submit(png()) for _ in range(2)]
        received: list[EncoderClosedError] = []

        def call(name: str) -> None:
            try:
                getattr(encoder, name)(png())
            except EncoderClosedError as error:
                received.append(error)

        callers = [
            threading.Thread(target=call, args=(name,)) for name in ("submit", "generate", "encode_image") * 2
        ]
        for caller in callers:
            caller.start()
        until(lambda: encoder.health().waiting == 6)
        closers = [threading.Thread(target=encoder.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for caller in callers:  # at once, without waiting for the tower
            caller.join(HANG)
            assert not caller.is_alive()
        assert len(set(map(id, received))) == 6
        assert all(closer.is_alive() for closer in closers)
        assert encoder.health().state == "draining"
    for closer in closers:
        closer.join(HANG)
        assert not closer.is_alive()
    assert all(future.result(timeout=0) for future in accepted)
    assert encoder.health().state == "closed"
    nothing_left(encoder)
