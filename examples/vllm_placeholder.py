"""Expand the image placeholders of a prompt, as vLLM and other engines do, and encode to match.

    python examples/vllm_placeholder.py CHECKPOINT [--token ID] [--device cpu]

An engine must know how many tokens an image takes before it schedules the prompt. The planner tells from the
header; the encoder then gets the same number as `expected_tokens` and raises PlanMismatchError before the
tower runs if the image does not make that many rows. vLLM itself is not needed here.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mm_encoder import Encoder, MediaPlan, MediaPlanner

# What config.json calls the placeholder's token: GLM-5.3 and DeepSeek-V4.1, Kimi-K3.
TOKEN_NAMES = ("image_token_id", "media_placeholder_token_id")


def placeholder_of(checkpoint: Path) -> int:
    """Return the placeholder's token. Raises SystemExit if config.json has none under a known name."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for name in TOKEN_NAMES:
        if name in config:
            return int(config[name])
    raise SystemExit(f"config.json has none of {', '.join(TOKEN_NAMES)}: pass --token ID")


def expand(prompt: Sequence[int], placeholder: int, plans: Sequence[MediaPlan]) -> list[int]:
    """Repeat each placeholder token once for every row of its image. Raises ValueError if their counts
    differ.
    """
    if prompt.count(placeholder) != len(plans):
        raise ValueError(f"{prompt.count(placeholder)} placeholders for {len(plans)} images")
    remaining = iter(plans)
    expanded: list[int] = []
    for token in prompt:
        expanded += [token] * (next(remaining).length if token == placeholder else 1)
    return expanded


def png(width: int, height: int) -> bytes:
    """Return an image as a request would contain it."""
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def main() -> None:
    """Plan two images, expand a prompt for them, encode them, and show where the rows go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--token", type=int, help=f"default: {' or '.join(TOKEN_NAMES)} of config.json")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    placeholder = placeholder_of(arguments.checkpoint) if arguments.token is None else arguments.token

    images = [png(640, 480), png(64, 64)]
    prompt = [1, 2, placeholder, 3, placeholder, 4]

    # In the front end: no weights, no device.
    planner = MediaPlanner(arguments.checkpoint)
    plans = [planner.plan(image) for image in images]
    tokens = expand(prompt, placeholder, plans)
    print(f"{len(prompt)} tokens became {len(tokens)}")

    # In the process with the GPU: every row replaces the embedding of one placeholder token, in order.
    with Encoder(arguments.checkpoint, device=arguments.device) as encoder:
        results = encoder.generate(images, expected_tokens=[plan.length for plan in plans])
    positions = iter([position for position, token in enumerate(tokens) if token == placeholder])
    for rows, _ in results:
        taken = [next(positions) for _ in rows]
        print(f"{len(rows)} rows go to positions {taken[0]} to {taken[-1]}")


if __name__ == "__main__":
    main()
