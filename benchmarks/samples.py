"""Images and checkpoints for the benchmarks."""

from __future__ import annotations

import atexit
import io
import itertools
import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
from PIL import Image

from mm_encoder.demo import write_config


def photo(width: int, height: int, kind: str = "JPEG", noise: int = 0) -> bytes:
    """Return a real photograph (scikit-image's astronaut) scaled to a size, optionally with noise."""
    import skimage.data

    image = Image.fromarray(skimage.data.astronaut()).resize((width, height), Image.Resampling.BICUBIC)
    if noise:
        pixels = np.asarray(image).astype(np.int16)
        pixels += np.random.default_rng(0).integers(-noise, noise + 1, pixels.shape, dtype=np.int16)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=90)
    return buffer.getvalue()


def detailed(width: int, height: int, kind: str = "JPEG") -> bytes:
    """Return a mosaic of photographs at their original resolution. It has as much detail per pixel as a
    camera's image, unlike an enlarged photograph.
    """
    import skimage.data

    photos = [getattr(skimage.data, name)() for name in ("astronaut", "coffee", "chelsea", "rocket")]
    page = np.zeros((height, width, 3), np.uint8)
    turn = itertools.cycle(photos)
    for top in range(0, height, 300):  # as tall as the lowest of them
        left = 0
        while left < width:
            part = next(turn)[: min(300, height - top), : width - left]
            page[top : top + part.shape[0], left : left + part.shape[1]] = part
            left += part.shape[1]
    buffer = io.BytesIO()
    Image.fromarray(page).save(buffer, kind, quality=90)
    return buffer.getvalue()


def config_folder(family: str) -> Path:
    """Write a family's config files with the released preprocessing settings, without weights."""
    if family == "glm53":
        return glm53_config_folder()
    folder, golden = temporary_folder(), Path(__file__).parent.parent / "tests" / "golden"
    released = {
        "media_proc_cfg": {"in_patch_limit": 65536, "patch_limit_on_one_side": 512},
        "vision_config": {"max_image_tokens": 1024, "min_pixels": 295936} if family == "deepseek41" else {},
    }
    for file in (golden / family / "checkpoint").glob("*.json"):
        config = json.loads(file.read_text())
        for name, settings in released.items():
            if name in config:
                config[name].update(settings)
        (folder / file.name).write_text(json.dumps(config))
    return folder


def glm53_config_folder() -> Path:
    """Write the released GLM-5.3 config files, without weights, in the form that the peers read too."""
    folder = temporary_folder()
    write_config(folder, released_size=True)
    return folder


def temporary_folder() -> Path:
    """Create a folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="mm-encoder-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def version(package: str) -> str:
    """Return a package's version for a column heading, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
