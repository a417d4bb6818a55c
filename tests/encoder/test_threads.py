"""Several replicas and calling threads, and a full queue."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder import (
    Encoder,
    ImageResult,
)
from mm_encoder.families.glm53 import Glm53

from ..helpers.holding import Hold
from ..helpers.images import mixed, png
from ..helpers.waiting import HANG, in_flight


@pytest.mark.parametrize("share_weights", [False, True])
def test_replicas_and_callers_give_the_bits_of_a_sequential_run(
    glm53_checkpoint: Path, share_weights: bool
) -> None:
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
            thread.join(HANG)
        assert in_flight(encoder) == (0, 0, 0, 0)
    for part in range(4):
        for result, wanted in zip(outcomes[part], sequential[part::4], strict=True):
            assert torch.equal(result.tensor, wanted.tensor)
            assert result.metadata == wanted.metadata


def test_two_images_run_on_two_replicas_at_once(glm53_checkpoint: Path, towers: Hold) -> None:
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=2) as encoder:
        futures = [encoder.submit(png(30, 30)) for _ in range(2)]
        towers.wait()
        towers.wait()
        towers.release()
        assert all(future.result(timeout=HANG) for future in futures)


@pytest.mark.parametrize(("share_weights", "copies"), [(False, 3), (True, 1)])
def test_weights_are_per_replica_or_shared(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, share_weights: bool, copies: int
) -> None:
    towers: list[Any] = []
    build = Glm53.build_tower

    def counted(*arguments: Any) -> Any:
        towers.append(build(*arguments))
        return towers[-1]

    monkeypatch.setattr(Glm53, "build_tower", counted)
    with Encoder(glm53_checkpoint, device="cpu", replicas_per_gpu=3, share_weights=share_weights):
        assert len(towers) == copies
        pointers = {tower.downsample.weight.data_ptr() for tower in towers}
        assert len(pointers) == copies


def test_a_full_queue_blocks_until_a_job_is_cancelled(glm53_checkpoint: Path, towers: Hold) -> None:
    with Encoder(glm53_checkpoint, device="cpu", queue_depth=2) as encoder:
        running = encoder.submit(png(20, 20))
        towers.wait()
        waiting = [encoder.submit(png(20, 20)) for _ in range(2)]
        late: list[Future[ImageResult]] = []
        caller = threading.Thread(target=lambda: late.append(encoder.submit(png(20, 20))))
        caller.start()
        caller.join(0.05)
        assert caller.is_alive()
        assert waiting[0].cancel()
        caller.join(HANG)
        assert not caller.is_alive()
        assert not running.cancel()
        towers.release()
        for future in (running, waiting[1], *late):
            assert future.result(timeout=HANG).metadata.length > 0
    assert in_flight(encoder) == (0, 0, 0, 0)
