"""Pixels -> patch rows in the orders that towers want: resized, padded and cut, in one native call where
there is the library for it, and with the same bits where there is none.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch

from .. import _native
from ..contract import Patches, Plan
from .geometry import pad_to_canvas, resize_bicubic_pillow, resize_bicubic_torch
from .picture import Pixels, without_alpha


class Bicubic(IntEnum):
    """Whose arithmetic a resize follows; both are antialiased and clamp to bytes between their passes."""

    PILLOW = 0
    TORCH = 1


# The kernels turn a few rows at a time into columns of 64 bytes. A picture that is longer than JPEG can say
# would have a thousand times more of them than pixels, at worst.
_MAX_NATIVE_SIDE = 1 << 16
_RESIZE = {Bicubic.PILLOW: resize_bicubic_pillow, Bicubic.TORCH: resize_bicubic_torch}


def resize_and_patchify(
    pixels: Pixels,
    plan: Plan,
    *,
    patch: int,
    bicubic: Bicubic,
    fill: int,
    merge: int = 1,
    out: torch.Tensor | None = None,
) -> Patches:
    """Resize uint8 `pixels` [h, w, 3 or 4] to the plan's content, put that on its canvas of `fill`, and cut
    it into rows [patches, 3·patch²] in the order of `patchify`. A fourth channel is left out.

    The rows are written to `out`, uint8 [patches, 3·patch²] and contiguous, if that is given.
    """
    canvas = plan.canvas
    shape = canvas.height * canvas.width // patch**2, 3 * patch**2
    if out is None:
        out = torch.from_numpy(np.empty(shape, np.uint8))  # torch.empty might give another device's
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous, of shape {shape}; got {tuple(out.shape)}, {out.stride()}")
    kernels = _native.kernels
    if kernels is None or max(pixels.shape) > _MAX_NATIVE_SIDE:
        content = _RESIZE[bicubic](without_alpha(pixels), plan.content)
        out.numpy()[:] = patchify(pad_to_canvas(content, canvas, plan.offset, fill), patch, merge)
    else:
        kernels.resize_and_patchify(
            pixels,
            content=plan.content,
            canvas=canvas,
            offset=plan.offset,
            fill=fill,
            patch=patch,
            merge=merge,
            arithmetic=bicubic,
            out=out.numpy(),
        )
    return Patches(out, plan)


def patchify(pixels: Pixels, patch: int, merge: int = 1) -> Pixels:
    """Cut uint8 [h, w, c] into rows [h·w / patch², c·patch·patch], each flattened as (c, y, x).

    With `merge` above 1 the rows of a merge x merge block of patches are consecutive (the block's own
    raster order), and blocks follow each other in raster order; with 1 it is plain raster order.
    """
    height, width, channels = pixels.shape
    block = patch * merge
    if height % block or width % block:
        raise ValueError(f"got an image of {width}x{height}, both sides must be multiples of {block}")
    grid = pixels.reshape(height // block, merge, patch, width // block, merge, patch, channels)
    rows = grid.transpose(0, 3, 1, 4, 6, 2, 5)  # block y, block x, patch y, patch x, c, y, x
    return rows.reshape(-1, channels * patch * patch)
