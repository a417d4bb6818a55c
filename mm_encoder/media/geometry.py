"""Rules by which families turn one picture into another: compositing, resizing, placing. On uint8.

In NumPy wherever it does, since Torch would spread a copy over threads of its own in every caller.
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
    """RGB of `pixels` [h, w, 3 or 4]; alpha is composited over opaque white in Pillow's arithmetic."""
    if pixels.shape[2] == 3:
        return pixels
    image = Image.fromarray(pixels)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.array(Image.alpha_composite(white, image).convert("RGB"))


def resize_bicubic_torch(pixels: Pixels, size: ImageSize) -> Pixels:
    """Resize [h, w, 3] to `size` as Torch does on a CPU with AVX2: bicubic, antialiased, clamped to bytes
    between its passes. Returns [height, width, 3]; the identity size is no copy.
    """
    if pixels.shape[1::-1] == size:
        return pixels
    image = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    if size.width > 1:
        return _interpolate(image, size)
    # Torch 2.14 for CPUs without AVX2 repeats the first row of what is one pixel wide. Two equal columns
    # come out right everywhere.
    across = _interpolate(image, ImageSize(1, pixels.shape[0]))[:, :1] if pixels.shape[1] > 1 else pixels
    column = torch.from_numpy(np.repeat(across, 2, axis=1)).permute(2, 0, 1).unsqueeze(0)
    return np.ascontiguousarray(_interpolate(column, ImageSize(2, size.height))[:, :1])


def _interpolate(image: torch.Tensor, size: ImageSize) -> Pixels:
    resized = torch.nn.functional.interpolate(
        image, size=(size.height, size.width), mode="bicubic", align_corners=False, antialias=True
    )
    return resized[0].permute(1, 2, 0).numpy()


def resize_bicubic_pillow(pixels: Pixels, size: ImageSize) -> Pixels:
    """Resize [h, w, 3] to `size` as Pillow does: bicubic in fixed point, first across and then down, clamped
    to bytes in between. Returns [height, width, 3]; the identity size is no copy.
    """
    if pixels.shape[1::-1] == size:
        return pixels
    return np.array(_two_pass_bicubic(Image.fromarray(pixels), size))


def resize_native(picture: Picture, size: ImageSize) -> Picture:
    """Resize in the mode that the picture was stored in, as Pillow does: alpha is premultiplied for the
    while, palette and one-bit pictures take the nearest pixel, everything else is bicubic.
    """
    image = picture.image
    if image.size == size or image.mode in ("P", "1"):
        return Picture.of(image.resize(size, Image.Resampling.NEAREST))
    premultiplied = {"RGBA": "RGBa", "LA": "La"}.get(image.mode)
    if premultiplied is None:
        return Picture.of(_two_pass_bicubic(image, size))
    return Picture.of(_two_pass_bicubic(image.convert(premultiplied), size).convert(image.mode))


def _two_pass_bicubic(image: Image.Image, size: ImageSize) -> Image.Image:
    # One after the other: from version 13 on, Pillow goes down first where that is less work, and clamps
    # something else. The references were made before that.
    across = image.resize((size.width, image.height), Image.Resampling.BICUBIC)
    return across.resize(size, Image.Resampling.BICUBIC)


@dataclass(frozen=True, slots=True)
class Background:
    """What shows through transparency: a colour, or grey squares on white. Sides in pixels."""

    PATTERNS: ClassVar[tuple[str, ...]] = ("chessboard", "white", "black", "gray")

    pattern: str = "black"
    chessboard_square_size: int = 16
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 200

    def __post_init__(self) -> None:
        if not all(0 <= v <= 255 for v in (self.chessboard_white_value, self.chessboard_gray_value)):
            raise ValueError(f"levels of a background are 0 to 255, got {self}")

    def draw(self, size: ImageSize) -> Pixels:
        """uint8 [height, width, 1]."""
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
    """RGB of a picture. Where it has an alpha band, or transparency beside another mode than RGB, it is
    composited over the background in float32 and truncated; with no background alpha is dropped.
    """
    pixels = picture.pixels
    keyed_rgb = picture.native is not None and picture.native.mode == "RGB"
    if pixels.shape[2] == 3 or keyed_rgb or background is None:
        return without_alpha(pixels)
    alpha = pixels[:, :, 3:].astype(np.float32) / 255
    over = alpha * pixels[:, :, :3] + (1 - alpha) * background.draw(picture.size)
    return over.astype(np.uint8)


def pad_to_canvas(pixels: Pixels, canvas: ImageSize, offset: tuple[int, int], fill: int) -> Pixels:
    """Put [h, w, c] on a canvas of one value at `offset` (left, top); no copy if it fills it."""
    height, width, channels = pixels.shape
    if (width, height) == canvas:
        return pixels
    left, top = offset
    page = np.full((canvas.height, canvas.width, channels), fill, dtype=np.uint8)
    page[top : top + height, left : left + width] = pixels
    return page
