"""Builder of TIFF files of every layout."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tags = Mapping[int, tuple[int, Sequence[int]]]
"""Tag number to type (3 short, 4 long) and values."""

_TYPES = {1: "B", 3: "H", 4: "I"}


def tiff(
    samples: np.ndarray[Any, Any],
    bits: int = 8,
    *,
    photometric: int,
    order: str = "<",
    planes: bool = False,
    tile: tuple[int, int] | None = None,
    rows: int = 0,
    compression: int = 1,
    extra: Sequence[int] = (),
    tags: Tags | None = None,
    behind: bytes = bytes(4),
) -> bytes:
    """Build a TIFF of samples [h, w, channels] in strips of `rows` or in tiles (width, height), uncompressed
    (1) or deflated (8). `tags` are added or replaced, those without values left out; `behind` follows the
    directory in the place of the next one's offset.
    """
    height, width, channels = samples.shape
    wide, high = tile or (width, rows or height)
    parts = []
    for plane in np.split(samples, channels, axis=2) if planes else [samples]:
        for top in range(0, height, high):
            for left in range(0, width, wide):
                part = plane[top : top + high, left : left + wide]
                if tile:
                    part = np.pad(part, ((0, high - part.shape[0]), (0, wide - part.shape[1]), (0, 0)))
                packed = _pack(part, bits, order)
                parts.append(zlib.compress(packed) if compression == 8 else packed)
    starts = [8 + sum(map(len, parts[:i])) for i in range(len(parts))]
    lengths = [len(part) for part in parts]
    data = b"".join(parts)
    data += b"\0" * (len(data) % 2)
    listed: dict[int, tuple[int, Sequence[int]]] = {
        256: (4, (width,)),
        257: (4, (height,)),
        258: (3, (bits,) * channels),
        259: (3, (compression,)),
        262: (3, (photometric,)),
        277: (3, (channels,)),
        284: (3, (2 if planes else 1,)),
        338: (3, extra),
    }
    if tile:
        listed |= {322: (4, (wide,)), 323: (4, (high,)), 324: (4, starts), 325: (4, lengths)}
    else:
        listed |= {273: (4, starts), 278: (4, (high,)), 279: (4, lengths)}
    listed |= tags or {}
    listed = {tag: entry for tag, entry in listed.items() if entry[1]}
    at = 8 + len(data)
    directory, values = struct.pack(order + "H", len(listed)), b""
    for tag, (kind, numbers) in sorted(listed.items()):
        payload = struct.pack(f"{order}{len(numbers)}{_TYPES[kind]}", *numbers)
        if len(payload) > 4:
            where = at + 2 + 12 * len(listed) + len(behind) + len(values)
            values += payload + b"\0" * (len(payload) % 2)
            payload = struct.pack(order + "I", where)
        directory += struct.pack(order + "HHI", tag, kind, len(numbers)) + payload.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "I", at) + data + directory + behind + values


def _pack(part: np.ndarray[Any, Any], bits: int, order: str) -> bytes:
    if bits > 8:
        return bytes(part.astype(f"{order}u{bits // 8}").tobytes())
    rows = part.reshape(part.shape[0], -1, 1).astype(np.uint8)
    spread = np.unpackbits(rows, axis=2)[:, :, 8 - bits :].reshape(part.shape[0], -1)
    return np.packbits(spread, axis=1).tobytes()
