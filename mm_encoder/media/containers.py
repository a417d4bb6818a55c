"""Walking files without decoding them: PNG and RIFF chunks, JPEG segments, GIF blocks; all bounded."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..contract import ImageSize
from ..errors import MediaDecodeError

# Far more chunks or segments than any encoder writes; a file of nothing else would only burn time.
MAX_CHUNKS = 1 << 17
# A GIF's data comes in sub-blocks of up to 255 bytes: 256 MiB in well-filled ones.
MAX_SUB_BLOCKS = 1 << 20
# Each scan of a JPEG is a pass over the whole picture, however few bytes it has; libjpeg-turbo's own
# fuzzers stop here, and encoders write ten.
MAX_SCANS = 500


class Chunk(NamedTuple):
    """A PNG or RIFF chunk: its name, and where its payload starts and ends in the file."""

    name: bytes
    start: int
    end: int


def png_chunks(data: bytes) -> Iterator[Chunk]:
    """Walk a PNG's chunks up to IEND or the end of the data; a cut last chunk ends past the data."""
    at = 8
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            return
        length = int.from_bytes(data[at : at + 4])
        chunk = Chunk(data[at + 4 : at + 8], at + 8, at + 8 + length)
        yield chunk
        if chunk.name == b"IEND":
            return
        at = chunk.end + 4
    raise MediaDecodeError(f"a PNG of more than {MAX_CHUNKS} chunks")


def riff_chunks(data: bytes) -> Iterator[Chunk]:
    """Walk a WebP's chunks up to the end that its RIFF header gives, or that of the data."""
    last = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > last:
            return
        name, length = struct.unpack_from("<4sI", data, at)
        chunk = Chunk(name, at + 8, at + 8 + length)
        if chunk.end > last:
            raise MediaDecodeError("the WebP is truncated or corrupt (a chunk reaches over its end)")
        yield chunk
        at = chunk.end + (length & 1)
    raise MediaDecodeError(f"a WebP of more than {MAX_CHUNKS} chunks")


# --- JPEG --------------------------------------------------------------------------------------------

SOS, EOI, APP0, APP1, APP14 = 0xDA, 0xD9, 0xE0, 0xE1, 0xEE
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})

# A marker is 0xFF and a byte that is no fill, no escaped 0xFF of entropy-coded data, no restart and
# nothing else that stands alone.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)


class Segment(NamedTuple):
    """A JPEG segment: its marker, and where its payload starts and ends."""

    marker: int
    start: int
    end: int


def jpeg_segments(data: bytes) -> Iterator[Segment]:
    """Walk a JPEG's segments, passing over whatever lies between them, scans included, up to the end
    marker or the end of the data. Raises struct.error where a length is cut.
    """
    at = 2
    for _ in range(MAX_CHUNKS):
        match = _MARKER.search(data, at)
        if match is None:
            return
        marker, start = data[match.end() - 1], match.end()
        if marker == EOI:
            yield Segment(marker, start, start)
            return
        (length,) = struct.unpack_from(">H", data, start)
        if length < 2:
            raise MediaDecodeError("the JPEG is corrupt (a segment shorter than its own length)")
        at = start + length
        yield Segment(marker, start + 2, at)
    raise MediaDecodeError(f"a JPEG of more than {MAX_CHUNKS} segments")


def check_jpeg_scans(data: bytes) -> None:
    """Raise MediaDecodeError unless the scans hold every coefficient of every component to its last bit.

    Early scans alone are a picture to libjpeg, as long as an end marker follows.
    """
    progressive, scans = False, 0
    missing: dict[int, int] = {}  # of each component, a bit a coefficient
    for marker, start, _ in jpeg_segments(data):
        if marker in START_OF_FRAME:
            progressive = marker in _PROGRESSIVE
            components = data[start + 6 : start + 6 + 3 * data[start + 5] : 3]
            missing = dict.fromkeys(components, (1 << 64) - 1)
        elif marker == SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise MediaDecodeError(f"a JPEG of more than {MAX_SCANS} scans")
            spectrum = start + 1 + 2 * data[start]
            first, last, bits = data[spectrum], data[spectrum + 1], data[spectrum + 2] & 15
            if not progressive:
                first, last, bits = 0, 63, 0
            if bits == 0:
                span = (1 << last + 1) - (1 << first) if first <= last else 0
                for component in data[start + 1 : spectrum : 2]:
                    missing[component] = missing.get(component, 0) & ~span
            if not any(missing.values()):
                return
    raise MediaDecodeError("the JPEG is truncated (some of its scans are missing)")


def repair_jpeg_headers(data: bytes, channels: int) -> bytes:
    """The same picture without what libjpeg merely warns of before it comes to the pixels: stray bytes
    between segments, an unknown JFIF revision or Adobe transform (taken as YCbCr or YCCK), a sequential
    scan with a progressive one's parameters.
    """
    repaired, progressive = bytearray(data[:2]), False
    for marker, start, end in jpeg_segments(data):
        payload = bytearray(data[start:end])
        if marker == APP0 and payload.startswith(b"JFIF\0") and len(payload) >= 14:
            payload[5] = 1
        elif marker == APP14 and payload.startswith(b"Adobe") and len(payload) >= 12 and payload[11]:
            payload[11] = 2 if channels == 4 else 1
        elif marker in START_OF_FRAME:
            progressive = marker in _PROGRESSIVE
        elif marker == SOS and not progressive:
            payload[-3:] = b"\x00\x3f\x00"
        repaired += b"\xff" + bytes([marker]) + (len(payload) + 2).to_bytes(2) + payload
        if marker == SOS:
            return bytes(repaired + data[end:])
    raise MediaDecodeError("the JPEG is truncated (it has no scan)")


# --- GIF ---------------------------------------------------------------------------------------------


class GifFrame(NamedTuple):
    """A GIF's canvas with its first frame: where the frame's own extensions and data lie in the file."""

    canvas: ImageSize
    tables_end: int  # end of the header and the global colour table
    control: int | None  # start of the frame's graphic control extension
    start: int  # start of its image descriptor
    end: int  # end of its image data


def gif_first_frame(data: bytes, *, whole: bool) -> GifFrame:
    """Find the first frame; with `whole`, its image data must be complete. Raises IndexError or
    struct.error where the data ends too early.
    """
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = tables_end = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    control = None
    for _ in range(MAX_CHUNKS):
        block = data[at]
        if block == 0x21:  # an extension; the last graphic control before the frame is the frame's
            if data[at + 1] == 0xF9 and data[at + 2] == 4:
                control = at
            at = _skip_sub_blocks(data, at + 2)
        elif block == 0x2C:
            left, top, wide, high, local = struct.unpack_from("<HHHHB", data, at + 1)
            # A frame that reaches over the canvas widens it, as in Pillow.
            canvas = ImageSize(max(width, left + wide), max(height, top + high))
            end = at + 10 + (3 << (local & 7) + 1 if local & 0x80 else 0) + 1
            if whole:
                end = _skip_sub_blocks(data, end)
            return GifFrame(canvas, tables_end, control, at, end)
        elif block == 0x3B:
            raise MediaDecodeError("the GIF holds no frame")
        else:
            at += 1  # stray bytes between blocks are passed over, as readers do
    raise MediaDecodeError(f"a GIF of more than {MAX_CHUNKS} blocks before its first frame")


def _skip_sub_blocks(data: bytes, at: int) -> int:
    for _ in range(MAX_SUB_BLOCKS):
        length = data[at]
        at += 1 + length
        if length == 0:
            return at
    raise MediaDecodeError(f"a GIF of more than {MAX_SUB_BLOCKS} sub-blocks in one block")
