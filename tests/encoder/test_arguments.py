"""Arguments of `Encoder` and of its calls, and the attributes that follow from them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_encoder import Encoder, PlanMismatchError

from ..helpers.images import png
from ..helpers.threads import library_threads


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
        ({"dtype": "float32"}, ValueError, "dtype must be one of torch.float32, .*, got 'float32'"),
        ({"family": "other"}, ValueError, "family must be one of glm53"),
        ({"cache": object()}, TypeError, "cache must be a CacheConfig or None, got object"),
        ({"batching": object()}, TypeError, "batching must be a BatchConfig or None, got object"),
        ({"limits": 5}, TypeError, "limits must be a MediaLimits, got int"),
        ({"model": 123}, TypeError, "model must be a str or None, got int"),
        ({"share_weights": 5}, TypeError, "share_weights must be a bool, got int"),
    ],
)
def test_invalid_arguments_raise_before_any_thread_starts(
    glm53_checkpoint: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Encoder(glm53_checkpoint, **({"device": "cpu"} | arguments))
    assert library_threads() == []


def test_invalid_call_arguments_raise(encoder: Encoder) -> None:
    with pytest.raises(TypeError, match="image_options must be an ImageOptions, got dict"):
        encoder.submit(png(10, 10), image_options={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected_tokens must be an int, got str"):
        encoder.submit(png(10, 10), expected_tokens="16")  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", [True, np.True_, torch.tensor(True), 16.0, np.float32(16)])
def test_expected_tokens_are_no_flags_and_no_fractions(encoder: Encoder, flag: Any) -> None:
    message = f"expected_tokens must be an int, got {type(flag).__name__}"
    with pytest.raises(TypeError, match=message):
        encoder.submit(png(10, 10), expected_tokens=flag)
    with pytest.raises(TypeError, match=message):
        encoder.generate([png(10, 10)], expected_tokens=[flag])


def test_expected_tokens_may_be_numpy_integers(encoder: Encoder) -> None:
    rows = encoder.generate(png(10, 10))[0].metadata.length
    for kind in (np.int64, np.uint8):
        encoder.submit(png(10, 10), expected_tokens=kind(rows)).result()  # type: ignore[arg-type]
    encoder.generate([png(10, 10)] * 2, expected_tokens=np.array([rows, rows]))
    with pytest.raises(PlanMismatchError, match=f"expected {rows + 1} tokens, but this image makes {rows}"):
        encoder.generate([png(10, 10)], expected_tokens=np.array([rows + 1]))
    with pytest.raises(ValueError, match="expected_tokens must be at least 1, got 0"):
        encoder.submit(png(10, 10), expected_tokens=np.int64(0))  # type: ignore[arg-type]


def test_attributes_and_one_log_line_per_replica(
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
