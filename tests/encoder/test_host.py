"""What the host does around an encoder must not hurt it, and an encoder not the host."""

from __future__ import annotations

import gc
import io
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mm_encoder import CacheConfig, Encoder, ImageResult, ReplicaError
from mm_encoder.engine.budget import Budget
from mm_encoder.engine.tally import Tally
from mm_encoder.families.glm53 import GlmTower
from mm_encoder.media import source

from ..helpers.holding import hold_towers
from ..helpers.images import png
from ..helpers.waiting import HANG, nothing_left


class Broken(logging.Handler):
    """A handler of the host's whose sink is gone."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the sink is gone")


@pytest.fixture
def broken_log() -> Iterator[None]:
    handler = Broken()
    logging.getLogger("mm_encoder").addHandler(handler)
    yield
    logging.getLogger("mm_encoder").removeHandler(handler)


@pytest.mark.usefixtures("broken_log")
def test_a_log_handler_that_raises_ends_no_thread(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        with monkeypatch.context() as patch:
            patch.setattr(GlmTower, "forward", lambda *_: 1 / 0)
            assert isinstance(encoder.submit(png()).exception(HANG), ReplicaError)
        assert encoder.generate(png())
        nothing_left(encoder)
        assert encoder.health().state == "ready"


def test_callbacks_see_none_of_our_modes(glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    towers = hold_towers(monkeypatch)
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        future = encoder.submit(png())
        future.add_done_callback(lambda _: modes.append(torch.is_grad_enabled()))
        towers.release()
        assert not future.result(HANG).tensor.requires_grad
    assert modes == [True]


def test_an_exception_that_the_host_handles_keeps_its_traceback(encoder: Encoder) -> None:
    failed, traceback = None, None
    host = KeyError("the host's")
    try:
        raise host
    except KeyError:
        failed = encoder.submit(b"no image").exception(HANG)
        traceback = host.__traceback__
    assert traceback is not None
    assert failed is not None
    link: BaseException | None = failed
    while link is not None:  # kept errors keep no frames alive, the host's included
        assert link.__traceback__ is None
        assert link is not host
        link = link.__context__


@pytest.mark.parametrize(("owner", "name"), [(Budget, "_fits"), (Tally, "ended"), (Budget, "_advance")])
def test_a_finalizer_may_cancel_inside_our_lock(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """As if the collector ran there. What it cancelled is cancelled, and its slot is free at once."""
    inside, todo = getattr(owner, name), list[Future[ImageResult]]()

    def interrupted(*arguments: Any) -> Any:
        while todo:
            todo.pop().cancel()
        return inside(*arguments)

    with Encoder(glm53_checkpoint, device="cpu", queue_depth=4) as encoder, hold_towers(monkeypatch):
        futures = [encoder.submit(png()) for _ in range(3)]
        monkeypatch.setattr(owner, name, interrupted)
        todo += futures[1:2]
        futures[2].cancel()
        encoder.submit(png(seed=3)).cancel()
        assert futures[1].cancelled()
        assert encoder.stats().cancelled == 3
        assert encoder.health().queue_length <= 1


@pytest.mark.parametrize("waiting", ["result", "wait"])
def test_a_signal_handler_may_cancel_what_its_thread_waits_for(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, waiting: str
) -> None:
    with (
        Encoder(glm53_checkpoint, device="cpu", queue_depth=4) as encoder,
        hold_towers(monkeypatch) as towers,
    ):
        encoder.submit(png())
        towers.wait()
        future = encoder.submit(png(seed=1))
        before = signal.signal(signal.SIGUSR1, lambda *_: future.cancel())
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        try:
            done = wait([future], HANG).done if waiting == "wait" else {future}
            with pytest.raises(CancelledError):
                future.result(HANG)
            assert done == {future}
            assert future.cancelled()
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)


class Late(Exception):
    """What a signal handler of the host's raises."""


@pytest.mark.parametrize("error", [Late("time is up"), TimeoutError("time is up")], ids=repr)
@pytest.mark.parametrize("cache", [None, CacheConfig()], ids=["", "cache"])
@pytest.mark.parametrize("where", ["pillow", "source", "orientation"])
def test_what_a_signal_handler_raises_reaches_the_caller(
    glm53_checkpoint: Path,
    cache: CacheConfig | None,
    where: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not the fault of the image, nor of the engine, and leaves nothing behind."""

    def late(*_: object) -> None:
        raise error

    def interrupted(*_: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    image = Image.open(io.BytesIO(png()))
    image.getexif()
    if where == "pillow":
        monkeypatch.setattr(image, "load", interrupted)
    elif where == "source":
        monkeypatch.setattr(source, "check_pixels", interrupted)
    else:
        monkeypatch.setattr(image.getexif(), "get", interrupted, raising=False)
    before = signal.signal(signal.SIGUSR1, late)
    try:
        with Encoder(glm53_checkpoint, device="cpu", cache=cache) as encoder:
            for call in (encoder.submit, encoder.generate):
                with pytest.raises(type(error)) as caught:
                    call(image)
                assert caught.value is error
                nothing_left(encoder)
            assert encoder.stats().failed == 0
            monkeypatch.undo()
            assert encoder.generate(image)
    finally:
        signal.signal(signal.SIGUSR1, before)


def at_depth(frames: int, call: Callable[[], object]) -> object:
    return call() if frames <= 0 else at_depth(frames - 1, call)


def test_cancelling_with_too_little_stack_can_be_repeated(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    with (
        Encoder(glm53_checkpoint, device="cpu", queue_depth=40) as encoder,
        hold_towers(monkeypatch) as towers,
    ):
        encoder.submit(png())
        towers.wait()
        errors = 0
        for room in range(4, 30):
            future = encoder.submit(png(seed=1))
            try:
                at_depth(sys.getrecursionlimit() - depth - room, future.cancel)
            except RecursionError:
                errors += 1
                future.cancel()
        assert errors
        assert encoder.stats().cancelled == 26
        assert encoder.health().queue_length == 0
        towers.release()
        nothing_left(encoder)


@pytest.mark.parametrize("cache", [None, CacheConfig()], ids=["", "cache"])
def test_a_submit_that_the_stack_ends_leaves_nothing_behind(
    glm53_checkpoint: Path, cache: CacheConfig | None
) -> None:
    """Giving back takes more stack than getting did, so at some depths only another thread can."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=100, cache=cache) as encoder:
        errors = 0
        for room in range(4, 60):
            submit = partial(encoder.submit, png(seed=room))
            try:
                at_depth(sys.getrecursionlimit() - depth - room, submit)
            except RecursionError:
                errors += 1
        assert errors
        nothing_left(encoder)
        assert encoder.generate(png())


def test_several_callbacks_finalizers_and_threads_close_at_once(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = hold_towers(monkeypatch)
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=8, replicas_per_gpu=2)

    class Closer:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            encoder.close()

    def collect(_: object) -> None:
        Closer()
        gc.collect()

    for seed in range(6):
        future = encoder.submit(png(seed=seed))
        future.add_done_callback(collect if seed % 2 else lambda _: encoder.close())
    threads = [threading.Thread(target=encoder.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    towers.release()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    encoder.close()
    assert encoder.health().state == "closed"
