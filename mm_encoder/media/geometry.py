"""Rules by which families turn one picture into another: compositing, resizing, placing. On uint8.

In NumPy wherever it does, since Torch would spread a copy over threads of its own in every caller.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from ..contract import ImageSize
from .decode import Pixels


def over_white(pixels: Pixels) -> Pixels:
    """RGB of `pixels` [h, w, 3 or 4]; alpha is composited over opaque white in Pillow's arithmetic."""
    if pixels.shape[2] == 3:
        return pixels
    image = Image.fromarray(pixels)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.array(Image.alpha_composite(white, image).convert("RGB"))


def resize_bicubic_torch(pixels: Pixels, size: ImageSize) -> Pixels:
    """Resize [h, w, 3] to `size` as Torch does on a CPU: bicubic, antialiased, clamped to bytes between
    its passes. Returns [height, width, 3]; the identity size is no copy.
    """
    if pixels.shape[1::-1] == size:
        return pixels
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0),
        size=(size.height, size.width),
        mode="bicubic",
        align_corners=False,
        antialias=True,
    )
    return resized[0].permute(1, 2, 0).numpy()


def place(pixels: Pixels, canvas: ImageSize, offset: tuple[int, int], fill: int) -> Pixels:
    """Put [h, w, c] on a canvas of one value at `offset` (left, top); no copy if it fills it."""
    height, width, channels = pixels.shape
    if (width, height) == canvas:
        return pixels
    left, top = offset
    page = np.full((canvas.height, canvas.width, channels), fill, dtype=np.uint8)
    page[top : top + height, left : left + width] = pixels
    return page
