"""Pixels -> patch rows in the orders that towers want."""

from __future__ import annotations

from .picture import Pixels


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
