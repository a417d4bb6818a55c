"""Encode images into embedding rows.

    python examples/quickstart.py CHECKPOINT [IMAGE...] [--device cpu]

CHECKPOINT is a directory with config.json, the processor file and safetensors shards. Without an IMAGE two
arrays are encoded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mm_encoder import Encoder, MediaError


def main() -> None:
    """Encode every image and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("images", type=Path, nargs="*")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    images = arguments.images or [np.full((480, 640, 3), 200, np.uint8), np.zeros((64, 64, 3), np.uint8)]

    with Encoder(arguments.checkpoint, device=arguments.device) as encoder:
        # Submitted one by one, so that a bad image fails alone; `generate` would raise for all of them.
        futures = [encoder.submit(image) for image in images]
        for number, future in enumerate(futures):
            try:
                rows, metadata = future.result()
            except MediaError as error:
                print(f"image {number}: {error}")
                continue
            size = "{}x{}".format(*metadata.original_size)
            print(
                f"image {number}: {size}, {len(rows)} rows of {rows.shape[1]}, grid {metadata.grid_thws[0]}"
            )


if __name__ == "__main__":
    main()
