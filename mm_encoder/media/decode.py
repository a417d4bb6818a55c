"""Encoded bytes to a decoded image, oriented as a viewer shows it.

JPEG is decoded by libjpeg-turbo (`simplejpeg`): the same bits as Pillow with one copy less, and its warnings
are available, so an image of which half is missing is an error even if it has an end marker. All other
formats go to Pillow, each passed so that no Pillow setting of the host matters: a PNG reduced to its pixel
chunks, a GIF to its first frame.
"""

from __future__ import annotations

import io
import re
import types

import numpy as np
import simplejpeg
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    _webp,
)

from ..config import MediaLimits
from ..errors import MediaDecodeError, MediaError, UnsupportedMediaError
from .containers import bmp_filled_up, check_jpeg_scans, gif_first_frame, repair_jpeg_headers
from .faults import check_memory, is_out_of_memory, raise_host_fault
from .header import BMP_RAW, BMP_RLE4, BMP_RLE8, Header, read_header, read_jpeg
from .iso import avif_decoder, avif_pixels, heif_image, heif_pixels
from .picture import Picture, Pixels, without_alpha
from .png import pixel_chunks
from .tiff import jpeg_parts, tiff_image, tiff_layout


def decode(data: bytes, limits: MediaLimits, *, exif_orientation: bool = True) -> Picture:
    """Decode the first frame of an encoded still image, and apply its EXIF orientation.

    Limits are enforced before any pixel is allocated. Raises MediaError.
    """
    header = read_header(data, limits)
    try:
        picture = _decode(data, header)
    except MediaDecodeError:
        if not check_memory(header.kind, header.size):
            raise
        picture = _decode(data, header)  # a moment ago there may have been less memory than now
    if picture.size != header.size:
        raise MediaDecodeError(
            f"the {header.kind} header says {header.size.width}x{header.size.height}, "
            f"but {picture.size.width}x{picture.size.height} was decoded"
        )
    return picture.oriented(header.orientation) if exif_orientation else picture


def _decode(data: bytes, header: Header) -> Picture:
    try:
        return _DECODERS[header.kind](data, header)
    except MediaError:
        raise
    except Exception as error:  # Pillow's parsers raise many types of exception on bad data
        raise_host_fault(error)
        raise MediaDecodeError(f"the {header.kind} is truncated or corrupt") from error


# --- JPEG --------------------------------------------------------------------------------------------

# Warnings that libjpeg gives before it decodes pixels.
_BEFORE_PIXELS = re.compile("extraneous bytes|Invalid SOS parameters|Adobe color transform|JFIF revision")
# libjpeg warns of stray bytes before the end marker when it has all pixels. A few are an encoder's padding;
# many mean that data was overwritten with something that decodes to fewer pixels.
_PADDING = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_MAX_PADDING = 64


def _decode_jpeg(data: bytes, header: Header) -> Picture:
    check_jpeg_scans(data)
    pixels = _decompress_jpeg(data, header.channels)
    if pixels is None:
        return Picture.of(_load(JpegImagePlugin.JpegImageFile(io.BytesIO(data))))
    if header.channels == 4:
        # CMYK is stored inverted, as Adobe writes it. Without an Adobe marker the format leaves the polarity
        # undefined; Pillow, and so the reference processors, treat it the same way.
        return Picture.of(Image.frombuffer("CMYK", pixels.shape[1::-1], 255 - pixels, "raw", "CMYK", 0, 1))
    return Picture(pixels)


def _decompress_jpeg(data: bytes, channels: int) -> Pixels | None:
    """Decode, and treat every libjpeg warning as an error except those that leave the image whole.

    libjpeg reports only its first warning, so a harmless header fault, which could hide a second warning, is
    repaired first. Returns None for a chroma subsampling that libjpeg decodes and the TurboJPEG API does not.
    """
    space = "CMYK" if channels == 4 else "RGB"
    pixels, reason = _decompress_strictly(data, space)
    if _BEFORE_PIXELS.search(reason):
        data = repair_jpeg_headers(data, channels)
        pixels, reason = _decompress_strictly(data, space)
    if (padding := _PADDING.search(reason)) and int(padding[1]) <= _MAX_PADDING:
        pixels = simplejpeg.decode_jpeg(data, space, strict=False)
    if pixels is None:
        if is_out_of_memory(reason):
            raise MemoryError(reason)
        if "subsampling" in reason:
            return None
        if reason.startswith("Unsupported"):
            raise UnsupportedMediaError(f"this kind of JPEG is not supported ({reason})")
        raise MediaDecodeError(f"the JPEG is truncated or corrupt ({reason})")
    return pixels


def _decompress_strictly(data: bytes, space: str) -> tuple[Pixels | None, str]:
    try:
        return simplejpeg.decode_jpeg(data, space), ""
    except ValueError as error:
        return None, str(error)


# --- the formats that Pillow decodes -----------------------------------------------------------------


def _decode_png(data: bytes, header: Header) -> Picture:
    png = pixel_chunks(data)
    if (pixels := png.pixels()) is not None:
        return Picture(pixels)
    image = _load(PngImagePlugin.PngImageFile(io.BytesIO(png.data)))
    picture = Picture.of(image)
    # Pillow accepts pixel data whose stream ends cleanly but too early, and leaves the other rows at zero.
    last = picture.pixels[-1]
    zero = not np.any(image.getpixel((0, image.height - 1))) and (last == last[0]).all()
    if (zero or png.ihdr.interlace) and not png.has_all_rows():
        raise MediaDecodeError("the PNG is truncated (some of its rows are missing)")
    return picture


def _decode_gif(data: bytes, header: Header) -> Picture:
    frame = gif_first_frame(data, whole=True)
    width, height = frame.canvas
    screen = data[:6] + width.to_bytes(2, "little") + height.to_bytes(2, "little")
    if data[frame.start + 9] & 0x80:
        # The frame has a local colour table. If that one is grey, Pillow would use the global table instead.
        screen += bytes(3)
    else:
        screen += data[10 : frame.tables_end]
    control = bytearray()
    if frame.control is not None:
        # The disposal method only matters to the next frame; Pillow would allocate memory for it.
        control += data[frame.control : frame.control + 8]
        control[3] &= 0b11100011
    image = data[frame.start : frame.end]
    single = screen + bytes(control) + image + b"\x3b"
    loaded = _load(GifImagePlugin.GifImageFile(io.BytesIO(single)))
    if loaded.mode == "L" and control and control[3] & 1:
        # With one of the loading strategies that a host may set, Pillow drops it for grey frames.
        loaded.info["transparency"] = control[6]
    return Picture.of(loaded)


def _decode_bmp(data: bytes, header: Header) -> Picture:
    image = BmpImagePlugin.BmpImageFile(io.BytesIO(data))
    compression, offset = image.info["compression"], image.tile[0].offset
    try:
        loaded = _load(image)
    except ValueError:
        if compression not in (BMP_RLE8, BMP_RLE4):
            raise
        filled = bmp_filled_up(data, offset, compression == BMP_RLE4, header.size)
        loaded = _load(BmpImagePlugin.BmpImageFile(io.BytesIO(filled)))
    if compression == BMP_RAW and loaded.mode == "RGBA":
        # The fourth byte of an uncompressed pixel is not alpha, unless a host sets Pillow to read it as such.
        loaded = loaded.convert("RGB")
    return Picture.of(loaded)


def _decode_webp(data: bytes, header: Header) -> Picture:
    # Pillow's WebP file class enforces the host's pixel limit, so its decoder is used directly. It fails on a
    # truncated file; frames after the first are not decoded.
    decoder = _webp.WebPAnimDecoder(data)
    frame = decoder.get_next()
    if frame is None:
        raise MediaDecodeError("the WebP is truncated or corrupt")
    width, height = header.size
    pixels = np.frombuffer(frame[0], np.uint8).reshape(height, width, 4)
    opaque = "RGBX" in decoder.get_info()
    return Picture(without_alpha(pixels) if opaque else pixels.copy())


def _decode_avif(data: bytes, header: Header) -> Picture:
    decoder, size, mode, _ = avif_decoder(data)
    return Picture.of(Image.frombytes(mode, size, avif_pixels(decoder)))


def _decode_heic(data: bytes, header: Header) -> Picture:
    mode, stride, rows = heif_pixels(heif_image(data))
    return Picture.of(Image.frombuffer(mode, header.size, rows, "raw", mode, stride, 1).copy())


def _decode_tiff(data: bytes, header: Header) -> Picture:
    layout = tiff_layout(data)
    for jpeg in jpeg_parts(data, layout):
        # libtiff passes over libjpeg's warnings, so that half a strip would be half grey.
        part = read_jpeg(jpeg)
        # Checked before any is decoded: each could be as large as the whole image.
        if part.size.width > layout.part.width or part.size.height > layout.part.height:
            raise MediaDecodeError(
                f"the TIFF is corrupt (a strip or tile is {part.size.width}x{part.size.height}, "
                f"where the directory says {layout.part.width}x{layout.part.height})"
            )
        check_jpeg_scans(jpeg)
        _decompress_jpeg(jpeg, part.channels)
    return Picture.of(tiff_image(data, layout))


def _load(image: ImageFile.ImageFile) -> Image.Image:
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        # The host has set Pillow to fill missing data with grey. Run the same loader with the default for
        # that one setting:
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
    "TIFF": _decode_tiff,
    "AVIF": _decode_avif,
    "HEIC": _decode_heic,
}
