"""Colours against an independent SVD, degenerate rows, and where things land on the sheet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mm_encoder import viz
from mm_encoder.contract import ImageMetadata, ImageResult, ImageSize, Plan
from mm_encoder.families.registry import load_family


def random_rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows whose components differ in strength, so that their order is certain."""
    generator = torch.Generator().manual_seed(seed)
    strengths = 3 * 0.7 ** torch.arange(width)
    mixing = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    rows: torch.Tensor = (torch.randn(count, width, generator=generator) * strengths) @ mixing + 5
    return rows


def grid(height: int, width: int) -> np.ndarray:
    return np.arange(height * width).reshape(height, width)


def expected_colours(rows: torch.Tensor, token_map: np.ndarray) -> np.ndarray:
    x = rows.double().numpy()
    x = x - x.mean(axis=0)
    _, _, components = np.linalg.svd(x, full_matrices=False)
    channels = []
    for component in components[:3]:
        sign = np.sign(component[np.argmax(np.abs(component))])
        scores = sign * x @ component
        low, high = np.percentile(scores, [1, 99])
        channels.append(np.clip((scores - low) / (high - low), 0, 1) * 255)
    colours: np.ndarray = np.stack(channels, axis=-1)[token_map]
    return colours


@pytest.mark.parametrize(("count", "width"), [(60, 16), (12, 40)], ids=["more rows", "wider"])
def test_colours_are_the_principal_components_of_an_svd(count: int, width: int) -> None:
    rows, tokens = random_rows(count, width), grid(4, count // 4)
    colours = viz.principal_colours(rows, tokens)
    assert colours.dtype == np.uint8
    assert colours.shape == (4, count // 4, 3)
    difference = np.abs(colours.astype(float) - expected_colours(rows, tokens))
    assert difference.max() <= 0.5001


def test_many_rows_are_fitted_to_a_sample_that_says_nearly_the_same() -> None:
    rows, tokens = random_rows(6000, 24), grid(60, 100)
    difference = np.abs(viz.principal_colours(rows, tokens).astype(float) - expected_colours(rows, tokens))
    assert difference.mean(axis=(0, 1)).max() < 12


def test_the_token_map_says_where_a_row_stands() -> None:
    rows = random_rows(12, 8)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    straight = viz.principal_colours(rows, grid(3, 4))
    inverse = torch.argsort(shuffled).numpy().reshape(3, 4)
    np.testing.assert_array_equal(viz.principal_colours(rows[shuffled], inverse), straight)


def test_the_same_rows_always_have_the_same_colours_and_keep_their_values() -> None:
    rows, before = random_rows(40, 12), random_rows(40, 12)
    first = viz.principal_colours(rows, grid(5, 8))
    np.testing.assert_array_equal(viz.principal_colours(rows.clone(), grid(5, 8)), first)
    assert torch.equal(rows, before)


def test_mirrored_rows_have_mirrored_colours() -> None:
    # The sign is decided by the component, not by chance: x and -x have it the same way round.
    rows = random_rows(40, 12)
    there, back = (viz.principal_colours(r, grid(5, 8)).astype(int) for r in (rows, -rows))
    assert np.abs(there + back - 255).max() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_dtype_is_taken(dtype: torch.dtype) -> None:
    rows = random_rows(40, 12)
    colours = viz.principal_colours(rows.to(dtype), grid(5, 8)).astype(int)
    assert np.abs(colours - viz.principal_colours(rows, grid(5, 8))).mean() < 5


@pytest.mark.parametrize("value", [0.0, 0.1, -3e4, 1e-30])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (6, 7)])
def test_rows_that_are_all_the_same_are_grey(value: float, shape: tuple[int, int]) -> None:
    rows = torch.full((shape[0] * shape[1], 33), value)
    assert set(viz.principal_colours(rows, grid(*shape)).ravel()) == {128}


def test_one_row_is_grey_and_two_rows_have_one_component() -> None:
    assert viz.principal_colours(random_rows(1, 9), grid(1, 1)).tolist() == [[[128, 128, 128]]]
    two = viz.principal_colours(random_rows(2, 9), grid(1, 2))[0]
    assert sorted(two[:, 0]) == [0, 255]
    assert set(two[:, 1:].ravel()) == {128}


def test_rows_one_wide_have_one_component() -> None:
    colours = viz.principal_colours(torch.arange(5.0).reshape(5, 1), grid(1, 5))[0]
    assert colours[:, 0].tolist() == sorted(colours[:, 0])
    assert set(colours[:, 1:].ravel()) == {128}


def test_values_that_are_not_finite_count_as_zero() -> None:
    rows = random_rows(40, 12)
    clean = rows.clone()
    clean[3, 2] = clean[7, 1] = clean[8, 8] = 0.0
    rows[3, 2], rows[7, 1], rows[8, 8] = float("nan"), float("inf"), float("-inf")
    np.testing.assert_array_equal(
        viz.principal_colours(rows, grid(5, 8)), viz.principal_colours(clean, grid(5, 8))
    )


def test_an_outlier_does_not_take_the_colours_of_the_others() -> None:
    rows = torch.cat([random_rows(199, 12), torch.full((1, 12), 0.0)])
    rows[-1] = rows[0] + 40 * (rows[1] - rows[0])
    red = viz.principal_colours(rows, grid(10, 20))[..., 0]
    assert np.ptp(np.sort(red.ravel())[10:-10].astype(int)) > 60


def make_plan(source: tuple[int, int], content: tuple[int, int], canvas: tuple[int, int]) -> Plan:
    cells = canvas[1] // 14, canvas[0] // 14
    return Plan(
        ImageSize(*source), ImageSize(*content), ImageSize(*canvas), (0, 0), (1, *cells),
        rows=cells[0] * cells[1] // 4,
    )  # fmt: skip


def make_panel(width: int, height: int, name: str = "name") -> viz.Panel:
    canvas = -(-width // 28) * 28, -(-height // 28) * 28
    plan = make_plan((width, height), (width, height), canvas)
    colours = np.zeros((canvas[1] // 28, canvas[0] // 28, 3), dtype=np.uint8)
    return viz.Panel(Image.new("RGB", (width, height), (255, 0, 0)), colours, plan, name, "details")


def extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    ys, xs = np.nonzero(mask)
    return int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1


def test_photograph_and_colours_have_one_size_side_by_side() -> None:
    sheet = np.asarray(viz.contact_sheet([make_panel(100, 60)], ""))
    left, top, right, bottom = extent((sheet == (255, 0, 0)).all(axis=2))
    others = extent((sheet[top:bottom, right:] == 0).all(axis=2))
    assert others[3] - others[1] == bottom - top
    assert others[2] - others[0] == right - left


def test_padding_is_cut_off_so_that_a_token_lies_beside_its_pixels() -> None:
    # 70 of the canvas' 84 pixels: the third column of tokens is half padding, and half as wide.
    colours = np.zeros((1, 3, 3), dtype=np.uint8)
    colours[0, :, 0] = 10, 20, 30
    panel = viz.Panel(Image.new("RGB", (70, 28)), colours, make_plan((70, 28), (70, 28), (84, 28)), "", "")
    assert viz.content_box(panel) == pytest.approx((0, 0, 2.5, 1))
    sheet = np.asarray(viz.contact_sheet([panel], ""))
    widths = {v: int((sheet == (v, 0, 0)).all(axis=2).sum(axis=1).max()) for v in (10, 20, 30)}
    assert abs(widths[10] - widths[20]) <= 1
    assert abs(widths[10] - 2 * widths[30]) <= 2


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_sheet_has_room_for_all(count: int) -> None:
    sheet = viz.contact_sheet([make_panel(90, 60)] * count, "title", "note")
    assert sheet.mode == "RGB"
    assert sheet.width == 1440
    red = (np.asarray(sheet) == (255, 0, 0)).all(axis=2)
    begins = np.diff(red.astype(int), axis=0, prepend=0) == 1
    starts = np.diff(begins.astype(int), axis=1, prepend=0) == 1
    assert starts.sum() == count


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (1, 1), (28, 28)])
def test_extreme_shapes_are_drawn(size: tuple[int, int]) -> None:
    sheet = viz.contact_sheet([make_panel(*size), make_panel(60, 40)], "title")
    assert max(sheet.size) <= 1440


def test_long_captions_are_cut_and_unknown_glyphs_are_drawn() -> None:
    short = viz.contact_sheet([make_panel(90, 60)] * 2, "t")
    long = viz.contact_sheet([make_panel(90, 60, "写真\N{SNOWMAN} " + "long" * 500)] * 2, "title" * 500)
    assert long.size == short.size
    margin = np.asarray(long)[:, 1440 - 30 :]
    assert (margin == margin[0, 0]).all()


def test_no_panels_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one panel"):
        viz.contact_sheet([], "title")


def test_only_the_first_two_dozen_are_drawn_and_the_sheet_says_so(
    tmp_path: Path, glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, family = load_family(glm53_checkpoint)
    path = tmp_path / "a.png"
    Image.new("RGBA", (60, 40), (0, 0, 255, 0)).save(path)  # transparent: the tower sees white
    plan = family.plan(ImageSize(60, 40))
    rows = random_rows(plan.rows, 8)
    metadata = ImageMetadata(
        "m", "h", plan.rows, (plan.rows, 8), "torch.float32", "cpu", (8, 1), (0, plan.rows),
        (plan.grid_thw,), (60, 40),
    )  # fmt: skip
    seen: list[tuple[list[viz.Panel], str]] = []

    def look(panels: list[viz.Panel], title: str, note: str) -> Image.Image:
        seen.append((panels, note))
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(viz, "contact_sheet", look)
    item = ("a.png", path, ImageResult(rows, metadata))
    viz.draw([item] * 30, family, "title", "remark")
    viz.draw([item] * 24, family, "title")
    (panels, note), (fewer, plain) = seen
    assert len(panels) == len(fewer) == 24
    assert "first 24 of 30" in note
    assert "remark" in note
    assert "first 24" not in plain
    assert panels[0].photo.getpixel((0, 0)) == (255, 255, 255)
    assert panels[0].colours.shape == (*family.token_map(plan).shape, 3)
    assert f"{plan.rows} rows" in panels[0].details
