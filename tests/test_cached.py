"""An encoder with a cache: hits, request coalescing, what is stored and what is not."""

from __future__ import annotations

import asyncio
import gc
import io
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_encoder import (
    CacheConfig,
    CacheError,
    CacheLockedError,
    CacheStats,
    DeadlineExceededError,
    Encoder,
    EncoderBusyError,
    EncoderClosedError,
    ImageOptions,
    ImageResult,
    MediaDecodeError,
    MediaError,
    MediaLimits,
    MediaTooLargeError,
    PlanMismatchError,
    ReplicaError,
    UnsupportedMediaError,
)
from mm_encoder.cache.inflight import Flight
from mm_encoder.cache.memory import live_cpu_bytes_process
from mm_encoder.coalescer import Coalescer, LookUp, Waiter
from mm_encoder.device import CpuLane
from mm_encoder.engine.deadlines import Deadlines
from mm_encoder.families.glm53 import Glm53, GlmTower
from mm_encoder.media.source import Source

from .cache.conftest import rewritten, tensors
from .helpers import images
from .helpers.waiting import HANG, nothing_left, until

pytestmark = pytest.mark.threads

MIB = 1024**2
Make = Callable[..., Encoder]


def png(seed: int = 0, width: int = 30, height: int = 30) -> bytes:
    return images.png(width, height, seed)


class Work:
    """Counts decodes and tower runs; after `hold`, blocks tower runs until `opened` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = self.run = 0
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()
        self.opened.set()
        self.failing: list[BaseException] = []
        patches, forward = Glm53.patches, GlmTower.forward

        def counted_patches(*arguments: Any) -> Any:
            self.decoded += 1
            return patches(*arguments)

        def counted_forward(*arguments: Any) -> torch.Tensor:
            self.run += 1
            self.arrived.release()
            assert self.opened.wait(HANG)
            if self.failing:
                raise self.failing.pop()
            return forward(*arguments)

        monkeypatch.setattr(Glm53, "patches", counted_patches)
        monkeypatch.setattr(GlmTower, "forward", counted_forward)

    def hold(self) -> None:
        self.opened.clear()

    def wait(self) -> None:
        assert self.arrived.acquire(timeout=HANG)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    work = Work(monkeypatch)
    yield work
    work.opened.set()


@pytest.fixture
def make(glm53_checkpoint: Path) -> Iterator[Make]:
    """Return a function that makes an encoder with a cache, from arguments of Encoder and CacheConfig."""
    made: list[Encoder] = []

    def encoder(checkpoint: Path = glm53_checkpoint, **arguments: Any) -> Encoder:
        names = CacheConfig.__dataclass_fields__
        config = {name: arguments.pop(name) for name in list(arguments) if name in names}
        config = {"memory_bytes": 64 * MIB, "max_entry_bytes": MIB} | config
        made.append(Encoder(checkpoint, device="cpu", cache=CacheConfig(**config), **arguments))
        return made[-1]

    yield encoder
    for one in made:
        one.close()


def on_disk(path: Path) -> dict[str, Any]:
    return {"disk_path": path, "disk_bytes": 64 * MIB}


# --- hits --------------------------------------------------------------------------------------------


def test_an_image_is_encoded_once(make: Make, work: Work, encoder: Encoder) -> None:
    plain = encoder.generate(png())[0]
    work.run = 0
    cached = make()
    miss, hit = cached.generate(png())[0], cached.generate(png())[0]
    assert work.run == 1
    assert torch.equal(miss.tensor, plain.tensor)
    assert hit.tensor is miss.tensor
    assert (miss.metadata.cache, hit.metadata.cache) == ("miss", "memory")
    assert plain.metadata.cache is None
    for one in (miss, hit):
        assert one.metadata.mm_hash == plain.metadata.mm_hash
        assert one.metadata.grid_thws == plain.metadata.grid_thws
    stats = cached.cache_stats()
    assert (stats.memory_hits, stats.misses, stats.joined, stats.disk_hits) == (1, 1, 0, 0)
    assert encoder.cache_stats() == CacheStats()


def test_every_method_serves_hits(make: Make, work: Work) -> None:
    encoder = make()
    first = encoder.generate(png())[0].tensor
    assert encoder.submit(png()).result(timeout=HANG).tensor is first
    assert encoder.encode_image(png())["embeddings"] is first
    assert asyncio.run(encoder.generate_async([png()]))[0].tensor is first
    assert asyncio.run(encoder.encode_image_async(png()))["embeddings"] is first
    assert work.run == 1


def test_cache_keys_follow_the_content_of_every_kind_of_source(
    make: Make, work: Work, tmp_path: Path
) -> None:
    encoder, data = make(), png()
    path = tmp_path / "x"
    path.write_bytes(data)
    array = np.asarray(Image.open(io.BytesIO(data)))
    for image in (data, bytearray(data), memoryview(data), path, array, array.copy()):
        encoder.generate(image)
    assert work.run == 2  # the file's bytes, and the array's pixels
    path.write_bytes(png(1))
    array = array.copy()
    array[0, 0] ^= 1
    encoder.generate([path, array])
    assert work.run == 4


def test_options_dtype_and_limits_have_separate_entries(make: Make, work: Work, tmp_path: Path) -> None:
    encoder = make(**on_disk(tmp_path / "cache"))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png(0, 40, 90))).save(buffer, "PNG", exif=exif)
    shown = encoder.generate(buffer.getvalue())[0]
    stored = encoder.generate(buffer.getvalue(), image_options=ImageOptions(exif_orientation=False))[0]
    assert shown.metadata.original_size == (90, 40)
    assert stored.metadata.original_size == (40, 90)
    assert stored.metadata.cache == "miss"
    encoder.close()
    half = make(dtype=torch.bfloat16, **on_disk(tmp_path / "cache"))
    assert half.generate(buffer.getvalue())[0].metadata.cache == "miss"
    half.close()
    small = make(limits=MediaLimits(max_bytes=10), **on_disk(tmp_path / "cache"))
    with pytest.raises(MediaTooLargeError):
        small.generate(buffer.getvalue())


def test_expected_tokens_are_checked_for_hits_and_followers(make: Make, work: Work) -> None:
    encoder = make()
    rows = encoder.generate(png())[0].metadata.length
    assert encoder.generate(png(), expected_tokens=[rows])
    with pytest.raises(PlanMismatchError, match=f"expected 99 tokens, but this image makes {rows}"):
        encoder.generate(png(), expected_tokens=[99])
    work.hold()
    leader = encoder.submit(png(1))
    work.wait()
    right, wrong = encoder.submit(png(1), expected_tokens=rows), encoder.submit(png(1), expected_tokens=99)
    work.opened.set()
    assert right.result(timeout=HANG).tensor is leader.result(timeout=HANG).tensor
    assert isinstance(wrong.exception(timeout=HANG), PlanMismatchError)
    assert work.run == 2


def test_disk_hits_after_reopen(make: Make, work: Work, tmp_path: Path) -> None:
    first = make(**on_disk(tmp_path / "cache"))
    rows = [first.generate(png(seed))[0].tensor for seed in range(5)]
    first.close()
    second = make(**on_disk(tmp_path / "cache"))
    results = second.generate([png(seed) for seed in range(5)])
    assert work.run == 5
    for result, row in zip(results, rows, strict=True):
        assert torch.equal(result.tensor, row)
        assert result.metadata.cache == "disk"
    assert second.generate(png(0))[0].metadata.cache == "memory"
    stats = second.cache_stats()
    assert (stats.disk_hits, stats.memory_hits, stats.misses) == (5, 1, 0)


def test_changed_weights_miss(make: Make, work: Work, tmp_path: Path, glm53_checkpoint: Path) -> None:
    other = Path(shutil.copytree(glm53_checkpoint, tmp_path / "checkpoint"))
    make(**on_disk(tmp_path / "cache")).generate(png())
    make_closed = make(other, model="checkpoint", disk_path=tmp_path / "b", disk_bytes=64 * MIB)
    make_closed.close()
    values = tensors(other)
    name = next(name for name in values if values[name].ndim == 2)
    values[name] = values[name].clone()
    values[name].view(torch.uint8)[0, 0] ^= 1
    rewritten(other, values)
    for encoder in (make(other, model="checkpoint", disk_path=tmp_path / "b", disk_bytes=64 * MIB),):
        assert encoder.generate(png())[0].metadata.cache == "miss"
    assert work.run == 2


SWITCHES: dict[str, tuple[Callable[[Any], object], Any, Any]] = {
    "attention": (torch.backends.cuda.enable_flash_sdp, False, True),
    "oneDNN": (torch._C._set_mkldnn_enabled, False, True),
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hit_has_the_bits_that_the_hosts_settings_give_now(
    make: Make, glm53_checkpoint: Path, switch: str, dtype: torch.dtype
) -> None:
    change, value, usual = SWITCHES[switch]
    image = png(width=300, height=200)
    with Encoder(glm53_checkpoint, device="cpu", dtype=dtype) as plain:
        cached = make(dtype=dtype)
        first = cached.generate(image)[0]
        try:
            change(value)
            now, answer = plain.generate(image)[0], cached.generate(image)[0]
        finally:
            change(usual)
        again = cached.generate(image)[0]
    assert not torch.equal(first.tensor, now.tensor)  # the control: it does change the bits
    assert torch.equal(answer.tensor, now.tensor)
    assert (answer.metadata.cache, again.metadata.cache) == ("miss", "memory")
    assert again.tensor is first.tensor


@pytest.mark.parametrize("until_when", ["in the run", "after the run", "for good"])
def test_rows_made_under_another_setting_than_asked_for_are_returned_and_not_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch, encoder: Encoder, until_when: str
) -> None:
    """A host switches a setting around work of its own, which another thread runs at any time."""
    forward, upload = GlmTower.forward, CpuLane.upload
    flash = torch.backends.cuda.enable_flash_sdp
    image = png(width=300, height=200)
    right = encoder.generate(image)[0].tensor

    def switched_in_the_run(self: GlmTower, *arguments: Any) -> torch.Tensor:
        flash(False)
        rows = forward(self, *arguments)
        if until_when == "in the run":
            flash(True)
        return rows

    def switched_before(self: CpuLane, host: torch.Tensor) -> torch.Tensor:
        flash(False)
        return upload(self, host)

    cached = make()
    try:
        with monkeypatch.context() as patch:
            if until_when != "for good":
                patch.setattr(GlmTower, "forward", switched_in_the_run)
            else:
                patch.setattr(CpuLane, "upload", switched_before)
            other = cached.generate(image)[0]
    finally:
        flash(True)
    again = cached.generate(image)[0]
    assert not torch.equal(other.tensor, right)
    assert torch.equal(again.tensor, right)
    assert (other.metadata.cache, again.metadata.cache) == ("miss", "miss")
    assert cached.generate(image)[0].tensor is again.tensor


def test_no_hits_from_before_bump_weights(make: Make, work: Work, tmp_path: Path) -> None:
    encoder = make(**on_disk(tmp_path / "cache"))
    encoder.generate(png())
    work.hold()
    under_way = encoder.submit(png(1))
    work.wait()
    work.wait()
    encoder.bump_weights()
    work.opened.set()
    assert under_way.result(timeout=HANG)
    assert [r.metadata.cache for r in encoder.generate([png(), png(1)])] == ["miss", "miss"]
    assert [r.metadata.cache for r in encoder.generate([png(), png(1)])] == ["memory", "memory"]
    encoder.close()
    again = make(**on_disk(tmp_path / "cache"))
    # The entry of the first epoch is found: the checkpoint is the same. The image in flight was not stored.
    assert [r.metadata.cache for r in again.generate([png(), png(1)])] == ["disk", "miss"]


# --- coalescing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["submit", "generate", "tasks"])
def test_64_callers_of_one_image_make_one_decode_and_one_run(make: Make, work: Work, way: str) -> None:
    encoder = make(replicas_per_gpu=2, preprocess_workers=2)
    work.hold()
    results: list[ImageResult] = []

    def ask() -> None:
        results.append(encoder.submit(png()).result(timeout=HANG))

    def generate() -> None:
        results.extend(encoder.generate(png()))

    async def tasks() -> None:
        for one in await asyncio.gather(*(encoder.generate_async(png()) for _ in range(64))):
            results.extend(one)

    calls = [lambda: asyncio.run(tasks())] if way == "tasks" else [ask if way == "submit" else generate] * 64
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    work.wait()
    threads[-1].join(0.1)
    work.opened.set()
    for thread in threads:
        thread.join(HANG)
    assert len(results) == 64
    assert (work.decoded, work.run) == (1, 1)
    assert len({result.tensor.data_ptr() for result in results}) == 1
    stats = encoder.cache_stats()
    assert stats.misses == 1
    assert stats.joined + stats.memory_hits == 63
    nothing_left(encoder)


def test_followers_get_their_rows_when_the_leader_is_cancelled(make: Make, work: Work) -> None:
    encoder = make(queue_depth=8)
    work.hold()
    blocker = encoder.submit(png(9))
    work.wait()
    leader = encoder.submit(png())
    until(lambda: encoder.cache_stats().misses == 2)
    followers = [encoder.submit(png()) for _ in range(3)]
    assert leader.cancel()
    assert followers[0].cancel()
    work.opened.set()
    assert followers[1].result(timeout=HANG).tensor is followers[2].result(timeout=HANG).tensor
    assert blocker.result(timeout=HANG)
    assert work.run == 2
    nothing_left(encoder)


def test_a_queued_image_is_not_encoded_when_all_its_waiters_cancel(make: Make, work: Work) -> None:
    encoder = make(queue_depth=8)
    work.hold()
    blocker = encoder.submit(png(9))
    work.wait()
    asks = [encoder.submit(png()) for _ in range(4)]
    until(lambda: encoder.cache_stats().misses == 2)
    assert all(ask.cancel() for ask in asks)
    until(lambda: encoder.health().queue_length == 0)  # a thread may have been preparing it
    work.opened.set()
    assert blocker.result(timeout=HANG)
    encoder.generate(png(9))
    assert work.run == 1
    assert encoder.generate(png())[0].metadata.cache == "miss"
    nothing_left(encoder)


def test_neither_leader_nor_follower_cancels_a_running_job(make: Make, work: Work) -> None:
    encoder = make()
    work.hold()
    leader = encoder.submit(png())
    work.wait()
    follower = encoder.submit(png(), deadline=time.monotonic() + 0.05)
    assert not leader.cancel()
    assert not follower.cancel()
    threading.Event().wait(0.1)
    work.opened.set()
    assert leader.result(timeout=HANG).tensor is follower.result(timeout=HANG).tensor


def test_an_error_reaches_leader_and_followers_and_is_not_cached(
    make: Make, work: Work, tmp_path: Path
) -> None:
    encoder = make(**on_disk(tmp_path / "cache"))
    work.hold()
    asks = [encoder.submit(png())]
    work.wait()
    asks += [encoder.submit(png()) for _ in range(5)]
    work.failing.append(ValueError("odd"))
    work.opened.set()
    errors = [ask.exception(timeout=HANG) for ask in asks]
    assert all(isinstance(error, ReplicaError) for error in errors)
    assert len(set(map(id, errors))) == 6
    assert encoder.generate(png())[0].metadata.cache == "miss"
    nothing_left(encoder)


def test_bad_media_fails_each_time_and_is_not_cached(make: Make, work: Work) -> None:
    encoder, cut = make(), png()[:-20]
    for _ in range(2):
        with pytest.raises(MediaDecodeError, match=r"^images\[1\]: "):
            encoder.generate([png(), cut])
        assert isinstance(encoder.submit(b"nothing").exception(timeout=HANG), MediaDecodeError)
        with pytest.raises(MediaError):
            asyncio.run(encoder.generate_async(cut))
    assert encoder.cache_stats().memory_entries == 1
    assert encoder.cache_stats().errors == 0
    nothing_left(encoder)


def test_deadlines_are_per_caller(make: Make, work: Work) -> None:
    encoder = make(queue_depth=8)
    work.hold()
    blocker = encoder.submit(png(9))
    work.wait()
    late = encoder.submit(png(), deadline=time.monotonic() + 0.1)
    until(lambda: encoder.cache_stats().misses == 2)
    patient = encoder.submit(png())
    assert isinstance(late.exception(timeout=HANG), DeadlineExceededError)
    assert not patient.done()
    work.opened.set()
    assert patient.result(timeout=HANG)
    assert blocker.result(timeout=HANG)
    assert isinstance(encoder.submit(png(), deadline=1e-9).exception(timeout=0), DeadlineExceededError)
    nothing_left(encoder)


def test_a_late_image_is_counted_as_late(make: Make, work: Work) -> None:
    encoder = make(queue_depth=8)
    work.hold()
    blocker = encoder.submit(png(9))
    work.wait()
    late = encoder.submit(png(), deadline=time.monotonic() + 0.1)
    assert isinstance(late.exception(timeout=HANG), DeadlineExceededError)
    until(lambda: encoder.stats().late == 1)
    assert encoder.stats().cancelled == 0
    work.opened.set()
    assert blocker.result(timeout=HANG)


def test_a_failed_generate_returns_after_its_preparation_has_stopped(
    make: Make, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make(queue_depth=8, preprocess_workers=2)
    inside, opened = threading.Event(), threading.Event()
    patches = Glm53.patches

    def slow(*arguments: Any) -> Any:
        inside.set()
        assert opened.wait(HANG)
        return patches(*arguments)

    monkeypatch.setattr(Glm53, "patches", slow)
    calls = (encoder.generate, lambda images: asyncio.run(encoder.generate_async(images)))
    for seed, call in enumerate(calls):
        inside.clear()
        opened.clear()
        ended = threading.Event()

        def ask(call: Any = call, ended: threading.Event = ended, seed: int = seed) -> None:
            with pytest.raises(MediaDecodeError):
                call([png(seed), png(4)[:-20]])
            ended.set()

        caller = threading.Thread(target=ask)
        caller.start()
        assert inside.wait(HANG)
        assert not ended.wait(0.1)
        opened.set()
        caller.join(HANG)
        assert ended.is_set()
        nothing_left(encoder)


@pytest.mark.parametrize("where", ["keep", "share", "give", "account"])
def test_an_internal_error_on_delivery_leaves_no_waiter(
    make: Make, work: Work, monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = make(queue_depth=8, preprocess_workers=1)
    coalescer = encoder._coalescer
    assert isinstance(coalescer, Coalescer)

    def broken(*_: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        if where == "keep":
            patch.setattr(coalescer.cache, "put", broken)
        elif where == "share":
            patch.setattr(coalescer, "_for_consumer", broken)
        elif where == "account":
            work.hold()
            asks = [encoder.submit(png()) for _ in range(3)]
            work.wait()
            until(lambda: encoder.cache_stats().joined == 2)
            forget, left = Deadlines.forget, [1]

            def broken_once(deadlines: Deadlines, promise: Any) -> None:
                if isinstance(promise, Waiter) and left:
                    left.pop()
                    raise MemoryError("no memory")
                forget(deadlines, promise)

            patch.setattr(Deadlines, "forget", broken_once)
            work.opened.set()
        else:
            patch.setattr(coalescer, "_result", broken)
            work.hold()
            # Two of one image with another between them: the last finds the first's result before decoding.
            asks = [encoder.submit(png(seed)) for seed in (1, 0)]
            work.wait()
            asks.append(encoder.submit(png(1)))
            work.opened.set()
        if where in ("keep", "share"):
            work.hold()
            asks = [encoder.submit(png()) for _ in range(3)]
            work.wait()
            until(lambda: encoder.cache_stats().joined == 2)
            work.opened.set()
        outcomes = [ask.exception(timeout=HANG) for ask in asks]
    assert where != "keep" or outcomes == [None] * 3
    assert where != "account" or outcomes.count(None) == 2
    assert where != "share" or isinstance(outcomes[0], ReplicaError)
    assert encoder.submit(png()).result(timeout=HANG)
    nothing_left(encoder)
    assert where != "keep" or (
        encoder.cache_stats().errors == 1 and "a result could not be cached" in caplog.text
    )


def test_callbacks_of_a_hit_found_before_decoding_run_without_the_cpu_permit(
    make: Make, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that waits for another encoder would deadlock on the permit that its thread holds."""
    permits = threading.BoundedSemaphore(1)
    monkeypatch.setattr("mm_encoder.engine.preprocess._CPUS", permits)
    encoder, other = make(queue_depth=8, preprocess_workers=1), make(preprocess_workers=1)
    work.hold()
    blocker = encoder.submit(png(9))
    work.wait()
    first = encoder.submit(png())
    until(lambda: encoder.cache_stats().misses == 2)
    assert isinstance(encoder._coalescer, Coalescer)
    find = encoder._coalescer.find
    # As if both had been looked up before either was in flight.
    monkeypatch.setattr(encoder._coalescer, "find", lambda *_: LookUp.MISS)
    second = encoder.submit(png())
    monkeypatch.setattr(encoder._coalescer, "find", find)
    answers: list[ImageResult] = []
    second.add_done_callback(lambda _: answers.extend(other.generate(png(3))))
    work.opened.set()
    assert second.result(timeout=HANG)
    until(lambda: len(answers) == 1)
    assert first.result(timeout=HANG)
    assert blocker.result(timeout=HANG)


def test_an_image_whose_result_was_stored_after_its_lookup_is_not_decoded(
    make: Make, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make()
    first = encoder.generate(png())[0]
    assert isinstance(encoder._coalescer, Coalescer)
    # As if it had been looked up before.
    monkeypatch.setattr(encoder._coalescer, "find", lambda *_: LookUp.MISS)
    second = encoder.generate(png())[0]
    assert second.tensor is first.tensor
    assert (work.decoded, work.run) == (1, 1)
    assert second.metadata.cache == "memory"
    nothing_left(encoder)


def test_an_image_cancelled_right_before_its_job_is_not_encoded(
    make: Make, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make()
    coalescer = encoder._coalescer
    assert isinstance(coalescer, Coalescer)
    start_leader = coalescer.start_leader

    def cancelled_first(waiter: Any, job: Any) -> None:
        assert waiter.future.cancel()
        start_leader(waiter, job)

    monkeypatch.setattr(coalescer, "start_leader", cancelled_first)
    assert encoder.submit(png()).cancelled()
    nothing_left(encoder)
    assert (work.decoded, work.run) == (0, 0)


def test_an_image_cancelled_while_it_moves_to_another_flight_leaves_that(
    make: Make, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make(queue_depth=8, preprocess_workers=1)
    coalescer = encoder._coalescer
    assert isinstance(coalescer, Coalescer)
    work.hold()
    blocker = encoder.submit(png(9))
    work.wait()
    with monkeypatch.context() as patch:
        patch.setattr(coalescer, "find", lambda *_: LookUp.MISS)
        second: Future[ImageResult]
        # Once it has joined, and before it is attached.
        patch.setattr(Flight, "forget", lambda _: second.cancelled() or second.cancel())
        first = encoder.submit(png())
        until(lambda: encoder.cache_stats().misses == 2)
        opened = threading.Event()
        before_decode = coalescer.before_decode
        patch.setattr(coalescer, "before_decode", lambda job: opened.wait(HANG) and before_decode(job))
        second = encoder.submit(png())
        opened.set()
        until(lambda: second.cancelled() and encoder.health().preprocessing[0].busy_s is None)
    assert first.cancel()
    until(lambda: encoder.health().queue_length == 0)  # nobody waits for the image any more
    work.opened.set()
    assert blocker.result(timeout=HANG)
    nothing_left(encoder)
    assert work.run == 1


def test_an_image_cancelled_while_hashed_leaves_no_flight(
    make: Make, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make(queue_depth=8, preprocess_workers=1)
    array = np.zeros((30, 30, 3), np.uint8)
    hashed, opened = threading.Semaphore(0), threading.Event()
    mm_hash = Source.mm_hash

    def slow(source: Source, model: str) -> str:
        if threading.current_thread().name.startswith("mm-encoder-prep"):
            hashed.release()
            assert opened.wait(HANG)
        return mm_hash(source, model)

    monkeypatch.setattr(Source, "mm_hash", slow)
    ask = encoder.submit(array)
    assert hashed.acquire(timeout=HANG)
    assert ask.cancel()
    opened.set()
    until(lambda: encoder.health().preprocessing[0].busy_s is None)
    nothing_left(encoder)
    assert (work.decoded, encoder.cache_stats().misses) == (0, 0)


def test_a_stored_error_of_generate_async_keeps_no_results_alive(make: Make, work: Work) -> None:
    encoder = make(memory_bytes=0)
    watches: list[weakref.ref[torch.Tensor]] = []
    keep = encoder.submit(png(0)).result(timeout=HANG)
    del keep

    async def call() -> MediaError:
        try:
            await encoder.generate_async([png(1), png(2)[:-20]])
        except MediaError as error:
            return error
        raise AssertionError("it did not fail")

    forward = GlmTower.forward

    def watched(*arguments: Any) -> torch.Tensor:
        rows = forward(*arguments)
        watches.append(weakref.ref(rows))
        return rows

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GlmTower, "forward", watched)
            error = asyncio.run(call())
        encoder.generate(png(3))
        assert error is not None
        until(lambda: all(watch() is None for watch in watches))
    finally:
        gc.enable()


def test_hits_and_followers_bypass_a_full_queue(make: Make, work: Work) -> None:
    encoder = make(queue_depth=1)
    encoder.generate(png())
    work.hold()
    running = encoder.submit(png(1))
    work.wait()
    work.wait()
    waiting = encoder.submit(png(2))
    with pytest.raises(EncoderBusyError):
        encoder.submit(png(3), timeout=0)
    assert encoder.submit(png(), timeout=0).result(timeout=0).metadata.cache == "memory"
    follower = encoder.submit(png(1), timeout=0)
    assert asyncio.run(encoder.generate_async(png(), timeout=0))[0].metadata.cache == "memory"
    work.opened.set()
    for future in (running, waiting, follower):
        assert future.result(timeout=HANG)
    nothing_left(encoder)


def test_a_refused_leader_does_not_fail_its_followers(make: Make, work: Work) -> None:
    encoder = make(queue_depth=1)
    work.hold()
    running = encoder.submit(png(1))
    work.wait()
    waiting = encoder.submit(png(2))
    patient: list[Future[ImageResult]] = []
    caller = threading.Thread(target=lambda: patient.append(encoder.submit(png())))
    caller.start()
    until(lambda: encoder.health().waiting == 1)
    for _ in range(3):
        with pytest.raises(EncoderBusyError):
            encoder.submit(png(), timeout=0.01)
    work.opened.set()
    caller.join(HANG)
    assert patient[0].result(timeout=HANG)
    assert running.result(timeout=HANG)
    assert waiting.result(timeout=HANG)
    nothing_left(encoder)


def test_cancelling_one_task_leaves_the_other_waiters(make: Make, work: Work) -> None:
    encoder = make(queue_depth=8)
    work.hold()

    async def main() -> list[ImageResult]:
        tasks = [asyncio.create_task(encoder.generate_async(png())) for _ in range(6)]
        while encoder.stats().requests == 0:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        tasks[3].cancel()
        await asyncio.sleep(0.01)
        work.opened.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes]
        assert cancelled == [True, False, False, True, False, False]
        return [outcome[0] for outcome in outcomes if isinstance(outcome, list)]

    results = asyncio.run(main())
    assert len({result.tensor.data_ptr() for result in results}) == 1
    nothing_left(encoder)


def test_rows_stay_right_while_entries_are_evicted(make: Make, work: Work) -> None:
    """A hit stays valid when its entry is evicted before the caller reads it (case D17 of tests/abuse)."""
    one = make().generate(png())[0].tensor.nbytes
    encoder = make(memory_bytes=3 * one, replicas_per_gpu=2)
    files = [png(seed) for seed in range(5)]
    wanted = [result.tensor.clone() for result in make().generate(files)]
    wrong: list[int] = []

    def caller() -> None:
        for _ in range(5):
            order = [0, 1, 2, 3, 4, 0]
            results = encoder.generate([files[index] for index in order])
            wrong.extend(
                i for i, r in zip(order, results, strict=True) if not torch.equal(r.tensor, wanted[i])
            )

    threads = [threading.Thread(target=caller) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert wrong == []
    stats = encoder.cache_stats()
    assert stats.memory_bytes <= 3 * one
    assert stats.memory_hits + stats.joined + stats.misses == 8 * 5 * 6
    nothing_left(encoder)


@pytest.mark.parametrize("config", [{"memory_bytes": 0}, {"max_entry_bytes": 1}])
def test_a_cache_that_stores_nothing_still_encodes(make: Make, work: Work, config: dict[str, Any]) -> None:
    encoder = make(**config)
    for _ in range(2):
        assert encoder.generate(png())[0].metadata.cache == "miss"
    stats = encoder.cache_stats()
    assert (work.run, stats.memory_entries, stats.misses) == (2, 0, 2)
    assert stats.bypasses == (2 if config.get("max_entry_bytes") else 0)


# --- closing and memory ------------------------------------------------------------------------------


def test_views_outlive_close_and_are_counted(make: Make, work: Work) -> None:
    gc.collect()
    before = live_cpu_bytes_process()
    encoder = make()
    rows = encoder.generate(png())[0].tensor
    kept, view = rows.clone(), rows[1:]
    del rows
    encoder.close()
    assert torch.equal(view, kept[1:])
    assert encoder.cache_stats().live_cpu_bytes_process >= before + kept.nbytes
    del view
    gc.collect()
    until(lambda: encoder.cache_stats().live_cpu_bytes_process == before)


def test_close_writes_pending_entries_and_unlocks_the_directory(
    make: Make, work: Work, tmp_path: Path
) -> None:
    encoder = make(**on_disk(tmp_path / "cache"))
    with pytest.raises(CacheLockedError, match="cache"):
        make(**on_disk(tmp_path / "cache"))
    encoder.generate([png(seed) for seed in range(10)])
    encoder.close()
    with pytest.raises(EncoderClosedError):
        encoder.submit(png())
    again = make(**on_disk(tmp_path / "cache"))
    assert again.cache_stats().disk_entries == 10


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_an_unusable_cache_directory_fails_construction(make: Make, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    before = threading.active_count()
    with pytest.raises(CacheError, match="file"):
        make(**on_disk(tmp_path / path))
    until(lambda: threading.active_count() == before)


def test_a_cache_directory_without_its_lock_file_is_reused(make: Make, tmp_path: Path) -> None:
    """A cleaner of temporary folders may delete the lock file."""
    encoder = make(**on_disk(tmp_path / "cache"))
    encoder.generate(png())
    encoder.close()
    (tmp_path / "cache" / "mm-encoder-cache.lock").unlink()
    assert make(**on_disk(tmp_path / "cache")).generate(png())[0].metadata.cache == "disk"


def test_disk_path_expands_a_tilde(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make(disk_path="~/cache", disk_bytes=64 * MIB)
    assert (tmp_path / "cache").is_dir()
    with pytest.raises(ValueError, match="disk_path must name a directory"):
        CacheConfig(disk_path="", disk_bytes=2**31)


def test_a_failed_construction_unlocks_the_directory(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Glm53, "build_tower", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(**on_disk(tmp_path / "cache"))
    assert make(**on_disk(tmp_path / "cache")).generate(png())


def test_a_dropped_encoder_closes_its_cache(glm53_checkpoint: Path, work: Work, tmp_path: Path) -> None:
    config = CacheConfig(max_entry_bytes=MIB, **on_disk(tmp_path / "cache"))
    encoder = Encoder(glm53_checkpoint, device="cpu", cache=config)
    encoder.generate(png())
    watch = weakref.ref(encoder)
    del encoder
    gc.collect()
    assert watch() is None

    def free() -> bool:
        try:
            Encoder(glm53_checkpoint, device="cpu", cache=config).close()
        except CacheLockedError:
            return False
        return True

    until(free)


def test_a_result_is_freed_with_its_last_reference(make: Make, work: Work) -> None:
    encoder = make(memory_bytes=0)
    gc.collect()
    gc.disable()
    try:
        future = encoder.submit(png())
        watch = weakref.ref(future.result(timeout=HANG).tensor)
        del future
        until(lambda: encoder.health().replicas[0].busy_s is None)
        encoder.generate(png(1))
        until(lambda: watch() is None)
    finally:
        gc.enable()


def test_leaving_by_an_exception_cancels_waiting_jobs(make: Make, work: Work) -> None:
    encoder = make(queue_depth=9)
    work.hold()
    running = encoder.submit(png(9))
    work.wait()
    waiting = [encoder.submit(png(seed)) for seed in (0, 1, 0)]
    threading.Timer(0.1, work.opened.set).start()
    with pytest.raises(KeyboardInterrupt), encoder:
        raise KeyboardInterrupt
    assert running.result(timeout=0)
    assert all(future.cancelled() for future in waiting)


def test_a_callback_may_close_an_encoder_with_a_cache(make: Make, work: Work) -> None:
    encoder = make()
    closed = threading.Event()

    def on_result(_: Future[ImageResult]) -> None:
        encoder.close()
        closed.set()

    encoder.submit(png()).add_done_callback(on_result)
    assert closed.wait(HANG)
    encoder.close()


def test_a_hit_is_of_an_allowed_format_too(glm53_checkpoint: Path, tmp_path: Path) -> None:
    cache = CacheConfig(disk_path=tmp_path / "rows", disk_bytes=4 * MIB, max_entry_bytes=MIB)
    with Encoder(glm53_checkpoint, device="cpu", cache=cache) as encoder:
        encoder.generate(png())
    narrowed = MediaLimits(formats=["JPEG"])
    with Encoder(glm53_checkpoint, device="cpu", cache=cache, limits=narrowed) as encoder:
        with pytest.raises(UnsupportedMediaError, match="not among the formats"):
            encoder.generate(png())
        assert encoder.cache_stats().disk_hits == 0
