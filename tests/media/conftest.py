from __future__ import annotations

from pathlib import Path

import pytest

from mm_encoder.planner import MediaPlanner


@pytest.fixture(scope="session")
def planner(glm53_checkpoint: Path) -> MediaPlanner:
    return MediaPlanner(glm53_checkpoint)
