"""What the tests of the disk tiers share. An entry follows from its key, so any process can tell whether what
it got is right.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mm_encoder.cache.directory import entry_path, scan
from mm_encoder.cache.entry import Entry
from mm_encoder.cache.files import FileTier
from mm_encoder.contract import ImageMetadata

MIB = 1024**2
BUDGET = 64 * MIB
"""More than any of the tests needs, and the least that every backend takes."""


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def entry(of: bytes, length: int = 3, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> Entry:
    """Rows of arbitrary bits (NaNs of all kinds among them), which depend on key and shape."""
    data = hashlib.shake_128(of).digest(length * width * dtype.itemsize)
    rows = torch.empty(length, width, dtype=dtype, device="cpu")
    rows.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(data, np.uint8)
    return Entry(rows, metadata(of, length, width, dtype))


def metadata(of: bytes, length: int, width: int, dtype: torch.dtype, /, **changed: Any) -> ImageMetadata:
    fields: dict[str, Any] = {
        "model": "zai-org/GLM",
        "mm_hash": of.hex(),
        "length": length,
        "shape": (length, width),
        "dtype": str(dtype),
        "device": "cpu",
        "strides": (width, 1),
        "embedding_offsets": (0, length),
        "grid_thws": ((1, 2 * length, 2),),
        "original_size": (28, 28 * length),
    }
    return ImageMetadata(**fields | changed)


def same(got: Entry | None, wanted: Entry) -> bool:
    """Bit for bit, which `torch.equal` is not for NaNs."""
    return (
        got is not None
        and got.metadata == wanted.metadata
        and got.rows.dtype == wanted.rows.dtype
        and torch.equal(got.rows.view(torch.uint8), wanted.rows.view(torch.uint8))
    )


def bytes_in(directory: str | os.PathLike[str]) -> int:
    """Of all files below, each counted once though it be renamed meanwhile."""
    sizes: dict[int, int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


# --- plain files -------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(path: Path) -> Iterator[FileTier]:
    tier = FileTier(path, BUDGET)
    yield tier
    tier.close()


def file_of(path: Path, number: int) -> Path:
    return Path(entry_path(str(path), key(number)))


def put(tier: FileTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.put(key(number), entry(key(number)))


def kept(path: Path) -> set[str]:
    return {Path(found.path).stem for found in scan(str(path)).entries}


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the file of one small entry takes."""
    path = tmp_path_factory.mktemp("one")
    tier = FileTier(path, BUDGET)
    put(tier, 0)
    tier.close()
    return file_of(path, 0).stat().st_size


def failing_with(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


# --- checkpoints -------------------------------------------------------------------------------------


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}
    return found


def rewritten(checkpoint: Path, values: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Replace a checkpoint's weights by `values`, spread over `shards` files."""
    for path in checkpoint.glob("*.safetensors*"):
        path.unlink()
    names = list(values)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"part-{index}.safetensors"
        part = {name: values[name].contiguous() for name in names[index::shards]}
        save_file(part, checkpoint / file)
        weight_map |= dict.fromkeys(part, file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
