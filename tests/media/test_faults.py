"""Whose fault it is: what another file cures is the media's, what another attempt may cure is the host's."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
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
from ..helpers.waiting import HANG

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


def test_a_decoder_that_does_not_say_why_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure gave back the memory that it had lacked."""
    real, calls = _webp.WebPAnimDecoder, list[bytes]()

    def fails_once(data: bytes) -> object:
        calls.append(data)
        if len(calls) == 1:
            raise OSError("could not create decoder object")
        return real(data)

    wanted = decoded(WEBP)
    monkeypatch.setattr(_webp, "WebPAnimDecoder", fails_once)
    assert (decoded(WEBP) == wanted).all()
    assert len(calls) == 2


OUT_OF_MEMORY = """
import ctypes, faulthandler, io, resource, sys
from pathlib import Path
import numpy as np
from PIL import Image
from mm_encoder.config import MediaLimits
from mm_encoder.errors import MediaError
from mm_encoder.media.decode import decode

faulthandler.enable()
FORMATS = {
    "JPEG": {},
    "JPEG progressive": {"progressive": True},
    "PNG": {"compress_level": 1},
    "WEBP": {"method": 0},
    "WEBP lossless": {"lossless": True, "method": 0},
    "GIF": {},
    "BMP": {},
    "TIFF": {},
    "TIFF deflate": {"compression": "tiff_adobe_deflate"},
    "TIFF jpeg": {"compression": "jpeg"},
    "AVIF": {"speed": 10},
}
SIDE = 1000
ramp = np.add.outer(np.arange(SIDE), np.arange(SIDE)).astype(np.uint8)
image = Image.fromarray(np.stack([ramp, ramp.T, ramp[::-1]], -1))

def saved(image, name):
    buffer = io.BytesIO()
    image.save(buffer, name.split()[0], **FORMATS[name])
    return buffer.getvalue()

def limit(spare):
    ctypes.CDLL(None).malloc_trim(0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, -1))

for name in FORMATS:
    large, small = saved(image, name), saved(image.resize((32, 32)), name)
    outcomes = set()
    for spare in (*range(0, 36, 4), 400):
        decode(small, MediaLimits())
        limit(spare << 20)
        try:
            decode(large, MediaLimits())
            outcome = "decoded"
        except MediaError as error:
            outcome = f"called bad with {spare} MiB to spare: {error}, from {error.__cause__!r}"
        except MemoryError:
            outcome = "too little memory"
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        outcomes.add(outcome)
    assert "decoded" in outcomes, name
    print(name, outcomes - {"decoded", "too little memory"} or "right", flush=True)
    print(name, outcomes, file=sys.stderr)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory with Linux's RLIMIT_AS")
def test_every_decoder_may_run_out_of_real_memory() -> None:
    """Good images, and less and less memory for them: none is called bad, and no library crashes."""
    run = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=False, timeout=HANG
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(lines) == 11
    assert all(line.endswith(" right") for line in lines), run.stdout
    ran_out = [line for line in run.stderr.splitlines() if "too little memory" in line]
    assert ran_out, run.stderr  # the limit limits; how many run out depends on what the heap has left


class Late(Exception):
    """What a signal handler of the host's raises."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RecursionError(),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EIO, "Input/output error"),
        RuntimeError("can't start new thread"),
        TimeoutError("the host's time is up"),
        Late("the host's time is up"),
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


@pytest.mark.parametrize(
    "error", [Late(), TimeoutError("the time is up"), OSError("out of the blue")], ids=repr
)
def test_what_the_host_raises_while_a_file_is_read_is_not_the_medias(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", _raising(error))
    with pytest.raises(type(error)) as caught:
        open_source(Path("x.png"), LIMITS)
    assert caught.value is error


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
