"""TIFF files: the first page's layout, read and checked here; its pixels, decoded by libtiff through Pillow.

Pillow gets the same file with a directory of our own behind it, of the tags that pixels depend on: no other
page, no metadata, no setting of the host reaches the decoder.
"""

from __future__ import annotations

import io
import struct
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, TiffImagePlugin

from ..contract import ImageSize
from ..errors import MediaDecodeError, UnsupportedMediaError
from .orientation import XMP, exif_orientation, orientation_of

# struct codes and sizes of the types that the tags below have.
_TYPES = {1: ("B", 1), 3: ("H", 2), 4: ("I", 4), 7: ("B", 1)}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 256, 257, 258, 259, 262, 266
_STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANAR = 273, 277, 278, 279, 284
_T4, _T6, _PREDICTOR, _COLOURS, _TILE_WIDTH, _TILE_HEIGHT = 292, 293, 317, 320, 322, 323
_TILES, _TILE_BYTES, _EXTRA, _FORMAT, _JPEG_TABLES, _YCBCR_SUBSAMPLING = 324, 325, 338, 339, 347, 530
_XMP, _DNG = 700, 50706
_SHORTS: tuple[int, ...] = (
    _BITS,
    _COMPRESSION,
    _PHOTOMETRIC,
    _SAMPLES,
    _PLANAR,
    _FILL_ORDER,
    _EXTRA,
    _PREDICTOR,
    _COLOURS,
)
_SHORTS += (_YCBCR_SUBSAMPLING,)
_COPIED = (_T4, _T6, _YCBCR_SUBSAMPLING)  # the other tags that libtiff needs, numbers all of them

_RAW, _JPEG = 1, 7
_COMPRESSIONS = {_RAW, 2, 3, 4, 5, _JPEG, 8, 32773, 32946}
_OTHER_COMPRESSIONS = {6: "old-style JPEG", 32809: "ThunderScan", 34676: "SGI LogLuv", 34677: "SGI LogLuv"}
_OTHER_COMPRESSIONS |= {34712: "JPEG 2000", 34892: "lossy JPEG", 34925: "LZMA", 50000: "Zstandard"}
_OTHER_COMPRESSIONS |= {50001: "WebP", 50002: "JPEG XL", 34887: "LERC", 32766: "NeXT", 34661: "JBIG"}
_CCITT = (2, 3, 4)
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK, _YCBCR_PHOTO = 0, 1, 2, 3, 5, 6
_COLOUR_NAMES = {
    4: "a transparency mask",
    8: "CIELAB",
    9: "ICCLAB",
    10: "ITULAB",
    32803: "a colour filter array",
}
_COLOUR_NAMES |= {32844: "LogL", 32845: "LogLuv", 34892: "linear raw"}
# Samples per pixel and bits per sample, by photometric interpretation.
_SAMPLES_OF = {_WHITE_IS_ZERO: (1,), _BLACK_IS_ZERO: (1, 2), _RGB: (3, 4), _PALETTE: (1,), _CMYK: (4,)}
_SAMPLES_OF |= {_YCBCR_PHOTO: (3,)}
_BITS_OF = {_WHITE_IS_ZERO: (1, 2, 4, 8, 16), _BLACK_IS_ZERO: (1, 2, 4, 8, 16), _RGB: (8, 16)}
_BITS_OF |= {_PALETTE: (1, 2, 4, 8), _CMYK: (8, 16), _YCBCR_PHOTO: (8,)}
# Parts of a file may be the same bytes, as in files whose empty tiles are stored once; but not without end:
# each is decompressed again.
_MAX_SHARING = 16

Values = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the first page of a TIFF file is stored."""

    size: ImageSize
    orientation: int
    padded: ImageSize
    """Its size with tiles whole."""
    part: ImageSize
    """Of a tile, or of a strip; the last strip may be lower."""
    bits: int
    inverted: bool
    """Whether white is zero and the decoder does not know."""
    compression: int
    tags: Mapping[int, Values] = field(repr=False)
    """What the decoder is given."""
    order: str
    parts: tuple[tuple[int, int], ...] = field(repr=False)
    """Offset and bytes of each strip or tile."""
    tables: bytes = field(repr=False)


class _Directory:
    """The first directory of a TIFF file; values are read when asked for. Raises struct.error."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = "<" if data[:2] == b"II" else ">"
        (at,) = struct.unpack_from(self.order + "I", data, 4)
        (count,) = struct.unpack_from(self.order + "H", data, at)
        self.entries: dict[int, tuple[int, int, int]] = {}
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, length = struct.unpack_from(self.order + "HHI", data, entry)
            if kind in _TYPES and length:
                self.entries.setdefault(tag, (kind, length, entry + 8))

    def bytes_of(self, tag: int) -> bytes:
        if tag not in self.entries:
            return b""
        kind, count, at = self.entries[tag]
        size = count * _TYPES[kind][1]
        if size > 4:
            (at,) = struct.unpack_from(self.order + "I", self.data, at)
        if at + size > len(self.data):
            raise MediaDecodeError("the TIFF is truncated or corrupt (a tag's values lie outside the file)")
        return self.data[at : at + size]

    def values(self, tag: int, default: Values = ()) -> Values:
        found = self.bytes_of(tag)
        if not found:
            return default
        kind, count, _ = self.entries[tag]
        return struct.unpack(f"{self.order}{count}{_TYPES[kind][0]}", found)

    def value(self, tag: int, default: int = 0) -> int:
        return self.values(tag, (default,))[0]


def tiff_layout(data: bytes) -> Layout:
    """Read how the first page is stored; check that it is decoded here and that its pixels are in the file.

    Raises MediaDecodeError, UnsupportedMediaError, and struct.error if the directory is cut off.
    """
    read = _Directory(data)
    if _DNG in read.entries:
        raise UnsupportedMediaError("DNG camera raw is not decoded here; convert it to JPEG")
    size = ImageSize(read.value(_WIDTH), read.value(_HEIGHT))
    compression, photometric = read.value(_COMPRESSION, _RAW), read.value(_PHOTOMETRIC)
    depths = read.values(_BITS, (1,))
    samples = read.value(_SAMPLES, 1)
    _check_kind(read, compression, photometric, depths, samples)
    bits = depths[0]
    if not size.width or not size.height:
        # Refused by its size.
        return Layout(size, 1, size, size, bits, False, compression, {}, read.order, (), b"")
    planes = samples if read.value(_PLANAR, 1) == 2 else 1
    tags = {
        _WIDTH: (size.width,),
        _HEIGHT: (size.height,),
        _BITS: (bits,) * samples,
        _COMPRESSION: (compression,),
        _PHOTOMETRIC: (photometric,),
        _SAMPLES: (samples,),
        _PLANAR: (2 if planes > 1 else 1,),
        _FILL_ORDER: (read.value(_FILL_ORDER, 1),),
        _EXTRA: _extra_samples(read, photometric, samples),
        _PREDICTOR: (read.value(_PREDICTOR, 1),),
        **{tag: read.values(tag) for tag in _COPIED},
    }
    inverted = photometric == _WHITE_IS_ZERO and bits == 16
    if inverted:  # Pillow takes it for black
        tags[_PHOTOMETRIC] = (_BLACK_IS_ZERO,)
    if photometric == _PALETTE:
        tags[_COLOURS] = read.values(_COLOURS)
        if len(tags[_COLOURS]) != 3 << bits:
            raise MediaDecodeError("the TIFF is corrupt (its colour map has the wrong length)")
    if any(max(tags.get(tag, ()), default=0) > 0xFFFF for tag in _SHORTS):
        raise MediaDecodeError("the TIFF is corrupt (a tag's value is out of range)")
    padded, part, parts = _place(read, size, planes, samples // planes * bits, compression, tags)
    return Layout(
        size,
        _orientation(read),
        padded,
        part,
        bits,
        inverted,
        compression,
        {tag: values for tag, values in tags.items() if values},
        read.order,
        parts,
        read.bytes_of(_JPEG_TABLES) if compression == _JPEG else b"",
    )


def _refusal(what: str) -> UnsupportedMediaError:
    remedy = "convert it to TIFF of 8-bit RGB, uncompressed or LZW, or to PNG"
    return UnsupportedMediaError(f"TIFF with {what} is not decoded here; {remedy}")


def _check_kind(read: _Directory, compression: int, photometric: int, depths: Values, samples: int) -> None:
    if compression not in _COMPRESSIONS:
        raise _refusal(f"{_OTHER_COMPRESSIONS.get(compression, f'number {compression}')} compression")
    if photometric not in _SAMPLES_OF:
        raise _refusal(f"{_COLOUR_NAMES.get(photometric, f'photometric interpretation {photometric}')}")
    kinds = set(read.values(_FORMAT, (1,)))
    if kinds != {1} and kinds != {4}:  # 4: undefined, which readers take for unsigned
        names = {2: "signed", 3: "floating-point", 5: "complex", 6: "complex"}
        raise _refusal(f"{names.get(max(kinds), 'unknown')} samples")
    if samples not in _SAMPLES_OF[photometric]:
        raise _refusal(f"{samples} samples per pixel in this colour space")
    if len(set(depths)) != 1 or depths[0] not in _BITS_OF[photometric] or (samples == 2 and depths[0] != 8):
        raise _refusal(f"{'/'.join(map(str, depths[:5]))} bits per sample in this colour space")
    if photometric == _YCBCR_PHOTO and compression != _JPEG:
        raise _refusal("YCbCr that is not compressed as JPEG")
    if compression == _JPEG and (depths[0] != 8 or photometric in (_WHITE_IS_ZERO, _PALETTE) or samples == 2):
        raise _refusal("JPEG compression in this colour space")
    if compression in _CCITT and depths != (1,):
        raise _refusal("CCITT compression of more than one bit")
    if compression == _JPEG and read.value(_PLANAR, 1) == 2:
        raise _refusal("JPEG compression in separate planes")
    if samples == 2 and read.value(_PLANAR, 1) == 2:
        raise _refusal("alpha in a plane of its own beside grey")
    if read.value(_FILL_ORDER, 1) not in (1, 2) or read.value(_PLANAR, 1) not in (1, 2):
        raise MediaDecodeError("the TIFF is corrupt (a tag's value is out of range)")
    if read.value(_FILL_ORDER, 1) == 2 and (depths[0] == 16 or samples != 1):
        raise _refusal("bits in reversed order")
    if read.value(_PREDICTOR, 1) not in (1, 2):
        raise _refusal("a floating-point predictor")


def _extra_samples(read: _Directory, photometric: int, samples: int) -> Values:
    """Return what the samples beyond the colours are: 0 anything, 1 premultiplied alpha, 2 alpha."""
    count = samples - {_RGB: 3, _CMYK: 4, _YCBCR_PHOTO: 3}.get(photometric, 1)
    kinds = read.values(_EXTRA)[:count]
    if kinds and max(kinds) > 2:
        raise _refusal(f"extra samples of kind {max(kinds)}")
    if not kinds and photometric == _RGB:
        return (2,) * count  # readers take the fourth sample for alpha
    return kinds or (0,) * count


def _orientation(read: _Directory) -> int:
    value = exif_orientation(read.data)
    if value is None and _XMP in read.entries:
        return orientation_of({XMP: read.bytes_of(_XMP)})
    return value if value is not None and 1 <= value <= 8 else 1


def _place(
    read: _Directory, size: ImageSize, planes: int, bits: int, compression: int, tags: dict[int, Values]
) -> tuple[ImageSize, ImageSize, tuple[tuple[int, int], ...]]:
    """Find the strips or tiles, put them into `tags`, and return the padded size, that of a part, and the
    parts.
    """
    tiled = _TILES in read.entries
    if tiled:
        wide, high = read.value(_TILE_WIDTH), read.value(_TILE_HEIGHT)
        if not wide or not high or wide % 16 or high % 16:
            raise MediaDecodeError("the TIFF is corrupt (the sides of a tile are multiples of 16)")
        tags[_TILE_WIDTH], tags[_TILE_HEIGHT] = (wide,), (high,)
    else:
        wide, high = size.width, min(read.value(_ROWS, size.height) or size.height, size.height)
        tags[_ROWS] = (high,)
    across, down = -(-size.width // wide), -(-size.height // high)
    padded = ImageSize(across * wide, down * high if tiled else size.height)
    count = across * down * planes
    starts = read.values(_TILES if tiled else _STRIPS)
    lengths = read.values(_TILE_BYTES if tiled else _STRIP_BYTES)
    row = -(-wide * bits // 8)
    if not lengths and compression == _RAW and count == len(starts) == 1:
        lengths = (row * high,)  # old writers leave this out
    if len(starts) < count or len(lengths) < count:
        raise MediaDecodeError("the TIFF is truncated or corrupt (some of its strips or tiles are missing)")
    parts = tuple(zip(starts[:count], lengths[:count], strict=True))
    if not all(length for _, length in parts):
        raise _refusal("strips or tiles left out (sparse)")
    if any(start + length > len(read.data) for start, length in parts):
        raise MediaDecodeError("the TIFF is truncated (some of its pixels lie past the end of the file)")
    if sum(length for _, length in parts) > _MAX_SHARING * len(read.data):
        raise MediaDecodeError(f"the TIFF has its pixels in the same bytes more than {_MAX_SHARING} times")
    if compression == _RAW:
        rows = [high] * down if tiled else [high] * (down - 1) + [size.height - high * (down - 1)]
        needed = [row * n for n in rows for _ in range(across)] * planes
        if any(length < least for (_, length), least in zip(parts, needed, strict=True)):
            raise MediaDecodeError("the TIFF is truncated or corrupt (a strip or tile is too short)")
    tags[_TILES if tiled else _STRIPS] = starts[:count]
    tags[_TILE_BYTES if tiled else _STRIP_BYTES] = lengths[:count]
    return padded, ImageSize(wide, high), parts


def jpeg_parts(data: bytes, layout: Layout) -> Iterator[bytes]:
    """Yield each strip or tile as a JPEG file of its own, with the tables that all share."""
    if layout.compression == _JPEG:
        for start, length in layout.parts:
            part = data[start : start + length]
            yield layout.tables[:-2] + part[2:] if layout.tables else part


def with_own_directory(data: bytes, layout: Layout) -> bytes:
    """Return the file with one directory, behind its data, of the layout's tags alone."""
    order = layout.order
    at = len(data) + len(data) % 2
    packed = {}
    for tag, numbers in layout.tags.items():
        kind = 3 if tag in _SHORTS else 4
        packed[tag] = kind, len(numbers), struct.pack(f"{order}{len(numbers)}{_TYPES[kind][0]}", *numbers)
    if layout.tables:
        packed[_JPEG_TABLES] = (7, len(layout.tables), layout.tables)
    behind = at + 2 + 12 * len(packed) + 4
    directory, values = struct.pack(order + "H", len(packed)), b""
    for tag, (kind, count, payload) in sorted(packed.items()):
        if len(payload) <= 4:
            where = payload.ljust(4, b"\0")
        else:
            where = struct.pack(order + "I", behind + len(values))
            values += payload + b"\0" * (len(payload) % 2)
        directory += struct.pack(order + "HHI", tag, kind, count) + where
    head = data[:2] + struct.pack(order + "HI", 42, at)
    return b"".join((head, data[8:], b"\0" * (at - len(data)), directory, bytes(4), values))


class _FirstPage(TiffImagePlugin.TiffImageFile):
    """A TIFF whose loading asks for no limit of the host's, and turns nothing."""

    def _setup(self) -> None:
        # Always through libtiff, which takes missing data for an error. For uncompressed files that is a
        # setting of the host's. Run the same function with that one setting changed:
        settings = {**vars(TiffImagePlugin), "READ_LIBTIFF": True}
        types.FunctionType(TiffImagePlugin.TiffImageFile._setup.__code__, settings)(self)

    def load_prepare(self) -> None:
        self.im = Image.core.new(self.mode, self.size)  # type: ignore[attr-defined]

    def load_end(self) -> None:
        pass


def tiff_image(data: bytes, layout: Layout) -> Image.Image:
    """Decode the first page as it is stored. Raises whatever Pillow does."""
    image = _FirstPage(io.BytesIO(with_own_directory(data, layout)))
    image.load()
    if layout.inverted:
        wide = np.asarray(image)
        return Image.fromarray(255 - (wide >> 8).astype(np.uint8))
    return image
