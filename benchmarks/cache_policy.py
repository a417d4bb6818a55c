"""How often the memory tier has what is asked for, beside LRU; and what it takes to ask."""

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
"""Images in the order of asking, and whether the request counts: one for what never returns does not."""


class Weight(Entry):
    """An entry that weighs what it is said to: the tier is run as it is, without gigabytes of rows."""

    weight: int

    @property
    def nbytes(self) -> int:
        return self.weight


class Tier:
    """The shipped tier."""

    def __init__(self, capacity: int) -> None:
        self._tier, self._rows = MemoryTier(capacity), torch.zeros(1, 1)

    def ask(self, image: int, nbytes: int) -> bool:
        key = image.to_bytes(32, "big")
        if self._tier.get(key) is not None:
            return True
        entry = Weight(self._rows, METADATA)
        entry.weight = nbytes
        self._tier.put(key, entry)
        return False


class Lru:
    """Least recently used, by bytes."""

    def __init__(self, capacity: int) -> None:
        self._free, self._kept = capacity, OrderedDict[int, int]()

    def ask(self, image: int, nbytes: int) -> bool:
        if image in self._kept:
            self._kept.move_to_end(image)
            return True
        self._kept[image] = nbytes
        self._free -= nbytes
        while self._free < 0:
            self._free += self._kept.popitem(last=False)[1]
        return False


def zipf(alpha: float) -> Trace:
    """The image of rank r is asked for in proportion to 1 / r^alpha."""
    chances = np.arange(1, IMAGES + 1) ** -alpha
    drawn = np.random.default_rng(0).choice(IMAGES, REQUESTS, p=chances / chances.sum())
    return [(image, True) for image in drawn.tolist()]


def with_scans(trace: Trace, every: int = 5000, length: int = 1000) -> Trace:
    """`trace`, with `length` images that are never asked for again after each `every` requests."""
    new = 10 * IMAGES
    mixed: Trace = []
    for start in range(0, len(trace), every):
        mixed += trace[start : start + every]
        mixed += [(new + turn, False) for turn in range(length)]
        new += length
    return mixed


def chats(together: int = 200) -> Trace:
    """Conversations of six turns on average, `together` at a time. A quarter of the turns bring an image of
    their own; each turn asks for all of its conversation's again.
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
    """Conversations and popular images in turns, with scans."""
    trace = [request for pair in zip(chats(), zipf(0.9), strict=False) for request in pair]
    return with_scans(trace, every=8000, length=800)


def loop(sizes: list[int], capacity: int) -> Trace:
    """As many images as weigh a tenth more than the cache holds, twenty times in the same order."""
    weight, once = 0, Trace()
    while weight < 1.1 * capacity:
        weight += sizes[len(once)]
        once.append((len(once), True))
    return once * 20


def hit_rate(policy: Tier | Lru, trace: Trace, sizes: list[int]) -> str:
    hits = sum([policy.ask(image, sizes[image]) and counts for image, counts in trace])
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
    """Hits a microsecond of `threads` threads together."""
    tier = MemoryTier(2**20)
    keys = [bytes([turn]) * 32 for turn in range(100)]
    for key in keys:
        tier.put(key, Entry(torch.zeros(4, 4), METADATA))
    start = threading.Barrier(threads + 1)

    def ask() -> None:
        get, mine = tier.get, keys * (count // threads // len(keys))
        start.wait()
        for key in mine:
            get(key)

    running = [threading.Thread(target=ask) for _ in range(threads)]
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
