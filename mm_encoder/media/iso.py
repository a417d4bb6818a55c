"""AVIF and HEIC: still images in ISO base media files. Their boxes are walked here, their images decoded by
libavif (through Pillow) and libheif (pillow-heif), called directly: no setting of Pillow's reaches them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from PIL import features

from ..contract import ImageSize
from ..errors import MediaDecodeError, UnsupportedMediaError
from .faults import raise_host_fault
from .orientation import EXIF, XMP, Metadata, exif_orientation, orientation_of

MAX_BOXES = 1 << 14
_CONTAINERS = (b"iprp", b"ipco", b"moov", b"trak", b"mdia", b"minf", b"stbl")

Box = tuple[bytes, int, int]
"""A box's type, and the byte offsets of its payload."""


def boxes(data: bytes) -> Iterator[Box]:
    """Yield the boxes of an ISO base media file, those inside containers too. Stops where one is damaged."""
    spans = [(0, len(data))]
    for _ in range(MAX_BOXES):
        while spans and spans[-1][0] + 8 > spans[-1][1]:
            spans.pop()
        if not spans:
            return
        at, last = spans.pop()
        size, kind, start = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8], at + 8
        if size == 1:
            size, start = int.from_bytes(data[start : start + 8]), at + 16
        end = last if size == 0 else at + size
        if end > last or end < start:
            return
        spans.append((end, last))
        yield kind, start, end
        if kind in _CONTAINERS:
            spans.append((start, end))
        elif kind == b"meta":
            spans.append((start + 4, end))
    raise MediaDecodeError(f"the file has more than {MAX_BOXES} boxes")


def largest_image(data: bytes) -> ImageSize:
    """Return the size of the largest image that any part of the file says it holds: what decoding may
    allocate. An AV1 stream is asked itself, because its decoder believes the stream and not the file.
    """
    sizes, streams, items = [ImageSize(0, 0)], list[int](), dict[int, int]()
    coded: set[int] = set()
    idat = 0
    for kind, start, end in boxes(data):
        if kind == b"ispe" and end - start >= 12:
            sizes.append(ImageSize(_number(data, start + 4, 4), _number(data, start + 8, 4)))
        elif kind == b"iinf":
            coded |= set(_av1_items(data, start, end))
        elif kind == b"iloc":
            items |= dict(_item_offsets(data, start, end))
        elif kind == b"idat":
            idat = start
        elif kind in (b"stco", b"co64") and end - start >= 12 and _number(data, start + 4, 4):
            streams.append(_number(data, start + 8, 4 if kind == b"stco" else 8))
    for item in coded & items.keys():
        streams.append(items[item] if items[item] >= 0 else idat - 1 - items[item])
    sizes += [size for at in streams if (size := _av1_size(data[at : at + 256])) is not None]
    return max(sizes, key=lambda size: size.width * size.height)


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size])


def _av1_items(data: bytes, start: int, end: int) -> Iterator[int]:
    at = start + (6 if data[start] == 0 else 8)
    for _ in range(MAX_BOXES):
        size = _number(data, at, 4)
        if size < 8 or at + size > end:
            return
        version = data[at + 8] if size > 8 else 0
        if data[at + 4 : at + 8] == b"infe" and version >= 2:
            wide = 2 if version == 2 else 4
            if data[at + 14 + wide : at + 18 + wide] == b"av01":
                yield _number(data, at + 12, wide)
        at += size


def _item_offsets(data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield each item's number and the offset of its data; -1 minus the offset where that is in `idat`."""
    if end - start < 8:
        return
    version, widths = data[start], _number(data, start + 4, 2)
    offset, length, base = widths >> 12, widths >> 8 & 15, widths >> 4 & 15
    index = widths & 15 if version else 0
    wide = 2 if version < 2 else 4
    at = start + 6 + wide
    for _ in range(min(_number(data, start + 6, wide), MAX_BOXES)):
        item, at = _number(data, at, wide), at + wide
        in_idat = False
        if version:
            in_idat, at = data[at + 1 : at + 2] == b"\x01", at + 2
        first, at = _number(data, at + 2, base), at + 2 + base
        extents, at = _number(data, at, 2), at + 2
        first += _number(data, at + index, offset)
        yield item, -1 - first if in_idat else first
        at += extents * (index + offset + length)
        if at > end:
            return


_SEQUENCE_HEADER, _TEMPORAL_DELIMITER = 1, 2


def _av1_size(stream: bytes) -> ImageSize | None:
    """Return the frame size of an AV1 stream's sequence header, if the stream begins with one."""
    at = 0
    for _ in range(4):
        if at + 2 > len(stream) or stream[at] & 0x80:
            return None
        kind, extended, sized = stream[at] >> 3 & 15, stream[at] >> 2 & 1, stream[at] >> 1 & 1
        at += 1 + extended
        size = shift = 0
        while sized and at < len(stream):
            byte = stream[at]
            size, shift, at = size | (byte & 127) << shift, shift + 7, at + 1
            sized = byte >> 7
        if kind == _SEQUENCE_HEADER:
            return _sequence_size(stream[at : at + 128])
        if kind != _TEMPORAL_DELIMITER:
            return None
        at += size
    return None


def _sequence_size(header: bytes) -> ImageSize | None:
    bits, left = int.from_bytes(header), 8 * len(header)

    def take(count: int) -> int:
        nonlocal left
        left -= count
        return bits >> left & (1 << count) - 1 if left >= 0 else 0

    take(4)  # profile, still picture
    if take(1):  # reduced header
        take(5)
    else:
        delay, model = 0, 0
        if take(1):  # timing
            take(64)
            if take(1):  # equal intervals: a number in Golomb's code
                zeros = 0
                while zeros < 32 and not take(1) and left > 0:
                    zeros += 1
                take(zeros)
            if model := take(1):
                delay = take(5) + 1
                take(32 + 10)
        initial = take(1)
        for _ in range(take(5) + 1):
            take(12)
            if take(5) > 7:
                take(1)
            if model and take(1):
                take(2 * delay + 1)
            if initial and take(1):
                take(4)
    width_bits, height_bits = take(4) + 1, take(4) + 1
    size = ImageSize(take(width_bits) + 1, take(height_bits) + 1)
    return size if left >= 0 else None


# --- AVIF --------------------------------------------------------------------------------------------


def avif_decoder(data: bytes) -> tuple[Any, ImageSize, str, int]:
    """Return a decoder of the file's primary image, its size, mode ("RGB" or "RGBA") and orientation. Nothing
    is decoded yet. One thread: libavif's own would be a hidden pool.
    """
    if not features.check("avif"):
        raise UnsupportedMediaError("AVIF needs a Pillow that is built with libavif; this one is not")
    from PIL import _avif

    try:
        decoder = _avif.AvifDecoder(data, "auto", 1)
        size, _, mode, _, exif, turned, xmp = decoder.get_info()
    except Exception as error:
        raise_host_fault(error)
        raise _avif_error(error) from error
    # The file's own transforms go before what its EXIF block says, as in Pillow.
    metadata: Metadata = {name: value for name, value in ((EXIF, exif), (XMP, xmp)) if value}
    if exif and turned != (exif_orientation(exif) or 1):
        metadata.pop(EXIF)
        return decoder, ImageSize(*size), mode, int(turned)
    return decoder, ImageSize(*size), mode, int(turned) if turned != 1 else orientation_of(metadata)


def _avif_error(error: Exception) -> Exception:
    reason = re.sub(r"^Failed to decode (?:image|frame \d+): ", "", str(error))
    if "not implemented" in reason.lower() or "unsupported" in reason.lower():
        return UnsupportedMediaError(f"AVIF of a kind that libavif does not decode ({reason})")
    return MediaDecodeError(f"the AVIF is truncated or corrupt ({reason})")


def avif_pixels(decoder: Any) -> bytes:
    """Decode the first frame: packed rows of the decoder's mode. Raises MediaError."""
    try:
        pixels: bytes = decoder.get_frame(0)[0]
    except Exception as error:
        raise_host_fault(error)
        raise _avif_error(error) from error
    return pixels


# --- HEIC --------------------------------------------------------------------------------------------


def heif_image(data: bytes) -> Any:
    """Return the file's primary image, not decoded yet. libheif turns images itself, so that their size is
    that which is shown. Raises MediaError.
    """
    try:
        library = importlib.import_module("pillow_heif")
    except ImportError:
        raise UnsupportedMediaError(
            "HEIC needs the package pillow-heif: install with the extra heif, see docs/install.md, or "
            "convert the image"
        ) from None
    try:
        file = library.open_heif(data, convert_hdr_to_8bit=True)
        return file[file.primary_index]
    except Exception as error:
        raise_host_fault(error)
        raise _heif_error(error) from error


def heif_pixels(image: Any) -> tuple[str, int, bytes]:
    """Decode: the mode, the bytes of a row, and the rows. Raises MediaError."""
    try:
        return image.mode, image.stride, image.data
    except Exception as error:
        raise_host_fault(error)
        raise _heif_error(error) from error


def _heif_error(error: Exception) -> Exception:
    if isinstance(error, SyntaxError) or "unsupported" in str(error).lower():
        return UnsupportedMediaError("HEIC of a kind that libheif does not decode")
    return MediaDecodeError("the HEIC is truncated or corrupt")
