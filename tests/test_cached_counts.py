"""What is counted where a cache is in front of the engine: docs/observability.md states it in a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mm_encoder import (
    CacheConfig,
    DeadlineExceededError,
    Encoder,
    EncoderBusyError,
    EncoderClosedError,
    MediaDecodeError,
    MediaPlanner,
    PlanMismatchError,
    UnsupportedMediaError,
)

from .helpers.holding import Hold, hold_towers
from .helpers.images import png
from .helpers.waiting import HANG, nothing_left, until


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    with hold_towers(monkeypatch) as hold:
        yield hold


@pytest.fixture
def cached(glm53_checkpoint: Path) -> Iterator[Encoder]:
    with Encoder(glm53_checkpoint, device="cpu", cache=CacheConfig()) as encoder:
        yield encoder


def counts(encoder: Encoder) -> dict[str, int]:
    """The counts that are not zero, those of the cache with their part of the name first."""
    stats, cache = encoder.stats(), encoder.cache_stats()
    names = "requests", "succeeded", "failed", "cancelled", "late", "refused", "joined"
    found = {name: getattr(stats, name) for name in names}
    found |= {
        f"cache {name}": getattr(cache, name) for name in ("memory_hits", "disk_hits", "misses", "joined")
    }
    return {name: count for name, count in found.items() if count}


ONE_MISS = {"requests": 1, "succeeded": 1, "cache misses": 1}


def test_a_hit_counts_in_the_cache_alone_even_if_another_count_was_expected(cached: Encoder) -> None:
    rows = cached.generate(png())[0].metadata.length
    cached.generate(png())
    with pytest.raises(PlanMismatchError):
        cached.generate(png(), expected_tokens=[rows + 1])
    assert counts(cached) == ONE_MISS | {"cache memory_hits": 2}


def test_a_lookup_that_fails_or_is_late_counts_nowhere(cached: Encoder, tmp_path: Path) -> None:
    with pytest.raises(MediaDecodeError):
        cached.submit(tmp_path / "missing.png").result(HANG)
    with pytest.raises(UnsupportedMediaError):
        cached.submit(np.zeros((2, 2, 2), np.uint8)).result(HANG)
    with pytest.raises(DeadlineExceededError):
        cached.submit(png(), deadline=time.monotonic() - 1).result(HANG)
    assert counts(cached) == {}


def test_callers_of_one_job_count_once_whatever_they_receive(
    cached: Encoder, glm53_checkpoint: Path, towers: Hold
) -> None:
    rows = MediaPlanner(glm53_checkpoint).plan(png()).length
    first = cached.submit(png())
    towers.wait()
    others = [cached.submit(png(), expected_tokens=n) for n in (rows, rows + 1)]
    towers.release()
    assert first.result(HANG).metadata.length == others[0].result(HANG).metadata.length == rows
    assert isinstance(others[1].exception(HANG), PlanMismatchError)
    nothing_left(cached)
    assert counts(cached) == ONE_MISS | {"cache joined": 2}


def test_only_the_last_to_leave_a_job_counts(glm53_checkpoint: Path, towers: Hold) -> None:
    with Encoder(glm53_checkpoint, device="cpu", cache=CacheConfig(), queue_depth=9) as encoder:
        running = encoder.submit(png(30, 30))
        towers.wait()
        first = encoder.submit(png(60, 60))
        until(lambda: encoder.cache_stats().misses == 2)
        second = encoder.submit(png(60, 60))
        assert second.cancel()
        assert encoder.stats().cancelled == 0
        assert first.cancel()
        until(lambda: encoder.stats().cancelled == 1)
        towers.release()
        running.result(HANG)
        nothing_left(encoder)
        assert counts(encoder) == {
            "requests": 2,
            "succeeded": 1,
            "cancelled": 1,
            "cache misses": 2,
            "cache joined": 1,
        }


def test_a_job_that_fails_or_is_refused_before_decoding_is_no_lookup(
    glm53_checkpoint: Path, towers: Hold
) -> None:
    with Encoder(glm53_checkpoint, device="cpu", cache=CacheConfig(), queue_depth=1) as encoder:
        with pytest.raises(MediaDecodeError):
            encoder.submit(b"nothing").result(HANG)
        running = encoder.submit(png(30, 30))
        towers.wait()
        waiting = encoder.submit(png(60, 60))
        with pytest.raises(EncoderBusyError):
            encoder.submit(png(50, 60), timeout=0)
        towers.release()
        running.result(HANG)
        waiting.result(HANG)
        nothing_left(encoder)
        assert counts(encoder) == {
            "requests": 4,
            "succeeded": 2,
            "failed": 1,
            "refused": 1,
            "cache misses": 2,
        }


@pytest.mark.parametrize("cache", [None, CacheConfig()], ids=["no cache", "cache"])
def test_calls_of_a_closed_encoder_count_nowhere(glm53_checkpoint: Path, cache: CacheConfig | None) -> None:
    encoder = Encoder(glm53_checkpoint, device="cpu", cache=cache)
    encoder.close()
    for call in (encoder.submit, encoder.generate):
        with pytest.raises(EncoderClosedError):
            call(png())
    assert counts(encoder) == {}
