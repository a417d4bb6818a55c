"""The kinds of image that an encoder takes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mm_encoder import (
    Encoder,
    ImageOptions,
)

from ..helpers.holding import Hold
from ..helpers.images import png


def test_every_kind_of_source_gives_the_same_rows(encoder: Encoder, tmp_path: Path) -> None:
    data = png(60, 50)
    path = tmp_path / "image"
    path.write_bytes(data)
    opened = Image.open(io.BytesIO(data))
    array = np.asarray(opened)
    results = encoder.generate([data, bytearray(data), memoryview(data), path, array, opened])
    for result in results[1:]:
        assert torch.equal(result.tensor, results[0].tensor)
    assert len({r.metadata.mm_hash for r in results[:4]}) == 1
    assert len({r.metadata.mm_hash for r in results}) == 3


def test_a_single_array_or_pillow_image_is_one_image(encoder: Encoder) -> None:
    array = np.zeros((3, 3, 3), np.uint8)
    assert len(encoder.generate(array)) == 1
    assert len(encoder.generate(Image.fromarray(array))) == 1


def test_orientation_is_applied_in_rows_and_metadata_alike(encoder: Encoder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", exif=exif)
    shown = encoder.generate(buffer.getvalue())[0]
    turned = encoder.generate(np.ascontiguousarray(np.rot90(pixels, -1)))[0]
    assert shown.metadata.original_size == (40, 90)
    assert shown.metadata.grid_thws == turned.metadata.grid_thws
    assert torch.equal(shown.tensor, turned.tensor)
    options = ImageOptions(exif_orientation=False)
    stored = encoder.generate(buffer.getvalue(), image_options=options)[0]
    assert stored.metadata.original_size == (90, 40)
    assert torch.equal(stored.tensor, encoder.generate(pixels)[0].tensor)


def test_the_source_may_be_changed_after_submit_returns(encoder: Encoder, towers: Hold) -> None:
    array = np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)
    original = array.copy()
    first = encoder.submit(array)
    towers.wait()
    second = encoder.submit(array)
    array[:] = 0
    towers.release()
    wanted = encoder.generate(original)[0]
    for future in (first, second):
        assert torch.equal(future.result().tensor, wanted.tensor)
        assert future.result().metadata == wanted.metadata
