"""Cache keys: every field of an identity changes the key, and nothing else does."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_encoder import ImageOptions, MediaLimits
from mm_encoder.cache.key import Keys, digest
from mm_encoder.engine.job import Job
from mm_encoder.families.registry import load_family
from mm_encoder.families.weights import Checkpoint
from mm_encoder.pipeline import ImagePipeline

from ..conftest import GOLDEN
from ..helpers.abuse import case
from .conftest import rewritten, tensors

CHECKPOINT = GOLDEN / "glm53" / "checkpoint"
CPU = torch.device("cpu")
IDENTITY = {
    "family": "glm53",
    "preprocessing": '{"patch_size": 14}',
    "weights": "ab" * 32,
    "dtype": "torch.bfloat16",
    "device": "NVIDIA H200",
}


def key(identity: dict[str, str] = IDENTITY, content: str = "cd" * 32, **options: bool) -> bytes:
    return Keys(identity).key(content, ImageOptions(**options))


def test_a_key_is_32_bytes_and_deterministic() -> None:
    assert len(key()) == 32
    assert key() == key(dict(reversed(IDENTITY.items())))
    assert Keys(IDENTITY).key("x", None) == Keys(IDENTITY).key("x", ImageOptions())


@pytest.mark.parametrize("name", IDENTITY)
def test_every_identity_field_changes_the_key(name: str) -> None:
    assert key(IDENTITY | {name: IDENTITY[name] + " "}) != key()
    assert key({n: v for n, v in IDENTITY.items() if n != name}) != key()


def test_content_and_options_change_the_key() -> None:
    assert key(content="cd" * 31 + "ce") != key()
    assert key(exif_orientation=False) != key()


def test_field_boundaries_change_the_digest() -> None:
    """Text cannot move from one field to the next without changing the digest."""
    assert digest([("a", "bc")]) != digest([("ab", "c")])
    assert digest([("a", ""), ("b", "")]) != digest([("a", "b"), ("", "")])
    assert digest([("a", "b")]) != digest([("a", "b"), ("", "")])


def test_every_epoch_has_its_own_keys() -> None:
    keys, others = Keys(IDENTITY), Keys(IDENTITY)
    seen = {keys.key("x", None)}
    for one in (keys, others, keys):
        one.bump()
        seen.add(one.key("x", None))
    assert len(seen) == 4


def test_fields_lists_everything_the_key_covers() -> None:
    fields = Keys(IDENTITY).fields("cd" * 32, ImageOptions(exif_orientation=False))
    assert fields | IDENTITY == fields
    assert fields["content"] == "cd" * 32
    assert fields["exif_orientation"] == "False"


def test_a_key_is_the_same_in_every_process() -> None:
    program = (
        "import sys, torch\n"
        "from mm_encoder.cache.key import Keys\n"
        "from mm_encoder.families.registry import load_family\n"
        "from mm_encoder.config import MediaLimits\n"
        "from mm_encoder.pipeline import ImagePipeline\n"
        "_, family = load_family(sys.argv[1], None)\n"
        "pipeline = ImagePipeline(family, MediaLimits(), 'a model', torch.float32)\n"
        "print(Keys(pipeline.identity(torch.device('cpu'))).key('x', None).hex())\n"
    )
    here = Keys(identity_of(CHECKPOINT)).key("x", None).hex()
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", program, str(CHECKPOINT)],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == here


# --- an encoder's identity ---------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))


def identity_of(checkpoint: Path, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    _, family = load_family(checkpoint, None)
    return ImagePipeline(family, MediaLimits(), "a model", dtype).identity(CPU)


def edited(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_the_weights_digest_does_not_depend_on_the_shards(checkpoint: Path) -> None:
    before = identity_of(checkpoint)["weights"]
    for shards in (1, 2, 5):
        rewritten(checkpoint, tensors(checkpoint), shards)
        assert identity_of(checkpoint)["weights"] == before


@pytest.mark.parametrize("change", ["a bit", "a shape", "a name", "a dtype", "one less"])
def test_every_change_of_a_vision_tensor_changes_the_digest(checkpoint: Path, change: str) -> None:
    opened = Checkpoint(checkpoint)
    _, family = load_family(checkpoint, None)
    before = opened.digest(family.tensor_prefixes)
    values = tensors(checkpoint)
    name = next(name for name in values if name.endswith("proj.weight") and values[name].ndim == 2)
    value = values[name]
    if change == "a bit":
        bits = value.clone()
        bits.view(torch.uint8)[0, 0] ^= 1
        values[name] = bits
    elif change == "a shape":
        values[name] = value.reshape(1, *value.shape)
    elif change == "a name":
        values[name + "x"] = values.pop(name)
    elif change == "a dtype":
        values[name] = value.view(torch.int16) if value.element_size() == 2 else value.view(torch.int32)
    else:
        del values[name]
    rewritten(checkpoint, values)
    assert Checkpoint(checkpoint).digest(family.tensor_prefixes) != before


def test_language_tensors_do_not_change_the_digest(checkpoint: Path) -> None:
    before = identity_of(checkpoint)["weights"]
    rewritten(checkpoint, tensors(checkpoint) | {"model.language_model.norm.weight": torch.ones(3)})
    assert identity_of(checkpoint)["weights"] == before


def test_config_files_and_dtype_change_the_identity(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identity_of(checkpoint)
    assert identity_of(checkpoint, torch.bfloat16) != before
    for name in ("torch", "pillow", "simplejpeg"):
        assert before[name]
    edited(checkpoint / "config.json", lambda c: c["vision_config"].update(rms_norm_eps=2e-5))
    other = identity_of(checkpoint)
    assert other != before
    edited(
        checkpoint / "processor_config.json",
        lambda c: c["image_processor"].update(image_mean=[0.5, 0.5, 0.5]),
    )
    assert identity_of(checkpoint)["preprocessing"] != other["preprocessing"]


def test_process_wide_settings_are_read_for_each_key(checkpoint: Path) -> None:
    _, family = load_family(checkpoint, None)
    made = ImagePipeline(family, MediaLimits(), "a model", torch.float32).cache_keys(CPU)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)  # once set, it is no longer reported as "none"
    before = made.key("x", None)
    torch.set_float32_matmul_precision("high")
    try:
        assert made.key("x", None) != before
        assert made.fields("x", None)["matmul precision"] != ""
    finally:
        torch.set_float32_matmul_precision(precision)
    assert made.key("x", None) == before


# --- content -----------------------------------------------------------------------------------------


def content(image: Any, model: str = "m") -> str:
    _, family = load_family(CHECKPOINT, None)
    return ImagePipeline(family, MediaLimits(), model, torch.float32).content_hash(Job(image))


def test_settings_count_by_value_and_not_by_object() -> None:
    current = [(("setting", "a"),)]
    keys = Keys({"model": "m"}, lambda: current[0])
    first = keys.key("content", None)
    current[0] = (("setting", "b"),)
    assert keys.key("content", None) != first
    assert keys.key("content", None, (("setting", "a"),)) == first
    assert keys.key("content", None) != first
    current[0] = (("setting", "a"),)
    assert keys.key("content", None) == first == Keys({"model": "m"}, lambda: current[0]).key("content", None)


def test_content_depends_on_the_bytes_not_on_their_carrier(tmp_path: Path) -> None:
    data = case("D06_good.jpg")
    path = tmp_path / "x"
    path.write_bytes(data)
    assert content(data) == content(bytearray(data)) == content(path) == content(memoryview(data))
    assert content(data) != content(data + b"\0")
    assert content(data) != content(data, "another")


def alike() -> list[Any]:
    """D14: images that are alike in one respect and differ in another."""
    square = np.arange(36, dtype=np.uint8).reshape(6, 6)
    same_bytes = [square, square.reshape(4, 9), square.reshape(9, 4), square.reshape(4, 3, 3)]
    grey, index = Image.fromarray(square), Image.fromarray(square)
    index.putpalette([*range(256)] * 3)
    files = [case(f"D14_{name}.png") for name in ("palette_a", "palette_b", "gray_same_indices")]
    shapes = [case(f"D14_shape_{name}.png") for name in ("150x30", "30x150", "90x50")]
    return [*same_bytes, square.reshape(3, 4, 3), grey, index, *files, *shapes, case("D14_same_pixels.bmp")]


def test_similar_images_have_different_keys() -> None:
    images = alike()
    assert len({content(image) for image in images}) == len(images)


def test_control_a_hash_of_the_pixels_alone_confuses_similar_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def pixels_alone(model: str, *fields: Any) -> str:
        return hashlib.sha256(fields[-1]).hexdigest()

    monkeypatch.setattr("mm_encoder.media.source._hash", pixels_alone)
    images = alike()
    assert len({content(image) for image in images}) < len(images)
