"""Compositing, resizing and padding of uint8 images, as the families' reference processors do them.

Uses NumPy where it suffices: Torch would run each copy on its own thread pool in every calling thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from PIL import Image

from ..contract import ImageSize
from .picture import Picture, Pixels, without_alpha


def composite_over_white(pixels: Pixels) -> Pixels:
    """Return RGB [h, w, 3] of `pixels` [h, w, 3 or 4], composited over white in Pillow's arithmetic."""
    if pixels.shape[2] == 3:
        return pixels
    image = Image.fromarray(pixels)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.array(Image.alpha_composite(white, image).convert("RGB"))


def resize_bicubic_torch(pixels: Pixels, size: ImageSize) -> Pixels:
    """Resize [h, w, 3] to `size` as Torch does on a CPU with AVX2: bicubic, antialiased, clamped to bytes
    between its passes. Returns [height, width, 3]: `pixels` itself if they have that size.
    """
    if pixels.shape[1::-1] == size:
        return pixels
    image = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    if size.width > 1:
        return _interpolate(image, size)
    # On CPUs without AVX2, Torch 2.14 repeats the first row of an image that is one pixel wide. Two equal
    # columns are resized correctly everywhere.
    across = _interpolate(image, ImageSize(1, pixels.shape[0]))[:, :1] if pixels.shape[1] > 1 else pixels
    column = torch.from_numpy(np.repeat(across, 2, axis=1)).permute(2, 0, 1).unsqueeze(0)
    return np.ascontiguousarray(_interpolate(column, ImageSize(2, size.height))[:, :1])


def _interpolate(image: torch.Tensor, size: ImageSize) -> Pixels:
    resized = torch.nn.functional.interpolate(
        image, size=(size.height, size.width), mode="bicubic", align_corners=False, antialias=True
    )
    return resized[0].permute(1, 2, 0).numpy()


def resize_bicubic_pillow(pixels: Pixels, size: ImageSize) -> Pixels:
    """Resize [h, w, 3] to `size` as Pillow does: bicubic in fixed point, first horizontally, then vertically,
    clamped to bytes in between. Returns [height, width, 3]: `pixels` itself if they have that size.
    """
    if pixels.shape[1::-1] == size:
        return pixels
    return np.array(_two_pass_bicubic(Image.fromarray(pixels), size))


def resize_native(picture: Picture, size: ImageSize) -> Picture:
    """Resize in the image's stored mode, as Pillow does: nearest neighbour for palette and one-bit images,
    bicubic for all others, on premultiplied alpha if there is an alpha channel.
    """
    image = picture.image
    if image.size == size or image.mode in ("P", "1"):
        return Picture.of(image.resize(size, Image.Resampling.NEAREST))
    premultiplied = {"RGBA": "RGBa", "LA": "La"}.get(image.mode)
    if premultiplied is None:
        return Picture.of(_two_pass_bicubic(image, size))
    return Picture.of(_two_pass_bicubic(image.convert(premultiplied), size).convert(image.mode))


def _two_pass_bicubic(image: Image.Image, size: ImageSize) -> Image.Image:
    # Two calls: from version 13 on, Pillow does the vertical pass first if that is less work, and then clamps
    # other intermediate values. The references are older than that.
    across = image.resize((size.width, image.height), Image.Resampling.BICUBIC)
    return across.resize(size, Image.Resampling.BICUBIC)


@dataclass(frozen=True, slots=True)
class Background:
    """The background of transparent images: one grey level or a chessboard. Squares in pixels."""

    PATTERNS: ClassVar[tuple[str, ...]] = ("chessboard", "white", "black", "gray")

    pattern: str = "black"
    chessboard_square_size: int = 16
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 200

    def __post_init__(self) -> None:
        if not all(0 <= v <= 255 for v in (self.chessboard_white_value, self.chessboard_gray_value)):
            raise ValueError(f"chessboard values must be 0 to 255, got {self}")

    def draw(self, size: ImageSize) -> Pixels:
        """Return the background as uint8 [height, width, 1]."""
        if self.pattern != "chessboard":
            level = {"white": 255, "black": 0, "gray": 128}[self.pattern]
            return np.full((size.height, size.width, 1), level, np.uint8)
        square = self.chessboard_square_size
        y, x = (np.arange(side) // square for side in (size.height, size.width))
        odd = (y[:, None] + x[None, :]) % 2 == 1
        grey = odd if self.chessboard_square_on_top_left else ~odd
        levels = np.where(grey, self.chessboard_gray_value, self.chessboard_white_value)
        return levels.astype(np.uint8)[:, :, None]


def composite_over(picture: Picture, background: Background | None) -> Pixels:
    """Return RGB [h, w, 3] of an image, composited over `background` in float32 and truncated. Alpha is
    dropped without a background, and for an RGB image whose transparency is a colour key.
    """
    pixels = picture.pixels
    keyed_rgb = picture.native is not None and picture.native.mode == "RGB"
    if pixels.shape[2] == 3 or keyed_rgb or background is None:
        return without_alpha(pixels)
    alpha = pixels[:, :, 3:].astype(np.float32) / 255
    over = alpha * pixels[:, :, :3] + (1 - alpha) * background.draw(picture.size)
    return over.astype(np.uint8)


def pad_to_canvas(pixels: Pixels, canvas: ImageSize, offset: tuple[int, int], fill: int) -> Pixels:
    """Pad [h, w, c] with `fill` to `canvas`, at `offset` (left, top); no copy if it has that size already."""
    height, width, channels = pixels.shape
    if (width, height) == canvas:
        return pixels
    left, top = offset
    page = np.full((canvas.height, canvas.width, channels), fill, dtype=np.uint8)
    page[top : top + height, left : left + width] = pixels
    return page
