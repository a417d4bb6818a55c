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
_MAX_JSON_BYTES = 1024**2  # a length beyond it is not read at all
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# Who serves an entry says where it came from, and times are those of another request.
_PER_REQUEST_FIELDS = {"cache", "timings"}
_STORED_FIELDS = tuple(field.name for field in fields(ImageMetadata) if field.name not in _PER_REQUEST_FIELDS)


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
    if (
        rows.dtype not in _DTYPE_NAMES
        or rows.ndim != 2
        or rows.device.type != "cpu"
        or not rows.is_contiguous()
    ):
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
        json_text = json.dumps(description, separators=(",", ":")).encode()
    except TypeError as error:
        raise ValueError(f"metadata must be plain values: {error}") from error
    json_text += b" " * (-(HEAD_BYTES + len(json_text)) % _ALIGNMENT)
    if len(json_text) > _MAX_JSON_BYTES:
        raise ValueError(f"metadata takes {len(json_text)} bytes as JSON, more than {_MAX_JSON_BYTES}")
    head_fields = _HEAD.pack(
        _MAGIC,
        FORMAT,
        len(json_text),
        len(payload),
        key,
        xxhash.xxh3_128_digest(payload),
        bytes(_CHECKSUM_BYTES),
    )[:-_CHECKSUM_BYTES]
    return head_fields + _header_checksum(head_fields, json_text) + json_text, payload


def header_length(head: bytes | memoryview) -> int:
    """Bytes of the whole header, by the first HEAD_BYTES of an entry. Raises EntryError."""
    if len(head) < HEAD_BYTES:
        raise EntryError(f"{len(head)} bytes, but a head has {HEAD_BYTES}")
    magic, format_number, json_length = _HEAD.unpack_from(head)[:3]
    if magic != _MAGIC:
        raise EntryError("it does not begin as an entry does")
    if format_number != FORMAT:
        raise EntryError(f"format {format_number}, but this version reads format {FORMAT}")
    if json_length > _MAX_JSON_BYTES:
        raise EntryError(f"{json_length} bytes of JSON, more than {_MAX_JSON_BYTES}")
    return HEAD_BYTES + int(json_length)


def read_header(data: bytes | memoryview) -> Header:
    """The header that `data` begins with; what follows it is not looked at. Raises EntryError.

    `payload_bytes` is a claim: compare it with what is there before `empty_rows` allocates it.
    """
    length = header_length(data)
    if len(data) < length:
        raise EntryError(f"{len(data)} bytes, but the header has {length}")
    _, _, _, payload_bytes, key, payload_checksum, checksum = _HEAD.unpack_from(data)
    json_text = bytes(data[HEAD_BYTES:length])
    if _header_checksum(bytes(data[: HEAD_BYTES - _CHECKSUM_BYTES]), json_text) != checksum:
        raise EntryError("the header's checksum differs")
    dtype, shape, metadata = _parse_json(json_text)
    expected = shape[0] * shape[1] * dtype.itemsize
    if payload_bytes != expected:
        raise EntryError(f"{payload_bytes} bytes of rows, but {shape} {dtype} takes {expected}")
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


def _header_checksum(head_fields: bytes, json_text: bytes) -> bytes:
    return xxhash.xxh3_128_digest(head_fields + json_text)


def _parse_json(json_text: bytes) -> tuple[torch.dtype, tuple[int, int], ImageMetadata]:
    """What the JSON says. The checksum held, so what is wrong here was written so."""
    try:
        parsed = json.loads(json_text)
        dtype, shape, stored = parsed["dtype"], _to_tuples(parsed["shape"]), parsed["metadata"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EntryError(f"its JSON cannot be read: {type(error).__name__}") from error
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise EntryError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
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
        raise EntryError("a field of its metadata is of the wrong type")
    return metadata


def _to_tuples(value: Any) -> Any:
    """JSON's lists are the tuples they were."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _is_int_tuple(value: Any, count: int | None = None) -> bool:
    return (
        isinstance(value, tuple)
        and all(type(item) is int for item in value)
        and (count is None or len(value) == count)
    )
