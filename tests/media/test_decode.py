from __future__ import annotations

import io
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, PngImagePlugin, _webp

from mm_encoder.config import ImageOptions
from mm_encoder.errors import MediaDecodeError, MediaError, UnsupportedMediaError
from mm_encoder.media import decode as decode_module
from mm_encoder.media.geometry import composite_over_white
from mm_encoder.media.header import read_header
from mm_encoder.media.picture import Picture, Pixels
from mm_encoder.media.source import open_source
from mm_encoder.planner import MediaPlanner

from ..helpers.abuse import ABUSE, ERRORS, Row, case, file_of, rows
from ..helpers.images import (
    GREYS,
    LIMITS,
    bmp_file,
    decoded,
    exif,
    gif_control,
    gif_file,
    ihdr,
    inserted,
    noise,
    png_chunk,
    png_file,
    riff,
    same_pixels,
    saved,
    scans_apart,
    segment,
    shown_by_pillow,
)

CORNERS = {"TL": (0.25, 0.25), "TR": (0.75, 0.25), "BL": (0.25, 0.75), "BR": (0.75, 0.75)}


def near(pixel: Pixels, wanted: Any, tolerance: int = 0) -> bool:
    return bool((np.abs(pixel.astype(int) - wanted) <= tolerance).all())


def check_corners(pixels: Pixels, row: Row) -> None:
    height, width = pixels.shape[:2]
    for corner, (x, y) in CORNERS.items():
        wanted = row["corners"][corner]
        assert near(pixels[int(height * y), int(width * x)], wanted, row.get("tol", 0)), corner


def named(case_name: str, file: str) -> Row:
    return next(row for row in rows(case_name) if row["file"] == file)


# --- orientation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("D01"), ids=file_of)
def test_header_plan_and_pixels_are_turned_alike(row: Row, planner: MediaPlanner) -> None:
    data, size = case(row["file"]), tuple(row["size"])
    plan, inputs = planner.prepare_inputs(data)
    assert read_header(data, LIMITS).display_size() == size
    assert plan == planner.plan(data) == planner.plan(size)
    assert plan.original_size == size
    assert inputs["grid_thws"].tolist() == [list(plan.grid_thws[0])]
    pixels = decoded(data)
    assert pixels.shape == (size[1], size[0], 3)
    check_corners(pixels, row)
    assert same_pixels(open_source(data, LIMITS).decode(LIMITS).pixels, pixels)


@pytest.mark.parametrize("row", rows("D01"), ids=file_of)
def test_the_stored_orientation_is_kept_on_request(row: Row, planner: MediaPlanner) -> None:
    data, stored = case(row["file"]), ImageOptions(exif_orientation=False)
    assert planner.plan(data, image_options=stored) == planner.plan((96, 64))
    assert planner.prepare_inputs(data, image_options=stored)[0].original_size == (96, 64)
    source = open_source(data, LIMITS, stored)
    assert source.size == (96, 64)
    assert same_pixels(source.decode(LIMITS).pixels, decoded(case("D01_orient1.jpg")))


def with_exif(kind: str, block: bytes) -> bytes:
    image = noise(23, 14)
    if kind == "JPEG":
        return inserted(saved(image, "JPEG"), segment(0xE1, b"Exif\0\0" + block))
    if kind == "PNG":
        return saved(image, "PNG", exif=block)
    if kind == "PNG, behind the pixels":
        return png_file(np.asarray(image), after=png_chunk(b"eXIf", block))
    return saved(image, "WEBP", exif=block)


def with_xmp(kind: str, orientation: int) -> bytes:
    image, xmp = noise(23, 14), f'<rdf:Description tiff:Orientation="{orientation}"/>'.encode()
    if kind == "JPEG":
        return inserted(saved(image, "JPEG"), segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp))
    if kind == "WebP":
        return saved(image, "WEBP", xmp=xmp)
    chunk = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    behind = "behind" in kind
    return png_file(np.asarray(image), before=b"" if behind else chunk, after=chunk if behind else b"")


CARRIERS = ["JPEG", "PNG", "PNG, behind the pixels", "WebP"]


def check_turned_as_pillow_does(data: bytes, planner: MediaPlanner) -> None:
    wanted = shown_by_pillow(data)
    assert same_pixels(decoded(data), wanted)
    assert read_header(data, LIMITS).display_size() == wanted.shape[1::-1]
    assert planner.plan(data).original_size == wanted.shape[1::-1]
    assert decoded(data, exif_orientation=False).shape == (14, 23, 3)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", CARRIERS)
def test_exif_turns_every_kind_as_pillow_does(kind: str, order: str, planner: MediaPlanner) -> None:
    for orientation in range(10):
        check_turned_as_pillow_does(with_exif(kind, exif(orientation, order)), planner)


@pytest.mark.parametrize("kind", CARRIERS)
def test_xmp_turns_every_kind_as_pillow_does(kind: str, planner: MediaPlanner) -> None:
    for orientation in range(10):
        check_turned_as_pillow_does(with_xmp(kind, orientation), planner)


def test_eight_orientations_give_eight_pictures() -> None:
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
    turned = [Picture(pixels).oriented(orientation).pixels for orientation in range(1, 9)]
    assert len({(t.shape, t.tobytes()) for t in turned}) == 8
    assert all(t.flags.c_contiguous for t in turned)


# --- transparency ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("D02"), ids=file_of)
def test_every_carrier_of_alpha_is_composited(row: Row) -> None:
    pixels = decoded(case(row["file"]))
    assert pixels.shape[2] == 4
    shown, width = composite_over_white(pixels), pixels.shape[1]
    tolerance = row.get("tol", 0)
    assert near(shown[:, : width // 2], row["left"], tolerance)
    assert near(shown[:, width // 2 :], row["right_composited_white"], tolerance)
    assert near(pixels[:, width // 2 :, :3], row["right_alpha_dropped"], tolerance)


def test_colour_under_alpha_zero_stays_hidden() -> None:
    for name in ("D03_hidden_red_rgba.png", "D03_hidden_red_rgba.webp"):
        row, pixels = named("D03", name), decoded(case(name))
        assert (pixels[0, 0] == (255, 0, 0, 0)).all()
        shown = composite_over_white(pixels)
        height, width = shown.shape[:2]
        if "centre" in row:
            assert near(shown[height // 2, width // 2], row["centre"])
            border = [shown[0], shown[-1], shown[:, 0], shown[:, -1]]
            assert all(near(edge, row["border_composited_white"]) for edge in border)
        else:
            assert near(shown[: height // 2], row["top_composited_white"])
            assert near(shown[height // 2 :], row["bottom"])


def test_an_alpha_ramp_is_composited_column_by_column() -> None:
    row = named("D03", "D03_alpha_ramp.png")
    shown = composite_over_white(decoded(case(row["file"])))
    assert shown.shape[1] == len(row["columns"])
    assert near(shown, row["columns"], row["tol"])


@pytest.mark.parametrize(
    "name", [r["file"] for r in rows("D02", "D03")] + ["D30_gif_transparent.gif", "D04_grayalpha16.png"]
)
def test_the_familys_pixels_are_composited(name: str, planner: MediaPlanner) -> None:
    shown = composite_over_white(decoded(case(name)))
    inputs = planner.prepare_inputs(case(name))[1]
    opaque = planner.prepare_inputs(saved(Image.fromarray(shown), "PNG"))[1]
    assert inputs["pixel_values"].equal(opaque["pixel_values"])


# --- depths and inks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("D04"), ids=file_of)
def test_every_depth_of_grey_is_scaled_to_bytes(row: Row) -> None:
    pixels = composite_over_white(decoded(case(row["file"])))
    wanted = np.array(row["columns"])[np.newaxis, :, np.newaxis]
    assert pixels.shape[1] == len(row["columns"])
    assert near(pixels, wanted, row.get("tol", 0))


def test_sixteen_bits_keep_their_high_byte_exactly() -> None:
    values = np.arange(65536).reshape(256, 256, 1)
    assert (decoded(png_file(values, 16)) == values >> 8).all()


@pytest.mark.parametrize("row", rows("D05"), ids=file_of)
def test_four_inks_are_no_negative(row: Row) -> None:
    pixels = decoded(case(row["file"]))
    height, width = pixels.shape[:2]
    assert near(pixels[height // 2, width // 4], row["left"], row["tol"])
    assert near(pixels[height // 2, 3 * width // 4], row["right"], row["tol"])
    assert same_pixels(pixels, shown_by_pillow(case(row["file"])))


def test_inks_without_a_marker_are_read_as_with_one() -> None:
    assert same_pixels(decoded(case("D05_cmyk_no_app14.jpg")), decoded(case("D05_cmyk_adobe.jpg")))


# --- damage, metadata, frames ------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("D06", "D18"), ids=file_of)
def test_damage_is_an_error_and_what_follows_the_end_is_not(row: Row) -> None:
    data = case(row["file"])
    if "error" in row:
        with pytest.raises(ERRORS[row["error"]]):
            decoded(data)
        return
    good = decoded(case(str(row.get("same_pixels_as", row["file"]))))
    assert good.shape == (96, 96, 3)
    assert same_pixels(decoded(data), good)
    assert same_pixels(good, shown_by_pillow(data))


def test_a_poisoned_file_leaves_the_next_one_alone() -> None:
    good = decoded(case("D06_good.jpg"))
    for _ in range(3):
        with pytest.raises(MediaDecodeError):
            decoded(case("D18_poison_idat.png"))
        assert same_pixels(decoded(case("D06_good.jpg")), good)


@pytest.mark.parametrize("row", rows("D09"), ids=file_of)
def test_metadata_cannot_spoil_a_picture(row: Row, planner: MediaPlanner) -> None:
    data = case(row["file"])
    pixels = decoded(data)
    assert planner.plan(data).original_size == pixels.shape[1::-1] == tuple(row["size"])
    check_corners(pixels, row)


@pytest.mark.parametrize("row", rows("D10", "D11"), ids=file_of)
def test_narrow_and_tiny_pictures_are_planned_and_prepared(row: Row, planner: MediaPlanner) -> None:
    data, (width, height) = case(row["file"]), row["size"]
    pixels = decoded(data)
    assert pixels.shape == (height, width, 3)
    plan, inputs = planner.prepare_inputs(data)
    assert plan == planner.plan(data) == planner.plan((width, height))
    assert plan.original_size == (width, height)
    t, h, w = plan.grid_thws[0]
    assert plan.length == t * h * w // 4 >= 1
    assert inputs["pixel_values"].shape[0] == t * h * w
    if row["case"] == "D11":
        assert near(pixels, (10, 120, 230))


@pytest.mark.parametrize("row", rows("D30"), ids=file_of)
def test_the_first_frame_is_the_picture(row: Row, planner: MediaPlanner) -> None:
    data = case(row["file"])
    shown = composite_over_white(decoded(data))
    assert planner.plan(data).original_size == shown.shape[1::-1]
    if "size" in row:
        assert shown.shape[1::-1] == tuple(row["size"])
    if "colour" in row:
        assert near(shown, row["colour"])
    if "centre" in row:
        assert near(shown[shown.shape[0] // 2, shown.shape[1] // 2], row["centre"])
        assert near(shown[0, 0], row["border_composited_white"])


def test_a_gifs_later_frames_never_reach_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []
    opened = GifImagePlugin.GifImageFile

    def spy(file: io.BytesIO) -> GifImagePlugin.GifImageFile:
        given.append(file.getvalue())
        return opened(file)

    monkeypatch.setattr(GifImagePlugin, "GifImageFile", spy)
    assert decoded(case("D30_frame_bomb.gif")).shape == (1024, 1024, 3)
    assert Image.open(io.BytesIO(given[0])).n_frames == 1  # type: ignore[attr-defined]
    assert len(given[0]) < 1000


def test_a_webps_later_frames_are_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    inner = _webp.WebPAnimDecoder

    class Spy:
        def __init__(self, data: bytes) -> None:
            self.decoder = inner(data)

        def get_next(self) -> Any:
            asked.append("frame")
            return self.decoder.get_next()

        def get_info(self) -> Any:
            return self.decoder.get_info()

    monkeypatch.setattr(_webp, "WebPAnimDecoder", Spy)
    decoded(case("D30_anim.webp"))
    assert asked == ["frame"]


# --- Pillow as the oracle ----------------------------------------------------------------------------

ODD_SIZES = [(1, 1), (3, 2), (16, 16), (17, 9), (37, 23)]


def check_against_pillow(data: bytes, channels: int = 3) -> None:
    pixels = decoded(data)
    assert pixels.shape[2] == channels
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert read_header(data, LIMITS).display_size() == pixels.shape[1::-1]
    assert same_pixels(pixels, shown_by_pillow(data, channels))


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("L", {}),
        ("RGB", {"subsampling": 0}),
        ("RGB", {"subsampling": 1}),
        ("RGB", {"subsampling": 2}),
        ("RGB", {"keep_rgb": True}),
        ("RGB", {"restart_marker_blocks": 1}),
        ("RGB", {"restart_marker_rows": 1, "quality": 30}),
        ("RGB", {"quality": 100, "subsampling": 2, "optimize": True}),
        ("CMYK", {}),
    ],
    ids=str,
)
def test_jpegs(mode: str, settings: dict[str, Any], progressive: bool, size: tuple[int, int]) -> None:
    check_against_pillow(saved(noise(*size, mode), "JPEG", progressive=progressive, **settings))


@pytest.mark.parametrize(
    ("luma", "chroma"),
    [(0x11, (1, 1)), (0x21, (2, 1)), (0x12, (1, 2)), (0x22, (2, 2)), (0x41, (4, 1)), (0x14, (1, 4))],
)
def test_jpegs_with_a_scan_for_each_component(luma: int, chroma: tuple[int, int]) -> None:
    less = (-(-37 // chroma[0]), -(-23 // chroma[1]))
    planes = [noise(*size, seed=i) for i, size in enumerate([(37, 23), less, less])]
    check_against_pillow(scans_apart(planes, [luma, 0x11, 0x11], (37, 23)))


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_pngs(mode: str, size: tuple[int, int]) -> None:
    channels = 4 if mode in ("LA", "RGBA") else 3
    image = noise(*size, "RGB").quantize(7) if mode == "P" else noise(*size, mode)
    check_against_pillow(saved(image, "PNG"), channels)
    if mode in ("1", "L", "P"):
        check_against_pillow(saved(image, "PNG", transparency=0), 4)
    if mode == "P":
        check_against_pillow(saved(image, "PNG", transparency=bytes([0, 90, 180])), 4)
    if mode == "RGB":
        check_against_pillow(saved(image, "PNG", transparency=image.getpixel((0, 0))), 4)


@pytest.mark.parametrize("interlace", [False, True])
@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize(
    ("depth", "channels"), [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 3), (8, 4), (16, 2), (16, 3), (16, 4)]
)
def test_pngs_of_every_layout(depth: int, channels: int, size: tuple[int, int], interlace: bool) -> None:
    samples = np.random.default_rng(0).integers(0, 2**depth, (size[1], size[0], channels))
    check_against_pillow(png_file(samples, depth, interlace=interlace), 4 if channels in (2, 4) else 3)


def test_grey_of_sixteen_bits_is_where_pillow_is_not_followed() -> None:
    data = case("D04_gray16.png")
    image = Image.open(io.BytesIO(data))
    assert image.mode.startswith("I;16")
    assert same_pixels(decoded(data)[:, :, 0], (np.asarray(image) >> 8).astype(np.uint8))


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("RGB", {}),
        ("RGB", {"lossless": True}),
        ("RGB", {"quality": 5}),
        ("RGBA", {}),
        ("RGBA", {"lossless": True, "exact": True}),
        ("RGBA", {"lossless": True, "exact": False}),
        ("L", {}),
    ],
    ids=str,
)
def test_webps(mode: str, settings: dict[str, Any], size: tuple[int, int]) -> None:
    image = noise(*size, mode)
    channels = 4 if mode == "RGBA" else 3
    check_against_pillow(saved(image, "WEBP", **settings), channels)
    if size != (1, 1):
        others = [noise(*size, mode, seed=i) for i in (1, 2)]
        animated = saved(image, "WEBP", save_all=True, append_images=others, **settings)
        assert Image.open(io.BytesIO(animated)).n_frames == 3  # type: ignore[attr-defined]
        check_against_pillow(animated, channels)


COLOURS = bytes(np.random.default_rng(3).integers(0, 256, 768, np.uint8))


@pytest.mark.parametrize("interlace", [False, True])
@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize(
    ("palette", "local"),
    [(COLOURS, b""), (GREYS, b""), (COLOURS, COLOURS[::-1]), (b"", COLOURS), (b"", GREYS), (b"", b"")],
    ids=["global", "grey", "local", "local only", "local grey", "none"],
)
def test_gifs(palette: bytes, local: bytes, size: tuple[int, int], interlace: bool) -> None:
    indices = np.random.default_rng(4).integers(0, 256, size[::-1])
    picture: dict[str, Any] = {"palette": palette, "local": local, "interlace": interlace}
    transparent = gif_control(1, int(indices[0, 0]))
    for screen, at in [(size, (0, 0)), ((50, 40), (5, 7)), ((4, 4), (3, 1))]:
        picture |= {"screen": screen, "at": at}
        check_against_pillow(gif_file(indices, **picture))
        check_against_pillow(gif_file(indices, before=transparent, **picture), 4)


def test_a_grey_table_of_the_frame_is_where_pillow_is_not_followed() -> None:
    indices = np.arange(64).reshape(8, 8)
    for before in (b"", gif_control(1, 9)):
        both = gif_file(indices, palette=COLOURS, local=GREYS, before=before)
        only = gif_file(indices, palette=b"", local=GREYS, before=before)
        assert same_pixels(decoded(both), decoded(only))
        assert (decoded(both)[:, :, 0] == indices).all()
    assert not same_pixels(shown_by_pillow(gif_file(indices, palette=COLOURS, local=GREYS)), decoded(only))


@pytest.mark.parametrize("dispose", range(8))
def test_how_a_gifs_frame_goes_does_not_matter(dispose: int) -> None:
    indices = np.arange(12).reshape(3, 4)
    for transparent in (0, 1):
        data = gif_file(indices, before=gif_control(dispose << 2 | transparent, 5), palette=COLOURS)
        check_against_pillow(data, 4 if transparent else 3)


def test_gifs_of_pillow() -> None:
    image = noise(37, 23).quantize(20)
    frames = [noise(37, 23, seed=i).quantize(20) for i in (1, 2)]
    check_against_pillow(saved(image, "GIF"))
    check_against_pillow(saved(image, "GIF", interlace=0))
    check_against_pillow(saved(image, "GIF", transparency=4), 4)
    check_against_pillow(saved(image, "GIF", save_all=True, append_images=frames, loop=0, duration=20))


def bmp_rows(indices: np.ndarray[Any, Any], bits: int) -> bytes:
    """Rows padded to four bytes, in the order given."""
    unpacked = np.unpackbits(indices.astype(np.uint8)[..., np.newaxis], axis=-1)[..., 8 - bits :]
    rows = np.packbits(unpacked.reshape(len(indices), -1), axis=1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).tobytes()


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("top_down", [False, True])
def test_bmps_of_indices(bits: int, size: tuple[int, int], top_down: bool) -> None:
    width, height = size
    palette = np.random.default_rng(1).integers(0, 256, (2**bits, 4), np.uint8)
    indices = np.random.default_rng(2).integers(0, 2**bits, (height, width))
    stored = indices if top_down else indices[::-1]
    data = bmp_file(
        bmp_rows(stored, bits), (width, -height if top_down else height), bits, palette=palette.tobytes()
    )
    check_against_pillow(data)
    assert (decoded(data) == palette[indices][:, :, 2::-1]).all()


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("bits", [16, 24, 32])
def test_bmps_of_colours(bits: int, size: tuple[int, int]) -> None:
    width, height = size
    row = -(-width * bits // 32) * 4
    rows = np.random.default_rng(bits).integers(0, 256, row * height, np.uint8).tobytes()
    check_against_pillow(bmp_file(rows, (width, height), bits))
    check_against_pillow(bmp_file(rows, (width, -height), bits))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_bmps_of_pillow(mode: str) -> None:
    check_against_pillow(saved(noise(37, 23, mode), "BMP"))


RUNS = bytes([3, 7, 0, 3, 1, 2, 3, 0, 0, 0, 6, 9, 0, 1])
NIBBLES = bytes([4, 0x12, 2, 0x34, 0, 0, 6, 0x56, 0, 1])


@pytest.mark.parametrize(("compression", "bits", "codes"), [(1, 8, RUNS), (2, 4, NIBBLES)])
def test_run_length_encoded_bmps(compression: int, bits: int, codes: bytes) -> None:
    palette = np.random.default_rng(1).integers(0, 256, (2**bits, 4), np.uint8).tobytes()
    data = bmp_file(codes, (6, 2), bits, palette=palette, compression=compression)
    check_against_pillow(data)


def test_a_run_length_encoded_bmp_is_only_so_wide() -> None:
    wide = bmp_file(b"\0\1", (1 << 17, 1), 8, palette=bytes(1024), compression=1)
    with pytest.raises(UnsupportedMediaError, match="columns"):
        decoded(wide)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            saved(noise(8, 8), "JPEG").replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
            "12 bits per sample",
        ),
        (b"\xff\xd8" + segment(0xC0, struct.pack(">BHHB", 8, 5, 5, 2) + bytes(6)), "2 colour channels"),
    ],
)
def test_kinds_of_jpeg_that_are_not_decoded_say_so(data: bytes, words: str) -> None:
    with pytest.raises(UnsupportedMediaError, match=words):
        decoded(data)


# --- cut and damaged files ---------------------------------------------------------------------------

GOOD: dict[str, bytes] = {
    "JPEG": saved(noise(19, 13), "JPEG"),
    "JPEG, noise": saved(noise(19, 13), "JPEG", quality=98, subsampling=0),
    "JPEG, grey": saved(noise(19, 13, "L"), "JPEG"),
    "JPEG, progressive": saved(noise(19, 13), "JPEG", progressive=True),
    "JPEG, restarts": saved(noise(33, 33), "JPEG", restart_marker_blocks=1),
    "JPEG, CMYK": saved(noise(19, 13, "CMYK"), "JPEG"),
    "PNG": saved(noise(19, 13), "PNG"),
    "PNG, alpha": saved(noise(19, 13, "RGBA"), "PNG"),
    "PNG, palette": saved(noise(19, 13).quantize(9), "PNG", transparency=3),
    "PNG, black": saved(Image.new("RGB", (19, 13)), "PNG"),
    "GIF": saved(noise(19, 13).quantize(9), "GIF", transparency=3),
    "GIF, animated": saved(
        noise(9, 8).quantize(9), "GIF", save_all=True, append_images=[noise(9, 8, seed=1).quantize(9)]
    ),
    "BMP": saved(noise(19, 13), "BMP"),
    "BMP, palette": saved(noise(19, 13).quantize(9), "BMP"),
    "BMP, bits": saved(noise(19, 13, "1"), "BMP"),
    "WebP": saved(noise(19, 13), "WEBP"),
    "WebP, lossless": saved(noise(19, 13, "RGBA"), "WEBP", lossless=True),
    "WebP, alpha": saved(noise(19, 13, "RGBA"), "WEBP"),
    "WebP, turned": saved(noise(19, 13), "WEBP", exif=exif(6)),
}


def check_cuts(data: bytes, ending: bytes = b"") -> None:
    whole = decoded(data)
    for cut in range(len(data) - len(ending)):
        try:
            pixels = decoded(data[:cut] + ending)
        except MediaError:
            continue
        assert same_pixels(pixels, whole), cut


@pytest.mark.parametrize("lenient", [False, True], ids=["", "host is lenient"])
@pytest.mark.parametrize("kind", GOOD)
def test_a_cut_file_is_never_another_picture(
    kind: str, lenient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    check_cuts(GOOD[kind])


@pytest.mark.parametrize("kind", [kind for kind in GOOD if kind.startswith("JPEG")])
def test_nor_is_one_that_ends_properly_after_the_cut(kind: str) -> None:
    """A progressive file with whole scans alone is a legal one: the same picture, coarser."""
    data = GOOD[kind]
    ends = [at for at in range(len(data)) if data[at : at + 1] == b"\xff" and data[at + 1] in (0xC4, 0xDA)]
    legal = [decoded(data)]
    if "progressive" in kind:
        legal += [decoded(data[:at] + b"\xff\xd9") for at in ends if b"\xff\xda" in data[:at]]
        assert len(legal) > 9
    for cut in range(len(data) - 2):
        try:
            pixels = decoded(data[:cut] + b"\xff\xd9")
        except MediaError:
            continue
        assert any(same_pixels(pixels, one) for one in legal), cut


@pytest.mark.parametrize("row", rows("D40"), ids=file_of)
def test_a_progressive_file_may_leave_coefficients_out(row: Row) -> None:
    data = case(row["file"])
    pixels = decoded(data)
    assert pixels.shape[1::-1] == tuple(row["size"])
    assert same_pixels(pixels, shown_by_pillow(data))


@pytest.mark.parametrize("nibbles", [False, True], ids=["RLE8", "RLE4"])
def test_a_run_length_bmp_may_end_early(nibbles: bool) -> None:
    """What it leaves out is of the first colour; one without its end code is cut off."""
    palette = b"".join(bytes([i, i // 2, 255 - i, 0]) for i in range(16 if nibbles else 256))
    codes = b"\x05\x33\0\0" + b"\0\x03" + (b"\x12\x30" if nibbles else b"\1\2\3\0") + b"\0\0"

    def build(codes: bytes) -> bytes:
        return bmp_file(
            codes, (7, 300), 4 if nibbles else 8, palette=palette, compression=2 if nibbles else 1
        )

    pixels = decoded(build(codes + b"\0\1"))[::-1]  # the last row comes first
    first, third = (255, 0, 0), (252, 1, 3) if nibbles else (255 - 0x33, 0x33 // 2, 0x33)
    assert tuple(pixels[0, 0]) == third
    assert tuple(pixels[1, 0]) == (254, 0, 1)
    assert (pixels[2:] == first).all()
    assert (pixels[:2, 5:] == first).all()
    with pytest.raises(MediaDecodeError):
        decoded(build(codes))


def test_pillow_alone_fills_up_what_the_host_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for kind in ("PNG", "GIF", "BMP"):
        half = GOOD[kind][: len(GOOD[kind]) * 3 // 4]
        assert not same_pixels(shown_by_pillow(half), shown_by_pillow(GOOD[kind]))
        with pytest.raises(MediaDecodeError):
            decoded(half)


BIG = {
    "baseline": saved(noise(160, 120), "JPEG"),
    "noise": saved(noise(160, 120), "JPEG", quality=98, subsampling=0),
    "progressive": saved(noise(160, 120), "JPEG", progressive=True),
    "CMYK": saved(noise(160, 120, "CMYK"), "JPEG"),
    "case": case("D06_good.jpg"),
    "progressive case": case("D06_good_progressive.jpg"),
}


@pytest.mark.parametrize("kind", BIG)
def test_a_jpeg_cut_in_half_is_corrupt_with_an_end_marker_too(kind: str) -> None:
    half = BIG[kind][: len(BIG[kind]) // 2]
    for ending in (b"", b"\xff\xd9", b"\0\0\xff\xd9", b"\xff\xd0\xff\xd9", half[-300:] + b"\xff\xd9"):
        with pytest.raises(MediaDecodeError):
            decoded(half + ending)


@pytest.mark.parametrize("kind", BIG)
@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"\x55"])
@pytest.mark.parametrize("kept", [0, 2])
def test_a_jpeg_whose_tail_was_overwritten_is_corrupt(kind: str, filler: bytes, kept: int) -> None:
    data = BIG[kind]
    for part in (0.3, 0.5, 0.8):
        head = data[: int(len(data) * part)]
        with pytest.raises(MediaDecodeError):
            decoded(head + filler * (len(data) - len(head) - kept) + data[len(data) - kept :])


def test_libjpeg_alone_forgives_an_overwritten_tail() -> None:
    data = BIG["noise"]
    half = data[: len(data) // 2]
    overwritten = half + bytes(len(data) - len(half) - 2) + data[-2:]
    assert not same_pixels(shown_by_pillow(overwritten), decoded(data))


def test_a_few_bytes_of_padding_before_the_end_are_none_of_the_picture() -> None:
    data = GOOD["JPEG"]
    for count in (1, 2, 64):
        assert same_pixels(decoded(data[:-2] + bytes(count) + data[-2:]), decoded(data))
    with pytest.raises(MediaDecodeError, match="extraneous"):
        decoded(data[:-2] + bytes(80) + data[-2:])


def test_a_jpeg_that_lost_a_restart_marker_is_corrupt() -> None:
    data = GOOD["JPEG, restarts"]
    at = data.index(b"\xff\xd1")
    for damaged in (data[:at] + data[at + 2 :], data[:at] + b"\xff\xd5" + data[at + 2 :]):
        with pytest.raises(MediaDecodeError):
            decoded(damaged)


@pytest.mark.parametrize("codes", [b"", b"\x00\x03"])
def test_a_gif_of_too_few_codes_is_cut(codes: bytes) -> None:
    with pytest.raises(MediaDecodeError):
        decoded(gif_file(np.arange(64).reshape(8, 8), codes=codes))


def test_what_was_decoded_must_be_what_the_header_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(data: bytes, header: object) -> Picture:
        return Picture(np.zeros((3, 3, 3), np.uint8))

    monkeypatch.setitem(decode_module._DECODERS, "PNG", other)
    with pytest.raises(MediaDecodeError, match="19x13, but 3x3"):
        decoded(GOOD["PNG"])


def hostile() -> dict[str, bytes]:
    black, endless = np.zeros((2, 2, 3)), bytes(150_000_000)
    jpeg, start = saved(noise(8, 8), "JPEG"), b"\x89PNG\r\n\x1a\n" + ihdr(2, 2)
    frame = segment(0xC0, struct.pack(">BHHB", 8, 65_000, 65_000, 3) + bytes(9))
    lossless = b"\x2f" + struct.pack("<I", 16382 | 16382 << 14) + bytes(50)
    text = png_chunk(b"zTXt", b"k\0\0" + zlib.compress(endless))
    skips = b"\0\2\xff\xff" * 9
    return {
        "a second header": png_file(black, before=ihdr(30_000, 30_000)),
        "a late second header": png_file(black, after=ihdr(30_000, 30_000)),
        "pixel data without end": png_file(black, rows=endless),
        "text without end": png_file(black, before=text),
        "a chunk of four gigabytes": start + b"\xff\xff\xff\xffIDAT",
        "a frame far off": gif_file(np.zeros((2, 2)), at=(65_533, 65_533)),
        "two sizes": riff((b"VP8L", lossless), (b"VP8X", bytes(10))),
        "a second frame header": jpeg.replace(b"\xff\xda", frame + b"\xff\xda", 1),
        "rows from the top": bmp_file(b"", (2, -0x02000000), 24),
        "columns to skip": bmp_file(skips, (1 << 26, 1), 8, palette=bytes(1024), compression=1),
    }


def test_hostile_files_stay_within_their_memory(tmp_path: Path) -> None:
    for name, data in hostile().items():
        (tmp_path / name).write_bytes(data)
    program = """
import resource, sys
from pathlib import Path
import numpy as np
from mm_encoder.config import MediaLimits
from mm_encoder.errors import MediaError
from mm_encoder.media.decode import decode

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 120_000_000, -1))
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        print(path.name, decode(path.read_bytes(), MediaLimits()).pixels.shape)
    except MediaError:
        pass
try:
    np.empty(150_000_000, np.uint8)
except MemoryError:
    print("limited")
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [
        "pixel data without end (2, 2, 3)",
        "text without end (2, 2, 3)",
        "limited",
    ]


# --- the host's Pillow -------------------------------------------------------------------------------

Setting = tuple[Any, str, Any]
HOSTS: dict[str, list[Setting]] = {
    "loads truncated images": [(ImageFile, "LOAD_TRUNCATED_IMAGES", True)],
    "allows ten pixels": [(Image, "MAX_IMAGE_PIXELS", 10)],
    "allows any number of pixels": [(Image, "MAX_IMAGE_PIXELS", None)],
    "allows no text": [(PngImagePlugin, "MAX_TEXT_CHUNK", 1), (PngImagePlugin, "MAX_TEXT_MEMORY", 1)],
    "wants GIFs in RGB": [(GifImagePlugin, "LOADING_STRATEGY", GifImagePlugin.LoadingStrategy.RGB_ALWAYS)],
    "wants GIFs in P": [
        (
            GifImagePlugin,
            "LOADING_STRATEGY",
            GifImagePlugin.LoadingStrategy.RGB_AFTER_DIFFERENT_PALETTE_ONLY,
        )
    ],
    "sees alpha in BMPs": [(BmpImagePlugin, "USE_RAW_ALPHA", True)],
    "reads byte by byte": [(ImageFile, "MAXBLOCK", 1), (ImageFile, "SAFEBLOCK", 1)],
    "does all of it": [
        (ImageFile, "LOAD_TRUNCATED_IMAGES", True),
        (Image, "MAX_IMAGE_PIXELS", 1),
        (PngImagePlugin, "MAX_TEXT_CHUNK", 1),
        (GifImagePlugin, "LOADING_STRATEGY", GifImagePlugin.LoadingStrategy.RGB_ALWAYS),
        (BmpImagePlugin, "USE_RAW_ALPHA", True),
    ],
}
SENSITIVE = {
    **GOOD,
    "grey GIF": gif_file(np.arange(64).reshape(8, 8), before=gif_control(1, 9)),
    "GIF to dispose of": gif_file(np.arange(64).reshape(8, 8), before=gif_control(3 << 2 | 1, 9)),
    "GIF over its canvas": gif_file(np.arange(64).reshape(8, 8), screen=(2, 2)),
    "RGBA BMP": saved(noise(5, 4, "RGBA"), "BMP"),
    "PNG with a cut key": png_file(np.zeros((2, 2, 1)), before=png_chunk(b"tRNS", b"\0")),
    "PNG with a cut header": b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIB", 2, 2, 8)),
    **{row["file"]: case(row["file"]) for row in rows() if not row["file"].endswith(".json")},
}


def outcome(data: bytes) -> tuple[object, ...]:
    try:
        pixels = decoded(data)
    except MediaError as error:
        return type(error), str(error)
    return pixels.shape, pixels.tobytes()


OUTCOMES: dict[str, tuple[object, ...]] = {}


def by_default(name: str) -> tuple[object, ...]:
    if name not in OUTCOMES:
        OUTCOMES[name] = outcome(SENSITIVE[name])
    return OUTCOMES[name]


def pillows_settings() -> list[dict[str, object]]:
    modules = (Image, ImageFile, PngImagePlugin, GifImagePlugin, BmpImagePlugin)
    return [{k: v for k, v in vars(m).items() if k.isupper()} for m in modules]


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_that_a_host_sets_in_pillow_matters(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name: by_default(name) for name in SENSITIVE}
    for module, name, value in HOSTS[host]:
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    before = pillows_settings(), warnings.filters[:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {name: outcome(data) for name, data in SENSITIVE.items()} == wanted
    assert (pillows_settings(), warnings.filters[:]) == before


def test_pillow_alone_minds_these_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {name: SENSITIVE[name] for name in ("grey GIF", "RGBA BMP")}
    usual = {name: Image.open(io.BytesIO(file)) for name, file in data.items()}
    assert usual["grey GIF"].has_transparency_data
    assert usual["RGBA BMP"].mode == "RGB"
    for module, name, value in HOSTS["does all of it"][2:]:
        monkeypatch.setattr(module, name, value)
    changed = {name: Image.open(io.BytesIO(file)) for name, file in data.items()}
    assert not changed["grey GIF"].has_transparency_data
    assert changed["RGBA BMP"].mode == "RGBA"
    with pytest.raises(ValueError, match="too large"):
        Image.open(ABUSE / "D09_ztxt_2MiB.png")


@pytest.mark.parametrize("sampling", [[0x22, 0x21, 0x11], [0x22, 0x22, 0x22], [0x31, 0x11, 0x11]])
def test_chroma_subsampled_in_unnamed_ways_is_decoded_as_by_pillow(sampling: list[int]) -> None:
    most = 2 if sampling[0] == 0x22 else 3
    high, wide = max(s & 15 for s in sampling), most
    planes = [noise(-(-37 * (s >> 4) // wide), -(-23 * (s & 15) // high)) for s in sampling]
    data = scans_apart(planes, sampling, (37, 23))
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert same_pixels(decoded(data), wanted)
    with pytest.raises(MediaDecodeError):
        decoded(data[: len(data) // 2])
