"""A decoded image: its RGB or RGBA pixels and, for rules that depend on it, the image in its stored mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from ..contract import ImageSize
from ..errors import UnsupportedMediaError

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""uint8 [height, width, 3 or 4]: RGB, or RGB with straight alpha."""

_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded image. `pixels` have four channels if it has any kind of transparency. `native` is the Pillow
    image if its mode is neither RGB nor RGBA, or if its transparency is not an alpha channel.
    """

    pixels: Pixels
    native: Image.Image | None = None

    @classmethod
    def of(cls, image: Image.Image) -> Picture:
        """Convert a loaded Pillow image of a mode with a fixed range. 16-bit grey keeps its high byte."""
        if image.mode in ("I", "F"):
            raise UnsupportedMediaError(
                f"a Pillow image of mode {image.mode} has no fixed range; convert it to L or I;16 first"
            )
        if image.mode.startswith("I;16"):
            return cls(_sixteen_bit(image))
        if image.mode == "La":
            image = image.convert("LA")  # the only mode that Pillow converts it to
        wanted = "RGBA" if image.has_transparency_data else "RGB"
        if image.mode == wanted:
            return cls(np.array(image))
        return cls(np.array(image.convert(wanted)), image)

    @property
    def size(self) -> ImageSize:
        """Width and height."""
        return ImageSize(self.pixels.shape[1], self.pixels.shape[0])

    @property
    def image(self) -> Image.Image:
        """The image as a Pillow image in its stored mode."""
        return Image.fromarray(self.pixels) if self.native is None else self.native

    def oriented(self, orientation: int) -> Picture:
        """Apply an EXIF orientation (EXIF 2.3, tag 0x0112: 1 to 8)."""
        if orientation == 1:
            return self
        pixels = self.pixels
        if orientation in (5, 6, 7, 8):
            pixels = pixels.transpose(1, 0, 2)
        if orientation in (3, 4, 7, 8):
            pixels = pixels[::-1]
        if orientation in (2, 3, 6, 7):
            pixels = pixels[:, ::-1]
        native = None if self.native is None else self.native.transpose(_TRANSPOSES[orientation])
        return Picture(np.ascontiguousarray(pixels), native)


def without_alpha(pixels: Pixels) -> Pixels:
    """Return the RGB channels of `pixels` [h, w, 3 or 4]: `pixels` themselves if there are only three."""
    if pixels.shape[2] == 3:
        return pixels
    rgb = np.empty((*pixels.shape[:2], 3), np.uint8)
    for channel in range(3):  # five times faster than copying three bytes per pixel
        rgb[:, :, channel] = pixels[:, :, channel]
    return rgb


def _sixteen_bit(image: Image.Image) -> Pixels:
    wide = np.asarray(image)
    grey = (wide >> 8).astype(np.uint8)
    planes = [grey, grey, grey]
    key = image.info.get("transparency")
    if key is not None:
        planes.append(np.where(wide == key, 0, 255).astype(np.uint8))
    return np.stack(planes, axis=-1)
