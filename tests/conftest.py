"""Fixtures that tests of several parts use, and what keeps GPU tests from being skipped unseen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mm_encoder import Encoder

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_cuda: runs on a GPU; skipped without one")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Where a GPU is promised, a test that needs it must not pass by being skipped.
    wanted = item.get_closest_marker("needs_cuda") is not None
    if wanted and not torch.cuda.is_available():
        if os.environ.get("FAIL_WITHOUT_CUDA"):
            pytest.fail("FAIL_WITHOUT_CUDA is set and there is no CUDA device")
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def glm53_checkpoint() -> Path:
    """A tiny GLM-5.3 checkpoint with the released names and formats."""
    return GOLDEN / "glm53" / "checkpoint"


@pytest.fixture
def encoder(glm53_checkpoint: Path) -> Iterator[Encoder]:
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        yield encoder
