"""What a file says of itself before its pixels are decoded: kind, size, orientation.

Only headers are walked, so this costs tens of microseconds, and nothing here depends on Pillow, whose
global limits belong to the host. Sizes are as stored; `Header.shown` is what a viewer shows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..config import MediaLimits
from ..contract import ImageSize
from ..errors import MediaDecodeError, MediaTooLargeError, UnsupportedMediaError

# Far more chunks or segments than any encoder writes; a file of nothing else would only burn time.
MAX_CHUNKS = 1 << 17
# A GIF's data comes in sub-blocks of up to 255 bytes: 256 MiB in well-filled ones.
MAX_SUB_BLOCKS = 1 << 20

_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


@dataclass(frozen=True, slots=True)
class Header:
    """A still image's kind, stored size, EXIF orientation (1 to 8) and, for JPEG, its channels."""

    kind: str
    size: ImageSize
    orientation: int = 1
    channels: int = 3

    def shown(self, exif_orientation: bool = True) -> ImageSize:
        """The size that a viewer shows; the stored one when orientation is not to be applied."""
        width, height = self.size
        swap = exif_orientation and self.orientation in _TRANSPOSED
        return ImageSize(height, width) if swap else self.size


def read_header(data: bytes, limits: MediaLimits) -> Header:
    """Read the header of an encoded still image and hold it to `limits`.

    Raises MediaDecodeError, UnsupportedMediaError or MediaTooLargeError.
    """
    if not data:
        raise MediaDecodeError("the image is empty (0 bytes)")
    check_source_bytes(len(data), limits)
    kind = sniff(data)
    reader = _READERS.get(kind)
    if reader is None:
        raise UnsupportedMediaError(
            f"{kind} is not decoded here; supported are {', '.join(sorted(_READERS))}"
        )
    try:
        header = reader(data)
    except (struct.error, IndexError):
        raise MediaDecodeError(f"the {kind} header is truncated") from None
    check_pixels(header.size, limits, f"the {kind} header")
    return header


def check_source_bytes(count: int, limits: MediaLimits) -> None:
    """Raise MediaTooLargeError when a source of `count` bytes is over the limit."""
    if count > limits.max_bytes:
        raise MediaTooLargeError(
            f"the source has {count} bytes, the limit is {limits.max_bytes} (MediaLimits.max_bytes)"
        )


def check_pixels(size: ImageSize, limits: MediaLimits, what: str) -> None:
    """Raise when `size` is empty or has more pixels than allowed."""
    width, height = size
    if width < 1 or height < 1:
        raise MediaDecodeError(f"{what} says {width}x{height}: there are no pixels")
    if width * height > limits.max_pixels:
        raise MediaTooLargeError(
            f"{what} says {width}x{height}, {width * height} pixels; the limit is "
            f"{limits.max_pixels} (MediaLimits.max_pixels)"
        )


# --- what kind of file is it -------------------------------------------------------------------------

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"8BPS", "PSD"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"%PDF-", "PDF"),
    (b"\x1aE\xdf\xa3", "Matroska/WebM video"),
    (b"OggS", "Ogg audio/video"),
    (b"ID3", "MP3 audio"),
    (b"fLaC", "FLAC audio"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "ZIP"),
)
_RIFF = {b"WEBP": "WebP", b"WAVE": "WAV audio", b"AVI ": "AVI video"}
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF"}
_MARKUP = re.compile(rb"\A(?:\xef\xbb\xbf)?\s*<", re.ASCII)
_SVG = re.compile(rb"<svg[\s>]", re.IGNORECASE)
_HTML = re.compile(rb"<(?:!doctype html|html|head|body)[\s>]", re.IGNORECASE)


def sniff(data: bytes) -> str:
    """Name the kind of file from its bytes alone; raises MediaDecodeError when they resemble nothing."""
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and (riff := _RIFF.get(data[8:12])):
        return riff
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "MP4/QuickTime video")
    head = data[:4096]
    if _MARKUP.match(head):
        if _SVG.search(head):
            return "SVG"
        if _HTML.search(head):
            raise MediaDecodeError("the bytes are an HTML page, not an image")
    raise MediaDecodeError(f"{len(data)} bytes that resemble no image format")


# --- one reader a format -----------------------------------------------------------------------------


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


def _read_png(data: bytes) -> Header:
    if data[12:16] != b"IHDR":
        raise MediaDecodeError("the PNG does not begin with IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    exif = xmp = None
    for name, start, end in png_chunks(data):
        if name == b"eXIf" and exif is None:
            exif = data[start:end]
        elif name == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0\0", start):
            xmp = data[start:end]
    return Header("PNG", ImageSize(width, height), _orientation(exif, xmp))


_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})


def _read_jpeg(data: bytes) -> Header:
    frame = exif = xmp = None
    at = 2
    for _ in range(MAX_CHUNKS):
        # A marker is 0xFF and a byte that is neither a fill byte nor an escaped 0xFF of entropy data.
        at = data.find(b"\xff", at)
        if at < 0 or at + 2 > len(data):
            break
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        at += 2
        if marker == 0 or marker in _STANDALONE:
            continue
        if marker in (0xDA, 0xD9):  # the pixels, or the end, start here
            break
        (length,) = struct.unpack_from(">H", data, at)
        if marker in _START_OF_FRAME and frame is None:
            _, height, width, channels = struct.unpack_from(">BHHB", data, at + 2)
            frame = ImageSize(width, height), channels
        elif marker == 0xE1:
            if exif is None and data.startswith(b"Exif\0\0", at + 2):
                exif = data[at + 8 : at + length]
            elif data.startswith(b"http://ns.adobe.com/xap/1.0/\0", at + 2):
                xmp = data[at + 31 : at + length]
        at += max(length, 2)
    else:
        raise MediaDecodeError(f"a JPEG of more than {MAX_CHUNKS} segments")
    if frame is None:
        raise MediaDecodeError("the JPEG ends before its frame header")
    size, channels = frame
    return Header("JPEG", size, _orientation(exif, xmp), channels)


def _riff_chunks(data: bytes) -> Iterator[Chunk]:
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            return
        name, length = struct.unpack_from("<4sI", data, at)
        yield Chunk(name, at + 8, at + 8 + length)
        at += 8 + length + (length & 1)
    raise MediaDecodeError(f"a WebP of more than {MAX_CHUNKS} chunks")


def _read_webp(data: bytes) -> Header:
    size = exif = xmp = None
    for name, start, end in _riff_chunks(data):
        if name == b"VP8X":
            flags = struct.unpack_from("<10B", data, start)
            size = ImageSize(
                1 + int.from_bytes(bytes(flags[4:7]), "little"),
                1 + int.from_bytes(bytes(flags[7:10]), "little"),
            )
        elif name == b"VP8 " and size is None:
            if data[start + 3 : start + 6] != b"\x9d\x01\x2a":
                raise MediaDecodeError("the WebP's lossy frame does not begin with its start code")
            width, height = struct.unpack_from("<HH", data, start + 6)
            size = ImageSize(width & 0x3FFF, height & 0x3FFF)
        elif name == b"VP8L" and size is None:
            signature, bits = struct.unpack_from("<BI", data, start)
            if signature != 0x2F:
                raise MediaDecodeError("the WebP's lossless frame does not begin with its signature")
            size = ImageSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        elif name == b"EXIF":
            exif = data[start:end]
        elif name == b"XMP ":
            xmp = data[start:end]
    if size is None:
        raise MediaDecodeError("the WebP holds no picture")
    return Header("WebP", size, _orientation(exif, xmp))


class GifFrame(NamedTuple):
    """A GIF's canvas with its first frame: where the frame's own extensions and data lie in the file."""

    canvas: ImageSize
    tables_end: int  # end of the header and the global colour table
    control: int | None  # start of the frame's graphic control extension
    start: int  # start of its image descriptor
    end: int  # end of its image data


def gif_first_frame(data: bytes, *, whole: bool) -> GifFrame:
    """Find the first frame; with `whole`, its image data must be complete."""
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


def _read_gif(data: bytes) -> Header:
    return Header("GIF", gif_first_frame(data, whole=False).canvas)


def _read_bmp(data: bytes) -> Header:
    (header_size,) = struct.unpack_from("<I", data, 14)
    if header_size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return Header("BMP", ImageSize(width, abs(height)))  # a negative height means rows from the top


_READERS = {
    "JPEG": _read_jpeg,
    "PNG": _read_png,
    "WebP": _read_webp,
    "GIF": _read_gif,
    "BMP": _read_bmp,
}

# --- orientation -------------------------------------------------------------------------------------

_ORIENTATION_TAG = 0x0112
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=[\"']|>)([0-9])")


def _orientation(exif: bytes | None, xmp: bytes | None) -> int:
    """EXIF's orientation, else XMP's, else 1; anything but 1 to 8 counts as 1, like in viewers."""
    value = _exif_orientation(exif) if exif else None
    if value is None and xmp and (match := _XMP_ORIENTATION.search(xmp)):
        value = int(match[1])
    return value if value is not None and 1 <= value <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
            if tag == _ORIENTATION_TAG and count == 1 and kind in (3, 4):
                (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), exif, entry + 8)
                return int(value)
    except struct.error:
        pass  # broken metadata does not make a good picture bad
    return None
