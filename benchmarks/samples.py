"""Pictures and checkpoints to measure on."""

from __future__ import annotations

import atexit
import io
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
