"""Memory does not grow with the number of images. SOAK=1 (`make soak`) encodes ten times as many."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .helpers.abuse import ABUSE
from .helpers.images import noise, saved
from .helpers.waiting import HANG

SCALE = 10 if os.environ.get("SOAK") else 1
KIB_PER_IMAGE = 1.0

PROGRAM = """
    import ctypes, gc, sys
    from pathlib import Path
    import numpy
    from mm_encoder import CacheConfig, Encoder, MediaError

    checkpoint, count, leak, folder, *files = sys.argv[1:]
    images = [Path(file).read_bytes() for file in files]
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    kept = []

    def resident():
        gc.collect()
        trim(0)  # memory that the allocator keeps for reuse is no leak
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4  # KiB

    def run(images):
        futures = [encoder.submit(image) for image in images]
        for future in futures:
            try:
                future.result()
            except MediaError:
                pass
            kept.append(bytearray(int(leak)))

    def next_images():
        if folder:  # each is a miss, and both tiers are full before the warm-up ends
            return list(random.integers(0, 256, (25, 40, 40, 3), numpy.uint8))
        return (images * 25)[:25]

    random = numpy.random.default_rng(0)
    cache = CacheConfig(256 * 1024, folder, 1024**2, 256 * 1024) if folder else None
    with Encoder(checkpoint, device="cpu", queue_depth=20, cache=cache) as encoder:
        samples, done = [], 0
        while done < int(count) * 1.5:
            if done >= int(count) * 0.5:  # the first third warms up
                samples.append((done, resident()))
            run(next_images())
            done += 25
        assert encoder.stats().in_flight == 0
        if cache:
            stats = encoder.cache_stats()
            assert stats.misses == done and stats.memory_evictions > done / 2 < stats.disk_evictions
            assert stats.memory_bytes <= cache.memory_bytes and stats.disk_bytes <= cache.disk_bytes
    x, y = numpy.array(samples, float).T
    print(numpy.polyfit(x, y, 1)[0])
"""


def slope(checkpoint: Path, files: list[Path], count: int, leak: int = 0, cache: Path | None = None) -> float:
    """Return by how many KiB per image a new process grows over `count` images, after a warm-up."""
    program = textwrap.dedent(PROGRAM)
    arguments = [str(checkpoint), str(count), str(leak), str(cache or ""), *map(str, files)]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
        # Torch's threads wait for each other in busy loops, which is slow beside other busy processes. Each
        # malloc arena fills up slowly, which looks like growth in a short run.
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert (run.returncode, run.stderr) == (0, "")
    return float(run.stdout)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("good")
    files = {"one.jpg": saved(noise(160, 120), "JPEG"), "two.png": saved(noise(90, 60, "RGBA"), "PNG")}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


@pytest.fixture(scope="module")
def bad(good: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bad")
    cut = []
    for path in good:
        data = path.read_bytes()
        cut.append(folder / path.name)
        cut[-1].write_bytes(data[: len(data) * 2 // 3])
    text = folder / "text"
    text.write_bytes(b"<html>not found</html>")
    return [*cut, text, ABUSE / "D18_poison_idat.png"]


@pytest.mark.parametrize(("kind", "count"), [("good", 1000), ("bad", 1000), ("animated", 600)])
def test_memory_does_not_grow_with_the_number_of_images(
    glm53_checkpoint: Path, good: list[Path], bad: list[Path], kind: str, count: int
) -> None:
    files = {"good": good, "bad": bad, "animated": [ABUSE / "D30_anim.gif", ABUSE / "D30_anim.webp"]}
    grown = slope(glm53_checkpoint, files[kind], count * SCALE)
    print(f"\n{kind}: {count * SCALE} images, {grown * 1024:+.0f} bytes per image")
    assert grown < KIB_PER_IMAGE


def test_memory_does_not_grow_with_the_number_of_images_cached(
    glm53_checkpoint: Path, tmp_path: Path
) -> None:
    count = 1000 * SCALE
    grown = slope(glm53_checkpoint, [], count, cache=tmp_path / "cache")
    print(f"\ncached: {count} distinct images, {grown * 1024:+.0f} bytes per image")
    assert grown < KIB_PER_IMAGE


def test_a_leak_of_four_kib_per_image_is_detected(glm53_checkpoint: Path, good: list[Path]) -> None:
    assert slope(glm53_checkpoint, good, 300, leak=4096) > 2 * KIB_PER_IMAGE
