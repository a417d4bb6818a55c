"""Walk image files without decoding them: PNG and RIFF chunks, JPEG segments, GIF blocks; all bounded."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..contract import ImageSize
from ..errors import MediaDecodeError

# Far more chunks or segments than any encoder writes: a file of many tiny ones would only burn CPU time.
MAX_CHUNKS = 1 << 17
# A GIF's data comes in sub-blocks of up to 255 bytes: 256 MiB in well-filled ones.
MAX_SUB_BLOCKS = 1 << 20
# Each JPEG scan is a pass over the whole image, however few bytes it has. Encoders write about ten;
# libjpeg-turbo's own fuzzers stop at this number.
MAX_SCANS = 500


class Chunk(NamedTuple):
    """A PNG or RIFF chunk: its name, and the byte offsets of its payload."""

    name: bytes
    start: int
    end: int


def png_chunks(data: bytes) -> Iterator[Chunk]:
    """Yield a PNG's chunks up to IEND or the end of the data; a truncated last chunk ends past the data."""
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
    raise MediaDecodeError(f"the PNG has more than {MAX_CHUNKS} chunks")


def riff_chunks(data: bytes) -> Iterator[Chunk]:
    """Yield a WebP's chunks up to the end of the RIFF container, or of the data if that comes first."""
    last = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > last:
            return
        name, length = struct.unpack_from("<4sI", data, at)
        chunk = Chunk(name, at + 8, at + 8 + length)
        if chunk.end > last:
            raise MediaDecodeError(
                "the WebP is truncated or corrupt (a chunk extends past the end of the file)"
            )
        yield chunk
        at = chunk.end + (length & 1)
    raise MediaDecodeError(f"the WebP has more than {MAX_CHUNKS} chunks")


# --- JPEG --------------------------------------------------------------------------------------------

SOS, EOI, APP0, APP1, APP14 = 0xDA, 0xD9, 0xE0, 0xE1, 0xEE
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})

# A segment's marker: 0xFF and a byte that is not padding, not an escaped 0xFF of entropy-coded data, and not
# a marker without a payload (restart, TEM, SOI).
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)


class Segment(NamedTuple):
    """A JPEG segment: its marker, and the byte offsets of its payload."""

    marker: int
    start: int
    end: int


def jpeg_segments(data: bytes) -> Iterator[Segment]:
    """Yield a JPEG's segments up to the end marker or the end of the data. Skips everything between
    segments, entropy-coded data included. Raises struct.error if a length field is truncated.
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
            raise MediaDecodeError("the JPEG is corrupt (a segment is shorter than its own length field)")
        at = start + length
        yield Segment(marker, start + 2, at)
    raise MediaDecodeError(f"the JPEG has more than {MAX_CHUNKS} segments")


def check_jpeg_scans(data: bytes) -> None:
    """Raise MediaDecodeError unless every component has a scan with its DC coefficients.

    That is what libjpeg needs to make an image, and does not check. An encoder may leave out any others of a
    progressive image, or their last bits: a file that was cut there is told by its last scan, which is not
    whole.
    """
    progressive, scans = False, 0
    missing: set[int] = set()  # components
    for marker, start, _ in jpeg_segments(data):
        if marker in START_OF_FRAME:
            progressive = marker in _PROGRESSIVE
            missing = set(data[start + 6 : start + 6 + 3 * data[start + 5] : 3])
        elif marker == SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise MediaDecodeError(f"the JPEG has more than {MAX_SCANS} scans")
            spectrum = start + 1 + 2 * data[start]
            if not progressive or data[spectrum] == 0:
                missing.difference_update(data[start + 1 : spectrum : 2])
            if not missing and not progressive:
                return
    if missing or not scans:
        raise MediaDecodeError("the JPEG is truncated (some of its scans are missing)")


def repair_jpeg_headers(data: bytes, channels: int) -> bytes:
    """Return the same JPEG without the header faults that libjpeg warns about before it decodes pixels:
    stray bytes between segments, an unknown JFIF revision or Adobe transform (taken as YCbCr or YCCK),
    progressive parameters on a sequential scan.
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
    raise MediaDecodeError("the JPEG is truncated (it contains no scan)")


# --- GIF ---------------------------------------------------------------------------------------------


class GifFrame(NamedTuple):
    """A GIF's canvas size, and the byte offsets of its first frame."""

    canvas: ImageSize
    tables_end: int  # end of the header and the global colour table
    control: int | None  # start of the frame's graphic control extension
    start: int  # start of its image descriptor
    end: int  # end of its image data


def gif_first_frame(data: bytes, *, whole: bool) -> GifFrame:
    """Find the first frame. With `whole`, its image data must be complete. Raises IndexError or
    struct.error if the data ends too early.
    """
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = tables_end = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    control = None
    for _ in range(MAX_CHUNKS):
        block = data[at]
        if block == 0x21:  # an extension; the last graphic control before a frame applies to it
            if data[at + 1] == 0xF9 and data[at + 2] == 4:
                control = at
            at = _skip_sub_blocks(data, at + 2)
        elif block == 0x2C:
            left, top, wide, high, local = struct.unpack_from("<HHHHB", data, at + 1)
            # A frame that extends past the canvas enlarges it, as in Pillow.
            canvas = ImageSize(max(width, left + wide), max(height, top + high))
            end = at + 10 + (3 << (local & 7) + 1 if local & 0x80 else 0) + 1
            if whole:
                end = _skip_sub_blocks(data, end)
            return GifFrame(canvas, tables_end, control, at, end)
        elif block == 0x3B:
            raise MediaDecodeError("the GIF contains no frame")
        else:
            at += 1  # skip stray bytes between blocks, as other readers do
    raise MediaDecodeError(f"the GIF has more than {MAX_CHUNKS} blocks before its first frame")


def _skip_sub_blocks(data: bytes, at: int) -> int:
    for _ in range(MAX_SUB_BLOCKS):
        length = data[at]
        at += 1 + length
        if length == 0:
            return at
    raise MediaDecodeError(f"the GIF has more than {MAX_SUB_BLOCKS} sub-blocks in one block")


# --- BMP ---------------------------------------------------------------------------------------------


def bmp_filled_up(data: bytes, at: int, nibbles: bool, size: ImageSize) -> bytes:
    """Return a run-length encoded BMP whose end code comes early, with the pixels that it leaves out: those
    are of the first colour, as in other readers. `at` is where its codes begin. Raises MediaDecodeError if
    there is no end code.
    """
    for _ in range(len(data)):
        if at + 2 > len(data):
            break
        count, value = data[at], data[at + 1]
        if count == 0 and value == 1:
            rest = b"\xff\0" * -(-size.width // 255) + b"\0\0"
            return data[:at] + b"\0\0" + rest * size.height + data[at:]
        at += 2
        if count == 0 and value == 2:
            at += 2
        elif count == 0 and value > 2:
            stored = -(-value // 2) if nibbles else value
            at += stored + stored % 2
    raise MediaDecodeError("the BMP is truncated (its run-length codes have no end)")
