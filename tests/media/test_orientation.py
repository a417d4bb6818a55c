"""Orientation is read wherever Pillow's `exif_transpose` reads it, and alike from bytes and Pillow images."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from mm_encoder.media.header import read_header
from mm_encoder.media.source import open_source, size_of
from mm_encoder.planner import MediaPlanner

from ..helpers.abuse import Row, case, file_of, rows
from ..helpers.images import (
    LIMITS,
    decoded,
    exif,
    inserted,
    noise,
    png_with,
    riff,
    same_pixels,
    saved,
    segment,
    shown_by_pillow,
)

EXIF_6, EXIF_3, NO_EXIF = (b"Exif\0\0" + exif(6)), (b"Exif\0\0" + exif(3)), b"Exif\0\0"
LONG_EXIF = b"II*\0" + struct.pack("<I", 3000) + bytes(2992) + exif(6)[8:]  # its directory comes at its end
XMP_8 = b'<rdf:Description tiff:Orientation="8"/>'
PROFILE_6 = f"\nexif\n{len(EXIF_6):8}\n{EXIF_6.hex()}\n".encode()


def app1(*payloads: bytes) -> bytes:
    return inserted(saved(noise(9, 7), "JPEG"), b"".join(segment(0xE1, payload) for payload in payloads))


def webp_with(*chunks: tuple[bytes, bytes]) -> bytes:
    frame = saved(noise(9, 7), "WEBP")[20:]
    return riff((b"VP8X", bytes([0x0C, 0, 0, 0]) + b"\x08\0\0\6\0\0"), (b"VP8 ", frame), *chunks)


WHERE_ORIENTATION_STANDS = {
    "JPEG, the first of two": app1(EXIF_6, EXIF_3),
    "JPEG, behind an empty one": app1(NO_EXIF, EXIF_6),
    "JPEG, over two segments": app1(NO_EXIF + LONG_EXIF[:2000], NO_EXIF + LONG_EXIF[2000:]),
    "JPEG, XMP": app1(b"http://ns.adobe.com/xap/1.0/\0" + XMP_8),
    "JPEG, the last XMP": app1(*(b"http://ns.adobe.com/xap/1.0/\0" + x for x in (b"<none/>", XMP_8))),
    "JPEG, EXIF without it and XMP": app1(
        b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0", b"http://ns.adobe.com/xap/1.0/\0" + XMP_8
    ),
    "PNG": png_with((b"eXIf", exif(6))),
    "PNG, the last of two": png_with((b"eXIf", exif(6)), (b"eXIf", exif(3))),
    "PNG, behind its pixels": png_with((b"eXIf", exif(6)), behind=True),
    "PNG, text": png_with((b"tEXt", b"Raw profile type exif\0" + PROFILE_6)),
    "PNG, text behind its pixels": png_with((b"tEXt", b"Raw profile type exif\0" + PROFILE_6), behind=True),
    "PNG, compressed text": png_with((b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(PROFILE_6))),
    "PNG, international text": png_with((b"iTXt", b"Raw profile type exif\0\0\0\0\0" + PROFILE_6)),
    "PNG, broken text": png_with((b"tEXt", b"Raw profile type exif\0\nexif\n 3\nxyz")),
    "PNG, XMP": png_with((b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP_8)),
    "PNG, compressed XMP": png_with((b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP_8))),
    "PNG, XMP in Latin": png_with((b"tEXt", b"XML:com.adobe.xmp\0" + XMP_8)),
    "WebP, the first of two": webp_with((b"EXIF", exif(6)), (b"EXIF", exif(3))),
    "WebP, XMP": webp_with((b"XMP ", XMP_8)),
    "of a wide type": app1(NO_EXIF + exif(6, kind=4)),
    "of two values": app1(NO_EXIF + exif(6, count=2)),
    "of text, and XMP": png_with(
        (b"eXIf", exif(6, kind=2)), (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP_8)
    ),
    "illegal, and XMP": png_with((b"eXIf", exif(9)), (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP_8)),
}


@pytest.mark.parametrize("where", WHERE_ORIENTATION_STANDS)
def test_orientation_is_read_wherever_pillow_reads_it(where: str, planner: MediaPlanner) -> None:
    """In bytes and in Pillow images, loaded or not, in pixels and in plans."""
    data = WHERE_ORIENTATION_STANDS[where]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about values that it drops
        try:
            wanted = shown_by_pillow(data)
        except ValueError:  # Pillow fails on broken text
            wanted = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        loaded = Image.open(io.BytesIO(data))
        loaded.load()
        lazy = Image.open(io.BytesIO(data))
        assert size_of(lazy, LIMITS) == wanted.shape[1::-1]
    for image in (data, loaded, Image.open(io.BytesIO(data))):
        source = open_source(image, LIMITS)
        assert source.size == size_of(image, LIMITS) == wanted.shape[1::-1]
        assert same_pixels(source.decode(LIMITS).pixels, wanted)
        plan = planner.plan(image)
        assert plan.original_size == wanted.shape[1::-1]


def test_they_do_not_all_say_the_same() -> None:
    found = [read_header(data, LIMITS).orientation for data in WHERE_ORIENTATION_STANDS.values()]
    assert {1, 3, 6, 8} == set(found)


def test_what_a_host_sets_or_deletes_on_a_pillow_image_counts() -> None:
    for value in (None, 1, 3, 8):
        image = Image.open(io.BytesIO(app1(EXIF_6)))
        if value is None:
            del image.getexif()[0x0112]
        else:
            image.getexif()[0x0112] = value
        wanted = np.array(ImageOps.exif_transpose(image))
        source = open_source(image, LIMITS)
        assert source.size == size_of(image, LIMITS) == wanted.shape[1::-1]
        assert same_pixels(source.decode(LIMITS).pixels, wanted)


@pytest.mark.parametrize("row", rows("D38"), ids=file_of)
def test_exif_in_several_segments(row: Row, planner: MediaPlanner) -> None:
    data = case(row["file"])
    assert read_header(data, LIMITS).display_size() == tuple(row["size"])
    assert planner.plan(data).original_size == planner.plan(Image.open(io.BytesIO(data))).original_size
    assert same_pixels(decoded(data), shown_by_pillow(data))
