"""The compiled towers of the golden fixtures. Compiling takes about 40 s each, so they are kept in build/,
under keys that cover all that they depend on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mm_encoder.compiled.choice import compiled_package
from mm_encoder.compiled.packages import VARIABLE, Package, Packages
from mm_encoder.families.registry import load_family

from ..conftest import GOLDEN

CPU = torch.device("cpu")
COMPILED = [
    ("glm53", torch.float32),
    ("kimi_k3", torch.float32),
    ("deepseek41", torch.float32),
    ("glm53", torch.bfloat16),
]
DIRECTORY = Path(__file__).parents[2] / "build" / "compiled"


@pytest.fixture(scope="session")
def built() -> dict[tuple[str, torch.dtype], Package]:
    """Compile what is missing, two at a time."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv(VARIABLE, str(DIRECTORY))
        families = [load_family(GOLDEN / name / "checkpoint")[1] for name, _ in COMPILED]
        dtypes = [dtype for _, dtype in COMPILED]
        made = pool.map(compiled_package, families, [CPU] * 4, dtypes)
        return {what: package for what, (package, _) in zip(COMPILED, made, strict=True)}


@pytest.fixture
def packages(built: dict[tuple[str, torch.dtype], Package], monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Have encoders find the compiled towers."""
    assert built
    monkeypatch.setenv(VARIABLE, str(DIRECTORY))
    return Packages()
