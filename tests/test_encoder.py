"""The encoder's contract, on the CPU with a tiny checkpoint."""

from __future__ import annotations

import gc
import io
import logging
import pickle
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_encoder import (
    DeviceOutOfMemoryError,
    Encoder,
    EncoderClosedError,
    ImageOptions,
    ImageResult,
    MediaDecodeError,
    MediaError,
    MediaLimits,
    MediaPlanner,
    MediaTooLargeError,
    PlanMismatchError,
    ReplicaError,
    UnsupportedMediaError,
)
from mm_encoder.engine.budget import Budget
from mm_encoder.engine.job import Job
from mm_encoder.families.glm53 import Glm53, GlmTower


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def mixed(count: int) -> list[bytes]:
    random.seed(11)
    return [png(random.randint(1, 200), random.randint(1, 200), seed) for seed in range(count)]


def in_flight(encoder: Encoder) -> tuple[int, int, int]:
    """Images with no outcome yet, slots in use, bytes in use."""
    health = encoder.health()
    return encoder.stats().in_flight, health.queue_length, health.queue_bytes


class Gate:
    """Holds every tower call until opened, and says when one has arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()
        forward = GlmTower.forward

        def held(tower: GlmTower, *arguments: Any) -> torch.Tensor:
            self.arrived.release()
            assert self.opened.wait(30)
            return forward(tower, *arguments)

        monkeypatch.setattr(GlmTower, "forward", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


# --- results -----------------------------------------------------------------------------------------


def test_results_come_in_input_order_one_each(encoder: Encoder) -> None:
    images = mixed(12)
    results = encoder.generate(images)
    alone = [encoder.generate(image)[0] for image in images]
    assert len(results) == len(images)
    for result, single in zip(results, alone, strict=True):
        assert torch.equal(result.tensor, single.tensor)
        assert result.metadata == single.metadata


def test_an_iterator_and_an_empty_list_are_fine(encoder: Encoder) -> None:
    assert encoder.generate([]) == []
    assert len(encoder.generate(image for image in mixed(3))) == 3


def test_metadata_says_what_the_tensor_is(encoder: Encoder, glm53_checkpoint: Path) -> None:
    rows, metadata = encoder.generate(png(100, 60))[0]
    plan = MediaPlanner(glm53_checkpoint).plan((100, 60))
    assert metadata.model == "checkpoint"
    assert metadata.length == plan.length == rows.shape[0]
    assert metadata.shape == tuple(rows.shape)
    assert metadata.strides == rows.stride()
    assert metadata.dtype == "torch.float32"
    assert metadata.device == "cpu"
    assert metadata.embedding_offsets == (0, plan.length)
    assert metadata.grid_thws == plan.grid_thws
    assert metadata.original_size == plan.original_size == (100, 60)
    assert metadata.cache is None
    stages = ["admission_wait", "open", "queue_wait", "hash", "decode", "patches", "replica_wait", "tower"]
    assert [stage for stage, _ in metadata.timings] == stages
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    assert hash(metadata) == hash(pickle.loads(pickle.dumps(metadata)))
    with pytest.raises(AttributeError):
        metadata.length = 3  # type: ignore[misc]


def test_metadata_differs_only_in_timings_between_runs(encoder: Encoder) -> None:
    first, second = encoder.generate([png(50, 50)] * 2)
    assert first.metadata == second.metadata
    assert first.metadata.timings != second.metadata.timings


def test_tensors_are_ordinary_and_own_their_storage(encoder: Encoder) -> None:
    rows = encoder.generate(png(100, 60)).pop().tensor
    assert rows.is_contiguous()
    assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
    assert not rows.requires_grad
    assert not rows.is_inference()
    assert torch.equal(torch.utils.dlpack.from_dlpack(rows), rows)
    (rows.clone().requires_grad_() * 2).sum().backward()  # an inference tensor would refuse


def test_a_view_of_a_larger_storage_is_copied_out(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = GlmTower.forward

    def padded(tower: GlmTower, *arguments: Any) -> torch.Tensor:
        rows = forward(tower, *arguments)
        return torch.cat([rows, rows])[: len(rows)]

    monkeypatch.setattr(GlmTower, "forward", padded)
    rows = encoder.generate(png(40, 40)).pop().tensor
    assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


def test_results_outlive_the_encoder(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    rows = encoder.generate(png(40, 40)).pop().tensor
    before = rows.clone()
    encoder.close()
    del encoder
    gc.collect()
    assert torch.equal(rows, before)


def test_encode_image_gives_named_tensors(encoder: Encoder) -> None:
    named = encoder.encode_image(png(40, 60))
    result = encoder.generate(png(40, 60))[0]
    assert list(named) == ["embeddings", "embedding_offsets", "grid_thws"]
    assert torch.equal(named["embeddings"], result.tensor)
    assert named["embedding_offsets"].tolist() == [0, result.metadata.length]
    assert named["grid_thws"].tolist() == [list(result.metadata.grid_thws[0])]
    assert named["embedding_offsets"].dtype == named["grid_thws"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_the_results_and_stays_near_float32(
    glm53_checkpoint: Path, encoder: Encoder, dtype: torch.dtype
) -> None:
    exact = encoder.generate(png(80, 80)).pop().tensor
    with Encoder(glm53_checkpoint, device="cpu", dtype=dtype) as half:
        rows = half.generate(png(80, 80)).pop().tensor
    assert rows.dtype == dtype
    assert torch.nn.functional.cosine_similarity(rows.float(), exact).min() > 0.999


def test_a_result_is_freed_with_its_last_reference(encoder: Encoder) -> None:
    gc.collect()
    gc.disable()
    try:
        result = encoder.generate(png(40, 40)).pop()
        watch = weakref.ref(result.tensor)
        del result
        encoder.generate(png(20, 20))  # the replica has let go of the job before
        assert watch() is None
        future = encoder.submit(png(40, 40))
        watch = weakref.ref(future.result().tensor)
        encoder.generate(png(20, 20))
        del future
        assert watch() is None
    finally:
        gc.enable()


# --- inputs ------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_rows(encoder: Encoder, tmp_path: Path) -> None:
    data = png(60, 50)
    path = tmp_path / "image"
    path.write_bytes(data)
    opened = Image.open(io.BytesIO(data))
    array = np.asarray(opened)
    results = encoder.generate([data, bytearray(data), memoryview(data), path, array, opened])
    for result in results[1:]:
        assert torch.equal(result.tensor, results[0].tensor)
    assert len({r.metadata.mm_hash for r in results[:4]}) == 1
    assert len({r.metadata.mm_hash for r in results}) == 3


def test_a_single_array_or_pillow_image_is_one_image(encoder: Encoder) -> None:
    array = np.zeros((3, 3, 3), np.uint8)
    assert len(encoder.generate(array)) == 1
    assert len(encoder.generate(Image.fromarray(array))) == 1


def test_orientation_is_applied_in_rows_and_metadata_alike(encoder: Encoder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", exif=exif)
    shown = encoder.generate(buffer.getvalue())[0]
    turned = encoder.generate(np.ascontiguousarray(np.rot90(pixels, -1)))[0]
    assert shown.metadata.original_size == (40, 90)
    assert shown.metadata.grid_thws == turned.metadata.grid_thws
    assert torch.equal(shown.tensor, turned.tensor)
    options = ImageOptions(exif_orientation=False)
    stored = encoder.generate(buffer.getvalue(), image_options=options)[0]
    assert stored.metadata.original_size == (90, 40)
    assert torch.equal(stored.tensor, encoder.generate(pixels)[0].tensor)


def test_the_source_may_be_changed_once_submit_returns(encoder: Encoder, gate: Gate) -> None:
    array = np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)
    original = array.copy()
    first = encoder.submit(array)
    assert gate.arrived.acquire(timeout=30)
    second = encoder.submit(array)
    array[:] = 0
    gate.opened.set()
    wanted = encoder.generate(original)[0]
    for future in (first, second):
        assert torch.equal(future.result().tensor, wanted.tensor)
        assert future.result().metadata == wanted.metadata


# --- faults ------------------------------------------------------------------------------------------


def test_a_bad_image_is_named_by_its_index_and_the_encoder_goes_on(encoder: Encoder) -> None:
    images = mixed(4)
    images[2] = images[2][: len(images[2]) // 2]
    with pytest.raises(MediaDecodeError, match=r"^images\[2\]: "):
        encoder.generate(images)
    with pytest.raises(MediaDecodeError, match="^the image is empty"):
        encoder.generate(b"")
    with pytest.raises(TypeError, match=r"^images\[1\]: an image is bytes, .* got int"):
        encoder.generate([images[0], 7])  # type: ignore[list-item]
    assert in_flight(encoder) == (0, 0, 0)
    assert len(encoder.generate(images[:2])) == 2


def test_the_index_is_the_items_that_was_at_fault(encoder: Encoder) -> None:
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


def test_after_a_failed_generate_nothing_is_left_running(
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
            assert in_flight(encoder) == (0, 0, 0)
    assert most > 1


def test_a_later_item_is_not_begun_after_a_fault(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_expected_tokens_are_held_to_the_plan_before_the_tower_runs(
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
def test_impossible_expected_tokens_raise(
    encoder: Encoder, counts: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        encoder.generate([png(10, 10)], expected_tokens=counts)


def test_limits_hold(glm53_checkpoint: Path) -> None:
    with Encoder(glm53_checkpoint, device="cpu", limits=MediaLimits(max_pixels=100)) as encoder:
        assert len(encoder.generate(png(10, 10))) == 1
        with pytest.raises(MediaTooLargeError, match="max_pixels"):
            encoder.generate(png(10, 11))
        with pytest.raises(MediaTooLargeError, match="max_pixels"):
            encoder.generate(np.zeros((10, 11), np.uint8))


def test_a_kept_fault_keeps_nothing_alive(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_kept_engine_fault_keeps_no_tower(glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    towers: list[weakref.ref[GlmTower]] = []
    build = Glm53.build_tower

    def watched(*arguments: Any) -> GlmTower:
        tower = build(*arguments)
        towers.append(weakref.ref(tower))
        return tower

    monkeypatch.setattr(Glm53, "build_tower", watched)
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
        assert any("in _encode" in note for note in kept.__notes__)  # the frames, as text


def test_a_failed_generate_keeps_no_results(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[weakref.ref[torch.Tensor]] = []
    forward = GlmTower.forward

    def watched(tower: GlmTower, *arguments: Any) -> torch.Tensor:
        rows = forward(tower, *arguments)
        watches.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(GlmTower, "forward", watched)
    gc.collect()
    gc.disable()
    try:
        try:
            encoder.generate([png(20, 20), png(21, 20), png(22, 20), png(23, 20)[:-30]])
        except MediaError:
            pass
        monkeypatch.setattr(GlmTower, "forward", forward)
        encoder.generate(png(20, 20))  # the replica has let go of the job before
        assert all(watch() is None for watch in watches)
    finally:
        gc.enable()


class Unruly:
    """A tower whose every third call fails as told, from a frame that holds a tensor."""

    def __init__(self, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.watched: list[weakref.ref[torch.Tensor]] = []
        forward = GlmTower.forward

        def unruly(tower: GlmTower, *arguments: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls % 3 == 0:
                held = torch.zeros(1000)
                self.watched.append(weakref.ref(held))
                raise error
            return forward(tower, *arguments)

        monkeypatch.setattr(GlmTower, "forward", unruly)


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
    unruly = Unruly(cause, monkeypatch)
    futures = [encoder.submit(image) for image in mixed(7)]
    errors = [error for future in futures if (error := future.exception(timeout=60))]
    assert [type(error) for error in errors] == [raised, raised]
    assert all(error.__cause__ is cause for error in errors)
    gc.disable()
    try:
        assert all(watch() is None for watch in unruly.watched)  # the kept errors keep no tensor
    finally:
        gc.enable()
    unruly.calls = 0
    assert len(encoder.generate(mixed(2))) == 2


def test_a_tower_that_gives_other_rows_than_planned_is_refused(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = GlmTower.forward
    monkeypatch.setattr(GlmTower, "forward", lambda *a: forward(*a)[:-1])
    with pytest.raises(ReplicaError, match=r"the tower gave \d+ rows, the plan has \d+; this is a bug"):
        encoder.generate(png(50, 50))


def test_a_fault_in_preprocessing_is_the_engines(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("bug")

    monkeypatch.setattr(Glm53, "patches", broken)
    with pytest.raises(ReplicaError, match="encoding failed: KeyError") as caught:
        encoder.generate(png(50, 50))
    assert isinstance(caught.value.__cause__, KeyError)


# --- threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_weights", [False, True])
def test_replicas_and_callers_give_the_sequential_bits(glm53_checkpoint: Path, share_weights: bool) -> None:
    images = mixed(40)
    with Encoder(glm53_checkpoint, device="cpu") as one:
        sequential = [one.generate(image)[0] for image in images]
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2, share_weights=share_weights) as encoder:
        outcomes: dict[int, list[ImageResult]] = {}

        def caller(part: int) -> None:
            outcomes[part] = encoder.generate(images[part::4])

        threads = [threading.Thread(target=caller, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert in_flight(encoder) == (0, 0, 0)
    for part in range(4):
        for result, wanted in zip(outcomes[part], sequential[part::4], strict=True):
            assert torch.equal(result.tensor, wanted.tensor)
            assert result.metadata == wanted.metadata


def test_two_images_run_on_two_replicas_at_once(glm53_checkpoint: Path, gate: Gate) -> None:
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2) as encoder:
        futures = [encoder.submit(png(30, 30)) for _ in range(2)]
        assert gate.arrived.acquire(timeout=30)
        assert gate.arrived.acquire(timeout=30)
        gate.opened.set()
        assert all(future.result(timeout=30) for future in futures)


@pytest.mark.parametrize(("share_weights", "copies"), [(False, 3), (True, 1)])
def test_weights_are_one_a_replica_or_shared(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, share_weights: bool, copies: int
) -> None:
    towers = []
    build = Glm53.build_tower

    def counted(*arguments: Any) -> GlmTower:
        towers.append(build(*arguments))
        return towers[-1]

    monkeypatch.setattr(Glm53, "build_tower", counted)
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=3, share_weights=share_weights):
        assert len(towers) == copies
        pointers = {tower.downsample.weight.data_ptr() for tower in towers}
        assert len(pointers) == copies


def test_a_full_queue_blocks_and_cancelling_makes_room(glm53_checkpoint: Path, gate: Gate) -> None:
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=2) as encoder:
        running = encoder.submit(png(20, 20))
        assert gate.arrived.acquire(timeout=30)
        waiting = [encoder.submit(png(20, 20)) for _ in range(2)]
        late: list[Future[ImageResult]] = []
        caller = threading.Thread(target=lambda: late.append(encoder.submit(png(20, 20))))
        caller.start()
        caller.join(0.05)
        assert caller.is_alive()
        assert waiting[0].cancel()
        caller.join(30)
        assert not caller.is_alive()
        assert not running.cancel()
        gate.opened.set()
        for future in (running, waiting[1], *late):
            assert future.result(timeout=30).metadata.length > 0
    assert in_flight(encoder) == (0, 0, 0)


def outcome_of(program: str, checkpoint: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a Python program that gets a checkpoint as its argument."""
    run = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


# --- life cycle --------------------------------------------------------------------------------------


def threads_of_the_library() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("mm-encoder")]


def test_close_finishes_accepted_work_and_joins_every_thread(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2, queue_depth=8)
    assert len(threads_of_the_library()) > 2
    futures = [encoder.submit(image) for image in mixed(8)]
    encoder.close()
    assert all(future.result(timeout=0).metadata.length for future in futures)
    assert threads_of_the_library() == []
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
    assert closed.wait(30)
    encoder.close()
    assert threads_of_the_library() == []


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
    assert done.acquire(timeout=30)
    if not raised:  # the result was there before the callback, which then runs in this thread
        return
    assert len(raised) == 3
    assert "cannot be called from a future's callback" in str(raised[0])


def leave_by_an_exception(encoder: Encoder, gate: Gate) -> None:
    """Leave the encoder's block by an exception while a tower runs, which then may go on."""

    def interrupted() -> None:
        with encoder:
            threading.Timer(0.1, gate.opened.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_leaving_the_block_by_an_exception_cancels_what_waits(glm53_checkpoint: Path, gate: Gate) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=9)
    running = encoder.submit(png(20, 20))
    assert gate.arrived.acquire(timeout=30)
    waiting = [encoder.submit(png(20, 20)) for _ in range(5)]

    leave_by_an_exception(encoder, gate)
    assert running.result(timeout=0)
    assert all(future.cancelled() for future in waiting)
    assert in_flight(encoder) == (0, 0, 0)


def test_generate_in_another_thread_is_told_that_the_encoder_was_closed(
    glm53_checkpoint: Path, gate: Gate
) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=9)
    told = threading.Semaphore(0)

    def elsewhere() -> None:
        with pytest.raises(EncoderClosedError, match="closed before this image was encoded"):
            encoder.generate([png(20, 20)] * 4)
        told.release()

    caller = threading.Thread(target=elsewhere)
    caller.start()
    assert gate.arrived.acquire(timeout=30)
    while encoder.health().queue_length < 3:
        caller.join(0.01)

    leave_by_an_exception(encoder, gate)
    assert told.acquire(timeout=30)


def test_a_forked_child_is_told_and_ends(glm53_checkpoint: Path) -> None:
    program = (
        "import os, sys, numpy, warnings, mm_encoder\n"
        "warnings.simplefilter('ignore')\n"
        "image = numpy.zeros((50, 50, 3), numpy.uint8)\n"
        "encoder = mm_encoder.Encoder(sys.argv[1], device='cpu')\n"
        "with encoder._engine.scheduler._to_run:\n"  # forked in the worst moment
        "    child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (encoder.generate, encoder.submit):\n"
        "        try:\n"
        "            call(image)\n"
        "        except mm_encoder.ForkedProcessError:\n"
        "            continue\n"
        "        sys.exit(1)\n"
        "    try:\n"
        "        with encoder:\n"
        "            encoder.submit(image)\n"
        "    except mm_encoder.ForkedProcessError:\n"
        "        sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert encoder.generate(image)\n"
    )
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


def test_leaving_by_an_exception_admits_nobody_from_the_line(glm53_checkpoint: Path, gate: Gate) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", queue_depth=1)
    running, waiting = encoder.submit(png(20, 20)), None
    assert gate.arrived.acquire(timeout=30)
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

    leave_by_an_exception(encoder, gate)
    for _ in callers:
        assert refused.acquire(timeout=30)
    assert running.result(timeout=0)
    assert waiting.cancelled()


def test_a_forked_child_can_make_an_encoder_while_a_picture_was_loading(glm53_checkpoint: Path) -> None:
    program = (
        "import os, sys, warnings, mm_encoder\n"
        "from mm_encoder.media import source\n"
        "from PIL import Image\n"
        "warnings.simplefilter('ignore')\n"
        "with source._PILLOW_LOCK:\n"
        "    child = os.fork()\n"
        "if child == 0:\n"
        "    planner = mm_encoder.MediaPlanner(sys.argv[1])\n"
        "    assert planner.plan(Image.new('RGB', (30, 30))).length\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


def test_two_callbacks_that_close_do_not_wait_for_each_other(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2)
    both = threading.Barrier(2, timeout=30)
    closed = threading.Semaphore(0)

    def on_result(_: Future[ImageResult]) -> None:
        both.wait()
        encoder.close()
        closed.release()

    for _ in range(2):
        encoder.submit(png(20, 20)).add_done_callback(on_result)
    assert closed.acquire(timeout=30)
    assert closed.acquire(timeout=30)
    encoder.close()
    assert threads_of_the_library() == []


@pytest.mark.parametrize("data", [png(20, 20), png(20, 20)[:-20]])
def test_a_callback_that_exits_ends_no_thread_of_the_engine(
    encoder: Encoder, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: Future[ImageResult]) -> None:
        sys.exit(3)

    for _ in range(5):
        future = encoder.submit(data)
        future.add_done_callback(leave)
        future.exception(timeout=30)
    assert encoder.generate(png(20, 20))
    assert "a callback on a result failed" in caplog.text


@pytest.mark.parametrize("lock", ["scheduler", "budget"])
def test_an_encoder_collected_inside_its_own_lock_ends(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    if lock == "scheduler":

        def number(job: Job) -> int:
            gc.collect()
            return job.number

        monkeypatch.setattr("mm_encoder.engine.scheduler._by_number", number)
    else:
        advance = Budget._advance

        def collecting(budget: Budget[Job]) -> Any:
            gc.collect()
            return advance(budget)

        monkeypatch.setattr(Budget, "_advance", collecting)
    encoder = Encoder(glm53_checkpoint, device="cpu")
    encoder.itself = encoder  # type: ignore[attr-defined]
    gc.disable()
    try:
        encoder.submit(png(100, 100))
        threads = threads_of_the_library()
        del encoder
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    finally:
        gc.enable()


def test_close_waits_in_every_thread_that_calls_it(glm53_checkpoint: Path, gate: Gate) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    future = encoder.submit(png(20, 20))
    assert gate.arrived.acquire(timeout=30)
    closers = [threading.Thread(target=encoder.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(0.05)
        assert closer.is_alive()
    gate.opened.set()
    for closer in closers:
        closer.join(30)
        assert not closer.is_alive()
    assert future.done()


def test_a_dropped_encoder_ends_its_threads(glm53_checkpoint: Path) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu")
    encoder.generate(png(20, 20))
    watch = weakref.ref(encoder)
    threads = threads_of_the_library()
    del encoder
    gc.collect()
    assert watch() is None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_an_encoder_alive_at_interpreter_exit_ends_cleanly(glm53_checkpoint: Path) -> None:
    program = (
        "import sys, numpy, mm_encoder\n"
        "encoder = mm_encoder.Encoder(sys.argv[1], device='cpu', replicas_per_gpu=2)\n"
        "image = numpy.zeros((50, 50, 3), numpy.uint8)\n"
        "futures = [encoder.submit(image) for _ in range(5)]\n"
    )
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


def test_a_thread_that_cannot_start_stops_the_others(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    for refused in ("replica-1", "prep-1"):

        def failing(thread: threading.Thread, refused: str = refused) -> None:
            if thread.name.endswith(refused):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2, preprocess_workers=2)
        assert threads_of_the_library() == []


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (RuntimeError("no room for a second tower"), RuntimeError),
        (torch.OutOfMemoryError("no room for a second tower"), DeviceOutOfMemoryError),
    ],
)
def test_a_replica_that_fails_to_load_stops_the_others(
    glm53_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: Exception,
    raised: type[Exception],
) -> None:
    built: list[weakref.ref[GlmTower]] = []
    build, turn = Glm53.build_tower, threading.Semaphore(1)

    def all_but_one_fail(*arguments: Any) -> GlmTower:
        if not turn.acquire(blocking=False):
            raise cause
        tower = build(*arguments)
        built.append(weakref.ref(tower))
        return tower

    monkeypatch.setattr(Glm53, "build_tower", all_but_one_fail)
    with pytest.raises(raised, match="no room for a second tower|weights of a replica"):
        Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=3)
    assert threads_of_the_library() == []
    gc.collect()
    assert built[0]() is None


# --- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "gpu"}, ValueError, "'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        ({"device": "cuda:x"}, ValueError, "'cpu', 'cuda' or 'cuda:N', got 'cuda:x'"),
        ({"device": "cuda:99"}, ValueError, "no device 'cuda:99'"),
        ({"replicas_per_gpu": 0}, ValueError, "replicas_per_gpu must be from 1 to 32, got 0"),
        ({"replicas_per_gpu": 33}, ValueError, "replicas_per_gpu must be from 1 to 32, got 33"),
        ({"replicas_per_gpu": True}, TypeError, "replicas_per_gpu must be an int, got bool"),
        ({"replicas_per_gpu": 1.0}, TypeError, "replicas_per_gpu must be an int, got float"),
        ({"queue_depth": 0}, ValueError, "queue_depth must be at least 1"),
        ({"queue_bytes": -1}, ValueError, "queue_bytes must be at least 1"),
        ({"preprocess_workers": 0}, ValueError, "preprocess_workers must be from 1 to 256"),
        ({"stream_priority": "low"}, TypeError, "stream_priority must be an int"),
        ({"dtype": torch.int8}, ValueError, "dtype must be one of"),
        ({"family": "other"}, ValueError, "family must be one of glm53"),
        ({"cache": object()}, TypeError, "cache must be a CacheConfig or None, got object"),
        ({"batching": object()}, NotImplementedError, "batching= is not built yet"),
        ({"limits": 5}, TypeError, "limits must be a MediaLimits, got int"),
        ({"model": 123}, TypeError, "model must be a str or None, got int"),
        ({"share_weights": 5}, TypeError, "share_weights must be a bool, got int"),
    ],
)
def test_impossible_arguments_raise_before_anything_starts(
    glm53_checkpoint: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Encoder(glm53_checkpoint, **({"device": "cpu"} | arguments))
    assert threads_of_the_library() == []


def test_impossible_arguments_of_calls_raise(encoder: Encoder) -> None:
    with pytest.raises(TypeError, match="image_options must be an ImageOptions, got dict"):
        encoder.submit(png(10, 10), image_options={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected_tokens must be an int, got str"):
        encoder.submit(png(10, 10), expected_tokens="16")  # type: ignore[arg-type]


def test_under_the_hosts_inference_mode_tensors_are_ordinary(glm53_checkpoint: Path) -> None:
    with torch.inference_mode(), Encoder(glm53_checkpoint, device="cpu") as encoder:
        named = encoder.encode_image(png(30, 30))
        _, inputs = MediaPlanner(glm53_checkpoint).prepare_inputs(png(30, 30))
    for name, value in (named | inputs).items():
        assert not value.is_inference(), name


def test_attributes_and_one_log_line_a_replica(
    glm53_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "mm_encoder"),
        Encoder(glm53_checkpoint, "some/name", device="cpu", replicas_per_gpu=2) as encoder,
    ):
        assert encoder.model == "some/name"
        assert encoder.family == "glm53"
        assert encoder.device == torch.device("cpu")
        assert encoder.dtype == torch.float32
        assert encoder.replicas_per_gpu == 2
        assert encoder.stream_priority == 0
        assert encoder.generate(png(20, 20))[0].metadata.model == "some/name"
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 3
    assert all(line.startswith("ready: some/name (glm53) replica") for line in lines[:2])
    assert lines[2] == "closed: 1 of 1 images encoded"
