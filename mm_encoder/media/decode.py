"""Encoded bytes -> uint8 pixels [height, width, 3 or 4] (RGB, or RGB with straight alpha).

JPEG goes through libjpeg-turbo (`simplejpeg`): the same bits as Pillow without its last copy, and its
warnings can be told apart, so a picture of which half is missing is an error even when it ends properly.
Every other format goes through Pillow, each handed over so that nothing the host has set in Pillow
matters: a PNG is cut down to the chunks that carry pixels, a GIF to its first frame.
"""

from __future__ import annotations

import io
import types
import zlib
from typing import Any

import numpy as np
import simplejpeg
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, PngImagePlugin, _webp

from ..config import MediaLimits
from ..errors import MediaDecodeError, MediaError, UnsupportedMediaError
from .header import Header, gif_first_frame, png_chunks, read_header

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def decode(data: bytes, limits: MediaLimits, *, exif_orientation: bool = True) -> Pixels:
    """Decode the first frame of an encoded still image to contiguous uint8 [height, width, 3 or 4].

    Four channels where the file carries transparency in any form, whatever its values. Limits are held
    before a pixel is allocated. Raises MediaError.
    """
    header = read_header(data, limits)
    try:
        pixels = _DECODERS[header.kind](data, header)
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # Pillow raises whatever its parsers stumble over
        raise MediaDecodeError(f"the {header.kind} is truncated or corrupt") from error
    if pixels.shape[1::-1] != header.size:
        raise MediaDecodeError(
            f"the {header.kind} header says {header.size.width}x{header.size.height}, "
            f"but {pixels.shape[1]}x{pixels.shape[0]} was decoded"
        )
    return apply_orientation(pixels, header.orientation) if exif_orientation else pixels


def apply_orientation(pixels: Pixels, orientation: int) -> Pixels:
    """Turn pixels as stored into pixels as shown (EXIF 2.3, tag 0x0112: 1 to 8)."""
    if orientation == 1:
        return pixels
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def pixels_of(image: Image.Image) -> Pixels:
    """A loaded Pillow image of any mode with a known range -> uint8 [height, width, 3 or 4].

    Sixteen-bit grey keeps its high byte. Transparency counts whatever carries it: an alpha band, or a
    colour key or palette alphas in `info`.
    """
    if image.mode in ("I", "F"):
        raise UnsupportedMediaError(
            f"a Pillow image of mode {image.mode} has no fixed range; convert it to L or I;16 first"
        )
    if image.mode.startswith("I;16"):
        return _sixteen_bit(image)
    transparent = image.has_transparency_data
    return np.array(image.convert("RGBA" if transparent else "RGB"))


def _sixteen_bit(image: Image.Image) -> Pixels:
    wide = np.asarray(image)
    grey = (wide >> 8).astype(np.uint8)
    planes = [grey, grey, grey]
    key = image.info.get("transparency")
    if key is not None:
        planes.append(np.where(wide == key, 0, 255).astype(np.uint8))
    return np.stack(planes, axis=-1)


# --- JPEG --------------------------------------------------------------------------------------------

# Warnings of libjpeg after which the picture is whole all the same.
_HARMLESS = ("extraneous bytes before marker", "Invalid SOS parameters", "Adobe color transform", "JFIF")


def _decode_jpeg(data: bytes, header: Header) -> Pixels:
    if header.channels not in (1, 3, 4):
        raise UnsupportedMediaError(f"JPEG with {header.channels} colour channels")
    space = "CMYK" if header.channels == 4 else "RGB"
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, space)
    except ValueError as error:
        # libjpeg-turbo names only the first thing that it found wrong. A harmless one may hide a missing
        # end, which shows in no end-of-image marker after the last scan.
        cut = data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda")
        if cut or not any(warning in str(error) for warning in _HARMLESS):
            raise MediaDecodeError(f"the JPEG is truncated or corrupt ({error})") from None
        pixels = simplejpeg.decode_jpeg(data, space, strict=False)
    if header.channels == 4:
        # Inks are stored inverted, as Adobe does. Without an Adobe marker the format leaves it open;
        # Pillow, and so the references, take it the same way.
        return np.array(Image.fromarray(255 - pixels, "CMYK").convert("RGB"))
    return pixels


# --- the formats that Pillow decodes -----------------------------------------------------------------

_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


def _decode_png(data: bytes, header: Header) -> Pixels:
    # Text, profiles and animation can neither fail the picture nor cost anything once they are left
    # out; and Pillow checks no CRC of the pixel data, so it is done here.
    kept = [data[:8]]
    name = b""
    for name, start, end in png_chunks(data):
        if name not in _PIXEL_CHUNKS:
            continue
        if int.from_bytes(data[end : end + 4]) != zlib.crc32(memoryview(data)[start - 4 : end]):
            raise MediaDecodeError(f"the PNG is truncated or corrupt (CRC of {name.decode()})")
        kept.append(data[start - 8 : end + 4])
    if name != b"IEND":
        raise MediaDecodeError("the PNG is truncated (no IEND)")
    return _load(PngImagePlugin.PngImageFile(io.BytesIO(b"".join(kept))))


def _decode_gif(data: bytes, header: Header) -> Pixels:
    frame = gif_first_frame(data, whole=True)
    width, height = frame.canvas
    screen = data[:6] + width.to_bytes(2, "little") + height.to_bytes(2, "little")
    control = bytearray()
    if frame.control is not None:
        # How to dispose of the frame matters to the next one only; Pillow would allocate for it.
        control += data[frame.control : frame.control + 8]
        control[3] &= 0b11100011
    image = data[frame.start : frame.end]
    one = screen + data[10 : frame.tables_end] + bytes(control) + image + b"\x3b"
    return _load(GifImagePlugin.GifImageFile(io.BytesIO(one)))


def _decode_bmp(data: bytes, header: Header) -> Pixels:
    return _load(BmpImagePlugin.BmpImageFile(io.BytesIO(data)))


def _decode_webp(data: bytes, header: Header) -> Pixels:
    # Pillow's WebP file class holds the picture to the host's pixel limit, so its decoder is used
    # directly. It fails on a cut file; frames after the first are not decoded.
    decoder = _webp.WebPAnimDecoder(data)
    frame = decoder.get_next()
    if frame is None:
        raise MediaDecodeError("the WebP is truncated or corrupt")
    width, height = header.size
    pixels = np.frombuffer(frame[0], np.uint8).reshape(height, width, 4)
    opaque = "RGBX" in decoder.get_info()
    return np.ascontiguousarray(pixels[:, :, :3]) if opaque else pixels.copy()


def _load(image: ImageFile.ImageFile) -> Pixels:
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        # The host asked Pillow to fill what is missing with grey. The same loader, with that one
        # setting as it is by default:
        settings = {**vars(ImageFile), "LOAD_TRUNCATED_IMAGES": False}
        types.FunctionType(ImageFile.ImageFile.load.__code__, settings)(image)
    else:
        image.load()
    return pixels_of(image)


_DECODERS = {
    "JPEG": _decode_jpeg,
    "PNG": _decode_png,
    "GIF": _decode_gif,
    "BMP": _decode_bmp,
    "WebP": _decode_webp,
}
