from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps

from mm_encoder.config import ImageOptions, MediaLimits
from mm_encoder.errors import MediaDecodeError, MediaError, MediaTooLargeError, UnsupportedMediaError
from mm_encoder.media import source as source_module
from mm_encoder.media.picture import Pixels
from mm_encoder.media.source import is_image, open_source, read_data_url, size_of

from ..helpers.abuse import ABUSE, case
from ..helpers.images import LIMITS, decoded, exif, noise, same_pixels, saved
from ..helpers.waiting import HANG

PNG = saved(noise(9, 7), "PNG")


def pixels_of(image: Any, **options: Any) -> Pixels:
    return open_source(image, LIMITS, **options).decode(LIMITS).pixels


def hash_of(image: Any, model: str = "m") -> str:
    return open_source(image, LIMITS).mm_hash(model)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


# --- encoded bytes -----------------------------------------------------------------------------------


def test_bytes_may_come_in_any_buffer(tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(PNG)
    spread = memoryview(bytes(b for byte in PNG for b in (byte, 0)))[::2]
    assert not spread.contiguous
    words = memoryview(PNG + bytes(-len(PNG) % 4)).cast("I")
    for given in (PNG, bytearray(PNG), memoryview(PNG), spread, words, path, data_url(PNG)):
        assert is_image(given)
        source = open_source(given, LIMITS)
        assert source.size == (9, 7)
        assert same_pixels(source.decode(LIMITS).pixels, decoded(PNG))


def test_a_buffer_may_be_changed_afterwards() -> None:
    buffer = bytearray(PNG)
    sources = [open_source(buffer, LIMITS), open_source(memoryview(buffer), LIMITS)]
    buffer[:] = bytes(len(buffer))
    for source in sources:
        assert same_pixels(source.decode(LIMITS).pixels, decoded(PNG))
        assert source.mm_hash("m") == hash_of(PNG)


@pytest.mark.parametrize("given", [None, 3, 2.5, [PNG], {"image": PNG}, os.fspath, io.BytesIO(PNG)])
def test_what_is_no_image_is_a_type_error(given: Any) -> None:
    assert not is_image(given)
    with pytest.raises(TypeError, match="an image is bytes"):
        open_source(given, LIMITS)


def test_bytes_are_weighed_before_they_are_copied() -> None:
    class Heavy(bytearray):
        def __bytes__(self) -> bytes:
            raise AssertionError("copied")

    with pytest.raises(MediaTooLargeError, match="max_bytes"):
        open_source(Heavy(100), MediaLimits(max_bytes=99))


# --- paths -------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read_are_the_callers_fault(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(PNG)
    missing = tmp_path / "missing.png"
    for path, words in [
        (missing, "missing.png: No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "a\0b", "null"),
        (tmp_path / ("n" * 300), "too long"),
    ]:
        with pytest.raises(MediaDecodeError, match=words) as error:
            open_source(path, LIMITS)
        assert str(tmp_path) not in str(error.value)
    with pytest.raises(MediaTooLargeError, match="max_bytes"):
        open_source(large, MediaLimits(max_bytes=len(PNG) - 1))
    assert open_source(large, MediaLimits(max_bytes=len(PNG))).size == (9, 7)


def test_a_path_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(PNG)
    assert open_source(Path("~/a.png"), LIMITS).size == (9, 7)
    monkeypatch.chdir(tmp_path)
    for name in ("~a.png", "~root"):  # names of files, and not of users
        Path(name).write_bytes(PNG)
        assert open_source(Path(name), LIMITS).size == (9, 7)


def test_a_home_that_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", _no_entry)
    with pytest.raises(MediaDecodeError, match="cannot read a.png: .* is not known .is HOME set"):
        open_source(Path("~/a.png"), LIMITS)


def _no_entry(*_: object) -> None:
    raise KeyError("uid not found")


def test_no_more_of_a_file_is_read_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MediaTooLargeError, match="has 1099511627776 bytes"):
        open_source(path, MediaLimits(max_bytes=1000))


def test_what_is_no_regular_file_is_not_read() -> None:
    with pytest.raises(MediaDecodeError, match="cannot read zero: it is not a regular file"):
        open_source(Path("/dev/zero"), LIMITS)


@pytest.mark.parametrize("prefix", ["", "file://", "data:"])
def test_a_string_is_never_opened(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(ABUSE / "D06_good.jpg")

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("a string must not reach the file system")

    for module, name in [(io, "open"), (os, "open"), (Path, "open"), (Path, "read_bytes")]:
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(MediaError, match="data URL") as error:
        open_source(prefix + path, LIMITS)
    assert "D06" not in str(error.value)
    with pytest.raises(AssertionError):
        open_source(Path(path), LIMITS)


# --- data URLs ---------------------------------------------------------------------------------------

URLS: list[dict[str, str]] = json.loads((ABUSE / "D28_data_urls.json").read_text())
ESCAPED: list[dict[str, str]] = json.loads((ABUSE / "D33_data_urls_percent.json").read_text())


@pytest.mark.parametrize("entry", URLS, ids=range(len(URLS)))
def test_data_urls_of_every_shape(entry: dict[str, str]) -> None:
    url = entry["url"]
    if entry["expect"].startswith("ok"):
        pixels = pixels_of(url)
        assert pixels.shape == (4, 4, 3)
        assert (pixels == (1, 2, 3)).all()
        return
    with pytest.raises(MediaError) as error:
        open_source(url, LIMITS)
    payload = url.partition(",")[2]
    assert not payload or payload not in str(error.value)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("entry", ESCAPED, ids=range(len(ESCAPED)))
def test_percent_encoding_in_a_data_url_is_undone(entry: dict[str, str]) -> None:
    if entry["expect"].startswith("ok"):
        assert read_data_url(entry["url"], LIMITS) == read_data_url(ESCAPED[0]["url"], LIMITS)
        return
    with pytest.raises(MediaDecodeError):
        read_data_url(entry["url"], LIMITS)


def test_percent_encoding_is_undone_once_and_before_the_limit() -> None:
    escaped = "".join(f"%{byte:02x}" for byte in base64.b64encode(PNG))
    assert read_data_url("data:;base64," + escaped, MediaLimits(max_bytes=len(PNG))) == PNG
    with pytest.raises(MediaDecodeError, match="base64"):
        read_data_url("data:;base64," + escaped.replace("%", "%25"), LIMITS)


def test_the_data_urls_are_both_good_and_bad() -> None:
    assert sum(entry["expect"].startswith("ok") for entry in URLS) == 9
    assert len(URLS) == 17


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "does not begin with 'data:'"),
        ("https://example.com/a.png", "does not begin with 'data:'"),
        (" data:;base64,AAAA", "does not begin with 'data:'"),
        ("data:image/png;base64", "no comma"),
        ("data:,", "not base64"),
        ("data:base64,AAAA", "not base64"),
        ("data:;base64;x=y,AAAA", "not base64"),
        ("data:;base64,", "empty"),
        ("data:;base64, \n=", "empty"),
        ("data:;base64,@@@@", "not valid base64"),
        ("data:;base64,AAAAA", "not valid base64"),
        ("data:;base64,AA=AAA", "not valid base64"),
        ("data:;base64,AA\u0661A", "not valid base64"),
        ("data:;base64,AA\ud800A", "not valid base64"),
    ],
)
def test_what_is_wrong_with_a_data_url_is_said(url: str, words: str) -> None:
    with pytest.raises(MediaError, match=words) as error:
        read_data_url(url, LIMITS)
    assert "AAAA" not in str(error.value)


@pytest.mark.parametrize("size", range(12))
def test_base64_is_read_however_it_is_written(size: int) -> None:
    data = bytes(range(251, 251 - size - 1, -1))
    text = base64.b64encode(data).decode()
    safe = base64.urlsafe_b64encode(data).decode()
    for payload in (text, text.rstrip("="), safe, safe.rstrip("="), "\r\n\t ".join(text)):
        for start in ("data:;base64,", "DATA:image/png;Base64,", "data:a/b;c=d; base64 ,"):
            assert read_data_url(start + payload, LIMITS) == data


def test_a_data_url_is_weighed_by_what_it_holds() -> None:
    data = bytes(1000)
    url = "data:;base64," + "\n".join(re.findall(".{1,76}", base64.b64encode(data).decode()))
    assert read_data_url(url, MediaLimits(max_bytes=1000)) == data
    with pytest.raises(MediaTooLargeError, match="1000 bytes, the limit is 999"):
        read_data_url(url, MediaLimits(max_bytes=999))


# --- arrays ------------------------------------------------------------------------------------------

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)


def test_an_array_is_taken_as_it_is() -> None:
    alpha = np.dstack([COLOURS, COLOURS[:, :, 0]])
    for given in (COLOURS, alpha):
        assert same_pixels(pixels_of(given), given)
        assert open_source(given, LIMITS).size == (5, 6)


def test_grey_arrays_may_have_a_channel_axis() -> None:
    grey = COLOURS[:, :, 0]
    wanted = np.dstack([grey] * 3)
    assert same_pixels(pixels_of(grey), wanted)
    assert same_pixels(pixels_of(grey[:, :, np.newaxis]), wanted)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (3, 3), (3, 3, 3), (1, 1, 3), (3, 1, 1)])
def test_axes_are_never_guessed_from_their_sizes(shape: tuple[int, ...]) -> None:
    source = open_source(np.zeros(shape, np.uint8), LIMITS)
    assert source.size == (shape[1], shape[0])
    assert source.decode(LIMITS).pixels.shape == (shape[0], shape[1], 3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble, ">f4", ">f8"])
def test_floats_are_scaled_from_one(dtype: Any) -> None:
    levels = np.arange(256).reshape(16, 16)
    assert (pixels_of((levels / 255).astype(dtype))[:, :, 0] == levels).all()
    edges = np.array([[-0.2, 0.0, 1.0, 1.1, 1.2]]).astype(dtype)
    assert pixels_of(edges)[0, :, 0].tolist() == [0, 0, 255, 255, 255]


def test_the_scale_follows_the_dtype_and_not_the_values() -> None:
    assert pixels_of(np.ones((2, 2), np.uint8))[0, 0, 0] == 1
    assert pixels_of(np.ones((2, 2), np.float32))[0, 0, 0] == 255
    assert pixels_of(np.full((2, 2), 200, np.uint16))[0, 0, 0] == 0


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bits_keep_their_high_byte(order: str) -> None:
    values = np.arange(0, 65536, 7).reshape(-1, 1)
    array = values.astype(order + "u2")
    assert (pixels_of(array)[:, :, 0] == values >> 8).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    array = np.zeros((3, 3), np.float32)
    array[1, 2] = bad
    with pytest.raises(MediaDecodeError, match="not finite"):
        open_source(array, LIMITS)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "int32", "int64", "uint32", "uint64", "complex64", "O"]
)
def test_dtypes_without_a_range_are_refused_by_name(dtype: str) -> None:
    array = np.zeros((3, 3), dtype)
    with pytest.raises(
        UnsupportedMediaError, match=r"uint8, uint16 or floating \(0 to 1\), got " + array.dtype.name
    ):
        open_source(array, LIMITS)


@pytest.mark.parametrize(
    "shape", [(), (3,), (3, 8, 9), (4, 8, 9), (8, 9, 2), (8, 9, 5), (1, 8, 9, 3), (8, 9, 0)]
)
def test_other_shapes_are_refused_with_what_would_be_right(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedMediaError, match=re.escape(f"got {shape}")):
        open_source(np.zeros(shape, np.uint8), LIMITS)


def test_empty_and_huge_arrays_are_refused_before_they_are_copied() -> None:
    for shape in [(0, 5), (5, 0), (0, 0, 3)]:
        with pytest.raises(MediaDecodeError, match="no pixels"):
            open_source(np.zeros(shape, np.uint8), LIMITS)
    with pytest.raises(MediaTooLargeError, match="50000x60000"):
        open_source(np.broadcast_to(np.float64(0), (60_000, 50_000, 3)), LIMITS)


class Unindexed(np.ndarray[Any, Any]):
    def __getitem__(self, item: Any) -> Any:
        raise AssertionError("a subclass may index in ways of its own")


def odd_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    base = np.random.default_rng(1).integers(0, 256, (12, 10, 3), np.uint8)
    base.tofile(path)
    readonly = base.copy()
    readonly.flags.writeable = False
    unaligned = np.frombuffer(b"x" + base.astype("<u2").tobytes(), "<u2", offset=1)
    return {
        "upside down": base[::-1],
        "channels reversed": base[..., ::-1],
        "mirrored": base[:, ::-1],
        "transposed": base.transpose(1, 0, 2),
        "every second column": base[:, ::2],
        "Fortran order": np.asfortranarray(base),
        "read-only": readonly,
        "read-only map": np.memmap(path, np.uint8, "r", shape=base.shape),
        "broadcast": np.broadcast_to(base[0, 0], (4, 6, 3)),
        "broadcast grey": np.broadcast_to(np.uint8(7), (4, 6)),
        "one row, reversed": base[:1][::-1],
        "an axis taken away": base[np.newaxis][0],
        "unaligned": unaligned.reshape(base.shape),
        "floats from the back": (base[::-1, ::-2] / 255).astype(np.float32),
        "masked": np.ma.masked_array(base, mask=base > 9),
        "of a subclass": base[..., 0].copy().view(Unindexed),
    }


def test_odd_arrays_are_taken_like_contiguous_copies(tmp_path: Path) -> None:
    for name, array in odd_arrays(tmp_path / "array").items():
        before = array.tobytes()
        plain = np.array(array, order="C")
        assert same_pixels(pixels_of(array), pixels_of(plain)), name
        assert hash_of(array) == hash_of(plain), name
        assert array.tobytes() == before, name
        assert pixels_of(array).flags.writeable, name
        assert not np.shares_memory(pixels_of(array), array), name


def test_an_array_may_be_changed_afterwards() -> None:
    array = COLOURS.copy()
    source = open_source(array, LIMITS)
    before = source.mm_hash("m")
    array[:] = 0
    assert same_pixels(source.decode(LIMITS).pixels, COLOURS)
    assert source.mm_hash("m") == before == hash_of(COLOURS)


# --- Pillow images -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_opaque_modes_become_rgb(mode: str) -> None:
    image = noise(9, 7).convert(mode)
    assert same_pixels(pixels_of(image), np.array(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_modes_with_an_alpha_band_keep_it(mode: str) -> None:
    rgba = noise(9, 7, "RGBA")
    image = {
        "La": lambda: rgba.convert("LA").convert("La"),
        "PA": lambda: rgba.convert("P").convert("PA"),
    }.get(mode, lambda: rgba.convert(mode))()
    assert image.mode == mode
    wanted = image.convert("LA") if mode == "La" else image
    assert same_pixels(pixels_of(image), np.array(wanted.convert("RGBA")))
    assert len(np.unique(pixels_of(image)[:, :, 3])) > 5


@pytest.mark.parametrize(
    ("mode", "key"),
    [("1", 255), ("L", 40), ("RGB", (40, 40, 40)), ("P", 1), ("P", b"\x00\x50"), ("I;16", 300)],
)
def test_transparency_kept_in_info_counts(mode: str, key: Any) -> None:
    image = {
        "P": lambda: Image.new("P", (3, 2), 0),
        "I;16": lambda: Image.new("I;16", (3, 2), 300),
    }.get(mode, lambda: Image.new(mode, (3, 2), key))()
    if mode == "P":
        image.putpalette([9, 9, 9, 40, 40, 40])
        image.paste(1, (0, 0, 2, 2))
    image.info["transparency"] = key
    alpha = pixels_of(image)[:, :, 3]
    assert alpha[0].tolist() == ([80, 80, 0] if isinstance(key, bytes) else [0, 0, 255 if mode == "P" else 0])


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N"])
def test_sixteen_bit_modes_keep_their_high_byte(mode: str) -> None:
    image = Image.new(mode, (3, 2), 0x1234)
    assert (pixels_of(image) == 0x12).all()
    assert len(hash_of(image)) == 64


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_a_range_are_refused_by_name(mode: str) -> None:
    with pytest.raises(UnsupportedMediaError, match=f"mode {mode} .*convert it"):
        open_source(Image.new(mode, (3, 2)), LIMITS)


def test_a_pillow_image_may_be_changed_afterwards() -> None:
    wide = Image.fromarray(np.asarray(noise(9, 7, "L")).astype(np.uint16) << 8)
    assert wide.mode == "I;16"
    for image in [wide, *(noise(9, 7, mode) for mode in ("RGB", "RGBA", "L", "P"))]:
        source = open_source(image, LIMITS)
        before, digest = source.decode(LIMITS).pixels.copy(), source.mm_hash("m")
        image.paste(0, (0, 0, 9, 7))
        assert same_pixels(source.decode(LIMITS).pixels, before)
        assert source.mm_hash("m") == digest
        assert not same_pixels(pixels_of(image), before)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_pillow_image_is_turned_as_pillow_turns_it(kind: str, loaded: bool) -> None:
    for orientation in range(1, 9):
        data = saved(noise(9, 7), kind, exif=exif(orientation))
        image = Image.open(io.BytesIO(data))
        if loaded:
            image.load()
        source = open_source(image, LIMITS)
        wanted = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        assert same_pixels(source.decode(LIMITS).pixels, wanted)
        assert source.size == wanted.shape[1::-1]


def test_a_pillow_images_stored_orientation_is_kept_on_request() -> None:
    image = Image.open(io.BytesIO(saved(noise(9, 7), "PNG", exif=exif(6))))
    assert open_source(image, LIMITS).size == (7, 9)
    assert open_source(image, LIMITS, ImageOptions(exif_orientation=False)).size == (9, 7)


def test_an_orientation_set_on_a_pillow_image_counts() -> None:
    image = noise(9, 7)
    image.getexif()[0x0112] = 6
    assert open_source(image, LIMITS).size == (7, 9)


FIVE_ENTRIES_SAID = b"II*\0\x08\0\0\0\x05\0" + exif(6)[10:22]


@pytest.mark.parametrize(
    ("block", "size"),
    [("text", (9, 7)), (3, (9, 7)), (b"junk", (9, 7)), (b"", (9, 7)), (FIVE_ENTRIES_SAID, (7, 9))],
)
def test_broken_exif_spoils_no_pillow_image(block: Any, size: tuple[int, int]) -> None:
    image = noise(9, 7)
    image.info["exif"] = block
    assert open_source(image, LIMITS).size == size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert open_source(image, LIMITS).size == size


def test_xmp_of_a_pillow_image_is_read_too() -> None:
    xmp = b'<rdf:Description tiff:Orientation="8"/>'
    for given in ({"xmp": xmp}, {"xmp": xmp, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}):
        image = noise(9, 7)
        image.info.update(given)
        assert open_source(image, LIMITS).size == (7, 9)


def broken_images() -> dict[str, Image.Image]:
    png = saved(noise(90, 70), "PNG")
    closed = Image.open(io.BytesIO(png))
    closed.close()
    key = Image.new("L", (3, 2))
    key.info["transparency"] = "no key"
    return {
        "cut": Image.open(io.BytesIO(png[: len(png) // 2])),
        "damaged": Image.open(io.BytesIO(png[:300] + bytes(100) + png[400:])),
        "closed": closed,
        "with a senseless key": key,
    }


@pytest.mark.parametrize("kind", list(broken_images()))
def test_a_pillow_image_that_cannot_be_loaded_is_a_media_error(kind: str) -> None:
    with pytest.raises(MediaDecodeError, match="cannot be loaded") as error:
        open_source(broken_images()[kind], LIMITS)
    assert error.value.__cause__ is not None
    assert "0x" not in str(error.value)


def test_a_pillow_error_of_any_type_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.open(io.BytesIO(PNG))
    for kind in (Image.DecompressionBombError, EOFError, KeyError, RuntimeWarning):
        monkeypatch.setattr(ImageFile.ImageFile, "load", _raising(kind))
        with pytest.raises(MediaDecodeError):
            open_source(image, LIMITS)
    monkeypatch.setattr(ImageFile.ImageFile, "load", _raising(MemoryError))
    with pytest.raises(MemoryError):
        open_source(image, LIMITS)


def _raising(kind: type[BaseException]) -> Any:
    def load(image: Image.Image) -> None:
        raise kind

    return load


def test_a_pillow_image_is_measured_before_it_is_loaded() -> None:
    image = Image.open(io.BytesIO(case("D06_good.jpg")))
    with pytest.raises(MediaTooLargeError, match="96x96"):
        open_source(image, MediaLimits(max_pixels=96 * 96 - 1))
    assert image.tile


# --- threads -----------------------------------------------------------------------------------------


@pytest.fixture
def eager_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("name", ["D06_good.jpg", "D07_png_named.jpg", "D30_anim.gif", "D30_anim.webp"])
def test_threads_may_share_an_image_that_is_not_loaded(name: str) -> None:
    data = case(name)
    wanted = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    threads = 16
    barrier = threading.Barrier(threads)

    def take(image: Image.Image) -> Pixels:
        barrier.wait(30)
        return pixels_of(image)

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(100):
            image = Image.open(io.BytesIO(data))
            for pixels in pool.map(take, [image] * threads):
                assert same_pixels(pixels[:, :, :3], wanted)


class Shared(io.BytesIO):
    """A file in which one reader waits a while for a second, and that notes whether one came."""

    def __init__(self, data: bytes, patience: float) -> None:
        super().__init__(data)
        self.patience = patience
        self.inside = threading.Semaphore(0)
        self.count, self.crowded = 0, threading.Event()
        self.guard = threading.Lock()

    def read(self, size: int | None = -1, /) -> bytes:
        with self.guard:
            self.count += 1
            if self.count > 1:
                self.crowded.set()
        self.crowded.wait(self.patience)
        data = super().read(size)
        with self.guard:
            self.count -= 1
        return data


def share(patience: float) -> bool:
    """Whether two threads that take one image were in its file at a time."""
    image = Image.open(io.BytesIO(PNG))
    file = Shared(PNG, patience)
    file.seek(image.fp.tell())  # type: ignore[union-attr]
    image.fp = image.png.fp = file  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(open_source, image, LIMITS) for _ in range(2)]:
            with contextlib.suppress(MediaError):
                future.result(60)
    return file.crowded.is_set()


def test_one_thread_at_a_time_reads_an_images_file() -> None:
    assert not share(patience=0.02)


def test_without_the_lock_two_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_lock_of", lambda image: contextlib.nullcontext())
    assert share(patience=10)


def test_an_image_that_stalls_holds_up_its_own_callers_only() -> None:
    file = Held(PNG)
    slow, ready = Image.open(file), Image.open(io.BytesIO(PNG))
    file.held = True
    with ThreadPoolExecutor(2) as pool:
        stalled = [pool.submit(open_source, slow, LIMITS) for _ in range(2)]
        try:
            assert file.reading.wait(HANG)
            assert open_source(ready, LIMITS).size == size_of(ready, LIMITS) == (9, 7)
            assert open_source(Image.open(io.BytesIO(PNG)), LIMITS).size == (9, 7)
            assert not any(future.done() for future in stalled)
        finally:
            file.go_on.set()
        assert [future.result(HANG).size for future in stalled] == [(9, 7)] * 2


class Held(io.BytesIO):
    """A file whose reads wait, once it is held, until they may go on."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.held, self.reading, self.go_on = False, threading.Event(), threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        if self.held:
            self.reading.set()
            assert self.go_on.wait(HANG)
        return super().read(size)


# --- identity ----------------------------------------------------------------------------------------


def encoded(data: bytes) -> source_module.Source:
    return source_module.Source(open_source(PNG, LIMITS).size, ImageOptions(), encoded=data)


def test_fields_of_the_hash_are_framed() -> None:
    assert encoded(b"c").mm_hash("ab") != encoded(b"bc").mm_hash("a")
    assert encoded(b"").mm_hash("abc") != encoded(b"abc").mm_hash("")
    assert encoded(b"imagec").mm_hash("a") != encoded(b"c").mm_hash("aimage")


def test_a_hash_is_all_of_a_sha256_and_repeats() -> None:
    digest = hash_of(PNG)
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert digest == hash_of(PNG)
    assert digest != hash_of(PNG, "another model")
    assert digest != hash_of(PNG + b"\0")


def test_options_are_not_in_the_hash_of_encoded_bytes() -> None:
    data = case("D01_orient6.jpg")
    stored = open_source(data, LIMITS, ImageOptions(exif_orientation=False))
    assert stored.mm_hash("m") == hash_of(data)


def test_equal_bytes_have_one_hash_whatever_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    given = [PNG, bytearray(PNG), memoryview(PNG), path, data_url(PNG)]
    assert len({hash_of(one) for one in given}) == 1


def test_bytes_arrays_and_pillow_images_have_hashes_of_their_own() -> None:
    pixels = decoded(PNG)
    hashes = {
        hash_of(PNG),
        hash_of(pixels),
        hash_of(Image.fromarray(pixels)),
        encoded(pixels.tobytes()).mm_hash("m"),
    }
    assert len(hashes) == 4


def test_mode_dtype_and_alpha_are_in_the_hash() -> None:
    grey = noise(9, 7, "L")
    plane = np.asarray(grey)
    given = [
        grey,
        grey.convert("RGB"),
        grey.convert("RGBA"),
        plane,
        plane.astype(np.uint16) << 8,
        (plane / 255).astype(np.float32),
        np.dstack([plane] * 3 + [np.full_like(plane, 255)]),
    ]
    assert len({hash_of(one) for one in given}) == len(given)


SHAPES = ["D14_shape_30x150.png", "D14_shape_150x30.png", "D14_shape_90x50.png"]


def test_equal_bytes_of_other_shapes_are_other_pictures() -> None:
    pictures = [decoded(case(name)) for name in SHAPES]
    assert len({picture.tobytes() for picture in pictures}) == 1
    assert len({picture.shape for picture in pictures}) == 3
    for make in (
        lambda name: case(name),
        lambda name: decoded(case(name)),
        lambda name: Image.open(ABUSE / name),
    ):
        assert len({hash_of(make(name)) for name in SHAPES}) == 3


def test_equal_indices_under_other_palettes_are_other_pictures() -> None:
    names = ["D14_palette_a.png", "D14_palette_b.png", "D14_gray_same_indices.png"]
    images = [Image.open(io.BytesIO(case(name))) for name in names]
    assert len({image.tobytes() for image in images}) == 1
    assert len({decoded(case(name)).tobytes() for name in names}) == 3
    assert len({hash_of(image) for image in images}) == 3
    assert len({hash_of(case(name)) for name in names}) == 3


def plain(mode: str, *pixels: Any) -> Image.Image:
    """Return an image of vertical stripes of these pixels."""
    bands = np.array(pixels, np.uint8).reshape(1, len(pixels), -1)
    rows = np.tile(bands, (16, 8, 1))
    return Image.frombytes(mode, (rows.shape[1], 16), rows.tobytes())


def indexed(*indices: int, key: Any = None) -> Image.Image:
    """Return a palette image in which indices 1 and 2 have one colour."""
    image = plain("P", *indices)
    image.putpalette([0, 0, 0, 9, 9, 9, 9, 9, 9, 200, 0, 0])
    if key is not None:
        image.info["transparency"] = key
    return image


def keyed(mode: str, key: Any, *pixels: Any) -> Image.Image:
    image = plain(mode, *pixels)
    image.info["transparency"] = key
    return image


# Pairs of Pillow images that differ and have the same RGB or RGBA.
SAME_RGB = {
    "CMYK": (plain("CMYK", (0, 0, 0, 255), (0, 0, 0, 0)), plain("CMYK", (255, 255, 255, 255), (0, 0, 0, 0))),
    "HSV": (plain("HSV", (0, 0, 0), (0, 0, 255)), plain("HSV", (128, 255, 0), (0, 0, 255))),
    "P": (indexed(0, 1), indexed(0, 2)),
    "P with a key": (indexed(0, 1, key=3), indexed(0, 2, key=3)),
    "L and RGB": (plain("L", 7, 90), plain("RGB", (7, 7, 7), (90, 90, 90))),
    "L and P": (plain("L", 0, 9), indexed(0, 1)),
    "LA and La": (plain("LA", (0, 0), (9, 255)), plain("La", (0, 0), (9, 255))),
    "RGBA and a key": (
        plain("RGBA", (0, 0, 0, 0), (9, 9, 9, 255)),
        keyed("RGB", (0, 0, 0), (0, 0, 0), (9, 9, 9)),
    ),
    "RGBX": (plain("RGBX", (1, 2, 3, 0)), plain("RGBX", (1, 2, 3, 9))),
}


@pytest.mark.parametrize("name", SAME_RGB)
@pytest.mark.parametrize("orientation", [1, 6])
def test_pillow_images_with_one_rgb_have_hashes_of_their_own(name: str, orientation: int) -> None:
    """A family may resize the stored mode, which the RGB does not determine."""
    first, second = (image.copy() for image in SAME_RGB[name])
    for image in (first, second):
        image.info["exif"] = exif(orientation)
    assert same_pixels(pixels_of(first), pixels_of(second))
    assert hash_of(first) == hash_of(first.copy())
    assert hash_of(first) != hash_of(second)


def test_control_the_rgb_of_two_cmyk_images_confuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_content_of", lambda picture: [picture.pixels.data])
    first, second = SAME_RGB["CMYK"]
    assert hash_of(first) == hash_of(second)


def test_equal_pixels_in_another_container_are_the_same_picture() -> None:
    bmp, png = case("D14_same_pixels.bmp"), case("D14_shape_30x150.png")
    assert same_pixels(decoded(bmp), decoded(png))
    assert hash_of(bmp) != hash_of(png)


def test_a_source_weighs_its_bytes_and_its_pixels() -> None:
    assert open_source(PNG, LIMITS).nbytes == len(PNG) + 4 * 9 * 7  # at most: a PNG may have alpha
    assert open_source(COLOURS, LIMITS).nbytes == COLOURS.nbytes


SCALES = {
    "0 to 255": [0.0, 254.0],
    "-1 to 1": [-1.0, 1.0],
    "-1 to 1, dark": [-0.9, -0.4],
    "-0.5 to 0.5": [-0.5, 0.5],
    "by mean and deviation": [-2.1, 2.6],
    "0 to 2": [0.0, 1.9],
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", SCALES)
def test_floats_of_another_scale_are_refused(scale: str, dtype: Any) -> None:
    with pytest.raises(MediaDecodeError, match=r"floating arrays hold 0 to 1, got .* by \(x \+ 1\) / 2"):
        open_source(np.array([SCALES[scale]], dtype), LIMITS)


def test_the_overshoot_of_a_resize_is_clipped() -> None:
    sharp = torch.zeros(1, 3, 8, 8)
    sharp[..., ::2, ::2] = sharp[..., 2:6, 2:6] = 1.0
    resized = torch.nn.functional.interpolate(sharp, size=(13, 13), mode="bicubic", align_corners=False)
    array = resized[0].permute(1, 2, 0).numpy()
    assert array.min() < -0.05
    assert array.max() > 1.05
    assert same_pixels(pixels_of(array), pixels_of(array.clip(0, 1)))
