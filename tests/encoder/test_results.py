"""The results of an encoder on the CPU: rows, metadata, order and ownership."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_encoder import (
    Encoder,
    MediaPlanner,
)
from mm_encoder.families.glm53 import GlmTower

from ..helpers.images import mixed, png


def test_results_have_input_order(encoder: Encoder) -> None:
    images = mixed(12)
    results = encoder.generate(images)
    alone = [encoder.generate(image)[0] for image in images]
    assert len(results) == len(images)
    for result, single in zip(results, alone, strict=True):
        assert torch.equal(result.tensor, single.tensor)
        assert result.metadata == single.metadata


def test_generate_accepts_an_iterator_and_an_empty_list(encoder: Encoder) -> None:
    assert encoder.generate([]) == []
    assert len(encoder.generate(image for image in mixed(3))) == 3


def test_metadata_describes_the_tensor(encoder: Encoder, glm53_checkpoint: Path) -> None:
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
    (rows.clone().requires_grad_() * 2).sum().backward()  # an inference tensor would raise


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
def test_dtype_sets_the_result_dtype_and_stays_close_to_float32(
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
        encoder.generate(png(20, 20))  # so that the replica has released the previous job
        assert watch() is None
        future = encoder.submit(png(40, 40))
        watch = weakref.ref(future.result().tensor)
        encoder.generate(png(20, 20))
        del future
        assert watch() is None
    finally:
        gc.enable()


def test_tensors_made_under_inference_mode_are_ordinary(glm53_checkpoint: Path) -> None:
    with torch.inference_mode(), Encoder(glm53_checkpoint, device="cpu") as encoder:
        named = encoder.encode_image(png(30, 30))
        _, inputs = MediaPlanner(glm53_checkpoint).prepare_inputs(png(30, 30))
    for name, value in (named | inputs).items():
        assert not value.is_inference(), name
