"""An entry as bytes: a fixed head, metadata as JSON, the rows as they lie in memory.

    head   magic, format, bytes of JSON, bytes of rows, key, checksum of the rows, checksum of the header
    JSON   dtype, shape, metadata; filled up with spaces, so that the rows begin at a multiple of 64
    rows   little-endian

Both checksums are XXH3-128; that of the header covers everything before it in the head, and the JSON. Magic
and format stay where they are in every format to come. Nothing is unpickled. xxhash lets go of the GIL while
it hashes rows.
"""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import xxhash

from ..contract import ImageMetadata
from .entry import Entry

FORMAT: int = 1
"""Raise it when a byte changes its meaning: the entries of other formats are then misses."""

_MAGIC = b"mm-rows\n"
_HEAD = struct.Struct("<8sIIQ32s16s16s")
HEAD_BYTES: int = _HEAD.size
"""How much of an entry `header_length` needs."""

_CHECKSUM_BYTES = 16
_ALIGNMENT = 64
_MAX_JSON = 1024**2  # a length beyond it is not read at all
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# Who serves an entry says where it came from, and times are those of another request.
_NOT_KEPT = {"cache", "timings"}
_KEPT = tuple(field.name for field in fields(ImageMetadata) if field.name not in _NOT_KEPT)


class EntryError(Exception):
    """The bytes are not a whole and right entry; the message says why."""


class Header(NamedTuple):
    """All of an entry but its rows. `header_bytes` is where the rows begin."""

    key: bytes
    dtype: torch.dtype
    shape: tuple[int, int]
    metadata: ImageMetadata
    payload_bytes: int
    payload_checksum: bytes
    header_bytes: int


def encode(key: bytes, entry: Entry) -> tuple[bytes, memoryview]:
    """`entry` as header and rows; the second is a view of the rows, no copy.

    Raises ValueError for a key that is not 32 bytes and for what cannot be kept as it is.
    """
    rows = entry.rows
    if len(key) != 32:
        raise ValueError(f"a key is 32 bytes, got {len(key)}")
    if rows.dtype not in _NAMES or rows.ndim != 2 or rows.device.type != "cpu" or not rows.is_contiguous():
        raise ValueError(
            f"rows must be contiguous [length, width] on the CPU in {', '.join(_DTYPES)}; got "
            f"{tuple(rows.shape)} {rows.dtype} on {rows.device}, strides {rows.stride()}"
        )
    payload = payload_view(rows).toreadonly()
    described = {
        "dtype": _NAMES[rows.dtype],
        "shape": list(rows.shape),
        "metadata": {name: getattr(entry.metadata, name) for name in _KEPT},
    }
    try:
        text = json.dumps(described, separators=(",", ":")).encode()
    except TypeError as error:
        raise ValueError(f"metadata must be plain values: {error}") from error
    text += b" " * (-(HEAD_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_JSON:
        raise ValueError(f"metadata takes {len(text)} bytes as JSON, more than {_MAX_JSON}")
    unsigned = _HEAD.pack(
        _MAGIC, FORMAT, len(text), len(payload), key, xxhash.xxh3_128_digest(payload), bytes(_CHECKSUM_BYTES)
    )[:-_CHECKSUM_BYTES]
    return unsigned + _header_checksum(unsigned, text) + text, payload


def header_length(head: bytes | memoryview) -> int:
    """Bytes of the whole header, by the first HEAD_BYTES of an entry. Raises EntryError."""
    if len(head) < HEAD_BYTES:
        raise EntryError(f"{len(head)} bytes, but a head has {HEAD_BYTES}")
    magic, number, text_bytes = _HEAD.unpack_from(head)[:3]
    if magic != _MAGIC:
        raise EntryError("it does not begin as an entry does")
    if number != FORMAT:
        raise EntryError(f"format {number}, but this version reads format {FORMAT}")
    if text_bytes > _MAX_JSON:
        raise EntryError(f"{text_bytes} bytes of JSON, more than {_MAX_JSON}")
    return HEAD_BYTES + int(text_bytes)


def read_header(data: bytes | memoryview) -> Header:
    """The header that `data` begins with; what follows it is not looked at. Raises EntryError.

    `payload_bytes` is a claim: compare it with what is there before `empty_rows` allocates it.
    """
    length = header_length(data)
    if len(data) < length:
        raise EntryError(f"{len(data)} bytes, but the header has {length}")
    _, _, _, payload_bytes, key, payload_checksum, checksum = _HEAD.unpack_from(data)
    text = bytes(data[HEAD_BYTES:length])
    if _header_checksum(bytes(data[: HEAD_BYTES - _CHECKSUM_BYTES]), text) != checksum:
        raise EntryError("the header's checksum differs")
    dtype, shape, metadata = _described(text)
    wanted = shape[0] * shape[1] * dtype.itemsize
    if payload_bytes != wanted:
        raise EntryError(f"{payload_bytes} bytes of rows, but {shape} {dtype} takes {wanted}")
    return Header(key, dtype, shape, metadata, payload_bytes, payload_checksum, length)


def empty_rows(header: Header) -> torch.Tensor:
    """Rows to read into, not initialised: an ordinary CPU tensor, whatever modes and defaults are set."""
    with torch.inference_mode(False):
        return torch.empty(
            header.shape, dtype=header.dtype, device="cpu", layout=torch.strided, requires_grad=False
        )


def payload_view(rows: torch.Tensor) -> memoryview:
    """The bytes of contiguous CPU rows, writable, in place. NumPy lacks bfloat16, so they go as uint8."""
    return memoryview(rows.detach().view(torch.uint8).numpy().reshape(-1))


def check(header: Header, key: bytes, rows: torch.Tensor) -> None:
    """Raise EntryError unless this is the entry of `key`, and `rows` are what was put."""
    if header.key != key:
        raise EntryError(f"it is the entry of {header.key.hex()}, not of {key.hex()}")
    if xxhash.xxh3_128_digest(payload_view(rows)) != header.payload_checksum:
        raise EntryError("the rows' checksum differs")


def _header_checksum(unsigned: bytes, text: bytes) -> bytes:
    return xxhash.xxh3_128_digest(unsigned + text)


def _described(text: bytes) -> tuple[torch.dtype, tuple[int, int], ImageMetadata]:
    """What the JSON says. The checksum held, so what is wrong here was written so."""
    try:
        found = json.loads(text)
        dtype, shape, kept = found["dtype"], _frozen(found["shape"]), found["metadata"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EntryError(f"its JSON cannot be read: {type(error).__name__}") from error
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise EntryError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
    if not _are_ints(shape, 2) or not all(0 <= side < 2**31 for side in shape):
        raise EntryError(f"shape {shape!r} is not a length and a width")
    return _DTYPES[dtype], shape, _metadata(kept)


def _metadata(kept: Any) -> ImageMetadata:
    if not isinstance(kept, dict) or kept.keys() != set(_KEPT):
        raise EntryError(f"its metadata does not have the fields {', '.join(_KEPT)}")
    metadata = ImageMetadata(**{name: _frozen(value) for name, value in kept.items()})
    right = (
        all(isinstance(getattr(metadata, name), str) for name in ("model", "mm_hash", "dtype", "device"))
        and type(metadata.length) is int
        and all(_are_ints(getattr(metadata, name)) for name in ("shape", "strides", "embedding_offsets"))
        and isinstance(metadata.grid_thws, tuple)
        and all(_are_ints(grid, 3) for grid in metadata.grid_thws)
        and _are_ints(metadata.original_size, 2)
    )
    if not right:
        raise EntryError("a field of its metadata is of the wrong type")
    return metadata


def _frozen(value: Any) -> Any:
    """JSON's lists are the tuples they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _are_ints(value: Any, count: int | None = None) -> bool:
    return (
        isinstance(value, tuple)
        and all(type(item) is int for item in value)
        and (count is None or len(value) == count)
    )
