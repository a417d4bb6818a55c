"""Previews of embeddings: each image beside the colours of its rows, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .config import MediaLimits
from .contract import ImageResult, ImageSize, Plan
from .families.family import Family
from .media.geometry import composite_over_white
from .media.source import open_source

Colours = np.ndarray[Any, np.dtype[np.uint8]]

MAX_IMAGES = 24
"""Number of images that `draw` puts on one sheet."""

_LEGEND = "Red, green and blue: the first three principal components of each image's rows."
_FIT_ROWS = 512  # rows that the components are fitted to: more would hardly change a colour and take seconds
_GREY = 128  # the value of a constant component

# Layout of the sheet, in pixels.
_WIDTH, _MAX_HEIGHT = 1440, 320
_MARGIN, _GUTTER, _GAP, _HEAD, _CAPTION = 40, 36, 4, 64, 58
_ASPECTS = (0.55, 3.0)  # least and greatest width / height of the box that a photograph is fitted into
_PAPER, _INK, _FAINT = (250, 250, 248), (32, 33, 36), (110, 112, 118)


@dataclass(frozen=True)
class Panel:
    """One image of a sheet: RGB `photo` of any resolution, orientation applied; `colours` [token rows, token
    columns, 3] of its whole canvas; its `plan`, with its place on the canvas; two captions.
    """

    photo: Image.Image
    colours: Colours
    plan: Plan
    name: str
    details: str


def draw(
    items: Sequence[tuple[str, Path, ImageResult]], family: Family, title: str, note: str = ""
) -> Image.Image:
    """Draw the first 24 of (name, file, result) on one sheet. Raises MediaError if a file cannot be read."""
    panels = []
    limits = MediaLimits()
    for name, path, (rows, metadata) in items[:MAX_IMAGES]:
        photo = Image.fromarray(composite_over_white(open_source(path, limits).decode(limits).pixels))
        photo.thumbnail((1024, 1024))  # at full size, two dozen could take gigabytes
        plan = family.plan(ImageSize(*metadata.original_size))
        colours = principal_colours(rows, family.token_map(plan))
        size = f"{metadata.original_size[0]}x{metadata.original_size[1]} pixels"
        tokens = f"{colours.shape[1]}x{colours.shape[0]} tokens"
        panels.append(Panel(photo, colours, plan, name, f"{size} · {tokens} · {len(rows)} rows"))
    count = f"The first {MAX_IMAGES} of {len(items)} images." if len(items) > MAX_IMAGES else ""
    return contact_sheet(panels, title, " ".join(filter(None, [_LEGEND, note, count])))


def principal_colours(rows: torch.Tensor, token_map: np.ndarray) -> Colours:
    """Return the colours, uint8 [token rows, token columns, 3], of embedding `rows` [n, width], any float
    dtype. `token_map` [token rows, token columns] has the index of the row at each place.

    Red, green and blue are the first three principal components of the mapped rows, each scaled from its 1st
    to its 99th percentile, with the sign that makes its largest loading positive. Missing components (few
    rows, constant rows) are mid-grey; values that are not finite count as zero.
    """
    placed = rows.detach().to("cpu", torch.float64).numpy()[token_map.ravel()]
    x = np.nan_to_num(placed, nan=0.0, posinf=0.0, neginf=0.0)
    noise = 1e-9 * np.abs(x).max()  # above float64's rounding errors, below one step of any row's dtype
    x = x - x.mean(axis=0)

    sample = x
    if len(x) > _FIT_ROWS:  # random with a fixed seed: every n-th row could come from a few columns only
        sample = x[np.random.default_rng(0).choice(len(x), _FIT_ROWS, replace=False)]
    # The eigenvectors of the small Gram matrix give those of the large covariance matrix.
    _, vectors = np.linalg.eigh(sample @ sample.T)
    directions = sample.T @ vectors[:, ::-1][:, :3]
    colours = np.full((len(x), 3), _GREY, dtype=np.uint8)
    for channel, direction in enumerate(directions.T):
        largest = direction[np.abs(direction).argmax()]
        if abs(largest) <= noise:
            continue
        scores = x @ (direction / largest)
        low, high = np.percentile(scores, (1, 99))
        if high - low > noise:
            colours[:, channel] = np.rint(255 * np.clip((scores - low) / (high - low), 0, 1))
    return colours.reshape(*token_map.shape, 3)


def contact_sheet(panels: Sequence[Panel], title: str, note: str = "") -> Image.Image:
    """Draw all panels on one RGB image 1440 pixels wide, two per line, scaled to fill the width.

    Photograph and colours are aligned: the canvas beyond the photograph is cropped. Raises ValueError if
    `panels` is empty.
    """
    if not panels:
        raise ValueError("a contact sheet needs at least one panel")
    lines = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    heights = [_line_height(line) for line in lines]
    height = 2 * _MARGIN + _HEAD + sum(heights) + (len(lines) - 1) * _CAPTION + _MARGIN
    sheet = Image.new("RGB", (_WIDTH, height), _PAPER)
    _draw_text(sheet, (_MARGIN, _MARGIN - 10), title, 24, _INK, _WIDTH - 2 * _MARGIN)
    _draw_text(sheet, (_MARGIN, _MARGIN + 22), note, 15, _FAINT, _WIDTH - 2 * _MARGIN)
    top = _MARGIN + _HEAD
    for line, line_height in zip(lines, heights, strict=True):
        left = _MARGIN
        for panel in line:
            box = round(_aspect(panel) * line_height), line_height
            _draw_panel(sheet, panel, (left, top), box)
            left += 2 * box[0] + _GAP + _GUTTER
        top += line_height + _CAPTION
    return sheet


def content_box(panel: Panel) -> tuple[float, float, float, float]:
    """Return the photograph's box on its colours: left, top, right, bottom in tokens."""
    plan = panel.plan
    rows, columns = panel.colours.shape[:2]
    across, down = columns / plan.canvas.width, rows / plan.canvas.height
    left, top = plan.offset
    right, bottom = left + plan.content.width, top + plan.content.height
    return left * across, top * down, right * across, bottom * down


def _aspect(panel: Panel) -> float:
    width, height = panel.photo.size
    return min(max(width / height, _ASPECTS[0]), _ASPECTS[1])


def _line_height(line: Sequence[Panel]) -> int:
    available = _WIDTH - 2 * _MARGIN - (len(line) - 1) * _GUTTER - len(line) * _GAP
    return min(_MAX_HEIGHT, int(available / sum(2 * _aspect(panel) for panel in line)))


def _draw_panel(sheet: Image.Image, panel: Panel, position: tuple[int, int], box: tuple[int, int]) -> None:
    (left, top), (width, height) = position, panel.photo.size
    scale = min(box[0] / width, box[1] / height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    colours = Image.fromarray(panel.colours)
    sheet.paste(panel.photo.resize(size, Image.Resampling.LANCZOS), position)
    sheet.paste(
        colours.resize(size, Image.Resampling.NEAREST, box=content_box(panel)), (left + size[0] + _GAP, top)
    )
    _draw_text(sheet, (left, top + size[1] + 6), panel.name, 15, _INK, 2 * box[0])
    _draw_text(sheet, (left, top + size[1] + 25), panel.details, 13, _FAINT, 2 * box[0])


def _draw_text(
    sheet: Image.Image,
    position: tuple[int, int],
    text: str,
    size: int,
    colour: tuple[int, int, int],
    width: int,
) -> None:
    """Draw one line of text in Pillow's default font, shortened in the middle to fit `width` pixels."""
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size)
    shortened, keep = text, len(text)
    while keep > 1 and (length := pen.textlength(shortened, font)) > width:
        keep = min(keep - 1, int(keep * width / length))
        shortened = f"{text[: keep // 2]}…{text[len(text) - (keep + 1) // 2 :]}"
    pen.text(position, shortened, fill=colour, font=font)
