"""The build backend: setuptools, plus auditwheel for wheels built on Linux.

An editable install is used only on this machine, so it does not need auditwheel.
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
    """Return setuptools' requirements, plus auditwheel, which finds the oldest glibc that suffices."""
    wanted = build_meta.get_requires_for_build_wheel(config_settings)
    return [*wanted, "auditwheel>=6.8"] if sys.platform == "linux" else wanted
