"""Pictures and checkpoints to measure on."""

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
    """A real photograph (scikit-image's astronaut) scaled to a size, with some noise if wanted."""
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
    """Photographs side by side at their own resolution: as much detail a pixel as a camera's picture has,
    which one that was enlarged to its size lacks.
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
    """Config files of a family with the released settings of its preprocessing, without weights."""
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
    """The released GLM-5.3 settings, without weights, as the peers read them too."""
    folder = temporary_folder()
    write_config(folder, released_size=True)
    return folder


def temporary_folder() -> Path:
    """A folder that is gone when the process ends."""
    folder = tempfile.mkdtemp(prefix="mm-encoder-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def version(package: str) -> str:
    """A package's version for a column's head, or that it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
