"""Pixels to patch rows in a tower's order: resize, pad and patchify in one native call, or with the same bits
in NumPy, Pillow and Torch if the native library is missing.
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
    """The library whose arithmetic a resize follows. Both antialias, and clamp to bytes between passes."""

    PILLOW = 0
    TORCH = 1


# The kernels transpose a few rows at a time into columns of 64 bytes. An image longer than the longest JPEG
# would at worst need a thousand times the memory of its pixels.
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
    """Resize uint8 `pixels` [h, w, 3 or 4] to the plan's content size, place that on its canvas filled with
    `fill`, and patchify it to rows [patches, 3·patch²] in the order of `patchify`. Ignores a fourth channel.

    Writes the rows to `out`, contiguous uint8 [patches, 3·patch²], if given.
    """
    canvas = plan.canvas
    shape = canvas.height * canvas.width // patch**2, 3 * patch**2
    if out is None:
        out = torch.from_numpy(np.empty(shape, np.uint8))  # torch.empty follows the host's default device
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
