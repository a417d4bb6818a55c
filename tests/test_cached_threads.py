"""Torch's number of threads divides the sums of a product, and each thread has its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from mm_encoder import CacheConfig, Encoder, ImageResult

from .helpers.threads import joined, started
from .helpers.waiting import HANG

MIB = 1024**2
IMAGES = np.random.default_rng(0).integers(0, 255, (2, 700, 900, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def set_elsewhere(threads: int) -> None:
    """Set the number that new threads get, and leave that of this one."""
    joined([started(lambda: torch.set_num_threads(threads))])
    assert torch.get_num_threads() == 2


def encode(checkpoint: Path, cache: CacheConfig | None = None) -> ImageResult:
    with Encoder(checkpoint, device="cpu", cache=cache) as encoder:
        return encoder.generate(IMAGES[0])[0]


def test_a_key_covers_the_number_of_the_thread_that_runs_the_tower(
    glm53_checkpoint: Path, tmp_path: Path
) -> None:
    """Which is not that of the thread that makes the encoder."""
    cache = CacheConfig(max_entry_bytes=MIB, disk_path=tmp_path / "cache", disk_bytes=64 * MIB)
    with_two = encode(glm53_checkpoint, cache)
    set_elsewhere(1)
    with_one, again = encode(glm53_checkpoint, cache), encode(glm53_checkpoint, cache)
    assert not torch.equal(with_one.tensor, with_two.tensor)  # the control: it does change the bits
    assert torch.equal(with_one.tensor, encode(glm53_checkpoint).tensor)
    assert torch.equal(with_one.tensor, again.tensor)
    assert [one.metadata.cache for one in (with_two, with_one, again)] == ["miss", "miss", "disk"]


def test_the_number_may_change_elsewhere_at_any_time(glm53_checkpoint: Path) -> None:
    with Encoder(glm53_checkpoint, device="cpu", cache=CacheConfig(max_entry_bytes=MIB)) as encoder:
        first = encoder.generate(IMAGES[0])[0]
        set_elsewhere(1)
        assert encoder.generate(IMAGES[0])[0].tensor is first.tensor
        joined([started(lambda: encoder.generate(IMAGES[1]))])
        assert encoder.generate(IMAGES[1])[0].metadata.cache == "memory"


def test_rows_of_a_replica_with_another_number_are_not_kept(glm53_checkpoint: Path) -> None:
    with Encoder(glm53_checkpoint, device="cpu", cache=CacheConfig(max_entry_bytes=MIB)) as encoder:
        right = encoder.generate(IMAGES[0])[0]

        def in_the_replica(_: Future[ImageResult]) -> None:
            torch.set_num_threads(1)

        future = encoder.submit(IMAGES[1][:30, :30])
        future.add_done_callback(in_the_replica)
        assert future.result(HANG)
        results = [encoder.generate(IMAGES[1])[0] for _ in range(2)]
        assert [result.metadata.cache for result in results] == ["miss", "miss"]
        assert encoder.generate(IMAGES[0])[0].tensor is right.tensor
