"""An image file's kind, size and orientation, read from its headers without decoding pixels.

Reading takes tens of microseconds and does not use Pillow, whose global limits belong to the host. Sizes are
as stored; `Header.display_size` is the size that a viewer shows.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ..config import MediaLimits
from ..contract import ImageSize
from ..errors import MediaDecodeError, MediaTooLargeError, UnsupportedMediaError
from .containers import (
    APP1,
    EOI,
    SOS,
    START_OF_FRAME,
    gif_first_frame,
    jpeg_segments,
    png_chunks,
    riff_chunks,
)

_SWAPS_SIDES = (5, 6, 7, 8)  # EXIF orientations that swap width and height


@dataclass(frozen=True, slots=True)
class Header:
    """A still image's kind, stored size, EXIF orientation (1 to 8) and, for JPEG, number of channels."""

    kind: str
    size: ImageSize
    orientation: int = 1
    channels: int = 3

    def display_size(self, exif_orientation: bool = True) -> ImageSize:
        """Return the size that a viewer shows, or the stored size without `exif_orientation`."""
        width, height = self.size
        swap = exif_orientation and self.orientation in _SWAPS_SIDES
        return ImageSize(height, width) if swap else self.size


def read_header(data: bytes, limits: MediaLimits) -> Header:
    """Read the header of an encoded still image and check it against `limits`.

    Raises MediaDecodeError, UnsupportedMediaError or MediaTooLargeError.
    """
    if not data:
        raise MediaDecodeError("the image is empty (0 bytes)")
    check_source_bytes(len(data), limits)
    kind = sniff(data)
    reader = _READERS.get(kind)
    if reader is None:
        raise UnsupportedMediaError(
            f"{kind} is not decoded here; convert it to one of {', '.join(sorted(_READERS))}"
        )
    try:
        header = reader(data)
    except (struct.error, IndexError):
        raise MediaDecodeError(f"the {kind} header is truncated") from None
    check_pixels(header.size, limits, f"the {kind} header")
    return header


def check_source_bytes(count: int, limits: MediaLimits) -> None:
    """Raise MediaTooLargeError if a source of `count` bytes exceeds the limit."""
    if count > limits.max_bytes:
        raise MediaTooLargeError(
            f"the source has {count} bytes, the limit is {limits.max_bytes}; raise MediaLimits.max_bytes"
        )


def check_pixels(size: ImageSize, limits: MediaLimits, what: str) -> None:
    """Raise MediaDecodeError if `size` is empty, MediaTooLargeError if it has more pixels than allowed."""
    width, height = size
    if width < 1 or height < 1:
        raise MediaDecodeError(f"{what} says {width}x{height}: there are no pixels")
    if width * height > limits.max_pixels:
        raise MediaTooLargeError(
            f"{what} says {width}x{height}, {width * height} pixels; the limit is "
            f"{limits.max_pixels}; raise MediaLimits.max_pixels"
        )


# --- kind of file ------------------------------------------------------------------------------------

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
    (b"\xff\xfb", "MP3 audio"),
    (b"\xff\xf3", "MP3 audio"),
    (b"\xff\xf2", "MP3 audio"),
    (b"\xff\xfa", "MP3 audio"),
    (b"\xff\xf1", "AAC audio"),
    (b"\xff\xf9", "AAC audio"),
    (b"#!AMR", "AMR audio"),
    (b".snd", "AU audio"),
    (b"caff", "CAF audio"),
    (b"MThd", "MIDI audio"),
    (b"RF64", "WAV audio"),
    (b"\x00\x00\x01\xba", "MPEG video"),
    (b"\x00\x00\x01\xb3", "MPEG video"),
    (b"FLV", "Flash video"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "Windows Media audio/video"),
    (b"fLaC", "FLAC audio"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "ZIP"),
)
_RIFF = {b"WEBP": "WebP", b"WAVE": "WAV audio", b"AVI ": "AVI video"}
_BRANDS = {b"M4A ": "M4A audio", b"M4B ": "M4A audio"}
_BRANDS |= {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF"}
_MARKUP = re.compile(rb"\A(?:\xef\xbb\xbf)?\s*<", re.ASCII)
_SVG = re.compile(rb"<svg[\s>]", re.IGNORECASE)
_HTML = re.compile(rb"<(?:!doctype html|html|head|body)[\s>]", re.IGNORECASE)


def sniff(data: bytes) -> str:
    """Return the kind of file, from its bytes alone. Raises MediaDecodeError if no signature matches."""
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and (riff := _RIFF.get(data[8:12])):
        return riff
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "MP4/QuickTime video")
    if data[4:8] in (b"moov", b"mdat", b"wide"):
        return "MP4/QuickTime video"
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return "AIFF audio"
    if data[:1] == data[188:189] == b"\x47":
        return "MPEG transport stream video"
    head = data[:4096]
    if _MARKUP.match(head):
        if _SVG.search(head):
            return "SVG"
        if _HTML.search(head):
            raise MediaDecodeError("the bytes are an HTML page, not an image")
    raise MediaDecodeError(f"the {len(data)} bytes are of no image format that is known here")


# --- one reader per format ---------------------------------------------------------------------------


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
    return Header("PNG", ImageSize(width, height), orientation_of(exif, xmp))


def _read_jpeg(data: bytes) -> Header:
    frame = exif = xmp = None
    for marker, start, end in jpeg_segments(data):
        if marker in (SOS, EOI):
            break
        if marker in START_OF_FRAME and frame is None:
            _, height, width, channels = struct.unpack_from(">BHHB", data, start)
            frame = ImageSize(width, height), channels
        elif marker == APP1:
            if exif is None and data.startswith(b"Exif\0\0", start):
                exif = data[start + 6 : end]
            elif data.startswith(b"http://ns.adobe.com/xap/1.0/\0", start):
                xmp = data[start + 29 : end]
    if frame is None:
        raise MediaDecodeError("the JPEG ends before its frame header")
    size, channels = frame
    return Header("JPEG", size, orientation_of(exif, xmp), channels)


_WEBP_HAS_EXIF, _WEBP_HAS_XMP = 0x08, 0x04  # flags of VP8X; without them readers ignore these chunks


def _read_webp(data: bytes) -> Header:
    size = exif = xmp = None
    flags = 0
    for name, start, end in riff_chunks(data):
        # Decoders use the first of these chunks.
        if name == b"VP8X" and size is None:
            flags, *rest = struct.unpack_from("<10B", data, start)
            size = ImageSize(
                1 + int.from_bytes(bytes(rest[3:6]), "little"),
                1 + int.from_bytes(bytes(rest[6:9]), "little"),
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
        elif name == b"EXIF" and flags & _WEBP_HAS_EXIF:
            exif = data[start:end]
        elif name == b"XMP " and flags & _WEBP_HAS_XMP:
            xmp = data[start:end]
    if size is None:
        raise MediaDecodeError("the WebP contains no image")
    return Header("WebP", size, orientation_of(exif, xmp))


def _read_gif(data: bytes) -> Header:
    return Header("GIF", gif_first_frame(data, whole=False).canvas)


def _read_bmp(data: bytes) -> Header:
    (header_size,) = struct.unpack_from("<I", data, 14)
    if header_size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return Header("BMP", ImageSize(width, abs(height)))  # a negative height means top-down rows


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


def orientation_of(exif: bytes | None, xmp: bytes | None) -> int:
    """Return EXIF's orientation, else XMP's, else 1. Values outside 1 to 8 count as 1, as in viewers."""
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
        pass  # broken metadata must not fail an image whose pixels are good
    return None
