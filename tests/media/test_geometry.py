from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode  # type: ignore[import-untyped]
from torchvision.transforms.v2 import functional as reference  # type: ignore[import-untyped]

from mm_encoder.contract import ImageSize
from mm_encoder.media.geometry import composite_over_white, pad_to_canvas, resize_bicubic_torch
from mm_encoder.media.picture import Pixels

from ..helpers.abuse import case, rows
from ..helpers.images import decoded, noise, same_pixels, saved

RNG = np.random.default_rng(7)


def bytes_of(width: int, height: int, channels: int = 3, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


# --- compositing -------------------------------------------------------------------------------------


def test_compositing_is_pillows_for_every_value_and_alpha() -> None:
    value, alpha = np.mgrid[:256, :256].astype(np.uint8)
    pixels = np.dstack([value, value[::-1], alpha, alpha])
    white = Image.new("RGBA", (256, 256), "white")
    wanted = np.array(Image.alpha_composite(white, Image.fromarray(pixels)).convert("RGB"))
    assert same_pixels(composite_over_white(pixels), wanted)
    exact = 255 - (255.0 - pixels[:, :, :3]) * alpha[:, :, np.newaxis] / 255
    assert np.abs(composite_over_white(pixels) - exact).max() <= 1


def test_opaque_and_hidden_pixels_are_exact() -> None:
    pixels = bytes_of(9, 7, 4)
    pixels[:, :, 3] = 255
    assert same_pixels(composite_over_white(pixels), pixels[:, :, :3])
    pixels[:, :, 3] = 0
    assert (composite_over_white(pixels) == 255).all()


def test_rgb_passes_and_rgba_is_left_as_it_was() -> None:
    rgb, rgba = bytes_of(9, 7), bytes_of(9, 7, 4)
    before = rgba.copy()
    assert composite_over_white(rgb) is rgb
    assert composite_over_white(rgba).flags.writeable
    assert same_pixels(rgba, before)


# --- resizing ----------------------------------------------------------------------------------------


def by_torchvision(pixels: Pixels, size: ImageSize) -> Pixels:
    planes = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    resized = reference.resize(
        planes, [size.height, size.width], interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    return np.ascontiguousarray(resized.permute(1, 2, 0).numpy())


def by_pillow(pixels: Pixels, size: ImageSize) -> Pixels:
    return np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def sizes(count: int, most: int) -> Iterator[tuple[ImageSize, ImageSize]]:
    for a, b, c, d in RNG.integers(1, most, (count, 4)).tolist():
        yield ImageSize(a, b), ImageSize(c, d)


@pytest.mark.parametrize("most", [4, 12, 70, 300])
def test_resizing_is_torchvisions_on_contiguous_planes(most: int) -> None:
    for source, target in sizes(60, most):
        if target == (1, 1):
            continue  # torch fails on contiguous planes
        pixels = bytes_of(*source, seed=source.width)
        resized = resize_bicubic_torch(pixels, target)
        assert same_pixels(resized, by_torchvision(pixels, target)), (source, target)


@pytest.mark.parametrize("side", [1, 2, 3, 5, 64, 257])
def test_sides_of_one_pixel_are_resized_too(side: int) -> None:
    for source in [(1, side), (side, 1), (1, 1)]:
        for target in [(1, 28), (28, 1), (28, 28), (3, 2), (1, 1)]:
            pixels = bytes_of(*source)
            resized = resize_bicubic_torch(pixels, ImageSize(*target))
            assert resized.shape == (target[1], target[0], 3)
            if target != (1, 1):
                assert same_pixels(resized, by_torchvision(pixels, ImageSize(*target)))


def test_the_layout_of_the_pixels_does_not_matter() -> None:
    plain = bytes_of(40, 30)
    wanted = by_torchvision(plain, ImageSize(23, 17))
    turned = np.ascontiguousarray(plain.transpose(1, 0, 2)).transpose(1, 0, 2)
    planar = np.ascontiguousarray(plain.transpose(2, 0, 1)).transpose(1, 2, 0)
    for pixels in (plain, turned, planar):
        assert same_pixels(resize_bicubic_torch(pixels, ImageSize(23, 17)), wanted)
    assert same_pixels(plain, bytes_of(40, 30))


def test_the_hosts_torch_settings_do_not_matter() -> None:
    pixels = bytes_of(40, 30)
    wanted = resize_bicubic_torch(pixels, ImageSize(23, 17))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.inference_mode(), torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            resized = resize_bicubic_torch(pixels, ImageSize(23, 17))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert same_pixels(resized, wanted)


@pytest.mark.parametrize("colour", [(0, 0, 0), (10, 120, 230), (255, 255, 255)])
def test_constant_in_is_constant_out(colour: tuple[int, int, int]) -> None:
    for source, target in sizes(30, 60):
        pixels = np.full((*source[::-1], 3), colour, np.uint8)
        assert (resize_bicubic_torch(pixels, target) == colour).all()


@pytest.mark.parametrize("row", rows("D11"), ids=lambda row: row["file"])
def test_tiny_pictures_stay_of_one_colour(row: dict[str, Any]) -> None:
    resized = resize_bicubic_torch(decoded(case(row["file"])), ImageSize(84, 56))
    assert np.abs(resized.astype(int) - (10, 120, 230)).max() <= 1


def test_the_same_size_is_no_copy() -> None:
    pixels = bytes_of(9, 7)
    assert resize_bicubic_torch(pixels, ImageSize(9, 7)) is pixels
    assert resize_bicubic_torch(pixels, ImageSize(7, 9)) is not pixels


def test_a_checkerboard_is_antialiased_to_grey() -> None:
    row = rows("D13")[0]
    pixels, target = decoded(case(row["file"])), ImageSize(*row["target"])
    resized = resize_bicubic_torch(pixels, target)
    assert ((resized >= row["min"]) & (resized <= row["max"])).all()
    planes = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    aliased = torch.nn.functional.interpolate(
        planes.float(), size=(target.height, target.width), mode="bicubic", antialias=False
    )
    assert aliased.max() - aliased.min() > 100


def test_overshoot_is_clamped_and_never_wrapped() -> None:
    row = next(row for row in rows("D13") if "overshoot" in row["file"])
    pixels, target = decoded(case(row["file"])), ImageSize(*row["target"])
    resized, pillow = resize_bicubic_torch(pixels, target), by_pillow(pixels, target)
    assert np.abs(resized.astype(int) - pillow).max() <= 1
    assert (resized == 0).any()
    assert (resized == 255).any()


def test_noise_is_resized_as_pillow_does_it_columns_first() -> None:
    row = next(row for row in rows("D13") if "noise" in row["file"])
    height, width = row["target_HW"]
    pixels, target = decoded(case(row["file"])), ImageSize(width, height)
    resized = resize_bicubic_torch(pixels, target).astype(int)
    columns_first = by_pillow(by_pillow(pixels, ImageSize(width, 64)), target)
    assert np.abs(resized - columns_first).max() <= 1
    # Pillow may take the passes in the other order, and each pass clamps what overshoots.
    difference = np.abs(resized - by_pillow(pixels, target))
    assert difference.mean() < 0.5
    assert difference.max() <= 18


@pytest.fixture
def torch_warns_always() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("torch_warns_always")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (6, 5)])
def test_whatever_was_decoded_can_be_resized_without_a_warning(kind: str, size: tuple[int, int]) -> None:
    for mode in ("RGB", "RGBA", "L"):
        pixels = decoded(saved(noise(*size, "RGB" if kind == "JPEG" else mode), kind))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert resize_bicubic_torch(composite_over_white(pixels), ImageSize(28, 28)).shape == (28, 28, 3)


@pytest.mark.usefixtures("torch_warns_always")
def test_torch_warns_of_pixels_that_it_may_not_write() -> None:
    with pytest.warns(UserWarning, match="not writable"):
        torch.from_numpy(np.frombuffer(b"pixels", np.uint8))


# --- placing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0, 128])
@pytest.mark.parametrize("offset", [(0, 0), (3, 0), (0, 4), (3, 4)])
def test_a_picture_is_placed_on_a_canvas_of_one_value(offset: tuple[int, int], fill: int) -> None:
    pixels = bytes_of(6, 5)
    page = pad_to_canvas(pixels, ImageSize(9, 9), offset, fill)
    left, top = offset
    assert page.shape == (9, 9, 3)
    for y in range(9):
        for x in range(9):
            inside = left <= x < left + 6 and top <= y < top + 5
            wanted = pixels[y - top, x - left] if inside else np.full(3, fill)
            assert (page[y, x] == wanted).all()


def test_a_picture_that_fills_its_canvas_is_no_copy() -> None:
    pixels = bytes_of(6, 5)
    assert pad_to_canvas(pixels, ImageSize(6, 5), (0, 0), fill=0) is pixels
    assert pad_to_canvas(pixels, ImageSize(6, 6), (0, 0), fill=0).shape == (6, 6, 3)


def test_what_does_not_fit_is_not_placed() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        pad_to_canvas(bytes_of(6, 5), ImageSize(9, 9), (4, 0), fill=0)
