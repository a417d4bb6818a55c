"""The native kernels, called through `ctypes`. Only this module knows their library.

`kernels` is None in an install without the library; its callers (`media.patches`, `media.png`) then compute
the same bits in Python.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from . import _manifest
from .errors import RuntimeMismatchError

LIBRARY = Path(__file__).with_name("_kernels.so")
_INTERFACE = 2
_OUT_OF_MEMORY = b"out of memory"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _int64(names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names.split()]


class _Pixels(ctypes.Structure):
    _fields_ = (
        ("buffer", c_void_p),
        *_int64("bytes first row_stride pixel_stride width height channels"),
    )


class _PatchifyRequest(ctypes.Structure):
    _fields_ = (
        ("pixels", _Pixels),
        *_int64("arithmetic content_width content_height left top canvas_width canvas_height"),
        *_int64("fill patch merge"),
        ("out", c_void_p),
        *_int64("out_bytes level"),
    )


class Kernels:
    """The functions of `native/kernels.h`. They run without the GIL."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.mm_interface.restype = c_int64
        found = self._library.mm_interface()
        if found != _INTERFACE:
            raise OSError(f"{library.name} has interface {found}, this package needs {_INTERFACE}")
        self._library.mm_level.restype = c_char_p
        self._library.mm_level.argtypes = (c_int64,)
        self._library.mm_resize_and_patchify.restype = c_char_p
        self._library.mm_resize_and_patchify.argtypes = (ctypes.POINTER(_PatchifyRequest),)
        unfilter = self._library.mm_unfilter
        unfilter.restype = c_char_p
        unfilter.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64)
        levels = iter(lambda: self._library.mm_level(len(names)), None)
        names: list[str] = []
        names.extend(name.decode() for name in levels)
        self.levels = tuple(names)
        """Instruction sets that there are kernels for and this CPU supports, the most basic one first."""

    def resize_and_patchify(
        self,
        pixels: Bytes,
        *,
        content: tuple[int, int],
        canvas: tuple[int, int],
        offset: tuple[int, int],
        fill: int,
        patch: int,
        merge: int,
        arithmetic: int,
        out: Bytes,
        level: int = -1,
    ) -> None:
        """Resize uint8 `pixels` [h, w, 3 or 4] to `content`, place them at `offset` on a `canvas` filled with
        `fill`, and write patches [canvas height · width / patch², 3·patch²] to the contiguous `out`.

        Sizes are (width, height), the offset is (left, top). `arithmetic` is 0 for Pillow's bicubic, 1 for
        Torch's; `level` is an index of `levels`, -1 for the last. Raises ValueError and MemoryError.
        """
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.strides[2] != 1:
            raise ValueError(f"pixels must be uint8 [h, w, 3 or 4], got {pixels.dtype} {pixels.shape}")
        height, width, channels = pixels.shape
        steps = (pixels.strides[0] * (height - 1), pixels.strides[1] * (width - 1))
        before = -sum(min(step, 0) for step in steps)
        size = before + sum(max(step, 0) for step in steps) + channels
        start = pixels.ctypes.data - before
        view = _Pixels(start, size, before, *pixels.strides[:2], width, height, channels)
        numbers = (arithmetic, *content, *offset, *canvas, fill, patch, merge)
        if any(abs(number) >> 63 for number in numbers):  # ctypes would silently keep the lower bits
            raise ValueError(f"sizes must fit 64 bits, got {numbers}")
        request = _PatchifyRequest(view, *numbers, _writable(out), out.nbytes, level)
        _check(self._library.mm_resize_and_patchify(request))

    def unfilter(
        self, data: Bytes, height: int, row_bytes: int, pixel_bytes: int, out: Bytes, level: int = -1
    ) -> None:
        """Undo the row filters of a PNG. `data` has `height` rows of one filter type byte and `row_bytes`
        bytes; writes the rows to `out`. Raises ValueError and MemoryError.
        """
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(f"data must be contiguous uint8, got {data.dtype}")
        source, sizes = (data.ctypes.data, data.nbytes), (height, row_bytes, pixel_bytes)
        _check(self._library.mm_unfilter(*source, *sizes, _writable(out), out.nbytes, level))


def _writable(out: Bytes) -> int:
    if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out must be contiguous writable uint8, got {out.dtype} {out.shape}")
    return int(out.ctypes.data)


def _check(message: bytes | None) -> None:
    if message == _OUT_OF_MEMORY:
        raise MemoryError("not enough memory to preprocess an image")
    if message is not None:
        raise ValueError(message.decode())


def _load() -> Kernels | None:
    if not _manifest.check(LIBRARY):
        return None
    try:
        return Kernels(LIBRARY)
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        raise RuntimeMismatchError(
            f"the native library of mm-encoder cannot be used here ({error}); reinstall mm-encoder, "
            "which rebuilds the library of an editable install too"
        ) from error


kernels = _load()
