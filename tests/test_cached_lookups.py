"""Lookups while a disk stalls: they obey timeout and deadline, and hold up nobody else."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder import CacheConfig, DeadlineExceededError, Encoder, EncoderBusyError
from mm_encoder.cache.files import FileTier
from mm_encoder.coalescer import Coalescer
from mm_encoder.daemons import DaemonPool
from mm_encoder.families.glm53 import Glm53
from mm_encoder.media.source import encoded_hash

from .helpers.holding import Hold, hold_towers
from .helpers.images import png
from .helpers.programs import outcome_of
from .helpers.threads import joined, library_threads, started
from .helpers.waiting import HANG, nothing_left, until

pytestmark = pytest.mark.threads

MIB = 1024**2
FAR = 1e6
Make = Callable[..., Encoder]


@pytest.fixture
def make(glm53_checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes an encoder with a disk tier, from arguments of Encoder."""
    made: list[Encoder] = []

    def encoder(memory_bytes: int = 64 * MIB, **arguments: Any) -> Encoder:
        config = CacheConfig(
            memory_bytes=memory_bytes,
            max_entry_bytes=MIB,
            disk_path=tmp_path / "cache",
            disk_bytes=64 * MIB,
        )
        made.append(Encoder(glm53_checkpoint, device="cpu", cache=config, **arguments))
        return made[-1]

    yield encoder
    for one in made:
        one.close()


def coalescer_of(encoder: Encoder) -> Coalescer:
    assert isinstance(encoder._coalescer, Coalescer)
    return encoder._coalescer


def key_of(encoder: Encoder, data: bytes) -> bytes:
    return coalescer_of(encoder).keys.key(encoded_hash(encoder.model, data), None)


def stalled_disk(monkeypatch: pytest.MonkeyPatch, encoder: Encoder, *images: bytes) -> Hold:
    """Hold reads of these images' keys; of all keys if there are none."""
    keys = {key_of(encoder, image) for image in images}
    return Hold(monkeypatch, FileTier, "get", lambda _, key: not keys or key in keys)


# --- one caller --------------------------------------------------------------------------------------


def test_without_time_a_stalled_disk_is_a_miss(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = make()
    with stalled_disk(monkeypatch, encoder):
        results = [
            encoder.submit(png(), timeout=0).result(HANG),
            asyncio.run(encoder.generate_async(png(seed=1), timeout=0))[0],
        ]
        assert [result.metadata.cache for result in results] == ["miss", "miss"]
        assert encoder.cache_stats().stalled == 2
    nothing_left(encoder)
    until(lambda: len(coalescer_of(encoder).cache._reads) == 0)


def test_the_queue_is_waited_for_as_long_as_the_disk_has_left(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make(queue_depth=1)
    with hold_towers(monkeypatch) as tower, stalled_disk(monkeypatch, encoder, png(seed=9)):
        running = encoder.submit(png(seed=1))
        tower.wait()
        waiting = encoder.submit(png(seed=2))
        with pytest.raises(EncoderBusyError):
            encoder.submit(png(seed=9), timeout=0.2)
        with pytest.raises(EncoderBusyError):
            asyncio.run(encoder.generate_async(png(seed=9), timeout=0.2))
    assert running.result(HANG)
    assert waiting.result(HANG)
    nothing_left(encoder)


@pytest.mark.parametrize("timeout", [None, FAR])
def test_a_deadline_ends_a_lookup(make: Make, monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> None:
    encoder = make()
    with stalled_disk(monkeypatch, encoder):
        late = encoder.submit(png(), timeout=timeout, deadline=time.monotonic() + 0.05)
        assert isinstance(late.exception(HANG), DeadlineExceededError)
        deadline = time.monotonic() + 0.05
        with pytest.raises(DeadlineExceededError):
            asyncio.run(encoder.generate_async(png(), timeout=timeout, deadline=deadline))
    nothing_left(encoder)
    assert encoder.submit(png(), deadline=time.monotonic() + FAR).result(HANG)


def test_limits_that_are_not_reached_cost_no_hit(make: Make) -> None:
    first = make(memory_bytes=0)
    rows = [first.generate(png(seed=seed))[0].tensor for seed in range(4)]
    first.close()
    second = make(memory_bytes=0)
    until_far = time.monotonic() + FAR
    results = [
        second.submit(png(seed=0), timeout=FAR).result(HANG),
        second.generate(png(seed=1), deadline=until_far)[0],
        asyncio.run(second.generate_async(png(seed=2), timeout=FAR, deadline=until_far))[0],
        asyncio.run(second.generate_async(png(seed=3)))[0],
    ]
    assert [result.metadata.cache for result in results] == ["disk"] * 4
    assert all(torch.equal(result.tensor, row) for result, row in zip(results, rows, strict=True))
    stats = second.cache_stats()
    assert (stats.disk_hits, stats.misses, stats.stalled) == (4, 0, 0)


def test_a_read_that_ends_after_its_caller_left_fills_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make()
    writer.generate(png())
    writer.close()
    encoder = make()
    with stalled_disk(monkeypatch, encoder) as hold:
        with pytest.raises(DeadlineExceededError):
            encoder.generate(png(), deadline=time.monotonic() + 0.05)
        hold.wait()
    until(lambda: encoder.cache_stats().memory_entries == 1)
    assert encoder.generate(png())[0].metadata.cache == "memory"


# --- other callers -----------------------------------------------------------------------------------


def test_others_pass_a_stalled_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """More lookups stall than there are threads for event loops."""
    writer = make()
    writer.generate(png(seed=2))
    writer.close()
    encoder = make(preprocess_workers=1)
    hot, stalled = png(seed=1), [png(seed=seed) for seed in range(10, 15)]
    encoder.generate(hot)

    async def main(hold: Hold) -> None:
        slow = [asyncio.create_task(encoder.generate_async(image)) for image in stalled * 20]
        await asyncio.to_thread(hold.wait, len(stalled))  # one read for each key
        found = [(await encoder.generate_async(image))[0].metadata.cache for image in (hot, png(seed=2))]
        assert found == ["memory", "disk"]
        assert not any(task.done() for task in slow)
        hold.release()
        await asyncio.gather(*slow)

    with stalled_disk(monkeypatch, encoder, *stalled) as hold:
        asyncio.run(main(hold))
    assert encoder.cache_stats().misses == 1 + len(stalled)
    nothing_left(encoder)


def test_others_pass_an_image_whose_file_stalls(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    encoder, path = make(preprocess_workers=1), tmp_path / "image"
    path.write_bytes(png(seed=1))
    encoder.generate(png())

    async def main(hold: Hold) -> None:
        slow = asyncio.create_task(encoder.generate_async(path))
        await asyncio.to_thread(hold.wait)
        assert (await encoder.generate_async(png()))[0].metadata.cache == "memory"
        hold.release()
        assert (await slow)[0].metadata.cache == "miss"

    with Hold(monkeypatch, Glm53, "open", lambda _, image, *__: image is path) as hold:
        asyncio.run(main(hold))


def test_a_caller_with_a_deadline_does_not_wait_for_the_one_who_reads(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make()
    with stalled_disk(monkeypatch, encoder) as hold:
        patient = started(lambda: encoder.generate(png()))
        hold.wait()
        late = encoder.submit(png(), deadline=time.monotonic() + 0.05)
        assert isinstance(late.exception(HANG), DeadlineExceededError)
        assert patient.is_alive()
    joined([patient])
    nothing_left(encoder)


# --- the end -----------------------------------------------------------------------------------------


def test_neither_close_nor_the_interpreter_waits_for_a_stalled_lookup(
    glm53_checkpoint: Path, tmp_path: Path
) -> None:
    program = f"""
        from mm_encoder.cache.files import FileTier

        limits = dict(disk_bytes=2**26, max_entry_bytes=2**20)
        config = mm_encoder.CacheConfig(disk_path={str(tmp_path / "cache")!r}, **limits)
        stalled = threading.Semaphore(0)

        def get(*_):
            stalled.release()
            threading.Event().wait()

        FileTier.get = get
        one = encoder(cache=config)

        async def ask():
            task = asyncio.create_task(one.generate_async(IMAGE))
            await asyncio.to_thread(stalled.acquire)
            task.cancel()

        asyncio.run(ask())
        assert one.submit(IMAGE + 1, timeout=0).result()
        one.close()
        print("closed")
    """
    assert outcome_of(program, glm53_checkpoint) == (0, "closed\n", "")


def test_idle_lookup_threads_end_with_the_encoder(make: Make) -> None:
    encoder = make()
    asyncio.run(encoder.generate_async([png(), png(seed=1)], timeout=FAR))
    assert any("lookup" in thread.name for thread in library_threads())
    assert any("read" in thread.name for thread in library_threads())
    encoder.close()
    del encoder
    gc.collect()
    until(lambda: not any("lookup" in one.name or "read" in one.name for one in library_threads()))


def test_a_pool_survives_what_its_work_and_its_callbacks_raise() -> None:
    pool = DaemonPool(1, "mm-encoder-test")

    def leave(_: object) -> None:
        raise SystemExit

    opened = threading.Event()
    first, second = pool.submit(lambda: opened.wait(HANG) / 0), pool.submit(lambda: None)
    second.add_done_callback(leave)
    opened.set()
    assert isinstance(first.exception(HANG), ZeroDivisionError)
    assert pool.submit(lambda: 3).result(HANG) == 3
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(lambda: None)
    until(lambda: not any(thread.is_alive() for thread in pool._threads))


def test_a_system_without_threads_makes_lookups_misses(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = make()

    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(DaemonPool, "_start_thread", none_left)
    assert encoder.submit(png(), timeout=FAR).result(HANG).metadata.cache == "miss"
