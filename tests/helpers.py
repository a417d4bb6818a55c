"""Files for tests: the abuse cases, and builders of pictures that Pillow cannot be asked to write."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from mm_encoder import Encoder, ImageResult, MediaPlanner
from mm_encoder.config import MediaLimits
from mm_encoder.errors import MediaDecodeError, MediaTooLargeError, UnsupportedMediaError
from mm_encoder.families.glm53 import Glm53, GlmTower
from mm_encoder.media.decode import decode
from mm_encoder.media.picture import Pixels
from mm_encoder.media.source import Source

ABUSE = Path(__file__).parent / "abuse"
LIMITS = MediaLimits()
ERRORS = {
    "InvalidImage": MediaDecodeError,
    "UnsupportedFormat": UnsupportedMediaError,
    "ImageTooLarge": MediaTooLargeError,
}
"""The names that expected.json gives to errors."""

Row = dict[str, Any]


def rows(*cases: str) -> list[Row]:
    """The rows of expected.json for these cases, all of them without any."""
    listed: list[Row] = json.loads((ABUSE / "expected.json").read_text())
    return [row for row in listed if not cases or row["case"] in cases]


def file_of(row: Row) -> str:
    """A parametrised test's name for a row."""
    return str(row["file"])


def case(name: str) -> bytes:
    return (ABUSE / name).read_bytes()


def decoded(data: bytes, *, exif_orientation: bool = True) -> Pixels:
    return decode(data, LIMITS, exif_orientation=exif_orientation).pixels


def shown_by_pillow(data: bytes, channels: int = 3) -> Pixels:
    """What Pillow makes of a file, turned as EXIF says: the oracle."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return np.array(image.convert("RGBA" if channels == 4 else "RGB"))


def same_pixels(one: Pixels, other: Pixels) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Random pixels, smoothed a little so that a JPEG's coefficients are not all at their largest."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 2 + 1, width // 2 + 1, 4), np.uint8)
    return Image.fromarray(coarse).resize((width, height)).convert(mode)


def saved(image: Image.Image, kind: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def exif(orientation: int, order: str = "<", *, kind: int = 3, count: int = 1) -> bytes:
    """An EXIF block of one entry, orientation."""
    value = struct.pack(order + ("H2x" if kind == 3 else "I"), orientation)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return head + struct.pack(order + "HHHI", 1, 0x0112, kind, count) + value + bytes(4)


# --- PNG ---------------------------------------------------------------------------------------------

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by number of channels


def png_chunk(name: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))


def ihdr(width: int, height: int, depth: int = 8, colour: int = 2, *, interlace: bool = False) -> bytes:
    return png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))


def png_rows(samples: np.ndarray[Any, Any], depth: int, *, interlace: bool = False) -> bytes:
    """Filtered rows (all of filter 0) of samples [h, w, channels], or of each of Adam7's passes."""
    passes = [samples[top::down, left::across] for left, top, across, down in ADAM7]
    lines = [row for part in (passes if interlace else [samples]) if part.size for row in part]
    return b"".join(b"\0" + _pack(row, depth) for row in lines)


def _pack(row: np.ndarray[Any, Any], depth: int) -> bytes:
    if depth == 16:
        return bytes(row.astype(">u2").tobytes())
    bits = np.unpackbits(row.astype(np.uint8).reshape(-1, 1), axis=1)[:, 8 - depth :]
    return np.packbits(bits.ravel()).tobytes()


def png_file(
    samples: np.ndarray[Any, Any],
    depth: int = 8,
    *,
    colour: int | None = None,
    interlace: bool = False,
    before: bytes = b"",
    rows: bytes | None = None,
    after: bytes = b"",
) -> bytes:
    """A PNG of samples [h, w, channels], with chunks `before` and `after` its pixel data; `rows` stands in
    for what that data inflates to.
    """
    height, width, channels = samples.shape
    head = ihdr(
        width, height, depth, COLOUR_TYPES[channels] if colour is None else colour, interlace=interlace
    )
    data = png_rows(samples, depth, interlace=interlace) if rows is None else rows
    pixels = png_chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + head + before + pixels + after + png_chunk(b"IEND")


# --- GIF ---------------------------------------------------------------------------------------------

GREYS = bytes(v for level in range(256) for v in (level, level, level))


def gif_blocks(payload: bytes) -> bytes:
    parts = [payload[i : i + 255] for i in range(0, len(payload), 255)]
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


def gif_codes(indices: bytes) -> bytes:
    """Indices as LZW codes of nine bits, cleared before they would grow."""
    codes = [code for i in range(0, len(indices), 250) for code in (256, *indices[i : i + 250])] + [257]
    bits = sum(code << 9 * i for i, code in enumerate(codes))
    return bytes(bits.to_bytes(-(-9 * len(codes) // 8), "little"))


def gif_control(flags: int, transparent: int = 0) -> bytes:
    return bytes([0x21, 0xF9, 4, flags, 0, 0, transparent, 0])


def gif_file(
    indices: np.ndarray[Any, Any],
    *,
    screen: tuple[int, int] | None = None,
    at: tuple[int, int] = (0, 0),
    palette: bytes = GREYS,
    local: bytes = b"",
    before: bytes = b"",
    interlace: bool = False,
    codes: bytes | None = None,
    after: bytes = b"\x3b",
) -> bytes:
    """A GIF of one frame of indices [h, w], `at` (left, top) on the screen, with blocks `before` it."""
    height, width = indices.shape
    order = [*range(0, height, 8), *range(4, height, 8), *range(2, height, 4), *range(1, height, 2)]
    lines = indices[order] if interlace else indices
    flags = (0x40 if interlace else 0) | (0x87 if local else 0)
    packed = gif_codes(lines.astype(np.uint8).tobytes()) if codes is None else codes
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", *(screen or (width, height)), 0x87 if palette else 0, 0, 0)
        + palette
        + before
        + b","
        + struct.pack("<HHHHB", *at, width, height, flags)
        + local
        + b"\x08"
        + gif_blocks(packed)
        + after
    )


# --- BMP ---------------------------------------------------------------------------------------------


def bmp_file(
    data: bytes, size: tuple[int, int], bits: int, *, palette: bytes = b"", compression: int = 0
) -> bytes:
    """A BMP of rows that are already packed; a negative height means from the top."""
    start = 54 + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, *size, 1, bits, compression, len(data), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + head + palette + data


# --- JPEG and WebP -----------------------------------------------------------------------------------


def segment(marker: int, payload: bytes = b"") -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def inserted(jpeg: bytes, extra: bytes) -> bytes:
    """A JPEG with bytes right behind its start."""
    return jpeg[:2] + extra + jpeg[2:]


def scans_apart(planes: list[Image.Image], factors: list[int], size: tuple[int, int]) -> bytes:
    """A sequential JPEG with a scan for each component. A grey JPEG's scan is just that, so the planes are
    saved as such; `factors` are their sampling factors (horizontal << 4 | vertical).
    """
    files = [saved(plane.convert("L"), "JPEG", quality=90) for plane in planes]
    first, start = files[0], files[0].index(b"\xff\xda")
    dqt, sof = first.index(b"\xff\xdb"), first.index(b"\xff\xc0")
    tables = first[sof + 13 : start]
    components = b"".join(bytes([i + 1, factor, 0]) for i, factor in enumerate(factors))
    frame = struct.pack(">BHHB", 8, size[1], size[0], len(planes)) + components
    data = b"\xff\xd8" + first[dqt:sof] + segment(0xC0, frame) + tables
    for i, file in enumerate(files):
        codes = file[file.index(b"\xff\xda") + 10 : -2]
        data += segment(0xDA, bytes([1, i + 1, 0, 0, 63, 0])) + codes
    return data + b"\xff\xd9"


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    """A WebP of these chunks."""
    body = b"".join(
        name + struct.pack("<I", len(payload)) + payload + bytes(len(payload) & 1) for name, payload in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to bring about."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come to be in 30 s"
        time.sleep(0.001)


# --- images held on their way ------------------------------------------------------------------------


def in_flight(encoder: Encoder) -> tuple[int, int, int, int]:
    """Images with no outcome yet, callers in line, slots in use, bytes in use."""
    health = encoder.health()
    return encoder.stats().in_flight, health.waiting, health.queue_length, health.queue_bytes


def nothing_left(encoder: Encoder) -> None:
    """Everything was given back, and every image had exactly one outcome."""
    until(lambda: in_flight(encoder) == (0, 0, 0, 0))
    stats = encoder.stats()
    outcomes = stats.succeeded + stats.failed + stats.cancelled + stats.late + stats.refused
    assert outcomes == stats.requests


class Hold:
    """Holds the calls of `owner.name` for which `when` is true until let go; tells when one has come."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        when: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self._arrived, self._opened = threading.Semaphore(0), threading.Event()
        call = getattr(owner, name)

        def held(*arguments: Any) -> Any:
            if when(*arguments):
                self._arrived.release()
                assert self._opened.wait(60), f"{name} was held for a minute"
            return call(*arguments)

        monkeypatch.setattr(owner, name, held)

    def wait(self, calls: int = 1) -> None:
        """Until so many more calls have come."""
        for _ in range(calls):
            assert self._arrived.acquire(timeout=30)

    def let_go(self) -> None:
        """Let those that wait and all that come go on."""
        self._opened.set()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


def hold_towers(monkeypatch: pytest.MonkeyPatch) -> Hold:
    return Hold(monkeypatch, GlmTower, "forward")


STAGES = ("waiting", "queued", "opening", "decoding", "patches", "ready", "running")
FIRST_SIZE, VICTIM_SIZE = (120, 60), (60, 180)


class Scene:
    """An encoder whose `victim` comes to a stage and no further, with others before and behind it.

    As a context manager it holds that stage; who is to be the victim begins it and calls `reached`.
    Afterwards `others_are_well` lets everything go on and looks at the rest.
    """

    def __init__(self, stage: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage, self.victim = stage, saved(noise(*VICTIM_SIZE), "PNG")
        depth = 2 if stage == "waiting" else 9
        self.encoder = Encoder(checkpoint, device="cpu", queue_depth=depth, preprocess_workers=1)
        first = saved(noise(*FIRST_SIZE), "PNG")
        self._images = [first, *(saved(noise(40 + 30 * i, 50, seed=i), "PNG") for i in range(4))]
        self._wanted = self.encoder.generate(self._images)
        self._others: list[Future[ImageResult]] = []
        size = FIRST_SIZE if stage in ("waiting", "queued", "ready") else VICTIM_SIZE
        grid = MediaPlanner(checkpoint).plan(size).grid_thws[0]
        self._hold = {
            "queued": lambda: Hold(monkeypatch, Source, "decode", lambda source, _: source.size == size),
            "opening": lambda: Hold(monkeypatch, Glm53, "open", lambda _, data, *__: data is self.victim),
            "decoding": lambda: Hold(monkeypatch, Source, "decode", lambda source, _: source.size == size),
            "patches": lambda: Hold(monkeypatch, Glm53, "patches", lambda *call: call[2].source == size),
        }.get(stage, lambda: Hold(monkeypatch, GlmTower, "forward", lambda *call: call[2] == [grid]))()

    def __enter__(self) -> Scene:
        self._submit(1)
        if self.stage in ("waiting", "queued", "ready"):
            self._hold.wait()  # the first is held
        if self.stage == "waiting":
            self._submit(2)  # the queue is full
        return self

    def __exit__(self, *_: object) -> None:
        self._hold.let_go()
        self.encoder.close()

    def reached(self) -> None:
        """Wait until the victim is where it is to be held, and send others after it."""
        scheduler = self.encoder._engine.scheduler
        if self.stage == "waiting":
            until(lambda: scheduler.slots.waiting == 1)
            return
        if self.stage == "queued":
            until(lambda: len(scheduler._queued) == 1)
        elif self.stage == "ready":
            until(lambda: len(scheduler._ready) == 1)
        else:
            self._hold.wait()
        self._submit(2)

    def let_go(self) -> None:
        self._hold.let_go()

    def others_are_well(self) -> None:
        """What the others got is what they get undisturbed, and nothing is left of anyone."""
        self.let_go()
        for future, wanted in zip(self._others, self._wanted, strict=False):
            rows, metadata = future.result(timeout=30)
            assert torch.equal(rows, wanted.tensor)
            assert metadata == wanted.metadata
        nothing_left(self.encoder)

    def _submit(self, count: int) -> None:
        for image in self._images[len(self._others) :][:count]:
            self._others.append(self.encoder.submit(image))


# --- programs of their own ---------------------------------------------------------------------------

BEGINNING = """
import asyncio, atexit, faulthandler, gc, os, signal, sys, threading, time, warnings
began = time.monotonic()
import numpy, torch
import mm_encoder
from mm_encoder.families.glm53 import GlmTower

torch.set_num_threads(1)
faulthandler.register(signal.SIGALRM, chain=True)  # says where every thread is, and then ends the program
# Not before the imports, which take what they take; a machine that is busy with other things gets longer.
patience = max(1, (time.monotonic() - began) / 3)
signal.alarm(int(LIMIT * patience))
CHECKPOINT = sys.argv[1]
IMAGE = numpy.zeros((50, 50, 3), numpy.uint8)
forward = GlmTower.forward
arrived, opened = threading.Semaphore(0), threading.Event()

def encoder(**settings):
    return mm_encoder.Encoder(CHECKPOINT, device="cpu", **settings)

def hold():
    def held(tower, *arguments):
        arrived.release()
        opened.wait()
        return forward(tower, *arguments)
    GlmTower.forward = held

def be_slow():
    # In and out of native code, where a thread must not be when the interpreter goes.
    def slow(tower, *arguments):
        matrix = torch.ones(400, 400)
        for _ in range(30):
            matrix = (matrix @ matrix).clamp(-1, 1)
        return forward(tower, *arguments)
    GlmTower.forward = slow

def until(condition):
    while not condition():
        time.sleep(0.001)
"""
"""What every program begins with; LIMIT is in seconds."""


def outcome_of(program: str, checkpoint: Path, *options: str, limit: int = 10) -> tuple[int, str, str]:
    """Exit code, output and errors of a program that hangs, and says where, after `limit` seconds."""
    source = BEGINNING.replace("LIMIT", str(limit)) + textwrap.dedent(program)
    run = subprocess.Popen(
        [sys.executable, *options, "-c", source, str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = run.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # and with it what it left, such as a forked child that hangs
        output, errors = run.communicate()
    return run.returncode, output, errors
