from __future__ import annotations

import numpy as np
import pytest

from mm_encoder.media.patches import patchify
from mm_encoder.media.picture import Pixels


def slowly(pixels: Pixels, patch: int, merge: int) -> Pixels:
    height, width, channels = pixels.shape
    rows = []
    for block_y in range(0, height, patch * merge):
        for block_x in range(0, width, patch * merge):
            for y in range(block_y, block_y + patch * merge, patch):
                for x in range(block_x, block_x + patch * merge, patch):
                    row = [
                        pixels[y + dy, x + dx, channel]
                        for channel in range(channels)
                        for dy in range(patch)
                        for dx in range(patch)
                    ]
                    rows.append(row)
    return np.array(rows, np.uint8)


def numbered(height: int, width: int, channels: int = 3) -> Pixels:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize(
    ("blocks", "patch", "merge"),
    [
        ((1, 1), 1, 1),
        ((1, 1), 14, 2),
        ((2, 3), 14, 2),
        ((3, 2), 14, 1),
        ((1, 5), 4, 3),
        ((5, 1), 2, 4),
        ((4, 4), 1, 2),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_patches_come_as_an_obvious_loop_gives_them(
    blocks: tuple[int, int], patch: int, merge: int, channels: int
) -> None:
    side = patch * merge
    pixels = numbered(blocks[0] * side, blocks[1] * side, channels)
    rows = patchify(pixels, patch, merge)
    assert rows.dtype == np.uint8
    assert rows.shape == (blocks[0] * blocks[1] * merge**2, channels * patch**2)
    assert (rows == slowly(pixels, patch, merge)).all()
    assert rows.flags.c_contiguous
    assert rows.flags.writeable


def test_without_merging_patches_are_in_raster_order() -> None:
    pixels = np.arange(4 * 6, dtype=np.uint8).reshape(4, 6, 1)
    assert patchify(pixels, 2)[:3].tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert patchify(pixels, 2, 1).tolist() == patchify(pixels, 2).tolist()


def test_with_merging_a_block_comes_before_the_next() -> None:
    pixels = np.arange(4 * 8, dtype=np.uint8).reshape(4, 8, 1)
    first = [row[0] for row in patchify(pixels, 2, 2)]
    assert first == [0, 2, 16, 18, 4, 6, 20, 22]


def test_channels_of_a_patch_come_one_after_another() -> None:
    pixels = np.dstack([np.full((2, 2), v, np.uint8) for v in (1, 2, 3)])
    assert patchify(pixels, 2).tolist() == [[1] * 4 + [2] * 4 + [3] * 4]


def test_views_are_cut_like_copies() -> None:
    pixels = numbered(28, 56)
    for view in (pixels[::-1], pixels[:, ::-1], pixels[..., ::-1], pixels.transpose(1, 0, 2)):
        assert (patchify(view, 14, 2) == patchify(view.copy(), 14, 2)).all()


@pytest.mark.parametrize(("height", "width"), [(27, 28), (28, 14), (29, 56), (14, 14)])
def test_sides_that_are_no_multiples_are_refused(height: int, width: int) -> None:
    with pytest.raises(
        ValueError, match=f"got an image of {width}x{height}, both sides must be multiples of 28"
    ):
        patchify(numbered(height, width), 14, 2)
