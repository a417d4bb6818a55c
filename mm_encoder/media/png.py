"""PNG files: reduced to their pixel chunks, checked for damage that Pillow accepts, decoded natively."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from isal import isal_zlib  # inflates twice as fast as zlib

from .. import _native
from ..errors import MediaDecodeError
from .containers import png_chunks
from .picture import Pixels

IsalError: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # its stubs declare an instance
_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_GREY, _RGB, _PALETTE, _RGBA = 0, 2, 3, 6
# Adam7's passes: first column, first row, and the steps between columns and rows.
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_ONE_PASS = ((0, 0, 1, 1),)


class Ihdr(NamedTuple):
    """The image header chunk."""

    width: int
    height: int
    depth: int
    colour: int
    compression: int
    filtering: int
    interlace: int


@dataclass(frozen=True, slots=True)
class PixelChunks:
    """A PNG reduced to its pixel chunks: the file, its header, and the payloads of its IDAT chunks."""

    data: bytes
    ihdr: Ihdr
    idat: list[memoryview]
    has_trns: bool
    """Whether a tRNS chunk defines transparency."""

    def pixels(self) -> Pixels | None:
        """Decode to [h, w, 3 or 4] in a third of Pillow's time. None if the PNG is not of the usual kind
        (8-bit RGB or RGBA, no tRNS chunk, not interlaced), or if there are no native kernels.
        """
        width, height, depth, colour, _, _, interlace = self.ihdr
        kernels = _native.kernels
        if kernels is None or depth != 8 or colour not in (_RGB, _RGBA) or interlace or self.has_trns:
            return None
        channels = _CHANNELS[colour]
        idat = b"".join(self.idat)
        if idat[:1] > b"\x7f":
            raise MediaDecodeError("the PNG is corrupt (its pixel data asks for a window larger than 32 KiB)")
        try:
            data = isal_zlib.decompressobj().decompress(idat, self.inflated_bytes)
        except IsalError:
            return None  # Pillow may get all rows before it reaches the fault, such as a bad checksum
        if len(data) < self.inflated_bytes:
            raise MediaDecodeError("the PNG is truncated (some of its rows are missing)")
        pixels = np.empty((height, width, channels), np.uint8)
        kernels.unfilter(np.frombuffer(data, np.uint8), height, width * channels, channels, pixels)
        return pixels

    @property
    def inflated_bytes(self) -> int:
        """Size of the decompressed pixel data, in bytes."""
        width, height, depth, colour, _, _, interlace = self.ihdr
        bits, total = depth * _CHANNELS[colour], 0
        for left, top, across, down in _ADAM7 if interlace else _ONE_PASS:
            columns, rows = -((left - width) // across), -((top - height) // down)
            if columns > 0 and rows > 0:
                total += rows * (1 + -(-columns * bits // 8))  # each row begins with its filter type
        return total

    def has_all_rows(self) -> bool:
        """Return whether the pixel data decompresses to every row; decompresses no more than that."""
        missing = self.inflated_bytes
        inflate = zlib.decompressobj()
        piece: bytes | memoryview
        for piece in self.idat:
            while missing > 0 and not inflate.eof and (part := inflate.decompress(piece, 1 << 16)):
                missing -= len(part)
                piece = inflate.unconsumed_tail
        return missing <= 0


def pixel_chunks(data: bytes) -> PixelChunks:
    """Drop text, colour profiles and animation, so that their content can neither fail the image nor cost
    time. Raises MediaDecodeError.
    """
    kept, idat = [data[:8]], list[memoryview]()
    ihdr, palette, name, has_trns, palette_after_idat = None, b"", b"", False, False
    for name, start, end in png_chunks(data):
        # Pillow does not check the CRC of pixel data. Check all: a damaged name could hide a pixel chunk.
        crc = zlib.crc32(memoryview(data)[start - 4 : end])
        if len(data) < end + 4 or crc != int.from_bytes(data[end : end + 4]):
            raise MediaDecodeError("the PNG is truncated or corrupt (the CRC of a chunk is wrong)")
        if not name.isalpha():
            raise MediaDecodeError("the PNG is corrupt (a chunk's name must be four letters)")
        if name not in _PIXEL_CHUNKS:
            continue  # a critical one is refused by the header's reader
        if name == b"IHDR":
            if ihdr is not None:
                raise MediaDecodeError("the PNG has a second IHDR")  # its size was never checked
            ihdr = Ihdr(*struct.unpack(">IIBBBBB", data[start:end]))
            if ihdr.compression or ihdr.filtering:
                raise MediaDecodeError("the PNG is corrupt (unknown compression or filter method)")
        elif name == b"PLTE":
            palette, palette_after_idat = data[start:end], bool(idat)
        elif name == b"IDAT":
            if palette_after_idat:
                raise MediaDecodeError("the PNG is corrupt (a palette between its pixel data)")
            idat.append(memoryview(data)[start:end])
        elif name == b"tRNS" and ihdr is not None:
            has_trns = True
            kept.append(_chunk(name, _scaled_colour_key(data[start:end], ihdr)))
            continue
        kept.append(data[start - 8 : end + 4])
    if name != b"IEND" or ihdr is None:
        raise MediaDecodeError("the PNG is truncated (no IEND chunk)")
    if ihdr.colour == _PALETTE and not palette:
        raise MediaDecodeError("the PNG has no palette")
    return PixelChunks(b"".join(kept), ihdr, idat, has_trns)


def _chunk(name: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(4) + name + payload + zlib.crc32(name + payload).to_bytes(4)


def _scaled_colour_key(payload: bytes, ihdr: Ihdr) -> bytes:
    """Convert a tRNS colour key to the samples that Pillow compares it with: scaled up to 8 bits, or the
    high byte of 16-bit RGB. (Pillow compares 16-bit grey unchanged.)
    """
    if ihdr.colour not in (_GREY, _RGB):
        return payload
    key = struct.unpack_from(f">{_CHANNELS[ihdr.colour]}H", payload)
    top = 2**ihdr.depth - 1
    if ihdr.depth <= 8:
        key = tuple((v & top) * 255 // top for v in key)
    elif ihdr.colour == _RGB:
        key = tuple(v >> 8 for v in key)
    return struct.pack(f">{len(key)}H", *key)
