"""Encoded bytes -> uint8 pixels [height, width, 3 or 4] (RGB, or RGB with straight alpha).

JPEG goes through libjpeg-turbo (`simplejpeg`): the same bits as Pillow without its last copy, and its
warnings can be told apart, so a picture of which half is missing is an error even when it ends properly.
Every other format goes through Pillow, each handed over so that nothing the host has set in Pillow
matters: a PNG is cut down to the chunks that carry pixels, a GIF to its first frame.
"""

from __future__ import annotations

import io
import re
import types
from typing import Any

import numpy as np
import simplejpeg
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, PngImagePlugin, _webp

from ..config import MediaLimits
from ..errors import MediaDecodeError, MediaError, UnsupportedMediaError
from .containers import check_jpeg_scans, gif_first_frame, tidy_jpeg
from .header import Header, read_header
from .png import pixel_chunks

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
    if image.mode == "La":
        image = image.convert("LA")  # the only mode that it converts to
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

# What libjpeg may warn of before it comes to the pixels.
_BEFORE_PIXELS = re.compile("extraneous bytes|Invalid SOS parameters|Adobe color transform|JFIF revision")
# Of stray bytes before the end marker it warns when it has all pixels. A few are an encoder's padding;
# many are what is left when data was overwritten with something that decodes to less.
_PADDING = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_MAX_PADDING = 64


def _decode_jpeg(data: bytes, header: Header) -> Pixels:
    if header.channels not in (1, 3, 4):
        raise UnsupportedMediaError(f"JPEG with {header.channels} colour channels")
    check_jpeg_scans(data)
    pixels = _decompress_jpeg(data, header.channels)
    if header.channels == 4:
        # Inks are stored inverted, as Adobe does. Without an Adobe marker the format leaves it open;
        # Pillow, and so the references, take it the same way.
        inks = Image.frombuffer("CMYK", pixels.shape[1::-1], 255 - pixels, "raw", "CMYK", 0, 1)
        return np.array(inks.convert("RGB"))
    return pixels


def _decompress_jpeg(data: bytes, channels: int) -> Pixels:
    """Decode, taking any warning of libjpeg for an error but those after which the picture is whole.

    It names only its first: what may hide another behind it has to be put right before it is believed.
    """
    space = "CMYK" if channels == 4 else "RGB"
    pixels, reason = _decompress_strictly(data, space)
    if _BEFORE_PIXELS.search(reason):
        data = tidy_jpeg(data, channels)
        pixels, reason = _decompress_strictly(data, space)
    if (padding := _PADDING.search(reason)) and int(padding[1]) <= _MAX_PADDING:
        pixels = simplejpeg.decode_jpeg(data, space, strict=False)
    if pixels is None:
        if reason.startswith("Unsupported"):
            raise UnsupportedMediaError(f"this kind of JPEG is not decoded here ({reason})")
        raise MediaDecodeError(f"the JPEG is truncated or corrupt ({reason})")
    return pixels


def _decompress_strictly(data: bytes, space: str) -> tuple[Pixels | None, str]:
    try:
        return simplejpeg.decode_jpeg(data, space), ""
    except ValueError as error:
        return None, str(error)


# --- the formats that Pillow decodes -----------------------------------------------------------------


def _decode_png(data: bytes, header: Header) -> Pixels:
    png = pixel_chunks(data)
    image = _load(PngImagePlugin.PngImageFile(io.BytesIO(png.data)))
    pixels = pixels_of(image)
    # Pillow takes pixel data that properly ends too early, and leaves the rest of the picture at zero.
    zero = not np.any(image.getpixel((0, image.height - 1))) and (pixels[-1] == pixels[-1, 0]).all()
    if (zero or png.ihdr.interlace) and not png.has_all_rows():
        raise MediaDecodeError("the PNG is truncated (some of its rows are missing)")
    return pixels


def _decode_gif(data: bytes, header: Header) -> Pixels:
    frame = gif_first_frame(data, whole=True)
    width, height = frame.canvas
    screen = data[:6] + width.to_bytes(2, "little") + height.to_bytes(2, "little")
    if data[frame.start + 9] & 0x80:
        # The frame has a table of its own. If that is of greys, Pillow takes the global one all the same.
        screen += bytes(3)
    else:
        screen += data[10 : frame.tables_end]
    control = bytearray()
    if frame.control is not None:
        # How to dispose of the frame matters to the next one only; Pillow would allocate for it.
        control += data[frame.control : frame.control + 8]
        control[3] &= 0b11100011
    image = data[frame.start : frame.end]
    one = screen + bytes(control) + image + b"\x3b"
    loaded = _load(GifImagePlugin.GifImageFile(io.BytesIO(one)))
    if loaded.mode == "L" and control and control[3] & 1:
        # Under one of the loading strategies that a host may set, Pillow forgets it for grey frames.
        loaded.info["transparency"] = control[6]
    return pixels_of(loaded)


_BMP_RAW, _BMP_RLE8, _BMP_RLE4 = 0, 1, 2
# Up to 12.2, Pillow lets one code of four bytes skip 255 rows past the end, and allocates for them.
_MAX_RLE_WIDTH = 1 << 16


def _decode_bmp(data: bytes, header: Header) -> Pixels:
    image = BmpImagePlugin.BmpImageFile(io.BytesIO(data))
    compression = image.info["compression"]
    if compression in (_BMP_RLE8, _BMP_RLE4) and image.width > _MAX_RLE_WIDTH:
        raise UnsupportedMediaError(f"run-length encoded BMP of more than {_MAX_RLE_WIDTH} columns")
    pixels = pixels_of(_load(image))
    if compression == _BMP_RAW:
        # The fourth byte of an uncompressed pixel is no alpha unless a host tells Pillow to see one.
        pixels = np.ascontiguousarray(pixels[:, :, :3])
    return pixels


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
    return np.array(pixels[:, :, :3] if opaque else pixels, order="C")


def _load(image: ImageFile.ImageFile) -> ImageFile.ImageFile:
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        # The host asked Pillow to fill what is missing with grey. The same loader, with that one
        # setting as it is by default:
        settings = {**vars(ImageFile), "LOAD_TRUNCATED_IMAGES": False}
        types.FunctionType(ImageFile.ImageFile.load.__code__, settings)(image)
    else:
        image.load()
    return image


_DECODERS = {
    "JPEG": _decode_jpeg,
    "PNG": _decode_png,
    "GIF": _decode_gif,
    "BMP": _decode_bmp,
    "WebP": _decode_webp,
}
