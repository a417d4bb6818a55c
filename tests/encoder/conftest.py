"""Fixtures of the encoder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ..helpers.holding import Hold, hold_towers


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Blocks every tower call until `release`."""
    with hold_towers(monkeypatch) as hold:
        yield hold


@pytest.fixture(scope="module")
def one_compute_thread() -> Iterator[None]:
    # The images are tiny: a second thread costs more than it saves.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
