"""Whose fault it is: what another file cures is the media's, what another attempt may cure is the host's."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from isal import isal_zlib
from PIL import Image, ImageFile, _webp

from mm_encoder import Encoder, _native
from mm_encoder.config import MediaLimits
from mm_encoder.errors import DeviceOutOfMemoryError, MediaDecodeError, MediaError, MediaTooLargeError
from mm_encoder.media.faults import host_fault
from mm_encoder.media.source import open_source
from mm_encoder.planner import MediaPlanner

from ..helpers.images import LIMITS, decoded, noise, saved

JPEG, PNG, WEBP = (saved(noise(45, 37), kind) for kind in ("JPEG", "PNG", "WEBP"))


@pytest.mark.parametrize(
    "reason", ["Insufficient memory (case 4)", "Memory allocation failure", "out of memory when reading"]
)
def test_libjpegs_words_for_it(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplejpeg, "decode_jpeg", _raising(ValueError(reason)))
    with pytest.raises(MemoryError):
        decoded(JPEG)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", _raising(ValueError("Premature end of JPEG file")))
    with pytest.raises(MediaDecodeError):
        decoded(JPEG)


def test_a_decoder_that_does_not_say_why_is_asked_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_webp, "WebPAnimDecoder", _raising(OSError("could not create decoder object")))
    with pytest.raises(MediaDecodeError):
        decoded(WEBP)
    monkeypatch.setattr(np, "empty", _raising(MemoryError()))
    with pytest.raises(MemoryError):
        decoded(WEBP)
    with pytest.raises(MemoryError):
        decoded(saved(noise(45, 37), "AVIF", speed=10)[:-50])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RecursionError(),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EIO, "Input/output error"),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
def test_a_decoder_passes_the_hosts_faults_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = Image.open(io.BytesIO(PNG))
    palette = saved(noise(45, 37).quantize(9), "PNG")
    monkeypatch.setattr(_webp, "WebPAnimDecoder", _raising(error))
    monkeypatch.setattr(ImageFile.ImageFile, "load", _raising(error))
    for data in (WEBP, palette, lazy):
        with pytest.raises(type(error)) as caught:
            open_source(data, LIMITS).decode(LIMITS)
        assert caught.value is error


def test_the_native_kernels_and_isal_may_lack_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isal_zlib, "decompressobj", _raising(MemoryError()))
    if _native.kernels is not None:
        with pytest.raises(MemoryError):
            decoded(PNG)
    assert isinstance(host_fault(OSError(errno.ENOMEM, "Cannot allocate memory")), MemoryError)
    assert isinstance(host_fault(ValueError("Error -4 while decompressing data")), MemoryError)
    assert isinstance(host_fault(OSError("decoder error -9 when reading image file")), MemoryError)
    assert host_fault(OSError("image file is truncated")) is None
    assert host_fault(FileNotFoundError(errno.ENOENT, "No such file or directory")) is None


def _raising(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


# --- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ELOOP])
def test_a_path_that_is_wrong_is_the_callers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", _raising(OSError(number, os.strerror(number))))
    with pytest.raises(MediaDecodeError, match=f"cannot read x.png: {os.strerror(number)}"):
        open_source(Path("x.png"), LIMITS)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_what_the_system_refuses_is_not_the_medias(
    number: int, monkeypatch: pytest.MonkeyPatch, glm53_checkpoint: Path, planner: MediaPlanner
) -> None:
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        monkeypatch.setattr(os, "open", _raising(OSError(number, os.strerror(number))))
        for read in (planner.plan, planner.prepare_inputs, encoder.generate):
            with pytest.raises(OSError, match=os.strerror(number)) as caught:
                read(Path("x.png"))
            assert caught.value.errno == number
            assert not isinstance(caught.value, MediaError)


def test_too_little_memory_for_a_file_is_not_the_medias(
    monkeypatch: pytest.MonkeyPatch, glm53_checkpoint: Path, planner: MediaPlanner
) -> None:
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        monkeypatch.setattr(os, "open", _raising(OSError(errno.ENOMEM, "no memory")))
        for read in (planner.plan, planner.prepare_inputs, encoder.generate):
            with pytest.raises(DeviceOutOfMemoryError):
                read(Path("x.png"))


def test_reading_follows_the_file_and_not_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    for limit in (len(PNG), 1 << 45, 1 << 63, 1 << 80):
        assert open_source(path, MediaLimits(max_bytes=limit)).encoded == PNG
    with pytest.raises(MediaTooLargeError):
        open_source(path, MediaLimits(max_bytes=len(PNG) - 1))


def test_a_file_that_grows_while_it_is_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    stat = os.fstat

    def smaller(number: int) -> os.stat_result:
        found = list(stat(number))
        found[6] = 9
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", smaller)
    assert open_source(path, LIMITS).encoded == PNG
    with pytest.raises(MediaTooLargeError):
        open_source(path, MediaLimits(max_bytes=20))
