"""Time from bytes to patches at each family's released settings, beside the peers; the time of single steps;
and how two preprocessing threads affect each other and a third thread.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

import numpy as np
import simplejpeg
import torch
from PIL import Image

from mm_encoder import _native
from mm_encoder.config import MediaLimits
from mm_encoder.contract import ImageSize
from mm_encoder.families.family import Family
from mm_encoder.families.registry import load_family
from mm_encoder.media.geometry import resize_bicubic_pillow, resize_bicubic_torch
from mm_encoder.media.patches import Bicubic
from mm_encoder.media.source import open_source
from mm_encoder.runtime import native_summary

from .samples import config_folder, detailed, photo, version
from .timing import medians, ratio, table

FAMILIES = ("glm53", "kimi_k3", "deepseek41")
LIMITS = MediaLimits()
Work = Callable[[bytes], object]


def samples() -> dict[str, bytes]:
    return {
        "JPEG 224x224": photo(224, 224),
        "JPEG 640x480": detailed(640, 480),
        "JPEG 1920x1080": detailed(1920, 1080),
        "JPEG 1920x1080, smooth": photo(1920, 1080),
        "JPEG 3840x2160": detailed(3840, 2160),
        "JPEG 3840x2160, smooth": photo(3840, 2160),
        "PNG 1024x1024, noisy": photo(1024, 1024, "PNG", 8),
        "PNG 1920x1080": detailed(1920, 1080, "PNG"),
        "WebP 1920x1080": detailed(1920, 1080, "WEBP"),
    }


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"\nnative kernels: {native_summary()}")
    try:
        for name in FAMILIES:
            bytes_to_patches(name)
        resizing()
        png_decoders()
        two_threads()
    finally:
        torch.set_num_threads(threads)


def by_pillow(data: bytes) -> object:
    return np.asarray(Image.open(io.BytesIO(data)))


def decode(data: bytes) -> object:
    return open_source(data, LIMITS).decode(LIMITS)


def prepare(family: Family, data: bytes) -> object:
    source = open_source(data, LIMITS)
    return family.patches(source.decode(LIMITS), family.plan(source.size))


def bytes_to_patches(name: str) -> None:
    folder = config_folder(name)
    _, family = load_family(folder)
    peers = {"mm-libtorch-encoder": libtorch(str(folder), family.checkpoints[0])}
    if name == "glm53":
        peers |= transformers()
    rows = []
    for sample, data in samples().items():
        works: dict[str, Callable[[], object] | None] = {
            "turbo": partial(simplejpeg.decode_jpeg if sample.startswith("JPEG") else by_pillow, data),
            "decode": partial(decode, data),
            "ours": partial(prepare, family, data),
            "python": partial(in_python, family, data),
            **{peer: bound(work, data) for peer, work in peers.items()},
        }
        ms = medians(works)
        ours, decoded, peer = ms["ours"], ms["turbo"], ms["mm-libtorch-encoder"]
        rows.append([sample, *ms.values(), ratio(ours, decoded), ratio(peer, ours)])
    table(
        f"Bytes to patches, {family.checkpoints[0]}, 1 thread, ms (median of 9)",
        [
            "image",
            f"libjpeg-turbo alone (others: Pillow {version('pillow')})",
            "our decode",
            "**bytes to patches**",
            "without native kernels",
            *(f"{peer} {version(peer.split()[0])}" for peer in peers),
            "ours / decode alone",
            "peer / ours",
        ],
        rows,
    )


def resizing() -> None:
    """Compare resizes. Ours also makes patches; the others only resize."""
    native = _native.kernels
    assert native is not None, "this table measures the native kernels, which this install does not have"
    rows: list[list[object]] = []
    for source, target in (((1920, 1080), (1918, 1078)), ((3840, 2160), (1920, 1080))):
        pixels = np.asarray(Image.open(io.BytesIO(detailed(*source))))
        size = ImageSize(*target)
        works: dict[str, Callable[[], object] | None] = {
            "pillow": partial(resize_bicubic_pillow, pixels, size),
            "torch": partial(resize_bicubic_torch, np.array(pixels), size),
        }
        for bicubic, (level, name) in product(Bicubic, enumerate(native.levels)):
            works[f"{bicubic.name} {name}"] = partial(
                native.resize_and_patchify,
                pixels,
                content=size,
                canvas=ImageSize(1932, 1092),
                offset=(0, 0),
                fill=0,
                patch=14,
                merge=2,
                arithmetic=bicubic,
                out=np.empty((78 * 138, 588), np.uint8),
                level=level,
            )
        ms = medians(works)
        best = (ms[f"{bicubic.name} {native.levels[-1]}"] for bicubic in Bicubic)
        gains = (ratio(ms[name], ours) for name, ours in zip(("pillow", "torch"), best, strict=True))
        rows.append([f"{source[0]}x{source[1]} to {target[0]}x{target[1]}", *ms.values(), *gains])
    table(
        "Bicubic, same bits: theirs resizes, ours also makes patches, 1 thread, ms (median of 9)",
        [
            "sizes",
            f"Pillow {version('pillow')}",
            f"torch {version('torch')}",
            *(f"ours as {bicubic.name.lower()}, {name}" for bicubic in Bicubic for name in native.levels),
            "Pillow / ours",
            "torch / ours",
        ],
        rows,
    )


def png_decoders() -> None:
    others: dict[str, Work | None] = {
        "pyspng": optional("pyspng", "load"),
        "imagecodecs": optional("imagecodecs", "png_decode"),
    }
    rows = []
    for name, data in samples().items():
        if name.startswith("PNG"):
            works: dict[str, Callable[[], object] | None] = {
                "ours": partial(decode, data),
                "pillow": partial(by_pillow, data),
                "torchvision": bound(torchvision_png(), data),
                **{other: bound(work, data) for other, work in others.items()},
            }
            ms = medians(works)
            rows.append([name, *ms.values(), ratio(ms["pillow"], ms["ours"])])
    names = ["pillow", "torchvision", *others]
    columns = ["image", "**ours**", *(f"{n} {version(n)}" for n in names), "Pillow / ours"]
    table("A PNG decoded, 1 thread, ms (median of 9)", columns, rows)


def two_threads() -> None:
    _, family = load_family(config_folder("glm53"))
    rows: list[list[object]] = []
    for name, data, count in (
        ("JPEG 1920x1080", detailed(1920, 1080), 60),
        ("JPEG 3840x2160", detailed(3840, 2160), 12),
    ):
        single: list[float] = []
        both: list[float] = []
        late: list[float] = []
        for _ in range(5):
            single.append(images_per_second(1, count, family, data))
            both.append(images_per_second(2, count, family, data))
            with ticking() as ticks:
                images_per_second(2, count, family, data)
            late += ticks
        one, two = float(np.median(single)), float(np.median(both))
        rows.append([name, one, two, f"{two / one:.2f}x", float(np.percentile(late, 99)), max(late)])
    table(
        "Two threads, GLM-5.3: images/s (median of 5), and the wake-up times of a third that sleeps for 1 ms",
        ["image", "1 thread", "2 threads", "gain (target 1.8x)", "its p99 ms (target 3)", "its longest ms"],
        rows,
    )


def images_per_second(threads: int, count: int, family: Family, data: bytes) -> float:
    def work() -> None:
        for _ in range(count // threads):
            prepare(family, data)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return count / (time.perf_counter() - begun)


@contextmanager
def ticking() -> Iterator[list[float]]:
    """Run a thread that sleeps for 1 ms at a time; yield its list of milliseconds between wake-ups."""
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            ticks.append((now - last) * 1e3)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield ticks
    finally:
        stop.set()
        thread.join()


def in_python(family: Family, data: bytes) -> object:
    """Prepare without native kernels, as in a pure install."""
    kernels, _native.kernels = _native.kernels, None
    try:
        return prepare(family, data)
    finally:
        _native.kernels = kernels


# --- peers -------------------------------------------------------------------------------------------


def bound(work: Work | None, data: bytes) -> Callable[[], object] | None:
    return None if work is None else lambda: work(data)


def optional(package: str, function: str) -> Work | None:
    try:
        work: Work = getattr(__import__(package), function)
    except ImportError:
        return None
    return work


def torchvision_png() -> Work | None:
    try:
        from torchvision.io import decode_png  # type: ignore[import-untyped]
    except ImportError:
        return None
    return lambda data: decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def libtorch(folder: str, model: str) -> Work | None:
    """Return the peer's planner. It prints to stderr for each image."""
    try:
        from mm_libtorch_encoder import MediaPlanner, ResolvedMedia

        planner = MediaPlanner(folder, model)
    except Exception as error:
        print(f"mm-libtorch-encoder is left out: {error}")
        return None
    return lambda data: planner.prepare_inputs(ResolvedMedia(data))


def transformers() -> dict[str, Work | None]:
    """Return the two GLM-5.3 processors of transformers."""
    try:
        from transformers.models.glm5_next.image_processing_glm5_next import Glm5NextImageProcessor
        from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
    except ImportError as error:
        print(f"transformers is left out: {error}")
        return {"transformers": None, "transformers PIL": None}
    fast, slow = Glm5NextImageProcessor(), Glm5NextImageProcessorPil()
    return {
        "transformers": lambda data: fast(Image.open(io.BytesIO(data)), return_tensors="pt"),
        "transformers PIL": lambda data: slow(Image.open(io.BytesIO(data)), return_tensors="pt"),
    }
