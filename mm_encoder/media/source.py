"""A snapshot of the caller's image: later changes to the input affect neither the rows nor their hash."""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import os
import re
import stat
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from ..config import ImageOptions, MediaLimits, expand_home
from ..contract import ImageSize
from ..errors import MediaDecodeError, MediaError, UnsupportedMediaError
from .decode import decode
from .faults import check_memory, is_callers, is_foreign, raise_host_fault
from .header import check_pixels, check_source_bytes, read_header
from .orientation import SWAPS_SIDES, orientation_of_pillow
from .picture import Picture, Pixels

ImageInput: TypeAlias = "bytes | bytearray | memoryview | str | Path | np.ndarray | Image.Image"
"""Encoded bytes, a base64 data URL, a path, an array [h, w] or [h, w, 1|3|4], or a Pillow image, of which the
frame counts at which it stands. Arrays are uint8, uint16 (0 to 65535: the high byte counts) or floating (0 to
1; clipped, and refused beyond -0.25 to 1.25).
"""


def is_image(value: object) -> bool:
    """Return whether `value` is one image rather than an iterable of images."""
    return isinstance(value, (bytes, bytearray, memoryview, str, Path, np.ndarray, Image.Image))


# What is read from these is in memory. A plain Image is loaded; Pillow loads those of a file when it has to.
_IN_MEMORY = (bytes, bytearray, memoryview, str, np.ndarray, Image.Image)


def may_stall(image: object) -> bool:
    """Return whether opening `image` may read from a file, which may take any time."""
    return type(image) not in _IN_MEMORY


def _lock_of(image: Image.Image) -> threading.Lock:
    """Return the lock of one Pillow image, which loads lazily, from a file with one position for all threads.

    Kept with the image, so that a file that stalls holds up its own callers only. It has one name a process:
    a thread that held it at a fork is not in the child.
    """
    lock: threading.Lock = vars(image).setdefault(f"_mm_encoder_lock_{os.getpid()}", threading.Lock())
    return lock


@dataclass(frozen=True, slots=True)
class Source:
    """A snapshot of one still image: `encoded` bytes, or a decoded `picture` with its orientation applied.

    `size` is the display size; `nbytes` is the size of the snapshot and its decoded pixels together.
    """

    size: ImageSize
    options: ImageOptions
    encoded: bytes | None = None
    picture: Picture | None = None
    mode: str = ""
    """Pillow mode and colour key, or dtype, of the caller's pixels; empty for encoded bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshot plus those of its decoded pixels, at four per pixel."""
        if self.picture is not None:
            return self.picture.pixels.nbytes * (1 if self.picture.native is None else 2)
        assert self.encoded is not None
        return len(self.encoded) + 4 * self.size.width * self.size.height

    def decode(self, limits: MediaLimits) -> Picture:
        """Decode the image, orientation applied. Raises MediaError."""
        if self.picture is not None:
            return self.picture
        assert self.encoded is not None
        return decode(self.encoded, limits, exif_orientation=self.options.exif_orientation)

    def mm_hash(self, model: str) -> str:
        """Return the SHA-256, in hex, of the model name, the kind of source and its content.

        Options are not part of it; pixels are hashed with their orientation applied.
        """
        if self.encoded is not None:
            return encoded_hash(model, self.encoded)
        assert self.picture is not None
        return _hash(model, b"pixels", self.mode.encode(), *_content_of(self.picture))


def encoded_hash(model: str, data: bytes) -> str:
    """Return `Source.mm_hash` of encoded bytes, without reading their header."""
    return _hash(model, b"image", data)


def _content_of(picture: Picture) -> list[bytes | memoryview]:
    """Return everything that a family may make pixels from, as fields of a hash.

    That is the stored mode where there is one, and not its RGB: many CMYK or palette images have the same RGB
    and are resized to different pixels. The RGB is made from it, so it adds nothing.
    """
    native, pixels = picture.native, picture.pixels
    shape = "x".join(map(str, pixels.shape)).encode()
    if native is None:
        return [shape, pixels.data]
    stored: list[bytes | memoryview] = [shape, b"stored", native.tobytes()]
    if native.palette is not None:
        stored += [native.palette.mode.encode(), bytes(native.getpalette(None) or ()), pixels.data]
    return stored


def _hash(model: str, kind: bytes, *fields: bytes | memoryview) -> str:
    digest = hashlib.sha256(_head(model, kind))
    for field in fields:
        digest.update(_length(field))
        digest.update(field)
    return digest.hexdigest()


@lru_cache(64)
def _head(model: str, kind: bytes) -> bytes:
    """Return the first fields of a hash, which are the same for all images of a kind."""
    fields = b"mm_encoder.media.1", model.encode(errors="surrogatepass"), kind
    return b"".join(_length(field) + field for field in fields)


def _length(field: bytes | memoryview) -> bytes:
    """Return what precedes each field, so that no two lists of fields give the same bytes."""
    return memoryview(field).nbytes.to_bytes(8, "little")


def check_input(image: object, options: object) -> None:
    """Raise TypeError if `image` has no supported type, or `options` is neither ImageOptions nor None."""
    _checked_options(options)
    if not is_image(image):
        raise TypeError(
            "an image is bytes, a data URL, a pathlib.Path, a NumPy array or a Pillow image, "
            f"got {type(image).__name__}"
        )


def open_source(image: ImageInput, limits: MediaLimits, options: ImageOptions | None = None) -> Source:
    """Take a snapshot of `image` and read its size; encoded bytes are not decoded yet.

    A `str` is always a data URL, never a path: text from a request must not reach the file system. A Pillow
    image is loaded here, under the host's Pillow settings.
    Raises MediaError for bad media, TypeError for an unsupported type.
    """
    check_input(image, options)
    options = options or ImageOptions()
    if isinstance(image, (np.ndarray, Image.Image)):
        return _open_pixels(image, limits, options)
    if isinstance(image, (bytes, bytearray, memoryview)):
        check_source_bytes(memoryview(image).nbytes, limits)
        data = bytes(image)
    elif isinstance(image, str):
        data = read_data_url(image, limits)
    else:
        data = _read_file(image, limits)
    size = read_header(data, limits).display_size(options.exif_orientation)
    return Source(size, options, encoded=data)


def size_of(image: ImageInput, limits: MediaLimits, options: ImageOptions | None = None) -> ImageSize:
    """Return the display size of `image`, as `open_source` would, without copying arrays or loading Pillow
    images.
    """
    options = _checked_options(options)
    if isinstance(image, np.ndarray):
        size = _array_size(image)
        check_pixels(size, limits, "the array")
        return size
    if isinstance(image, Image.Image):
        size = ImageSize(*image.size)
        check_pixels(size, limits, "the Pillow image")
        if getattr(image, "format", None) in _SAY_MORE_ONCE_LOADED and getattr(image, "tile", None):
            return open_source(image, limits, options).size
        with _lock_of(image):
            orientation = orientation_of_pillow(image)
        swapped = options.exif_orientation and orientation in SWAPS_SIDES
        return ImageSize(size.height, size.width) if swapped else size
    return open_source(image, limits, options).size


# Loading orients a TIFF, and reads what stands behind a PNG's pixels.
_SAY_MORE_ONCE_LOADED = ("TIFF", "PNG")


def _checked_options(options: object) -> ImageOptions:
    if options is not None and not isinstance(options, ImageOptions):
        raise TypeError(f"image_options must be an ImageOptions, got {type(options).__name__}")
    return options or ImageOptions()


_PIECE = 1 << 20


def _read_file(path: Path, limits: MediaLimits) -> bytes:
    try:
        if path.parts[:1] == ("~",):  # only this: another name that begins with a tilde is probably a file's
            path = expand_home("an image", path)
        # Without O_NONBLOCK, opening a pipe or a device could block this thread forever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            check_source_bytes(found.st_size, limits)
            pieces = [file.read(found.st_size)]
            count = len(pieces[0])
            while piece := file.read(_PIECE):  # it has grown, or does not tell its size
                pieces.append(piece)
                count += len(piece)
                check_source_bytes(count, limits)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if isinstance(error, MediaError) or is_foreign(error) or getattr(error, "errno", 0) is None:
            raise
        if not is_callers(error):
            raise_host_fault(error)
        reason = getattr(error, "strerror", None) or str(error)
        raise MediaDecodeError(f"cannot read {path.name}: {reason}") from error
    return b"".join(pieces) if len(pieces) > 1 else pieces[0]


def read_data_url(url: str, limits: MediaLimits) -> bytes:
    """Decode a base64 data URL (RFC 2397). Accepts percent-encoding, parameters, any case, missing padding,
    the URL-safe alphabet and white space; ignores the media type. Raises MediaError.
    """
    if url[:5].lower() != "data:":
        raise UnsupportedMediaError(
            "a string must be a data URL, and this one does not begin with 'data:'; "
            "nothing is downloaded, and a file is passed as a pathlib.Path"
        )
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise MediaDecodeError("the data URL has no comma before its data")
    if ";" not in header or header.rpartition(";")[2].strip().lower() != "base64":
        raise MediaDecodeError("the data URL is not base64 (';base64' is missing before the comma)")
    try:
        text = _unescaped(payload).translate(_URL_SAFE, _WHITE_SPACE).rstrip(b"=")
        check_source_bytes(len(text) * 3 // 4, limits)
        if not text:
            raise MediaDecodeError("the data URL is empty")
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise MediaDecodeError("the data URL is not valid base64") from None


_ESCAPE = re.compile(rb"%[0-9A-Fa-f]{2}")
_WHITE_SPACE = b" \t\n\r\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def _unescaped(payload: str) -> bytes:
    """Undo the percent-encoding of a URL's data, once (RFC 3986). What is no escape stays as it is."""
    return _ESCAPE.sub(lambda escape: bytes.fromhex(escape[0][1:].decode()), payload.encode("ascii"))


def _open_pixels(image: np.ndarray | Image.Image, limits: MediaLimits, options: ImageOptions) -> Source:
    if isinstance(image, np.ndarray):
        array = np.asarray(image)  # subclasses may index differently
        mode = f"array {array.dtype.name}"
        check_pixels(_array_size(array), limits, "the array")
        picture = Picture(_array_pixels(array))
    else:
        # Some families' resizing depends on the colour key, so the hash must cover it.
        mode = f"{image.mode} {image.info.get('transparency')!r}"
        check_pixels(ImageSize(*image.size), limits, "the Pillow image")
        with _lock_of(image):
            picture, orientation = _copy_pillow(image)
        if options.exif_orientation:
            picture = picture.oriented(orientation)
    return Source(picture.size, options, picture=picture, mode=mode)


def _copy_pillow(image: Image.Image) -> tuple[Picture, int]:
    """Return a copy of the image and its EXIF orientation."""
    try:
        image.load()  # first: loading a TIFF orients it and removes the orientation tag
        picture = Picture.of(image)
        if picture.native is image:
            picture = Picture(picture.pixels, image.copy())
    except MediaError:
        raise
    except Exception as error:  # Pillow's parsers raise many types of exception on bad data
        raise_host_fault(error)
        check_memory(str(image.format), ImageSize(*image.size))
        raise MediaDecodeError(f"the Pillow image cannot be loaded: {error}") from error
    return picture, orientation_of_pillow(image)


def _array_size(array: np.ndarray) -> ImageSize:
    # The axes are always (height, width, channels): guessing from the shape fails for 3-pixel sides.
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4)):
        return ImageSize(array.shape[1], array.shape[0])
    first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
    raise UnsupportedMediaError(
        f"an array image must be [height, width] or [height, width, 1, 3 or 4], got {array.shape}"
        + ("; channels first? pass array.transpose(1, 2, 0)" if first else "")
    )


# A bicubic resize overshoots 0 to 1 by up to a fifth, which is clipped. Values beyond this range are of
# another scale: 0 to 255, -1 to 1, -0.5 to 0.5, or normalised by mean and deviation.
_FLOAT_MIN, _FLOAT_MAX = -0.25, 1.25


def _array_pixels(array: np.ndarray) -> Pixels:
    """Return a contiguous uint8 copy with 3 or 4 channels. The scale follows the dtype, never the values."""
    if np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all():
            raise MediaDecodeError("the array contains values that are not finite")
        if array.min() < _FLOAT_MIN or array.max() > _FLOAT_MAX:
            raise MediaDecodeError(
                f"floating arrays hold 0 to 1, got {array.min():g} to {array.max():g}; "
                "convert values of 0 to 255 to uint8, and those of -1 to 1 by (x + 1) / 2"
            )
        array = np.rint(np.clip(array, 0.0, 1.0) * 255.0)
    elif array.dtype.newbyteorder("=") == np.uint16:
        array = array >> 8
    elif array.dtype != np.uint8:
        raise UnsupportedMediaError(
            f"array images are uint8, uint16 or floating (0 to 1), got {array.dtype.name}"
        )
    if array.ndim == 2:
        array = array[:, :, np.newaxis]
    if array.shape[2] == 1:
        array = np.broadcast_to(array, (*array.shape[:2], 3))
    return np.array(array, dtype=np.uint8, order="C")
