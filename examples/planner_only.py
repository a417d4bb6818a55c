"""Plan images without weights and without a device, as a scheduler or an API front end does.

    python examples/planner_only.py CHECKPOINT [IMAGE | WIDTHxHEIGHT ...]

For each image: its rows and its patch grid, from the header alone. Then an array of zeros is preprocessed on
the CPU, for callers that run their own tower.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

from mm_encoder import MediaPlanner


def main() -> None:
    """Print a plan for every size or image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("images", nargs="*", default=["640x480", "1920x1080"])
    arguments = parser.parse_args()

    planner = MediaPlanner(arguments.checkpoint)
    for name in arguments.images:
        size = re.fullmatch(r"(\d+)x(\d+)", name)
        plan = planner.plan((int(size[1]), int(size[2])) if size else Path(name))
        print(f"{name}: {plan.length} rows, grid {plan.grid_thws[0]}")

    plan, inputs = planner.prepare_inputs(np.zeros((480, 640, 3), np.uint8))
    values = inputs["pixel_values"]
    print(f"pixel_values of a 640x480 array: {tuple(values.shape)} {values.dtype} for {plan.length} rows")


if __name__ == "__main__":
    main()
