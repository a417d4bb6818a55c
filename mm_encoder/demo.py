"""The inputs of `mm-encoder demo`: a small checkpoint with random weights in the release's formats, and
photographs from the scikit-image package. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file

from .config import user_cache
from .families.glm53 import NAMES, GlmTower, ProcessorConfig, VisionConfig
from .families.trunk import rename

# Version of the folders' content. Raise it with every change to them: older folders are then rebuilt.
_RECIPE = 2
# Written last into each folder that is built. Only folders that contain it are ever replaced.
_MARK = ".mm-encoder-demo.json"
_WORK = ".mm-encoder-work"

_PHOTOS = ("astronaut.png", "coffee.png", "camera.png", "rocket.jpg", "retina.jpg", "chelsea.png")

_RELEASED = VisionConfig(out_hidden_size=4096)
_SMALL = VisionConfig(4, 256, 4, 1024, out_hidden_size=512, projection_intermediate_size=1280)


def default_folder() -> Path:
    """Return `mm-encoder/demo` in the user's cache directory ($XDG_CACHE_HOME, else ~/.cache).

    Raises ValueError if neither is known.
    """
    return user_cache("the demo's folder") / "demo"


def prepare(folder: Path) -> tuple[Path, list[Path]]:
    """Return the checkpoint directory and the photographs in `folder`; build them if they are missing.

    If several processes call it at once, one builds and the others wait. The remains of an interrupted build
    are removed. Raises FileExistsError if `folder` contains foreign files, and FileNotFoundError if
    scikit-image is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".mm-encoder-demo.lock"  # created first, so it also marks the folder as the demo's
    if any(folder.iterdir()) and not lock.exists():
        raise FileExistsError(f"{folder} holds other files; give --folder a new or an empty folder")
    with FileLock(lock):
        checkpoint = _build_once(folder / "checkpoint", make_checkpoint)
        pictures = _build_once(folder / "photos", photos)
    return checkpoint, [pictures / name for name in _PHOTOS]


def photos(folder: Path) -> list[Path]:
    """Copy six of scikit-image's photographs to `folder`, byte for byte, and return their paths.

    Raises FileNotFoundError if scikit-image is not installed.
    """
    package = importlib.util.find_spec("skimage")  # not imported: that takes a second
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "the photographs come with scikit-image: install with the extra demo, see docs/install.md"
        )
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(package.origin).parent / "data"
    return [Path(shutil.copyfile(data / name, folder / name)) for name in _PHOTOS]


def make_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    released_size: bool = False,
    image_tokens: tuple[int, int] | None = None,
    shards: int = 2,
    depth: int | None = None,
) -> Path:
    """Write a GLM-5.3 checkpoint to `folder` and return the folder. File names, tensor names, dtype
    (bfloat16) and config formats are the release's; the weights are random, the same for the same arguments.

    released_size: 24 layers of width 1024 and rows of width 4096 (1.1 GB on disk), with the release's token
    limits; otherwise 4 layers of width 256 and rows of width 512 (15 MB).
    image_tokens: (fewest, most) rows per image; smaller images are enlarged, larger ones reduced. The default
    of the small checkpoint gives photographs of any size a fine grid.
    depth: number of layers, if another than these.
    """
    config = write_config(folder, released_size=released_size, image_tokens=image_tokens, depth=depth)
    # Declared without storage: only names and shapes.
    declared = GlmTower(config, torch.empty(3, 256, device="meta")).state_dict()
    shapes = [(f"model.visual.{rename(name, NAMES)}", tuple(like.shape)) for name, like in declared.items()]
    generator = torch.Generator("cpu").manual_seed(seed)
    weight_map: dict[str, str] = {}
    total = 0
    per_shard = -(-len(shapes) // shards)
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = shapes[index * per_shard : (index + 1) * per_shard]
        tensors = {name: _random(name, shape, generator) for name, shape in part}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    return folder


def write_config(
    folder: Path,
    *,
    released_size: bool,
    image_tokens: tuple[int, int] | None = None,
    depth: int | None = None,
) -> VisionConfig:
    """Write the config files alone (see `make_checkpoint`); return the tower's config."""
    config = _RELEASED if released_size else _SMALL
    config = replace(config, depth=depth or config.depth)
    fewest, most = image_tokens or ((16, 8000) if released_size else (900, 1024))
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(config))
    processor = ProcessorConfig(min_image_tokens=fewest, max_image_tokens=most)
    _write_json(folder / "processor_config.json", _processor_config(processor))
    return config


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return bfloat16 weights that keep activations near 1 at any depth: N(0, 1.5²/fan-in) for matrices,
    small biases, norms near 1.
    """
    values = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
    if len(shape) > 1:
        values *= 1.5 / math.sqrt(math.prod(shape[1:]))
    elif name.endswith("bias"):
        values *= 0.1
    else:
        values = 1 + 0.1 * values
    return values.to(torch.bfloat16)


def _config(vision: VisionConfig) -> dict[str, Any]:
    sizes = asdict(vision)
    del sizes["rope_theta"]  # the release leaves it to the class
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "image_token_id": 154854,
        "video_token_id": 154855,
        "image_start_token_id": 154830,
        "image_end_token_id": 154831,
        "video_start_token_id": 154832,
        "video_end_token_id": 154833,
        "text_config": {"model_type": "glm5_next_text", "hidden_size": vision.out_hidden_size},
        "vision_config": {
            "model_type": "glm5_next_vision",
            **sizes,
            "image_size": 448,
            "in_channels": 3,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
        },
    }


def _processor_config(processor: ProcessorConfig) -> dict[str, Any]:
    steps = ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize")
    return {
        "processor_class": "Glm5NextProcessor",
        "image_processor": {
            "image_processor_type": "Glm5NextImageProcessor",
            **dict.fromkeys(steps, True),
            **asdict(processor),
            "resample": 3,
            "size": {"longest_edge": 1},
        },
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _build_once(target: Path, build: Callable[[Path], object]) -> Path:
    """Build `target` in a work folder and move it into place, unless it exists and is complete.

    The caller must hold the lock, so anything in the work folder is left from an interrupted build.
    """
    work = target.parent / _WORK
    shutil.rmtree(work, ignore_errors=True)
    if _is_whole(target):
        return target
    if target.exists() and not (target / _MARK).is_file():
        raise FileExistsError(f"{target} was not made by the demo; move it away or give another --folder")
    new = work / target.name
    new.mkdir(parents=True)
    build(new)
    files = {path.name: path.stat().st_size for path in new.iterdir()}
    _write_json(new / _MARK, {"recipe": _RECIPE, "files": files})
    if target.exists():
        target.rename(work / "old")
    new.rename(target)
    shutil.rmtree(work)
    return target


def _is_whole(target: Path) -> bool:
    """Return whether `target` was built by this recipe and still has all files: cache folders get cleaned."""
    try:
        mark = json.loads((target / _MARK).read_text(encoding="utf-8"))
        sizes = {name: (target / name).stat().st_size for name in mark["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(mark["recipe"] == _RECIPE and mark["files"] == sizes)
