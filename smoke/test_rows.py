"""The rows: their values, their ownership, and that neither concurrency nor bad images change them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from mm_encoder import Encoder, EncoderClosedError, MediaError, MediaPlanner, PlanMismatchError

# bfloat16 has 8 bits of precision. At the released depth of GLM-5.3 (24 layers, random weights) every row is
# above 0.9995; real weights may be somewhat worse. Rows of different images, or of a tower that was loaded
# wrongly, are below 0.8.
COSINE = 0.99


def rows_in(dtype: torch.dtype, checkpoint: Path, device: torch.device, images: list[bytes]) -> torch.Tensor:
    """Return all rows of `images` from a tower in `dtype`, checked, as float32 on the CPU."""
    with Encoder(checkpoint, device=device, dtype=dtype) as encoder:
        results = encoder.generate(images)
        assert len(results) == len(images)
        for rows, metadata in results:
            assert rows.dtype == dtype
            assert rows.device == device
            assert rows.ndim == 2
            assert tuple(rows.shape) == metadata.shape
            assert len(rows) == metadata.length
            assert bool(rows.isfinite().all())
            assert bool(rows.any())
        assert len({rows.shape[1] for rows, _ in results}) == 1
        return torch.cat([rows.float().cpu() for rows, _ in results])


def test_float32_and_bfloat16_rows_are_finite_and_agree(
    checkpoint: Path,
    device: torch.device,
    images: list[bytes],
    record_property: Callable[[str, object], None],
) -> None:
    full = rows_in(torch.float32, checkpoint, device, images)
    half = rows_in(torch.bfloat16, checkpoint, device, images)
    lowest = torch.nn.functional.cosine_similarity(full, half).min().item()
    record_property("lowest cosine", f"{lowest:.5f}")
    assert lowest > COSINE


def test_the_planner_knows_the_number_of_rows(
    checkpoint: Path, encoder: Encoder, images: list[bytes], expected: list[torch.Tensor]
) -> None:
    planner = MediaPlanner(checkpoint)
    planned = [planner.plan(image).length for image in images]
    assert planned == [len(rows) for rows in expected]
    encoder.generate(images, expected_tokens=planned)
    with pytest.raises(PlanMismatchError):
        encoder.generate(images[0], expected_tokens=[planned[0] + 1])


def test_two_threads_at_once_get_the_bits_of_a_sequential_run(
    checkpoint: Path, device: torch.device, images: list[bytes], expected: list[torch.Tensor]
) -> None:
    both_ready = threading.Barrier(2, timeout=60)

    def call(encoder: Encoder) -> list[torch.Tensor]:
        both_ready.wait()
        return [encoder.generate(image)[0].tensor.cpu() for _ in range(3) for image in images]

    with Encoder(checkpoint, device=device, replicas_per_gpu=2) as encoder, ThreadPoolExecutor(2) as callers:
        for got in callers.map(call, [encoder, encoder]):
            for rows, wanted in zip(got, 3 * expected, strict=True):
                assert torch.equal(rows, wanted)


MALFORMED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda good: good[: len(good) // 2],
    "text": lambda _: b"This is not a picture.\n" * 100,
    "header only": lambda good: good[: good.index(b"\xff\xda")],  # all of a JPEG before its first scan
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_image_is_a_media_error_and_changes_nothing(
    encoder: Encoder, images: list[bytes], expected: list[torch.Tensor], kind: str
) -> None:
    with pytest.raises(MediaError):
        encoder.generate(MALFORMED[kind](images[0]))
    assert torch.equal(encoder.generate(images[0])[0].tensor.cpu(), expected[0])


def test_results_outlive_the_encoder(
    checkpoint: Path, device: torch.device, images: list[bytes], expected: list[torch.Tensor]
) -> None:
    encoder = Encoder(checkpoint, device=device)
    results = encoder.generate(images)
    encoder.close()
    with pytest.raises(EncoderClosedError):
        encoder.generate(images[0])
    del encoder
    gc.collect()
    # The memory that the encoder has freed may now be reused and overwritten.
    torch.cuda.empty_cache()
    others = [torch.full_like(rows, 7) for rows, _ in results for _ in range(4)]
    for (rows, _), wanted in zip(results, expected, strict=True):
        assert torch.equal(rows.cpu(), wanted)
    assert all(bool((other == 7).all()) for other in others)


def test_a_result_is_an_ordinary_tensor_with_storage_of_its_own(
    encoder: Encoder, images: list[bytes], expected: list[torch.Tensor]
) -> None:
    first, second = (encoder.generate(images[0])[0].tensor for _ in range(2))
    assert first.is_contiguous()
    assert not first.requires_grad
    assert not first.is_inference()
    assert first.untyped_storage().nbytes() == first.numel() * first.element_size()
    first.zero_()
    assert torch.equal(second.cpu(), expected[0])
    assert torch.equal(encoder.generate(images[0])[0].tensor.cpu(), expected[0])


def test_a_result_goes_through_dlpack_and_back(
    encoder: Encoder, images: list[bytes], expected: list[torch.Tensor]
) -> None:
    rows = encoder.generate(images[0])[0].tensor
    back = from_dlpack(rows)
    assert back.data_ptr() == rows.data_ptr()
    del rows
    gc.collect()
    assert torch.equal(back.cpu(), expected[0])
