"""The build backend: setuptools, and auditwheel where a wheel is built on Linux.

An editable install is for this machine alone and does without it.
"""

from __future__ import annotations

import sys
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What setuptools asks for, and what finds the oldest glibc that the library runs with."""
    wanted = build_meta.get_requires_for_build_wheel(config_settings)
    return [*wanted, "auditwheel>=6.8"] if sys.platform == "linux" else wanted
