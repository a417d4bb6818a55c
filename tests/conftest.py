"""Fixtures for tests of several parts, the markers with their `FAIL_WITHOUT_*` variables, and the options of
`make stress`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mm_encoder import Encoder
from mm_encoder._native import kernels

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, help="run every test marked `threads` this many times")
    parser.addoption(
        "--switch-interval", type=float, help="seconds a thread keeps the GIL (0.005 by default)"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Towers that were compiled on this machine must not change what is tested.
    os.environ["MM_ENCODER_COMPILED"] = str(Path(__file__).parent / "no-compiled-towers")
    config.addinivalue_line("markers", "needs_cuda: runs on a GPU; skipped without one")
    config.addinivalue_line("markers", "needs_native: calls the native kernels; skipped in a pure install")
    config.addinivalue_line("markers", "threads: several threads race in it; `make stress` repeats it")
    interval = config.getoption("--switch-interval")
    if interval is not None:
        sys.setswitchinterval(interval)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rounds = metafunc.config.getoption("--repeat")
    if rounds > 1 and metafunc.definition.get_closest_marker("threads"):
        metafunc.fixturenames.append("stress_round")
        metafunc.parametrize("stress_round", range(rounds))


@pytest.fixture(scope="module", autouse=True)
def collect_garbage() -> Iterator[None]:
    """Free what a module's tests left in cycles: Python sees few objects, and waits, where they are large."""
    yield
    gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # On a machine that is meant to have it, a test that needs it must not pass by being skipped.
    for name, there, what in (
        ("CUDA", torch.cuda.is_available, "a CUDA device"),
        (
            "NATIVE",
            lambda: kernels is not None,
            "the native kernels (built with a C++ compiler)",
        ),
    ):
        if item.get_closest_marker(f"needs_{name.lower()}") is not None and not there():
            if os.environ.get(f"FAIL_WITHOUT_{name}"):
                pytest.fail(f"FAIL_WITHOUT_{name} is set and this needs {what}")
            pytest.skip(f"needs {what}")


@pytest.fixture(scope="session")
def glm53_checkpoint() -> Path:
    """A tiny GLM-5.3 checkpoint with the released names and formats."""
    return GOLDEN / "glm53" / "checkpoint"


@pytest.fixture
def encoder(glm53_checkpoint: Path) -> Iterator[Encoder]:
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        yield encoder


@pytest.fixture
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    # Variables of a developer's shell or a CI must not change the output of the command line.
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "GITHUB_ACTIONS", "COLUMNS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
