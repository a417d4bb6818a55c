"""Images for tests, and builders of files that Pillow cannot write."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mm_encoder.config import MediaLimits
from mm_encoder.media.decode import decode
from mm_encoder.media.picture import Pixels

LIMITS = MediaLimits()


def decoded(data: bytes, *, exif_orientation: bool = True) -> Pixels:
    return decode(data, LIMITS, exif_orientation=exif_orientation).pixels


def shown_by_pillow(data: bytes, channels: int = 3) -> Pixels:
    """Decode a file with Pillow and apply its EXIF orientation: the reference result."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return np.array(image.convert("RGBA" if channels == 4 else "RGB"))


def same_pixels(one: Pixels, other: Pixels) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return random pixels, smoothed so that not every JPEG coefficient is at its maximum."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 2 + 1, width // 2 + 1, 4), np.uint8)
    return Image.fromarray(coarse).resize((width, height)).convert(mode)


def saved(image: Image.Image, kind: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def png(width: int = 40, height: int = 40, seed: int = 0) -> bytes:
    return saved(noise(width, height, seed=seed), "PNG")


def mixed(count: int) -> list[bytes]:
    """Return PNG files of `count` different sizes up to 200 x 200."""
    chance = random.Random(11)
    return [png(chance.randint(1, 200), chance.randint(1, 200), seed) for seed in range(count)]


def exif(orientation: int, order: str = "<", *, kind: int = 3, count: int = 1) -> bytes:
    """Build an EXIF block with one entry, the orientation."""
    value = struct.pack(order + ("H2x" if kind == 3 else "I"), orientation)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return head + struct.pack(order + "HHHI", 1, 0x0112, kind, count) + value + bytes(4)


# --- PNG ---------------------------------------------------------------------------------------------

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by number of channels


def png_chunk(name: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))


def ihdr(width: int, height: int, depth: int = 8, colour: int = 2, *, interlace: bool = False) -> bytes:
    return png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))


def png_rows(samples: np.ndarray[Any, Any], depth: int, *, interlace: bool = False) -> bytes:
    """Return the filtered rows (all with filter 0) of samples [h, w, channels], or of each Adam7 pass."""
    passes = [samples[top::down, left::across] for left, top, across, down in ADAM7]
    lines = [row for part in (passes if interlace else [samples]) if part.size for row in part]
    return b"".join(b"\0" + _pack(row, depth) for row in lines)


def _pack(row: np.ndarray[Any, Any], depth: int) -> bytes:
    if depth == 16:
        return bytes(row.astype(">u2").tobytes())
    bits = np.unpackbits(row.astype(np.uint8).reshape(-1, 1), axis=1)[:, 8 - depth :]
    return np.packbits(bits.ravel()).tobytes()


def png_file(
    samples: np.ndarray[Any, Any],
    depth: int = 8,
    *,
    colour: int | None = None,
    interlace: bool = False,
    before: bytes = b"",
    rows: bytes | None = None,
    after: bytes = b"",
) -> bytes:
    """Build a PNG of samples [h, w, channels], with chunks `before` and `after` its pixel data.

    `rows` replaces the filtered rows that are compressed.
    """
    height, width, channels = samples.shape
    head = ihdr(
        width, height, depth, COLOUR_TYPES[channels] if colour is None else colour, interlace=interlace
    )
    data = png_rows(samples, depth, interlace=interlace) if rows is None else rows
    pixels = png_chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + head + before + pixels + after + png_chunk(b"IEND")


def png_with(*chunks: tuple[bytes, bytes], behind: bool = False) -> bytes:
    """Return a PNG of 9 x 7 noise with extra chunks, before its pixels or behind them."""
    extra = b"".join(png_chunk(*chunk) for chunk in chunks)
    data = saved(noise(9, 7), "PNG")
    at = len(data) - 12 if behind else 33
    return data[:at] + extra + data[at:]


# --- GIF ---------------------------------------------------------------------------------------------

GREYS = bytes(v for level in range(256) for v in (level, level, level))


def gif_blocks(payload: bytes) -> bytes:
    parts = [payload[i : i + 255] for i in range(0, len(payload), 255)]
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


def gif_codes(indices: bytes) -> bytes:
    """Encode indices as 9-bit LZW codes, with a clear code before the code size would grow."""
    codes = [code for i in range(0, len(indices), 250) for code in (256, *indices[i : i + 250])] + [257]
    bits = sum(code << 9 * i for i, code in enumerate(codes))
    return bytes(bits.to_bytes(-(-9 * len(codes) // 8), "little"))


def gif_control(flags: int, transparent: int = 0) -> bytes:
    return bytes([0x21, 0xF9, 4, flags, 0, 0, transparent, 0])


def gif_file(
    indices: np.ndarray[Any, Any],
    *,
    screen: tuple[int, int] | None = None,
    at: tuple[int, int] = (0, 0),
    palette: bytes = GREYS,
    local: bytes = b"",
    before: bytes = b"",
    interlace: bool = False,
    codes: bytes | None = None,
    after: bytes = b"\x3b",
) -> bytes:
    """Build a GIF of one frame of indices [h, w], `at` (left, top) on the screen, with blocks `before` it."""
    height, width = indices.shape
    order = [*range(0, height, 8), *range(4, height, 8), *range(2, height, 4), *range(1, height, 2)]
    lines = indices[order] if interlace else indices
    flags = (0x40 if interlace else 0) | (0x87 if local else 0)
    packed = gif_codes(lines.astype(np.uint8).tobytes()) if codes is None else codes
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", *(screen or (width, height)), 0x87 if palette else 0, 0, 0)
        + palette
        + before
        + b","
        + struct.pack("<HHHHB", *at, width, height, flags)
        + local
        + b"\x08"
        + gif_blocks(packed)
        + after
    )


# --- BMP ---------------------------------------------------------------------------------------------


def bmp_file(
    data: bytes, size: tuple[int, int], bits: int, *, palette: bytes = b"", compression: int = 0
) -> bytes:
    """Build a BMP from packed rows; a negative height means that the top row comes first."""
    start = 54 + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, *size, 1, bits, compression, len(data), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + head + palette + data


# --- JPEG and WebP -----------------------------------------------------------------------------------


def segment(marker: int, payload: bytes = b"") -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def inserted(jpeg: bytes, extra: bytes) -> bytes:
    """Insert bytes into a JPEG, directly after its start-of-image marker."""
    return jpeg[:2] + extra + jpeg[2:]


def scans_apart(planes: list[Image.Image], factors: list[int], size: tuple[int, int]) -> bytes:
    """Build a sequential JPEG with one scan per component.

    Each plane is saved as a greyscale JPEG, whose only scan becomes the component's scan. `factors` are the
    sampling factors (horizontal << 4 | vertical).
    """
    files = [saved(plane.convert("L"), "JPEG", quality=90) for plane in planes]
    first, start = files[0], files[0].index(b"\xff\xda")
    dqt, sof = first.index(b"\xff\xdb"), first.index(b"\xff\xc0")
    tables = first[sof + 13 : start]
    components = b"".join(bytes([i + 1, factor, 0]) for i, factor in enumerate(factors))
    frame = struct.pack(">BHHB", 8, size[1], size[0], len(planes)) + components
    data = b"\xff\xd8" + first[dqt:sof] + segment(0xC0, frame) + tables
    for i, file in enumerate(files):
        codes = file[file.index(b"\xff\xda") + 10 : -2]
        data += segment(0xDA, bytes([1, i + 1, 0, 0, 63, 0])) + codes
    return data + b"\xff\xd9"


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    """Build a WebP file of these chunks."""
    body = b"".join(
        name + struct.pack("<I", len(payload)) + payload + bytes(len(payload) & 1) for name, payload in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body
