"""Find image files, encode them, and write one safetensors file. Independent of the terminal."""

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

from ..config import expand_home
from ..contract import ImageResult
from ..encoder import Encoder
from ..errors import MMEncoderError
from ..runtime import identity

EXPECTED_ERRORS = (MMEncoderError, ValueError, OSError, MemoryError, SafetensorError)
"""Errors caused by an image, an argument or a file: reported in one line, without a traceback."""

_ENDS = "apng avif avifs bmp dib gif heic heif hif jfif jpe jpeg jpg png tif tiff webp"
SUFFIXES = tuple(f".{end}" for end in _ENDS.split())
"""Ends of the names that are taken for images' in folders. What a file is comes from its bytes."""


class Input(NamedTuple):
    """A file to encode, and the key of its rows in the output."""

    key: str
    path: Path


class Found(NamedTuple):
    """Images to encode, and how many other files there are in the folders that were searched."""

    inputs: list[Input]
    skipped: int


class Encoded(NamedTuple):
    """An input and its result, with the rows on the CPU."""

    input: Input
    result: ImageResult


def find_images(names: Sequence[str]) -> Found:
    """Return the files that `names` stand for: files as they are, and a folder's images at any depth, sorted.

    In folders, names with another end than `SUFFIXES` are counted as skipped, hidden files are not looked at,
    and links to folders are not followed. `~/` is the home directory. A key is the path as given, or relative
    to the folder given, with `/`; if two files have the same key, the later one gets `#2`, `#3`, ... A file
    that occurs twice under one key counts once. Raises ValueError if nothing is found, OSError for a folder
    that cannot be read.
    """
    found: list[tuple[str, Path]] = []
    skipped: set[Path] = set()
    for given in names:
        # Only this: another name that begins with a tilde is probably a file's.
        name = os.fspath(expand_home("an image", given)) if given == "~" or given.startswith("~/") else given
        if os.path.isdir(name):
            folder = Path(name)
            below = _files_below(folder)
            images = [path for path in below if _may_be_image(path)]
            skipped |= set(below) - set(images)
            found += [(path.relative_to(folder).as_posix(), path) for path in images]
        elif name:
            found.append((Path(name).as_posix(), Path(name)))
    if not found:
        raise ValueError(f"no images ({' '.join(SUFFIXES)}) in {', '.join(map(repr, names))}")
    inputs: dict[str, Input] = {}
    for name, path in dict.fromkeys(found):
        plain = name.encode("utf-8", "backslashreplace").decode()  # safetensors accepts only UTF-8 names
        keys = itertools.chain([plain], (f"{plain}#{number}" for number in itertools.count(2)))
        # __metadata__ is the name of the format's own entry.
        key = next(key for key in keys if key not in inputs and key != "__metadata__")
        # In full, where a folder of this name was found: an encoder would take it for the home directory.
        inputs[key] = Input(key, path.absolute() if path.parts[:1] == ("~",) else path)
    return Found(list(inputs.values()), len(skipped.difference(path for _, path in found)))


def _files_below(folder: Path) -> list[Path]:
    def stop(error: OSError) -> None:
        raise error  # os.walk would silently skip the folder

    paths = (Path(root, name) for root, _, names in os.walk(folder, onerror=stop) for name in names)
    return sorted(path for path in paths if not path.name.startswith("."))  # such as ._photo.jpg


def _may_be_image(path: Path) -> bool:
    # No pipes and devices, which could block; but broken links, which are then reported as errors.
    return path.suffix.lower() in SUFFIXES and (path.is_file() or not path.exists())


def encode_all(
    encoder: Encoder, inputs: Sequence[Input]
) -> Iterator[tuple[int, ImageResult | BaseException]]:
    """Yield each input's index with its result, rows on the CPU, or its error, in the order of completion.

    The encoder's queue limits how many images are in progress, and so how many results wait on a device.
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
    """Write one tensor per image under its key, and metadata about the model and the images.

    The metadata: `model`, `family`, `mm_encoder_version`, and `images`, a JSON list of objects `key`,
    `grid_thws`, `embedding_offsets`, `mm_hash`, `original_size`. An existing file is replaced atomically.
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
    """Return rows by key without shared storage, which safetensors refuses and a cache gives equal images."""
    rows: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for item, (tensor, _) in encoded:
        storage = tensor.untyped_storage().data_ptr()
        rows[item.key] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return rows


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, which replaces it on success and is removed on failure."""
    new = path.with_name(f".mm-encoder-{secrets.token_hex(8)}.tmp")
    new.touch()
    mode = new.stat().st_mode
    try:
        yield new
        new.chmod(mode)  # as umask says: safetensors creates files that only their owner can read
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def check_output(option: str, path: Path, suffix: str, inputs: Sequence[Input]) -> None:
    """Create the folder of an output file and check that the file may be written there, before anything is
    computed. Raises ValueError and OSError.
    """
    if path.suffix.lower() != suffix:
        raise ValueError(f"{option} must end in {suffix}, got {str(path)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"{option} must be a file, but {str(path)!r} is a folder")
    if any(os.path.realpath(path) == os.path.realpath(item.path) for item in inputs):
        raise ValueError(f"{option} would overwrite one of the images, {str(path)!r}; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{option}: no permission to write in the folder {str(path.parent)!r}")
