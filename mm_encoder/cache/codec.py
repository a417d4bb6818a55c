"""Serialization of an entry: a fixed-size head, metadata as JSON, then the raw rows.

    head   magic, format, length of the JSON, length of the rows, key, rows' checksum, header's checksum
    JSON   dtype, shape, metadata; padded with spaces so that the rows start at a multiple of 64 bytes
    rows   little-endian

"Header" means head and JSON together. Both checksums are XXH3-128; the header's covers the head before it and
the JSON. Every future format keeps the magic and the format number in place. Nothing is unpickled. xxhash
releases the GIL while it hashes the rows.
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
"""Increase it whenever the meaning of a byte changes; entries of any other format are misses."""

_MAGIC = b"mm-rows\n"
_HEAD = struct.Struct("<8sIIQ32s16s16s")
HEAD_BYTES: int = _HEAD.size
"""Number of leading bytes that `header_length` needs."""

_CHECKSUM_BYTES = 16
_ALIGNMENT = 64
_MAX_JSON_BYTES = 1024**2  # a larger length is rejected before anything is read
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# They belong to one request, not to the result: the tier that served it, and its timings.
_PER_REQUEST_FIELDS = {"cache", "timings"}
_STORED_FIELDS = tuple(f.name for f in fields(ImageMetadata) if f.name not in _PER_REQUEST_FIELDS)


class EntryError(Exception):
    """The bytes are not a complete, valid entry; the message gives the reason."""


class Header(NamedTuple):
    """Everything in an entry except its rows. `header_bytes` is the offset of the rows."""

    key: bytes
    dtype: torch.dtype
    shape: tuple[int, int]
    metadata: ImageMetadata
    payload_bytes: int
    payload_checksum: bytes
    header_bytes: int


def encode(key: bytes, entry: Entry) -> tuple[bytes, memoryview]:
    """Serialize `entry` into its header and a read-only view of the rows, which are not copied.

    Raises ValueError for a key that is not 32 bytes, and for rows or metadata that cannot be stored exactly.
    """
    rows = entry.rows
    if len(key) != 32:
        raise ValueError(f"a key is 32 bytes, got {len(key)}")
    plain = rows.ndim == 2 and rows.device.type == "cpu" and rows.is_contiguous()
    if not plain or rows.dtype not in _DTYPE_NAMES:
        raise ValueError(
            f"rows must be contiguous [length, width] on the CPU in {', '.join(_DTYPES)}; got "
            f"{tuple(rows.shape)} {rows.dtype} on {rows.device}, strides {rows.stride()}"
        )
    payload = payload_view(rows).toreadonly()
    description = {
        "dtype": _DTYPE_NAMES[rows.dtype],
        "shape": list(rows.shape),
        "metadata": {name: getattr(entry.metadata, name) for name in _STORED_FIELDS},
    }
    try:
        text = json.dumps(description, separators=(",", ":")).encode()
    except TypeError as error:
        raise ValueError(f"metadata must be plain values: {error}") from error
    text += b" " * (-(HEAD_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"metadata takes {len(text)} bytes as JSON, more than {_MAX_JSON_BYTES}")
    checksum = xxhash.xxh3_128_digest(payload)
    head = _HEAD.pack(_MAGIC, FORMAT, len(text), len(payload), key, checksum, bytes(_CHECKSUM_BYTES))
    head_fields = head[:-_CHECKSUM_BYTES]
    return head_fields + _header_checksum(head_fields, text) + text, payload


def header_length(head: bytes | memoryview) -> int:
    """Return the length of the whole header from an entry's first HEAD_BYTES. Raises EntryError."""
    if len(head) < HEAD_BYTES:
        raise EntryError(f"{len(head)} bytes, but a head has {HEAD_BYTES}")
    magic, format_number, json_length = _HEAD.unpack_from(head)[:3]
    if magic != _MAGIC:
        raise EntryError("it does not start with the magic of an entry")
    if format_number != FORMAT:
        raise EntryError(f"format {format_number}, but this version reads format {FORMAT}")
    if json_length > _MAX_JSON_BYTES:
        raise EntryError(f"{json_length} bytes of JSON, more than {_MAX_JSON_BYTES}")
    return HEAD_BYTES + int(json_length)


def read_header(data: bytes | memoryview) -> Header:
    """Parse the header at the start of `data`; any bytes after it are ignored. Raises EntryError.

    `payload_bytes` is unverified: compare it with the file's size before `empty_rows` allocates that much.
    """
    length = header_length(data)
    if len(data) < length:
        raise EntryError(f"{len(data)} bytes, but the header has {length}")
    _, _, _, payload_bytes, key, payload_checksum, checksum = _HEAD.unpack_from(data)
    text = bytes(data[HEAD_BYTES:length])
    if _header_checksum(bytes(data[: HEAD_BYTES - _CHECKSUM_BYTES]), text) != checksum:
        raise EntryError("the header's checksum differs")
    dtype, shape, metadata = _parse_json(text)
    expected = shape[0] * shape[1] * dtype.itemsize
    if payload_bytes != expected:
        raise EntryError(f"{payload_bytes} bytes of rows, but {shape} {dtype} takes {expected}")
    return Header(key, dtype, shape, metadata, payload_bytes, payload_checksum, length)


def empty_rows(header: Header) -> torch.Tensor:
    """Allocate uninitialized rows: a plain CPU tensor, whatever Torch modes and defaults are active."""
    with torch.inference_mode(False):
        return torch.empty(
            header.shape, dtype=header.dtype, device="cpu", layout=torch.strided, requires_grad=False
        )


def payload_view(rows: torch.Tensor) -> memoryview:
    """Return the bytes of contiguous CPU rows as a writable view; as uint8, since NumPy lacks bfloat16."""
    return memoryview(rows.detach().view(torch.uint8).numpy().reshape(-1))


def check(header: Header, key: bytes, rows: torch.Tensor) -> None:
    """Raise EntryError unless the header is that of `key` and `rows` match its checksum."""
    if header.key != key:
        raise EntryError(f"it is the entry of {header.key.hex()}, not of {key.hex()}")
    if xxhash.xxh3_128_digest(payload_view(rows)) != header.payload_checksum:
        raise EntryError("the rows' checksum differs")


def _header_checksum(head_fields: bytes, text: bytes) -> bytes:
    return xxhash.xxh3_128_digest(head_fields + text)


def _parse_json(text: bytes) -> tuple[torch.dtype, tuple[int, int], ImageMetadata]:
    """Return dtype, shape and metadata. The checksum was right, so any fault here was written that way."""
    try:
        parsed = json.loads(text)
        dtype, shape, stored = parsed["dtype"], _to_tuples(parsed["shape"]), parsed["metadata"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EntryError(f"its JSON cannot be read: {type(error).__name__}") from error
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise EntryError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if not _is_int_tuple(shape, 2) or not all(0 <= side < 2**31 for side in shape):
        raise EntryError(f"shape {shape!r} is not a length and a width")
    return _DTYPES[dtype], shape, _parse_metadata(stored)


def _parse_metadata(stored: Any) -> ImageMetadata:
    if not isinstance(stored, dict) or stored.keys() != set(_STORED_FIELDS):
        raise EntryError(f"its metadata does not have the fields {', '.join(_STORED_FIELDS)}")
    metadata = ImageMetadata(**{name: _to_tuples(value) for name, value in stored.items()})
    valid = (
        all(isinstance(getattr(metadata, name), str) for name in ("model", "mm_hash", "dtype", "device"))
        and type(metadata.length) is int
        and all(_is_int_tuple(getattr(metadata, name)) for name in ("shape", "strides", "embedding_offsets"))
        and isinstance(metadata.grid_thws, tuple)
        and all(_is_int_tuple(grid, 3) for grid in metadata.grid_thws)
        and _is_int_tuple(metadata.original_size, 2)
    )
    if not valid:
        raise EntryError("a field of its metadata has the wrong type")
    return metadata


def _to_tuples(value: Any) -> Any:
    """Convert JSON lists back to tuples, at every depth."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _is_int_tuple(value: Any, count: int | None = None) -> bool:
    return (
        isinstance(value, tuple)
        and all(type(item) is int for item in value)
        and (count is None or len(value) == count)
    )
