"""Errors of single images and of the engine: what callers get, and what stays alive."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import (
    DeviceOutOfMemoryError,
    Encoder,
    MediaDecodeError,
    MediaError,
    MediaLimits,
    MediaTooLargeError,
    PlanMismatchError,
    ReplicaError,
    UnsupportedMediaError,
)
from mm_encoder.families.glm53 import Glm53, GlmTower

from ..helpers.holding import watch_towers
from ..helpers.images import mixed, png
from ..helpers.waiting import HANG, in_flight


def test_a_bad_image_is_reported_by_its_index_and_the_encoder_goes_on(encoder: Encoder) -> None:
    images = mixed(4)
    images[2] = images[2][: len(images[2]) // 2]
    with pytest.raises(MediaDecodeError, match=r"^images\[2\]: "):
        encoder.generate(images)
    with pytest.raises(MediaDecodeError, match="^the image is empty"):
        encoder.generate(b"")
    with pytest.raises(TypeError, match=r"^images\[1\]: an image is bytes, .* got int"):
        encoder.generate([images[0], 7])  # type: ignore[list-item]
    assert in_flight(encoder) == (0, 0, 0, 0)
    assert len(encoder.generate(images[:2])) == 2


def test_the_index_is_that_of_the_failed_item(encoder: Encoder) -> None:
    good, cut = png(30, 30), png(30, 30)[:-30]
    with pytest.raises(MediaError, match=r"^images\[\d\]: ") as caught:
        encoder.generate([good, cut, good, b"nothing"])
    assert str(caught.value)[:10] in ("images[1]:", "images[3]:")
    assert ("truncated" in str(caught.value)) == str(caught.value).startswith("images[1]")
    with pytest.raises(TypeError, match="^from the iterable"):
        encoder.generate(good for _ in iter_then_raise(TypeError("from the iterable")))
    with pytest.raises(TypeError, match="^an image is bytes, .* got BytesIO"):
        encoder.generate(io.BytesIO(good))
    with pytest.raises(TypeError, match="^images must be an image or an iterable of images, got int"):
        encoder.generate(5)  # type: ignore[arg-type]


def iter_then_raise(error: Exception) -> Iterator[int]:
    yield 0
    raise error


def test_a_failed_generate_leaves_nothing_running(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparing, most = 0, 0
    lock = threading.Lock()
    patches = Glm53.patches

    def slow(*arguments: Any) -> Any:
        nonlocal preparing, most
        with lock:
            preparing += 1
            most = max(most, preparing)
        try:
            threading.Event().wait(0.02)
            return patches(*arguments)
        finally:
            with lock:
                preparing -= 1

    monkeypatch.setattr(Glm53, "patches", slow)
    images = mixed(30)
    images[3] = images[3][:-20]
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=8, preprocess_workers=4) as encoder:
        for _ in range(3):
            with pytest.raises(MediaError, match=r"^images\[3\]: "):
                encoder.generate(images)
            assert preparing == 0
            assert in_flight(encoder) == (0, 0, 0, 0)
    assert most > 1


def test_generate_submits_no_more_items_after_an_error(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    patches = Glm53.patches

    def counted(*arguments: Any) -> Any:
        begun.append(1)
        return patches(*arguments)

    monkeypatch.setattr(Glm53, "patches", counted)
    with pytest.raises(MediaError):
        encoder.generate([png(20, 20)[:-20], *([png(20, 20)] * 500)])
    assert len(begun) < 400


def test_submit_returns_a_failed_future_for_bad_media(encoder: Encoder) -> None:
    future = encoder.submit(b"not an image")
    assert isinstance(future.exception(timeout=0), MediaDecodeError)


def test_expected_tokens_are_checked_before_the_tower_runs(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = png(100, 60)
    rows = encoder.generate(image)[0].metadata.length
    assert encoder.generate([image, image], expected_tokens=[rows, rows])
    assert encoder.generate(image, expected_tokens=[rows])
    monkeypatch.setattr(GlmTower, "forward", lambda *_: pytest.fail("the tower ran"))
    with pytest.raises(PlanMismatchError, match=rf"^images\[0\]: expected 99 tokens, .* makes {rows}$"):
        encoder.generate([image], expected_tokens=[99])
    assert issubclass(PlanMismatchError, ValueError)


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([], ValueError, "got 0 for 1 images"),
        ([1, 2], ValueError, "got 2 for 1 images"),
        ([0], ValueError, "at least 1, got 0"),
        ([True], TypeError, "must be an int, got bool"),
        ([1.0], TypeError, "must be an int, got float"),
    ],
)
def test_invalid_expected_tokens_raise(
    encoder: Encoder, counts: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        encoder.generate([png(10, 10)], expected_tokens=counts)


def test_limits_apply_to_files_and_arrays(glm53_checkpoint: Path) -> None:
    with Encoder(glm53_checkpoint, device="cpu", limits=MediaLimits(max_pixels=100)) as encoder:
        assert len(encoder.generate(png(10, 10))) == 1
        with pytest.raises(MediaTooLargeError, match="max_pixels"):
            encoder.generate(png(10, 11))
        with pytest.raises(MediaTooLargeError, match="max_pixels"):
            encoder.generate(np.zeros((10, 11), np.uint8))


def test_a_stored_media_error_keeps_nothing_alive(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Canary(np.ndarray):
        pass

    def array() -> Canary:
        return np.full((10, 10, 7), 3, np.uint8).view(Canary)

    gc.collect()
    gc.disable()
    try:
        bad = array()
        watch = weakref.ref(bad)
        error = encoder.submit(bad).exception()
        del bad
        assert isinstance(error, UnsupportedMediaError)
        assert watch() is None
        watch_error = weakref.ref(error)
        del error
        assert watch_error() is None
    finally:
        gc.enable()


def test_a_stored_replica_error_keeps_no_tower_alive(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = watch_towers(monkeypatch)
    monkeypatch.setattr(GlmTower, "forward", lambda *_: 1 / 0)
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        error = encoder.submit(png(20, 20)).exception()
        with pytest.raises(ReplicaError) as raised:
            encoder.generate(png(20, 20))
    del encoder
    gc.collect()
    assert towers[0]() is None
    for kept in (error, raised.value):
        assert isinstance(kept, ReplicaError)
        assert isinstance(kept.__cause__, ZeroDivisionError)
        assert any("in _encode" in note for note in kept.__notes__)  # the stack, as text


@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("way", ["generate", "generate_async"])
def test_a_failed_generate_keeps_no_results_alive(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, way: str, bad: int
) -> None:
    watches: list[weakref.ref[torch.Tensor]] = []
    kept: list[MediaError] = []
    forward = GlmTower.forward

    def watched(tower: GlmTower, *arguments: Any) -> torch.Tensor:
        rows = forward(tower, *arguments)
        watches.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(GlmTower, "forward", watched)
    # The failing image is large, so that it fails late, after all the others were admitted.
    images = [png(600, 600)[:-30] if index == bad else png(20 + index, 20) for index in range(4)]
    gc.collect()
    gc.disable()
    try:
        try:
            if way == "generate":
                encoder.generate(images)
            else:
                asyncio.run(encoder.generate_async(images))
        except MediaError as error:
            kept.append(error)
        monkeypatch.setattr(GlmTower, "forward", forward)
        encoder.generate(png(20, 20))  # so that the replica has released the previous job
        assert len(kept) == 1
        assert all(watch() is None for watch in watches)
    finally:
        gc.enable()


def test_the_error_of_a_single_image_is_in_no_cycle(encoder: Encoder) -> None:
    class Caller:
        """Lives as long as the frame of the failed call."""

    def call() -> weakref.ref[Caller]:
        caller = Caller()
        with pytest.raises(MediaError):
            encoder.generate(png(300, 300)[:-30])
        return weakref.ref(caller)

    gc.collect()
    gc.disable()
    try:
        watch = call()
        assert watch() is None
    finally:
        gc.enable()


class FailingTower:
    """A tower of which every third call raises `error`, from a frame that holds a tensor."""

    def __init__(self, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.watched: list[weakref.ref[torch.Tensor]] = []
        forward = GlmTower.forward

        def sometimes_failing(tower: GlmTower, *arguments: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls % 3 == 0:
                held = torch.zeros(1000)
                self.watched.append(weakref.ref(held))
                raise error
            return forward(tower, *arguments)

        monkeypatch.setattr(GlmTower, "forward", sometimes_failing)


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (ValueError("odd"), ReplicaError),
        (RuntimeError("CUDA error: something"), ReplicaError),
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceOutOfMemoryError),
        (MemoryError(), DeviceOutOfMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), DeviceOutOfMemoryError),
        (SystemExit(1), ReplicaError),
    ],
)
def test_a_failing_tower_fails_that_job_only(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, cause: BaseException, raised: type[ReplicaError]
) -> None:
    tower = FailingTower(cause, monkeypatch)
    futures = [encoder.submit(image) for image in mixed(7)]
    errors = [error for future in futures if (error := future.exception(timeout=HANG))]
    assert [type(error) for error in errors] == [raised, raised]
    assert all(error.__cause__ is cause for error in errors)
    gc.disable()
    try:
        assert all(watch() is None for watch in tower.watched)  # the stored errors keep no tensor alive
    finally:
        gc.enable()
    tower.calls = 0
    assert len(encoder.generate(mixed(2))) == 2


def test_a_tower_with_a_wrong_number_of_rows_raises(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = GlmTower.forward
    monkeypatch.setattr(GlmTower, "forward", lambda *a: forward(*a)[:-1])
    with pytest.raises(ReplicaError, match=r"the tower gave \d+ rows, the plan has \d+; this is a bug"):
        encoder.generate(png(50, 50))


def test_an_exception_in_preprocessing_is_a_replica_error(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("bug")

    monkeypatch.setattr(Glm53, "patches", broken)
    with pytest.raises(ReplicaError, match="encoding failed: KeyError") as caught:
        encoder.generate(png(50, 50))
    assert isinstance(caught.value.__cause__, KeyError)
