"""Hit rates of the memory tier compared with LRU, and the cost of a hit."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import torch

from mm_encoder.cache.entry import Entry
from mm_encoder.cache.memory import MemoryTier
from mm_encoder.contract import ImageMetadata

from .timing import table

IMAGES = 5000
REQUESTS = 100_000
SHARES = (0.05, 0.10, 0.25)
METADATA = ImageMetadata("m", "0" * 64, 1, (1, 1), "bfloat16", "cpu", (1, 1), (0, 1), ((1, 2, 2),), (1, 1))

Trace = list[tuple[int, bool]]
"""Requested images in order, and whether each counts: requests for images that never return do not."""


class SizedEntry(Entry):
    """An entry with a pretended size, to run the real tier without gigabytes of rows."""

    pretended_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.pretended_nbytes


class Tier:
    """The shipped tier."""

    def __init__(self, capacity: int) -> None:
        self._tier, self._rows = MemoryTier(capacity), torch.zeros(1, 1)

    def request(self, image: int, nbytes: int) -> bool:
        key = image.to_bytes(32, "big")
        if self._tier.get(key) is not None:
            return True
        entry = SizedEntry(self._rows, METADATA)
        entry.pretended_nbytes = nbytes
        self._tier.put(key, entry)
        return False


class Lru:
    """LRU by bytes."""

    def __init__(self, capacity: int) -> None:
        self._free, self._kept = capacity, OrderedDict[int, int]()

    def request(self, image: int, nbytes: int) -> bool:
        if image in self._kept:
            self._kept.move_to_end(image)
            return True
        self._kept[image] = nbytes
        self._free -= nbytes
        while self._free < 0:
            self._free += self._kept.popitem(last=False)[1]
        return False


def zipf(alpha: float) -> Trace:
    """Requests in which the image of rank r has a probability proportional to 1 / r^alpha."""
    chances = np.arange(1, IMAGES + 1) ** -alpha
    drawn = np.random.default_rng(0).choice(IMAGES, REQUESTS, p=chances / chances.sum())
    return [(image, True) for image in drawn.tolist()]


def with_scans(trace: Trace, every: int = 5000, length: int = 1000) -> Trace:
    """`trace`, interrupted after every `every` requests by `length` images that never return."""
    new = 10 * IMAGES
    mixed: Trace = []
    for start in range(0, len(trace), every):
        mixed += trace[start : start + every]
        mixed += [(new + turn, False) for turn in range(length)]
        new += length
    return mixed


def chats(together: int = 200) -> Trace:
    """Conversations of six turns on average, `together` at a time. A quarter of the turns add a new image;
    each turn requests all images of its conversation again.
    """
    random.seed(0)
    trace: Trace = []
    images: list[list[int]] = [[] for _ in range(together)]
    new = iter(range(2 * IMAGES, 3 * IMAGES))
    while True:
        chat = random.choice(images)
        if chat and random.random() < 1 / 6:
            chat.clear()
        if not chat or random.random() < 1 / 4:
            image = next(new, None)
            if image is None:
                return trace
            chat.append(image)
        trace += [(image, True) for image in chat]


def blended() -> Trace:
    """Conversations and popular images, interleaved, with scans."""
    trace = [request for pair in zip(chats(), zipf(0.9), strict=False) for request in pair]
    return with_scans(trace, every=8000, length=800)


def loop(sizes: list[int], capacity: int) -> Trace:
    """Images of 1.1 times the cache's capacity, requested twenty times in the same order."""
    total, once = 0, Trace()
    while total < 1.1 * capacity:
        total += sizes[len(once)]
        once.append((len(once), True))
    return once * 20


def hit_rate(policy: Tier | Lru, trace: Trace, sizes: list[int]) -> str:
    hits = sum([policy.request(image, sizes[image]) and counts for image, counts in trace])
    return f"{100 * hits / sum(counts for _, counts in trace):.1f} %"


def rates() -> Iterator[list[object]]:
    # Log-normal: from 0.2 to 22 MB, the median 3, as rows of thumbnails up to large pages are.
    megabytes = np.random.default_rng(1).lognormal(np.log(3), 0.9, 20 * IMAGES).clip(0.2, 22)
    sizes = [int(size) for size in (megabytes * 1e6).tolist()]
    traces = {f"Zipf {alpha}": zipf(alpha) for alpha in (0.7, 0.9, 1.1)}
    traces |= {"Zipf 0.9 with scans": with_scans(zipf(0.9)), "conversations": chats(), "blend": blended()}
    for name, trace in traces.items():
        footprint = sum(sizes[image] for image in {image for image, counts in trace if counts})
        cells: list[object] = []
        for share in SHARES:
            capacity = int(footprint * share)
            cells += [hit_rate(policy(capacity), trace, sizes) for policy in (Lru, Tier)]
        yield [name, *cells]
    cells = []
    for share in SHARES:
        capacity = int(sum(sizes[:IMAGES]) * share)
        trace = loop(sizes, capacity)
        cells += [hit_rate(policy(capacity), trace, sizes) for policy in (Lru, Tier)]
    yield ["loop over 1.1 of the cache", *cells]


def gets(threads: int, count: int = 200_000) -> float:
    """Return the hits per microsecond of `threads` threads together."""
    tier = MemoryTier(2**20)
    keys = [bytes([turn]) * 32 for turn in range(100)]
    for key in keys:
        tier.put(key, Entry(torch.zeros(4, 4), METADATA))
    start = threading.Barrier(threads + 1)

    def request() -> None:
        get, mine = tier.get, keys * (count // threads // len(keys))
        start.wait()
        for key in mine:
            get(key)

    running = [threading.Thread(target=request) for _ in range(threads)]
    for thread in running:
        thread.start()
    start.wait()
    begun = time.perf_counter()
    for thread in running:
        thread.join()
    return count / (time.perf_counter() - begun) / 1e6


def median_of(work: Callable[[], float], rounds: int = 7) -> float:
    return statistics.median(work() for _ in range(rounds))


def main() -> None:
    columns = [f"{name}, {share:.0%}" for share in SHARES for name in ("LRU", "S3-FIFO")]
    table("Hits of the memory tier, by its share of the images' bytes", ["trace", *columns], list(rates()))
    speeds = {threads: median_of(lambda threads=threads: gets(threads)) for threads in (1, 2, 8)}  # type: ignore[misc]
    table(
        "get() of the memory tier, a hit (median of 7)",
        ["threads", "µs a call", "million calls/s, all threads"],
        [[threads, 1 / speed, speed] for threads, speed in speeds.items()],
    )


if __name__ == "__main__":
    main()
