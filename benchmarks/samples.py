"""Pictures and checkpoints to measure on."""

from __future__ import annotations

import io
import json
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
from PIL import Image


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
    folder = Path(tempfile.mkdtemp(prefix="mm-encoder-bench-"))
    vision = {
        "model_type": "glm5_next_vision",
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "out_hidden_size": 4096,
        "projection_intermediate_size": 10240,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
        "image_size": 448,
    }
    config = {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "image_token_id": 154854,
        "video_token_id": 154855,
        "image_start_token_id": 154830,
        "image_end_token_id": 154831,
        "video_start_token_id": 154832,
        "video_end_token_id": 154833,
        "text_config": {"model_type": "glm5_next_text", "hidden_size": 4096},
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": "Glm5NextImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "patch_expand_factor": 1,
        "min_image_tokens": 16,
        "max_image_tokens": 8000,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "rescale_factor": 1 / 255,
        "resample": 3,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "size": {"longest_edge": 1},
    }
    video = processor | {"image_processor_type": None, "video_processor_type": "Glm5NextVideoProcessor"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": processor, "video_processor": video})
    )
    return folder


def version(package: str) -> str:
    """A package's version for a column's head, or that it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
