"""Whose fault a failed read or decode is: the media's, or that of the host, which ran out of something."""

from __future__ import annotations

import errno
import re
import sys

import numpy as np

from ..contract import ImageSize

# What another file cures: this one is missing, is none, or is not for this process.
_CALLERS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS}
    | {errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.ENOTSUP}
)
# How the libraries that decode say that an allocation failed: libjpeg, TurboJPEG, zlib's -4, libavif,
# libheif, and Pillow's codecs (-9; -8 where zlib cannot begin).
_OUT_OF_MEMORY = re.compile(
    r"insufficient memory|out of memory|memory allocation|cannot allocate|can't allocate|bad_alloc"
    r"|\berror -4\b|decoder error -[89]\b|bad configuration when",
    re.IGNORECASE,
)
_NO_MEMORY = "not enough memory to decode an image"
# Bytes per pixel, and in all, that decoding takes at most on the way to its pixels: of the formats whose
# libraries do not always say that an allocation failed.
_WORK_PER_PIXEL = {"WebP": 24, "WEBP": 24, "AVIF": 24, "HEIC": 24, "HEIF": 24, "TIFF": 16}
_WORK = 16 << 20

# Whose types of exception decoders raise.
_DECODERS = sys.stdlib_module_names | {"PIL", "numpy", "simplejpeg", "pillow_heif", "isal", "igzip_lib"}
_DECODERS |= {__name__.partition(".")[0]}


def is_callers(error: OSError | ValueError) -> bool:
    """Return whether opening a file failed for a reason that another path cures."""
    return not isinstance(error, OSError) or error.errno in _CALLERS


def is_foreign(error: BaseException) -> bool:
    """Return whether `error` was raised by code of the host's, which a signal handler may do anywhere, and a
    file object in every read. Only its type tells: one that no decoder raises.
    """
    kind = type(error)
    if kind.__module__ == "builtins":  # such as TimeoutError("too late"): the system gives a number
        return isinstance(error, OSError) and error.errno is None and kind is not OSError
    return kind.__module__.partition(".")[0] not in _DECODERS


def host_fault(error: BaseException) -> BaseException | None:
    """Return what to raise if `error` is the host's fault, None if it can be the media's.

    The host's are too little memory, as MemoryError whatever the library called it; too deep a stack; what
    its own code raised; and whatever the system refused, such as a descriptor or a read, as it gave it.
    """
    if isinstance(error, (MemoryError, RecursionError)) or is_foreign(error):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return MemoryError(_NO_MEMORY)
    if isinstance(error, OSError) and error.errno is not None:
        return None if is_callers(error) else error
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return error
    return MemoryError(_NO_MEMORY) if is_out_of_memory(str(error)) else None


def is_out_of_memory(reason: str) -> bool:
    """Return whether a decoder's message says that an allocation failed."""
    return _OUT_OF_MEMORY.search(reason) is not None


def raise_host_fault(error: BaseException) -> None:
    """Raise what `host_fault` says, if anything."""
    fault = host_fault(error)
    if fault is error:
        raise error
    if fault is not None:
        raise fault from error


def check_memory(kind: str, size: ImageSize) -> bool:
    """Return whether images of this kind are decoded by a library that does not always say why it failed.

    Raises MemoryError if the host could not give what it takes: that was why. If it could, there may have
    been too little all the same: failing gives memory back.
    """
    per_pixel = _WORK_PER_PIXEL.get(kind)
    if per_pixel:
        np.empty(_WORK + per_pixel * size.width * size.height, np.uint8)
    return per_pixel is not None
