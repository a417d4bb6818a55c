"""Bytes to model input at GLM-5.3's released settings, one thread, beside the peers."""

from __future__ import annotations

import io
from collections.abc import Callable

import simplejpeg
import torch
from PIL import Image

from mm_encoder.config import MediaLimits
from mm_encoder.families.registry import load_family
from mm_encoder.media.source import open_source

from .samples import glm53_config_folder, photo, version
from .timing import medians, ratio, table

SAMPLES = [
    ("JPEG 224x224", (224, 224), "JPEG", 0),
    ("JPEG 640x480", (640, 480), "JPEG", 0),
    ("JPEG 1920x1080", (1920, 1080), "JPEG", 0),
    ("JPEG 3840x2160", (3840, 2160), "JPEG", 0),
    ("PNG 1024x1024, noisy", (1024, 1024), "PNG", 8),
    ("WebP 1920x1080", (1920, 1080), "WEBP", 0),
]


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measure()
    finally:
        torch.set_num_threads(threads)


def measure() -> None:
    folder = glm53_config_folder()
    _, family = load_family(folder)
    limits = MediaLimits()
    peer, fast, slow = peers(str(folder))
    rows = []
    for name, size, kind, noise in SAMPLES:
        data = photo(*size, kind, noise)

        def ours(data: bytes = data) -> object:
            source = open_source(data, limits)
            return family.patches(source.decode(limits), family.plan(source.size))

        def decode(data: bytes = data) -> object:
            return simplejpeg.decode_jpeg(data)

        def pillow(data: bytes = data) -> object:
            return Image.open(io.BytesIO(data)).load()

        def decode_ours(data: bytes = data) -> object:
            return open_source(data, limits).decode(limits)

        def bound(
            function: Callable[[bytes], object] | None, data: bytes = data
        ) -> Callable[[], object] | None:
            return None if function is None else lambda: function(data)

        ms = medians(
            {
                "turbo": decode if kind == "JPEG" else None,
                "pillow": pillow,
                "decode": decode_ours,
                "ours": ours,
                "peer": bound(peer),
                "fast": bound(fast),
                "slow": bound(slow),
            }
        )
        base = ms["turbo"] or ms["pillow"]
        rows.append([name, *ms.values(), ratio(ms["ours"], base), ratio(ms["peer"], ms["ours"])])
    table(
        "Bytes to model input, GLM-5.3 settings, 1 thread, ms (median of 9)",
        [
            "image",
            "libjpeg-turbo alone",
            f"Pillow {version('pillow')} load",
            "our decode",
            "**bytes to patches**",
            f"mm-libtorch-encoder {version('mm-libtorch-encoder')}",
            f"transformers {version('transformers')}",
            "transformers PIL",
            "ours / decode alone",
            "peer / ours",
        ],
        rows,
    )


def peers(folder: str) -> list[Callable[[bytes], object] | None]:
    """The peer's planner and transformers' two processors; None for what is not installed."""
    found: list[Callable[[bytes], object] | None] = [None, None, None]
    try:
        from mm_libtorch_encoder import MediaPlanner, ResolvedMedia

        planner = MediaPlanner(folder, "zai-org/GLM-5.3-Flash")
        found[0] = lambda data: planner.prepare_inputs(ResolvedMedia(data))
    except Exception as error:
        print(f"mm-libtorch-encoder is left out: {error}")
    try:
        from transformers.models.glm5_next.image_processing_glm5_next import Glm5NextImageProcessor
        from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

        fast, slow = Glm5NextImageProcessor(), Glm5NextImageProcessorPil()
        found[1] = lambda data: fast(Image.open(io.BytesIO(data)), return_tensors="pt")
        found[2] = lambda data: slow(Image.open(io.BytesIO(data)), return_tensors="pt")
    except ImportError as error:
        print(f"transformers is left out: {error}")
    return found
