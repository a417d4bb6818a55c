"""Files and folders in, results as they finish, one safetensors file out. Knows no terminal."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..contract import ImageResult
from ..encoder import Encoder
from ..errors import MMEncoderError
from ..runtime import identity

EXPECTED_ERRORS = (MMEncoderError, ValueError, OSError, MemoryError, SafetensorError)
"""What is at fault outside this program: an image, an argument, a file."""

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"}


class Input(NamedTuple):
    """A file to encode, and the key of its rows in the output."""

    key: str
    path: Path


class Encoded(NamedTuple):
    """An input with its result, whose rows are on the CPU."""

    input: Input
    result: ImageResult


def find_images(names: Sequence[str]) -> list[Input]:
    """The files that `names` stand for: a file as it is; of a folder its images, sorted, at any depth.

    Hidden files of a folder are left out, and links to folders inside it are not followed. A key is the path
    as given, or below the folder given, with `/`; where two files would have the same, the later one gets
    `#2`, `#3` and so on. A file that comes twice under one key counts once. Raises ValueError if there is
    nothing, OSError for a folder that cannot be read.
    """
    found: list[tuple[str, Path]] = []
    for name in names:
        if os.path.isdir(name):
            folder = Path(name)
            found += [(path.relative_to(folder).as_posix(), path) for path in _images_below(folder)]
        elif name:
            found.append((Path(name).as_posix(), Path(name)))
    if not found:
        wanted = " ".join(sorted(_SUFFIXES))
        raise ValueError(f"no images ({wanted}) in {', '.join(map(repr, names))}")
    inputs: dict[str, Input] = {}
    for name, path in dict.fromkeys(found):
        plain = name.encode("utf-8", "backslashreplace").decode()  # safetensors takes no other names
        keys = itertools.chain([plain], (f"{plain}#{number}" for number in itertools.count(2)))
        # __metadata__ is what the format calls its own entry.
        key = next(key for key in keys if key not in inputs and key != "__metadata__")
        inputs[key] = Input(key, path)
    return list(inputs.values())


def _images_below(folder: Path) -> list[Path]:
    def stop(error: OSError) -> None:
        raise error  # rather than leave its images out without a word

    paths = (Path(root, name) for root, _, names in os.walk(folder, onerror=stop) for name in names)
    # A pipe or a device would be waited for; a link to nothing is kept, and reported as a fault.
    return sorted(
        path
        for path in paths
        if path.suffix.lower() in _SUFFIXES
        and not path.name.startswith(".")  # editors' and systems' own, such as ._photo.jpg
        and (path.is_file() or not path.exists())
    )


def encode_all(
    encoder: Encoder, inputs: Sequence[Input]
) -> Iterator[tuple[int, ImageResult | BaseException]]:
    """Each input's number with its result, rows moved to the CPU, or its fault; in the order they finish.

    Images overlap as far as the encoder's queue allows; no more than that many results wait on a device.
    """
    pending: dict[Future[ImageResult], int] = {}

    def take(future: Future[ImageResult]) -> tuple[int, ImageResult | BaseException]:
        index, error = pending.pop(future), future.exception()
        if error is not None:
            return index, error
        rows, metadata = future.result()
        return index, ImageResult(rows.cpu(), metadata)

    for index, item in enumerate(inputs):
        try:
            pending[encoder.submit(item.path)] = index  # waits while the queue is full
        except EXPECTED_ERRORS as error:
            yield index, error
        for future in [future for future in pending if future.done()]:
            yield take(future)
    for future in as_completed(list(pending)):
        yield take(future)


def write(path: Path, encoder: Encoder, encoded: Sequence[Encoded]) -> None:
    """Write a tensor for each image under its key; the file's metadata says what made them.

    The metadata: `model`, `family`, `mm_encoder_version`, and `images`, a JSON list of objects `key`,
    `grid_thws`, `embedding_offsets`, `mm_hash`, `original_size`. What was at `path` before is replaced
    only by a whole file.
    """
    records = [
        {
            "key": item.key,
            "grid_thws": metadata.grid_thws,
            "embedding_offsets": metadata.embedding_offsets,
            "mm_hash": metadata.mm_hash,
            "original_size": metadata.original_size,
        }
        for item, (_, metadata) in encoded
    ]
    about = {
        "model": encoder.model,
        "family": encoder.family,
        "mm_encoder_version": identity()["mm-encoder"],
        "images": json.dumps(records),
    }
    with atomic_write(path) as new:
        save_file(_unshared(encoded), new, about)


def _unshared(encoded: Sequence[Encoded]) -> dict[str, torch.Tensor]:
    """Rows by key, each in a storage of its own, as the format asks: a cache gives equal pictures one."""
    rows: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for item, (tensor, _) in encoded:
        storage = tensor.untyped_storage().data_ptr()
        rows[item.key] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return rows


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its place if the block ends well and goes otherwise."""
    new = path.with_name(f".mm-encoder-{secrets.token_hex(8)}.tmp")
    new.touch()
    mode = new.stat().st_mode
    try:
        yield new
        new.chmod(mode)  # the usual one: safetensors makes files that only their owner can read
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def check_output(option: str, path: Path, suffix: str, inputs: Sequence[Input]) -> None:
    """Make the folder of a file to be written, and refuse what could not or should not be written there
    before anything is computed. Raises ValueError and OSError.
    """
    if path.suffix.lower() != suffix:
        raise ValueError(f"{option} must end in {suffix}, got {str(path)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"{option} is a folder: {str(path)!r}")
    if any(os.path.realpath(path) == os.path.realpath(item.path) for item in inputs):
        raise ValueError(f"{option} is one of the images: {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{option}: cannot write into {str(path.parent)!r}")
