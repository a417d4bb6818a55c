"""The files of tests/abuse and the outcomes that its expected.json lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mm_encoder.errors import MediaDecodeError, MediaTooLargeError, UnsupportedMediaError

ABUSE = Path(__file__).parent.parent / "abuse"
ERRORS = {
    "InvalidImage": MediaDecodeError,
    "UnsupportedFormat": UnsupportedMediaError,
    "ImageTooLarge": MediaTooLargeError,
}
"""Error names of expected.json to exception classes."""

Row = dict[str, Any]


def rows(*cases: str) -> list[Row]:
    """Return the rows of expected.json for these cases; all rows if no case is given."""
    listed: list[Row] = json.loads((ABUSE / "expected.json").read_text())
    return [row for row in listed if not cases or row["case"] in cases]


def file_of(row: Row) -> str:
    """Return the file name of a row: the id of a parametrized test."""
    return str(row["file"])


def case(name: str) -> bytes:
    return (ABUSE / name).read_bytes()
