"""Cost of a hit in memory, by threads, and from disk compared with bare reads and other stores; and the cost
of opening a directory, encoding a folder again, and digesting a checkpoint's weights.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file

from mm_encoder import CacheConfig, Encoder
from mm_encoder.cache import codec
from mm_encoder.cache.entry import DiskTier, Entry
from mm_encoder.cache.files import FileTier
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.cache.memory import MemoryTier
from mm_encoder.coalescer import Coalescer
from mm_encoder.demo import make_checkpoint
from mm_encoder.families.weights import Checkpoint
from mm_encoder.media.source import encoded_hash

from . import cache_policy
from .cache_policy import METADATA
from .samples import photo, version
from .timing import medians, ratio, table

KIB, MIB = 1024, 1024**2
CALLS = {64: 5000, 4 * KIB: 5000, 64 * KIB: 3000, MIB: 500, 8 * MIB: 100}
THREADS = (1, 2, 4, 8)
SMALL_ENTRIES = 10_000
IMAGES = 40
WEIGHTS = 512 * MIB
KEY = bytes(32)


def main() -> None:
    with TemporaryDirectory(prefix="mm-encoder-bench-") as name:
        folder = Path(name)
        checkpoint = make_checkpoint(folder / "checkpoint")
        with Encoder(checkpoint, device="cpu", cache=CacheConfig()) as encoder:
            memory_hits(encoder)
            hits_by_threads(encoder)
            assert encoder.cache_stats().misses == 0
    # A new folder for each, so that its files are removed before the next begins.
    for measure in (disk_hits, opening, encode_again, weights):
        with TemporaryDirectory(prefix="mm-encoder-bench-") as name:
            measure(Path(name))
    cache_policy.main()


# --- memory ------------------------------------------------------------------------------------------


def preload(encoder: Encoder, nbytes: int) -> bytes:
    """Return a source whose result is in memory. A hit is never decoded, so it need not be an image."""
    assert isinstance(encoder._coalescer, Coalescer)
    data, cache = random.Random(nbytes).randbytes(nbytes), encoder._coalescer.cache
    cache.put(
        encoder._coalescer.keys.key(encoded_hash(encoder.model, data), None), torch.zeros(256, 512), METADATA
    )
    return data


def sha256(data: bytes) -> object:
    return hashlib.sha256(data).digest()


def hit(encoder: Encoder, data: bytes) -> object:
    return encoder.submit(data).result()


def memory_hits(encoder: Encoder) -> None:
    rows: list[list[object]] = []
    for nbytes, calls in CALLS.items():
        data = preload(encoder, nbytes)
        works = partial(sha256, data), partial(hit, encoder, data)
        wall, cpu = np.empty((calls, 2)), np.empty((calls, 2))
        for turn in range(-calls // 10, calls):
            for which in (0, 1) if turn % 2 else (1, 0):  # the second finds the data in the CPU's cache
                begun, busy = time.perf_counter(), time.thread_time()
                works[which]()
                busy, taken = time.thread_time() - busy, time.perf_counter() - begun
                if turn >= 0:
                    wall[turn, which], cpu[turn, which] = taken * 1e6, busy * 1e6
        more = [float(np.median(times[:, 1] - times[:, 0])) for times in (wall, cpu)]
        rows.append([size_of(nbytes), *np.median(wall, axis=0).tolist()[::-1], *more])
    columns = ["source", "submit().result()", "SHA-256 alone", "difference of pairs (target 30)"]
    title = f"A hit in memory, µs (medians of {min(CALLS.values())} calls and more, 1 thread)"
    table(title, [*columns, "the same, CPU time"], rows)


def hits_by_threads(encoder: Encoder) -> None:
    data, large, tier = preload(encoder, 64 * KIB), preload(encoder, MIB), MemoryTier(MIB)
    tier.put(KEY, Entry(torch.zeros(4, 4), METADATA))
    works: dict[str, tuple[Callable[[], object], int]] = {
        "submit().result()": (partial(hit, encoder, data), 3000),
        "SHA-256 alone": (partial(sha256, data), 6000),
        "of 1 MiB": (partial(hit, encoder, large), 600),
        "SHA-256 of 1 MiB alone": (partial(sha256, large), 600),
        "MemoryTier.get": (partial(tier.get, KEY), 400_000),
    }
    found: dict[tuple[int, str], list[float]] = {(n, name): [] for n in THREADS for name in works}
    for _ in range(7):
        for threads, name in found:
            found[threads, name].append(calls_per_second(threads, *works[name]))
    rows = [[n, *(statistics.median(found[n, name]) for name in works)] for n in THREADS]
    title = f"Hits a second of a source of 64 KiB, by threads that ask ({os.cpu_count()} CPUs, median of 7)"
    table(title, ["threads", *works], rows)


def calls_per_second(threads: int, work: Callable[[], object], calls: int) -> float:
    """Return the calls per second of all threads together, which share `calls` evenly."""
    start = threading.Barrier(threads)
    begun: list[float] = []

    def run() -> None:
        start.wait()
        begun.append(time.perf_counter())  # measured here: the main thread may be scheduled late
        for _ in range(calls // threads):
            work()

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return calls / (time.perf_counter() - min(begun))


# --- disk --------------------------------------------------------------------------------------------


class Store(NamedTuple):
    """A store of entries by key. `get` leaves the rows in a tensor."""

    get: Callable[[bytes], object]
    put: Callable[[bytes], object]


def disk_hits(folder: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        entry = Entry(torch.randn(2691, 4096).to(torch.bfloat16), METADATA)
    known = {  # what it is, and whether get() checks the bytes
        "bare read": ("", "no"),
        "bare read + XXH3-128": (f"xxhash {version('xxhash')}", "yes"),
        "the same, into a new tensor": (f"xxhash {version('xxhash')}", "yes"),
        "FileTier": ("", "yes"),
        "FoyerTier": (f"foyer-py {version('foyer-py')}", "yes"),
        "diskcache": (version("diskcache"), "no"),
        "lmdb, not synced": (version("lmdb"), "no"),
    }
    with ExitStack() as stack:
        stores: list[Store | None] = [
            # Each has its own file: one that was just read is in the CPU's cache.
            bare_store(folder / "read", entry, checked=False),
            bare_store(folder / "checked", entry, checked=True),
            bare_store(folder / "anew", entry, checked=True, anew=True),
            tier_store(stack, FileTier(folder / "files", 1024 * MIB), entry),
            tier_store(stack, FoyerTier(folder / "foyer", 1024 * MIB), entry) if module("foyer") else None,
            diskcache_store(stack, folder / "diskcache", entry),
            lmdb_store(stack, folder / "lmdb", entry),
        ]
        named = dict(zip(known, stores, strict=True))
        for store in filter(None, stores):
            store.put(KEY)
        gets = medians({name: store and partial(store.get, KEY) for name, store in named.items()}, 21)
        new = count(1)  # a stored key is not written again

        def put_new(store: Store) -> None:
            store.put(next(new).to_bytes(32, "big"))

        puts = medians({name: store and partial(put_new, store) for name, store in named.items()}, 7)

    nbytes, bound, fresh = entry.nbytes, gets["bare read + XXH3-128"], gets["the same, into a new tensor"]
    columns = ["store", "version", "verified", "get, ms", "get, MB/s"]
    columns += [
        "bare read + XXH3-128 / get (target 0.60x)",
        "into a new tensor / get",
        "put, ms",
        "put, MB/s",
    ]
    rows: list[list[object]] = []
    for name, about in known.items():
        get, put = gets[name], puts[name]
        rows.append([name, *about, get, speed(nbytes, get), ratio(bound, get), ratio(fresh, get)])
        rows[-1] += [put, speed(nbytes, put)]
    size = f"{nbytes / 1e6:.0f} MB"
    table(f"One entry of {size} on disk, in the page cache, 1 thread (medians of 21 and 7)", columns, rows)


def bare_store(folder: Path, entry: Entry, *, checked: bool, anew: bool = False) -> Store:
    """A plain file, read into the same tensor, or with `anew` into a new one each time."""
    folder.mkdir()
    header, payload = codec.encode(KEY, entry)
    same = torch.empty_like(entry.rows)

    def get(key: bytes) -> None:
        target = codec.payload_view(torch.empty_like(entry.rows) if anew else same)
        with open(folder / key.hex(), "rb", buffering=0) as file:
            file.seek(len(header))
            assert file.readinto(target) == len(target)
        if checked:
            xxhash.xxh3_128_digest(target)

    def put(key: bytes) -> None:
        if checked:
            xxhash.xxh3_128_digest(payload)
        with open(folder / key.hex(), "wb", buffering=0) as file:
            assert file.write(header) + file.write(payload) == len(header) + len(payload)

    return Store(get, put)


def tier_store(stack: ExitStack, tier: DiskTier, entry: Entry) -> Store:
    stack.callback(tier.close)

    def get(key: bytes) -> None:
        assert tier.get(key) is not None

    def put(key: bytes) -> None:
        assert tier.put(key, entry)

    return Store(get, put)


def diskcache_store(stack: ExitStack, path: Path, entry: Entry) -> Store | None:
    peer = module("diskcache")
    if peer is None:
        return None
    parts = codec.encode(KEY, entry)
    cache = stack.enter_context(peer.Cache(str(path), size_limit=4096 * MIB))
    return Store(lambda key: rows_of(memoryview(cache.get(key))), lambda key: cache.set(key, b"".join(parts)))


def lmdb_store(stack: ExitStack, path: Path, entry: Entry) -> Store | None:
    peer = module("lmdb")
    if peer is None:
        return None
    parts = codec.encode(KEY, entry)
    # Not synced, like the other stores; its memory map is the fastest way to read.
    database = stack.enter_context(peer.open(str(path), map_size=4096 * MIB, sync=False))

    def get(key: bytes) -> None:
        with database.begin(buffers=True) as transaction:
            rows_of(transaction.get(key))

    def put(key: bytes) -> None:
        with database.begin(write=True) as transaction:
            transaction.put(key, b"".join(parts))

    return Store(get, put)


def rows_of(data: memoryview) -> torch.Tensor:
    """Copy header and payload into new rows, which a server needs from any store."""
    header = codec.read_header(data)
    rows = codec.empty_rows(header)
    codec.payload_view(rows)[:] = data[header.header_bytes :]
    return rows


def opening(folder: Path) -> None:
    tier, entry = FileTier(folder / "files", 1024 * MIB), Entry(torch.zeros(4, 4), METADATA)
    start = time.perf_counter()
    for turn in range(SMALL_ENTRIES):
        assert tier.put(turn.to_bytes(32, "big"), entry)
    written = time.perf_counter() - start
    tier.close()

    def scan() -> None:
        with os.scandir(folder / "files") as files:
            assert sum(file.stat(follow_symlinks=False).st_size for file in files)

    ms = medians({"open": lambda: FileTier(folder / "files", 1024 * MIB).close(), "scan": scan})
    opened, scanned = (None if taken is None else taken / 1e3 for taken in ms.values())
    table(
        f"A directory of {SMALL_ENTRIES} small entries, s (median of 9; written once)",
        ["open and close a FileTier", "scandir and stat alone", "open / scan", "to write them"],
        [[opened, scanned, ratio(opened, scanned), written]],
    )


# --- encoder -----------------------------------------------------------------------------------------


def encode_again(folder: Path) -> None:
    # Few rows: with the demo's usual 900 an image takes seconds, and hits cost the same.
    checkpoint = make_checkpoint(folder / "checkpoint", image_tokens=(16, 1024))
    paths = [folder / f"{turn}.jpg" for turn in range(IMAGES)]
    for turn, path in enumerate(paths):
        path.write_bytes(photo(224, 224, noise=turn))
    times: dict[str, list[float]] = {"first run": [], "second run: memory": [], "new encoder: disk": []}

    def run(name: str, encoder: Encoder) -> None:
        start = time.perf_counter()
        encoder.generate(paths)
        times[name].append((time.perf_counter() - start) * 1e3 / IMAGES)

    for turn in range(3):
        config = CacheConfig(disk_path=folder / f"cache{turn}", disk_bytes=1024 * MIB)
        with Encoder(checkpoint, device="cpu", cache=config) as encoder:
            run("first run", encoder)
            run("second run: memory", encoder)
            stats = encoder.cache_stats()
            assert (stats.misses, stats.memory_hits) == (IMAGES, IMAGES), stats
        with Encoder(checkpoint, device="cpu", cache=config) as encoder:
            run("new encoder: disk", encoder)
            assert encoder.cache_stats().disk_hits == IMAGES, encoder.cache_stats()
    first = statistics.median(times["first run"])
    table(
        f"generate() of {IMAGES} JPEG files of 224x224 (64 rows), small tower, ms an image (median of 3)",
        ["run", "ms", "first run / this"],
        [[name, taken := statistics.median(found), ratio(first, taken)] for name, found in times.items()],
    )


def weights(folder: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = (1024, 4096)  # a layer of a released checkpoint
        tensors = {
            f"model.visual.{index}": torch.randn(shape).to(torch.bfloat16)
            for index in range(WEIGHTS // (2 * shape[0] * shape[1]))
        }
    file = folder / "model.safetensors"
    save_file(tensors, file)
    del tensors
    (folder / "config.json").write_text("{}")

    def read() -> None:
        buffer = bytearray(MIB)
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    def whole() -> None:
        with open(file, "rb", buffering=0) as opened:
            hashlib.file_digest(opened, "sha256")

    work = {"Checkpoint.digest": lambda: Checkpoint(folder).digest(["model.visual."])}
    ms = medians(work | {"SHA-256 of the file, 1 thread": whole, "plain read, 1 thread": read}, rounds=7)
    bound = ms["SHA-256 of the file, 1 thread"]
    table(
        f"Identity of {WEIGHTS // MIB} MiB of weights in the page cache ({os.cpu_count()} CPUs, median of 7)",
        ["what", "ms", "MB/s", "SHA-256 of the file / this"],
        [[name, taken, speed(WEIGHTS, taken), ratio(bound, taken)] for name, taken in ms.items()],
    )


def module(name: str) -> Any:
    """Import a module; None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def speed(nbytes: int, ms: float | None) -> float | None:
    """Return MB/s."""
    return None if ms is None else nbytes / 1e3 / ms


def size_of(nbytes: int) -> str:
    return (
        f"{nbytes} B" if nbytes < KIB else f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
    )


if __name__ == "__main__":
    main()
