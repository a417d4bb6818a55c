"""TIFF: every layout gives the samples it was built of; what is not decoded is named; damage is an error."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, TiffImagePlugin

from mm_encoder.config import MediaLimits
from mm_encoder.errors import MediaDecodeError, MediaError, MediaTooLargeError, UnsupportedMediaError
from mm_encoder.media import decode as decode_module
from mm_encoder.media.decode import decode
from mm_encoder.media.header import read_header
from mm_encoder.media.source import open_source, size_of
from mm_encoder.planner import MediaPlanner

from ..helpers.images import LIMITS, decoded, exif, noise, same_pixels, saved
from ..helpers.tiffs import Tags, tiff

XMP_6 = b'<rdf:Description tiff:Orientation="6"/>'


def samples(channels: int, bits: int = 8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(bits).integers(0, 2**bits, (37, 45, channels))


def high_bytes(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    return (values >> 8 if bits == 16 else values * 255 // (2**bits - 1)).astype(np.uint8)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planes", [False, True], ids=["", "planes"])
@pytest.mark.parametrize("tile", [None, (16, 32)], ids=["strips", "tiles"])
@pytest.mark.parametrize("compression", [1, 8], ids=["raw", "deflate"])
@pytest.mark.parametrize(
    ("photometric", "channels", "extra", "depths"),
    [
        (0, 1, (), (1, 2, 4, 8, 16)),
        (1, 1, (), (1, 2, 4, 8, 16)),
        (2, 3, (), (8, 16)),
        (2, 4, (2,), (8, 16)),
        (2, 4, (), (8, 16)),
        (2, 4, (0,), (8, 16)),
        (5, 4, (), (8, 16)),
    ],
    ids=["white is zero", "black is zero", "RGB", "RGBA", "RGB and one", "RGBX", "CMYK"],
)
def test_a_tiff_of_any_layout_is_what_it_was_built_of(
    order: str,
    planes: bool,
    tile: tuple[int, int] | None,
    compression: int,
    photometric: int,
    channels: int,
    extra: tuple[int, ...],
    depths: tuple[int, ...],
) -> None:
    for bits in depths:
        given = samples(channels, bits)
        data = tiff(
            given,
            bits,
            photometric=photometric,
            order=order,
            planes=planes,
            tile=tile,
            rows=10,
            compression=compression,
            extra=extra,
        )
        wanted = high_bytes(given, bits)
        if photometric == 0:
            wanted = 255 - wanted
        if channels == 1:
            wanted = np.repeat(wanted, 3, axis=2)
        elif photometric == 5:
            wanted = np.array(Image.frombytes("CMYK", (45, 37), wanted.tobytes()).convert("RGB"))
        elif extra == (0,):
            wanted = wanted[:, :, :3]
        assert same_pixels(decoded(data), wanted), bits


def test_palette_predictor_and_grey_with_alpha() -> None:
    for bits in (1, 2, 4, 8):
        given, colours = samples(1, bits), np.random.default_rng(0).integers(0, 65536, (3, 2**bits))
        data = tiff(given, bits, photometric=3, tags={320: (3, colours.ravel().tolist())})
        assert same_pixels(decoded(data), (colours >> 8).astype(np.uint8).T[given[:, :, 0]])
    given = samples(3)
    differences = np.diff(given, axis=1, prepend=0) % 256
    data = tiff(differences, photometric=2, compression=8, tags={317: (3, (2,))})
    assert same_pixels(decoded(data), given.astype(np.uint8))
    given = samples(2)
    data = tiff(given, photometric=1, extra=(2,))
    assert same_pixels(decoded(data), given[:, :, [0, 0, 0, 1]].astype(np.uint8))


@pytest.mark.parametrize(
    ("mode", "compression"),
    [
        *(("RGB", kind) for kind in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")),
        *(("1", kind) for kind in ("group3", "group4", "tiff_ccitt")),
        ("CMYK", "jpeg"),
        ("L", "jpeg"),
        ("YCbCr", "jpeg"),
    ],
)
def test_compressions(mode: str, compression: str) -> None:
    data = saved(noise(45, 37, mode), "TIFF", compression=compression)
    assert same_pixels(decoded(data), np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def test_of_several_pages_the_first_counts_and_no_loop_is_followed() -> None:
    pages = [noise(9, 7, seed=seed) for seed in range(3)]
    data = saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert same_pixels(decoded(data), np.array(pages[0]))
    given = samples(3)
    plain = tiff(given, photometric=2)
    (first,) = struct.unpack_from("<I", plain, 4)
    for following in (first, 8, 0xFFFFFFFF):
        looped = tiff(given, photometric=2, behind=struct.pack("<I", following))
        assert same_pixels(decoded(looped), given.astype(np.uint8))


@pytest.mark.parametrize("compression", [1, 8])
def test_orientation_is_applied_once(compression: int, planner: MediaPlanner) -> None:
    given = samples(3)
    for orientation in range(1, 9):
        for tags in ({274: (3, (orientation,))}, {274: (4, (orientation,))}):
            data = tiff(given, photometric=2, compression=compression, tags=tags)
            check_turned(data, planner)
    data = tiff(given, photometric=2, compression=compression, tags={700: (1, XMP_6)})
    assert planner.plan(data).original_size == (37, 45)
    check_turned(data, planner)


def check_turned(data: bytes, planner: MediaPlanner) -> None:
    image = Image.open(io.BytesIO(data))
    image.load()  # this turns a TIFF
    wanted = np.array(image)
    for given in (data, Image.open(io.BytesIO(data)), image):
        source = open_source(given, LIMITS)
        assert source.size == size_of(given, LIMITS) == planner.plan(given).original_size == image.size
        assert same_pixels(source.decode(LIMITS).pixels, wanted)
    assert decoded(data, exif_orientation=False).shape == (37, 45, 3)


def with_tags(**changes: tuple[int, tuple[int, ...]]) -> bytes:
    names = {"compression": 259, "photometric": 262, "format": 339, "samples": 277, "bits": 258}
    names |= {"predictor": 317, "dng": 50706, "extra": 338, "lengths": 279}
    tags: Tags = {names[name]: entry for name, entry in changes.items()}
    return tiff(samples(3), photometric=2, tags=tags)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tiff(samples(1, 16), 32, photometric=1, tags={339: (3, (3,))}), "floating-point"),
        (tiff(samples(1), photometric=1, tags={339: (3, (2,))}), "signed"),
        (tiff(samples(1, 16), 32, photometric=1), "32 bits"),
        (with_tags(compression=(3, (6,))), "old-style JPEG"),
        (with_tags(compression=(3, (50000,))), "Zstandard"),
        (with_tags(compression=(3, (12345,))), "number 12345"),
        (with_tags(photometric=(3, (8,))), "CIELAB"),
        (with_tags(photometric=(3, (32803,))), "colour filter"),
        (with_tags(samples=(3, (7,))), "7 samples"),
        (with_tags(bits=(3, (5, 6, 5))), "5/6/5 bits"),
        (with_tags(predictor=(3, (3,))), "predictor"),
        (with_tags(dng=(1, (1, 4, 0, 0))), "DNG"),
        (with_tags(lengths=(4, (0,))), "sparse"),
        (tiff(samples(4), photometric=2, extra=(77,)), "extra samples"),
        (b"II+\0" + bytes(30), "BigTIFF .TIFF with 64-bit offsets"),
    ],
)
def test_what_is_not_decoded_is_named(data: bytes, words: str, planner: MediaPlanner) -> None:
    for read in (lambda: planner.plan(data), lambda: decoded(data)):
        with pytest.raises(UnsupportedMediaError, match=f"{words}.*; convert it to"):
            read()


@pytest.mark.parametrize("lenient", [False, True], ids=["", "host is lenient"])
@pytest.mark.parametrize("kind", ["raw", "deflate", "lzw", "jpeg", "group4"])
def test_a_cut_tiff_is_an_error(kind: str, lenient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    if kind in ("raw", "deflate"):
        data = tiff(samples(3), photometric=2, rows=9, compression=8 if kind == "deflate" else 1)
    else:
        names = {"lzw": ("RGB", "tiff_lzw"), "jpeg": ("RGB", "jpeg"), "group4": ("1", "group4")}
        data = saved(noise(45, 37, names[kind][0]), "TIFF", compression=names[kind][1])
    whole = decoded(data)
    for cut in range(0, len(data), 3):
        try:
            assert same_pixels(decoded(data[:cut]), whole), cut  # padding may be missing
        except MediaError:
            pass


def test_pixels_that_end_early_are_an_error() -> None:
    for compression in (1, 8):
        short = tiff(samples(3)[:30], photometric=2, compression=compression, tags={257: (4, (37,))})
        with pytest.raises(MediaDecodeError):
            decoded(short)
    jpeg = saved(noise(45, 37), "TIFF", compression="jpeg")
    at = jpeg.index(b"\xff\xda") + 60
    with pytest.raises(MediaDecodeError):
        decoded(jpeg[:at] + b"\xff\xd9" + jpeg[at + 2 :])


def test_sizes_are_refused_from_the_directory(planner: MediaPlanner) -> None:
    small = MediaLimits(max_pixels=45 * 37)
    given = samples(3)
    assert decode(tiff(given, photometric=2), small).size == (45, 37)
    for data in (
        tiff(given, photometric=2, tags={256: (4, (60_000,)), 257: (4, (60_000,))}),
        tiff(given, photometric=2, tags={256: (4, (0,))}),
        tiff(given, photometric=2, tile=(16, 16), tags={322: (4, (1 << 20,)), 323: (4, (1 << 20,))}),
    ):
        for read in (lambda data=data: planner.plan(data), lambda data=data: decoded(data)):
            with pytest.raises(MediaError):
                read()
    with pytest.raises(MediaTooLargeError):
        read_header(tiff(given, photometric=2, tile=(64, 64)), small)  # what a tile pads counts as well


def test_a_directory_or_a_list_of_strips_may_be_huge_on_paper() -> None:
    data = tiff(samples(1), photometric=1)
    (at,) = struct.unpack_from("<I", data, 4)
    with pytest.raises(MediaDecodeError):
        decoded(data[:at] + b"\xff\xff" + data[at + 2 :])
    for tag in (273, 279):
        entry = data.index(struct.pack("<HH", tag, 4), at)
        many = data[: entry + 4] + b"\xff\xff\xff\x3f" + data[entry + 8 :]
        with pytest.raises(MediaDecodeError):
            decoded(many)


def test_the_same_bytes_many_times_are_refused() -> None:
    rows = 37
    tags: Tags = {273: (4, (8,) * rows), 279: (4, (200_000,) * rows), 278: (4, (1,))}
    data = tiff(np.zeros((2000, 45, 3)), photometric=2, tags={**tags, 257: (4, (rows,))})
    with pytest.raises(MediaDecodeError, match="same bytes"):
        decoded(data)


def in_jpeg_parts(given: Image.Image, size: tuple[int, int], *, tiled: bool) -> bytes:
    """Build a grey TIFF of 64x48 whose parts, of `size` by its directory, are all the same JPEG."""
    jpeg = saved(given, "JPEG")
    count = -(-64 // size[0]) * -(-48 // size[1])
    starts, lengths = [8] * count, [len(jpeg)] * count
    tags: dict[int, tuple[int, Sequence[int]]] = {256: (4, (64,)), 257: (4, (48,)), 259: (3, (7,))}
    if tiled:
        tags |= {322: (4, size[:1]), 323: (4, size[1:]), 324: (4, starts), 325: (4, lengths)}
        tags |= dict.fromkeys((273, 278, 279), (4, ()))
    else:
        tags |= {273: (4, starts), 278: (4, size[1:]), 279: (4, lengths)}
    stored = np.frombuffer(jpeg, np.uint8).reshape(-1, 1, 1)  # as the samples of one strip
    return tiff(stored, photometric=1, tags=tags)


@pytest.mark.parametrize("tiled", [False, True], ids=["strips", "tiles"])
@pytest.mark.parametrize(("wider", "higher"), [(0, 0), (16, 0), (0, 16)])
def test_a_part_larger_than_the_directory_says_is_not_decoded(
    tiled: bool, wider: int, higher: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part could be as large as the whole image, and decoding them all take minutes."""
    size = (16, 16) if tiled else (64, 16)
    data = in_jpeg_parts(noise(size[0] + wider, size[1] + higher, "L"), size, tiled=tiled)
    calls = []
    decompress = decode_module._decompress_jpeg

    def noted(jpeg: bytes, channels: int) -> Any:
        calls.append(jpeg)
        return decompress(jpeg, channels)

    monkeypatch.setattr(decode_module, "_decompress_jpeg", noted)
    if not wider and not higher:
        assert decoded(data).shape == (48, 64, 3)
        assert calls
        return
    with pytest.raises(MediaDecodeError, match=f"is {size[0] + wider}x{size[1] + higher}, where"):
        decoded(data)
    assert not calls


def test_no_setting_of_the_host_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tiff(samples(3), photometric=2, rows=9), saved(noise(45, 37), "TIFF", compression="tiff_lzw")]
    before = [decoded(data) for data in files]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for through_libtiff in (False, True):
        monkeypatch.setattr(TiffImagePlugin, "READ_LIBTIFF", through_libtiff)
        assert all(same_pixels(decoded(data), one) for data, one in zip(files, before, strict=True))


def test_exif_of_a_saved_tiff_is_its_own_directory() -> None:
    image = Image.Exif()
    image.load(exif(6))
    data = saved(noise(9, 7), "TIFF", exif=image)
    assert read_header(data, LIMITS).display_size() == (7, 9)
    assert decoded(data).shape == (9, 7, 3)
