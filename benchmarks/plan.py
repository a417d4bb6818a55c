"""The time of a plan, from a header and from a size."""

from __future__ import annotations

import random
from collections.abc import Callable

from mm_encoder import ImageSize, MediaPlanner
from mm_encoder.families import deepseek41, glm53, kimi_k3

from .samples import glm53_config_folder, photo
from .timing import medians, table

REPEATS = 100


def main() -> None:
    planner = MediaPlanner(glm53_config_folder())
    every_family()
    rows = []
    for name, size in [("JPEG 1920x1080", (1920, 1080)), ("JPEG 3840x2160", (3840, 2160))]:
        data = photo(*size)

        def header(data: bytes = data) -> None:
            for _ in range(REPEATS):
                planner.plan(data)

        def arithmetic(size: tuple[int, int] = size) -> None:
            for _ in range(REPEATS):
                planner.plan(size)

        ms = medians({"header": header, "size": arithmetic})
        rows.append([name, *(f"{(value or 0) / REPEATS * 1e3:.0f}" for value in ms.values())])
    table(
        "A plan, microseconds (median of 9)",
        ["image", "from the bytes' header", "from (width, height)"],
        rows,
    )


def every_family() -> None:
    """Plan 10,000 random sizes per family, with the default settings of its config classes."""
    random.seed(0)
    sizes = [ImageSize(random.randint(1, 20_000), random.randint(1, 20_000)) for _ in range(10_000)]
    planners = {
        "glm53": (glm53.plan_image, glm53.ProcessorConfig()),
        "kimi_k3": (kimi_k3.plan_image, kimi_k3.ProcessorConfig()),
        "deepseek41": (deepseek41.plan_image, deepseek41.VisionConfig()),
    }

    def work(name: str) -> Callable[[], object]:
        plan, settings = planners[name]
        return lambda: [plan(size, settings) for size in sizes]  # type: ignore[operator]

    ms = medians({name: work(name) for name in planners}, rounds=3)
    table("10,000 plans, ms (median of 3)", list(ms), [list(ms.values())])
