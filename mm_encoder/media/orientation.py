"""EXIF orientation, from wherever a file or a Pillow image has it, as Pillow's `exif_transpose` reads it.

Broken metadata must not fail an image whose pixels are good: it counts as none. Pillow would warn about it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from PIL import Image

from .faults import is_foreign

ORIENTATION_TAG = 0x0112
SWAPS_SIDES = (5, 6, 7, 8)
"""Orientations that swap width and height."""

Metadata = dict[str, bytes]
"""What a file says besides its pixels, under the names that Pillow gives it in `Image.info`."""

EXIF, XMP, XMP_TEXT, RAW_PROFILE = "exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"
TEXT_KEYS = frozenset({EXIF, XMP_TEXT, RAW_PROFILE})
"""Keywords of PNG text chunks that orientation may come from."""
_MAX_TEXT = 1 << 20  # bytes of a compressed text that are looked at

# Type of an EXIF value: its struct code and bytes. Pillow compares whatever number is there with 1 to 8.
_NUMBERS = {3: ("H", 2), 4: ("I", 4), 6: ("b", 1), 8: ("h", 2), 9: ("i", 4), 11: ("f", 4), 12: ("d", 8)}
_NUMBERS |= {13: ("I", 4), 5: ("2I", 8), 10: ("2i", 8), 16: ("Q", 8)}
_OTHER_SIZES = {1: 1, 2: 1, 7: 1}
_ORDERS = {b"II": "<", b"MM": ">"}
_MAGIC = (b"II*\0", b"MM\0*", b"MM*\0", b"II\0*")  # the last two are wrong, and read all the same
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation_of(metadata: Mapping[Any, object]) -> int:
    """Return EXIF's orientation, else XMP's, else 1. Values outside 1 to 8 count as 1, as in viewers."""
    exif = metadata.get(EXIF)
    if exif is None:
        exif = _profile(metadata.get(RAW_PROFILE))
    value = exif_orientation(exif) if isinstance(exif, bytes) else None
    if value is None:
        xmp = metadata.get(XMP_TEXT) or metadata.get(XMP)
        if isinstance(xmp, str):
            xmp = xmp.encode(errors="replace")
        if isinstance(xmp, bytes) and (match := _XMP_ORIENTATION.search(xmp)):
            value = int(match[1])
    return value if value is not None and 1 <= value <= 8 else 1


def orientation_of_pillow(image: Image.Image) -> int:
    """Return the orientation of a Pillow image. What has been read or set in its EXIF object goes before what
    its file says.
    """
    read = getattr(image, "_exif", None)
    if read is not None:
        try:
            value = read.get(ORIENTATION_TAG)
            if value is not None or getattr(read, "_info", None) is not None:  # without: it could not be read
                return int(value) if value in range(1, 9) else 1
        except Exception as error:
            # Pillow's parser raises many types of exception, and warnings where the host wants.
            if is_foreign(error):
                raise
    return orientation_of(image.info)


def exif_orientation(exif: bytes) -> int | None:
    """Return the orientation in the first directory of an EXIF block or of a TIFF file, None without one."""
    exif = re.sub(rb"\A(?:Exif\0\0){1,2}", b"", exif[:12]) + exif[12:]
    if exif[:4] not in _MAGIC:
        return None
    order = _ORDERS[exif[:2]]
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
            if tag != ORIENTATION_TAG or not count:
                continue
            code, size = _NUMBERS.get(kind, ("", _OTHER_SIZES.get(kind, 0)))
            where = entry + 8
            if size * count > 4:
                (where,) = struct.unpack_from(order + "I", exif, where)
            if not size or where + size * count > len(exif):
                continue  # as if it were not there: the next entry of this tag counts
            return _whole(*struct.unpack_from(order + code, exif, where)) if code else 0
    except struct.error:
        pass
    return None


def _whole(number: float, divisor: int = 1) -> int:
    return next((value for value in range(1, 9) if number == value * divisor), 0)


def _profile(text: object) -> bytes | None:
    """Return the EXIF block that ImageMagick writes into PNG files as hexadecimal text."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if not isinstance(text, str):
        return None
    try:
        return bytes.fromhex("".join(text.split("\n")[3:]))
    except ValueError:
        return None


def read_text_chunk(name: bytes, payload: bytes, into: Metadata) -> None:
    """Put the text of a PNG's tEXt, zTXt or iTXt chunk into `into` if orientation may come from it."""
    keyword, found, text = payload.partition(b"\0")
    key = keyword.decode("latin-1")
    if not found or key not in TEXT_KEYS:
        return
    compressed = name == b"zTXt"
    if compressed:
        if text[:1] not in (b"\0", b""):
            return
        text = text[1:]
    elif name == b"iTXt":
        if len(text) < 2 or text.count(b"\0", 2) < 2 or (text[0] and text[1]):
            return
        compressed = text[0] != 0
        text = text[2:].split(b"\0", 2)[2]
    if compressed:
        try:
            text = zlib.decompressobj().decompress(text, _MAX_TEXT)
        except zlib.error:
            return
    if key == XMP_TEXT and name == b"iTXt":
        into[XMP] = text
    if key != EXIF or name == b"tEXt":
        into[key] = text
