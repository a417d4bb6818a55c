"""What a plan costs: from a header, from a size."""

from __future__ import annotations

from mm_encoder import MediaPlanner

from .samples import glm53_config_folder, photo
from .timing import medians, table

REPEATS = 100


def main() -> None:
    planner = MediaPlanner(glm53_config_folder())
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
