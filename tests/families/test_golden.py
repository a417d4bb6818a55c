"""Rows and pixels against fixtures that the references made (tests/golden/README.md)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mm_encoder import Encoder, MediaPlanner

from ..conftest import GOLDEN

FAMILIES = ["glm53", "kimi_k3", "deepseek41"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def images(family: str) -> list[Path]:
    return sorted((GOLDEN / family / "images").iterdir())


def expected(family: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / family / "expected.safetensors")


def test_pixels_are_the_references_to_the_bit(family: str) -> None:
    planner = MediaPlanner(GOLDEN / family / "checkpoint")
    digests = json.loads((GOLDEN / family / "pixels.sha256.json").read_text())
    wanted = expected(family)
    for path in images(family):
        plan, inputs = planner.prepare_inputs(path)
        pixels = inputs["pixel_values"]
        bits = pixels.numpy().astype("<f4").tobytes()
        assert hashlib.sha256(bits).hexdigest() == digests[f"{path.stem}.pixels"], path.name
        assert inputs["grid_thws"].tolist() == [wanted[f"{path.stem}.grid"].tolist()]
        assert plan.grid_thws == (tuple(wanted[f"{path.stem}.grid"].tolist()),)
    assert len(digests) == len(images(family))


def test_float32_rows_through_the_encoder(family: str) -> None:
    wanted = expected(family)
    paths = images(family)
    with Encoder(GOLDEN / family / "checkpoint", device="cpu", replicas_per_gpu=2) as encoder:
        results = encoder.generate([path.read_bytes() for path in paths])
    for path, (rows, metadata) in zip(paths, results, strict=True):
        reference = wanted[f"{path.stem}.embedding"]
        assert rows.dtype == torch.float32
        assert rows.shape == reference.shape == metadata.shape
        assert (rows - reference).abs().max().item() <= 2e-5, path.name
        assert metadata.grid_thws == (tuple(wanted[f"{path.stem}.grid"].tolist()),)


def cosine(rows: torch.Tensor, exact: torch.Tensor) -> float:
    """The worst row's (a vector counts as one row)."""
    return float(torch.nn.functional.cosine_similarity(rows, exact, dim=-1).min())


def distance(rows: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative in L2."""
    return float((rows.float() - exact).norm() / exact.norm())


def test_bfloat16_rows_are_as_near_to_float32_as_the_references_own(family: str) -> None:
    # A cosine of 0.9999 for every single row is out of reach for GLM-5.3's fixture: rounding nothing but
    # the inputs of the matrix products already costs more. The reference's own worst row has 0.9995.
    wanted = expected(family)
    paths = images(family)
    with Encoder(GOLDEN / family / "checkpoint", device="cpu", dtype=torch.bfloat16) as encoder:
        results = encoder.generate(paths)
    for path, (rows, _) in zip(paths, results, strict=True):
        exact = wanted[f"{path.stem}.embedding"]
        theirs = wanted[f"{path.stem}.embedding_bf16"].float()
        assert rows.dtype == torch.bfloat16
        assert distance(rows, exact) <= distance(theirs, exact), path.name
        assert cosine(rows.float().flatten(), exact.flatten()) > 0.9999, path.name
        worst = cosine(theirs, exact) - 1e-4 if family == "glm53" else 0.9999
        assert cosine(rows.float(), exact) > worst, path.name
