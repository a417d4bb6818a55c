"""An image file's kind, size and orientation, read from its headers without decoding pixels.

Reading takes tens of microseconds and does not use Pillow's file classes, whose global limits belong to the
host. Sizes are as stored; `Header.display_size` is the size that a viewer shows. A legal variety that is not
decoded here is refused here, so that planning and decoding decide alike.
"""

from __future__ import annotations

import struct
import zlib
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
from .iso import avif_decoder, heif_image, largest_image
from .kinds import kind_allowed
from .orientation import EXIF, SWAPS_SIDES, XMP, Metadata, orientation_of, read_text_chunk
from .tiff import tiff_layout


@dataclass(frozen=True, slots=True)
class Header:
    """A still image's kind, stored size, EXIF orientation (1 to 8) and, for JPEG, number of channels."""

    kind: str
    size: ImageSize
    orientation: int = 1
    channels: int = 3
    allocated: ImageSize | None = None
    """What decoding allocates, where that is more than `size`."""

    def display_size(self, exif_orientation: bool = True) -> ImageSize:
        """Return the size that a viewer shows, or the stored size without `exif_orientation`."""
        width, height = self.size
        swap = exif_orientation and self.orientation in SWAPS_SIDES
        return ImageSize(height, width) if swap else self.size


def read_header(data: bytes, limits: MediaLimits) -> Header:
    """Read the header of an encoded still image and check it against `limits`.

    Raises MediaDecodeError, UnsupportedMediaError or MediaTooLargeError.
    """
    if not data:
        raise MediaDecodeError("the image is empty (0 bytes)")
    check_source_bytes(len(data), limits)
    kind = kind_allowed(data, limits)
    try:
        if kind in ("AVIF", "HEIC") and (largest := largest_image(data)).width:
            check_pixels(largest, limits, f"the {kind} header")
        header = _READERS[kind](data)
    except (struct.error, IndexError):
        raise MediaDecodeError(f"the {kind} header is truncated") from None
    check_pixels(header.size, limits, f"the {kind} header")
    if header.allocated is not None:
        check_pixels(header.allocated, limits, f"the {kind} header")
    return header


def check_source_bytes(count: int, limits: MediaLimits) -> None:
    """Raise MediaTooLargeError if a source of `count` bytes exceeds the limit."""
    if count > limits.max_bytes:
        raise MediaTooLargeError(
            f"the source has {count} bytes, the limit is {limits.max_bytes}; send a smaller file, or raise "
            "MediaLimits.max_bytes"
        )


def check_pixels(size: ImageSize, limits: MediaLimits, what: str) -> None:
    """Raise MediaDecodeError if `size` is empty, MediaTooLargeError if it has more pixels than allowed."""
    width, height = size
    if width < 1 or height < 1:
        raise MediaDecodeError(f"{what} says {width}x{height}: there are no pixels")
    if width * height > limits.max_pixels:
        raise MediaTooLargeError(
            f"{what} says {width}x{height}, {width * height} pixels; the limit is "
            f"{limits.max_pixels}; resize it, or raise MediaLimits.max_pixels"
        )


# --- one reader per format ---------------------------------------------------------------------------


# Critical PNG chunks that are known here. Without another one the image cannot be decoded.
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")


def _read_png(data: bytes) -> Header:
    if data[12:16] == b"CgBI":
        raise UnsupportedMediaError("PNG in Apple's CgBI variety (from an iOS app) is not decoded here")
    if data[12:16] != b"IHDR":
        raise MediaDecodeError("the PNG does not begin with IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    metadata: Metadata = {}
    for name, start, end in png_chunks(data):
        if name == b"IDAT":
            continue
        if name == b"eXIf":
            metadata[EXIF] = data[start:end]
        elif name in (b"tEXt", b"zTXt", b"iTXt"):
            read_text_chunk(name, data[start:end], metadata)
        elif name[:1].isupper() and name.isalpha() and name not in _CRITICAL:
            if zlib.crc32(memoryview(data)[start - 4 : end]) != int.from_bytes(data[end : end + 4]):
                raise MediaDecodeError("the PNG is truncated or corrupt (the CRC of a chunk is wrong)")
            raise UnsupportedMediaError("PNG with a critical chunk that is not in the standard")
    return Header("PNG", ImageSize(width, height), orientation_of(metadata))


_JPEG_LS = 0xF7
_JPEG_KINDS = {0xC0: "", 0xC1: "", 0xC2: "", 0xC9: "", 0xCA: "", 0xC3: "lossless", 0xCB: "lossless"}


def read_jpeg(data: bytes) -> Header:
    """Read a JPEG's header; no limit is checked. Raises as `read_header`, and struct.error."""
    frame = None
    metadata: Metadata = {}
    for marker, start, end in jpeg_segments(data):
        if marker in (SOS, EOI):
            break
        if marker == _JPEG_LS and frame is None:
            raise UnsupportedMediaError("JPEG-LS is not decoded here")
        if marker in START_OF_FRAME and frame is None:
            frame = _jpeg_frame(marker, *struct.unpack_from(">BHHB", data, start))
        elif marker == APP1:
            if data.startswith(
                b"Exif\0\0", start
            ):  # a block that is too long for one segment goes on in the next
                metadata[EXIF] = metadata.get(EXIF, b"") + data[start + 6 : end]
            elif data.startswith(b"http://ns.adobe.com/xap/1.0/\0", start):
                metadata[XMP] = data[start + 29 : end]
    if frame is None:
        raise MediaDecodeError("the JPEG ends before its frame header")
    size, channels = frame
    return Header("JPEG", size, orientation_of(metadata), channels)


def _jpeg_frame(marker: int, depth: int, height: int, width: int, channels: int) -> tuple[ImageSize, int]:
    if kind := _JPEG_KINDS.get(marker, "hierarchical"):
        raise UnsupportedMediaError(f"{kind} JPEG is not decoded here")
    if depth != 8 and 2 <= depth <= 16:
        raise UnsupportedMediaError(f"JPEG with {depth} bits per sample is not decoded here, only with 8")
    if width and not height:
        raise UnsupportedMediaError("JPEG whose height follows in a DNL segment is not decoded here")
    if channels not in (1, 3, 4):
        raise UnsupportedMediaError(f"JPEG with {channels} colour channels is not decoded here")
    return ImageSize(width, height), channels


_WEBP_HAS_EXIF, _WEBP_HAS_XMP = 0x08, 0x04  # flags of VP8X; without them readers ignore these chunks


def _read_webp(data: bytes) -> Header:
    size = None
    flags = 0
    metadata: Metadata = {}
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
            metadata.setdefault(EXIF, data[start:end])
        elif name == b"XMP " and flags & _WEBP_HAS_XMP:
            metadata.setdefault(XMP, data[start:end])
    if size is None:
        raise MediaDecodeError("the WebP contains no image")
    return Header("WebP", size, orientation_of(metadata))


def _read_gif(data: bytes) -> Header:
    return Header("GIF", gif_first_frame(data, whole=False).canvas)


_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
BMP_RAW, BMP_RLE8, BMP_RLE4, _BMP_BITFIELDS = 0, 1, 2, 3
_BMP_OTHERS = {4: "JPEG", 5: "PNG", 6: "alpha bit fields", 11: "CMYK", 12: "CMYK", 13: "CMYK"}
# Up to 12.2, Pillow lets one four-byte code skip 255 rows past the end, and allocates memory for them.
_MAX_RLE_WIDTH = 1 << 16
# Masks of red, green and blue, by bits; those of 32 bits with alpha's.
_BMP_MASKS = {
    16: ((0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F)),
    24: ((0xFF0000, 0xFF00, 0xFF),),
    32: (
        (0xFF0000, 0xFF00, 0xFF, 0),
        (0xFF000000, 0xFF0000, 0xFF00, 0),
        (0xFF000000, 0xFF00, 0xFF, 0),
        (0xFF000000, 0xFF0000, 0xFF00, 0xFF),
        (0xFF, 0xFF00, 0xFF0000, 0xFF000000),
        (0xFF0000, 0xFF00, 0xFF, 0xFF000000),
        (0xFF000000, 0xFF00, 0xFF, 0xFF0000),
        (0, 0, 0, 0),
    ),
}


def _read_bmp(data: bytes) -> Header:
    (header_size,) = struct.unpack_from("<I", data, 14)
    if header_size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        compression = BMP_RAW
    elif header_size in _BMP_HEADERS:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    else:
        raise UnsupportedMediaError(f"BMP with a header of {header_size} bytes is not decoded here")
    if bits not in (1, 4, 8, 16, 24, 32) and compression not in _BMP_OTHERS:
        raise UnsupportedMediaError(f"BMP with {bits} bits per pixel is not decoded here")
    if compression > _BMP_BITFIELDS or (header_size == 64 and compression == _BMP_BITFIELDS):
        kind = _BMP_OTHERS.get(compression, f"number {compression}")
        raise UnsupportedMediaError(f"BMP with compression {kind} is not decoded here")
    if compression == _BMP_BITFIELDS:
        masks = struct.unpack_from("<4I" if bits == 32 and header_size >= 56 else "<3I", data, 54)
        if bits == 32 and len(masks) == 3:
            masks += (0,)
        if masks not in _BMP_MASKS.get(bits, ()):
            raise UnsupportedMediaError("BMP with bit fields of this layout is not decoded here")
    if compression in (BMP_RLE8, BMP_RLE4) and width > _MAX_RLE_WIDTH:
        raise UnsupportedMediaError(f"a run-length encoded BMP may have {_MAX_RLE_WIDTH} columns at most")
    return Header("BMP", ImageSize(width, abs(height)))  # a negative height means top-down rows


def _read_tiff(data: bytes) -> Header:
    layout = tiff_layout(data)
    return Header("TIFF", layout.size, layout.orientation, allocated=layout.padded)


def _read_avif(data: bytes) -> Header:
    _, size, _, orientation = avif_decoder(data)
    return Header("AVIF", size, orientation)


def _read_heic(data: bytes) -> Header:
    return Header("HEIC", ImageSize(*heif_image(data).size))


_READERS = {
    "JPEG": read_jpeg,
    "PNG": _read_png,
    "WebP": _read_webp,
    "GIF": _read_gif,
    "BMP": _read_bmp,
    "TIFF": _read_tiff,
    "AVIF": _read_avif,
    "HEIC": _read_heic,
}
