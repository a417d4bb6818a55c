"""Two processes of one machine, one encoder each, share a cache directory.

    python examples/shared_cache.py CHECKPOINT DIRECTORY [--device cpu]

The first process computes the rows and writes them; the second finds them on disk. The processes are spawned
and never forked: an encoder's threads do not survive a fork. Run it again, and both read from disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from mm_encoder import CacheConfig, Encoder

IMAGES = [np.full((120, 160, 3), value, np.uint8) for value in (0, 100, 200)]


def serve(name: str, checkpoint: Path, directory: Path, device: str, start: Event, stored: Event) -> None:
    """Encode the images once `start` is set; set `stored` when they are on disk. Runs in its own process."""
    cache = CacheConfig(
        disk_path=directory, disk_bytes=256 * 1024**2, max_entry_bytes=64 * 1024**2, shared=True
    )
    with Encoder(checkpoint, "shared-example", device, cache=cache) as encoder:
        start.wait()
        origins = [metadata.cache for _, metadata in encoder.generate(IMAGES)]
        print(f"{name}: {origins.count('miss')} computed, {origins.count('disk')} from disk", flush=True)
        # Disk writes happen behind the results.
        while encoder.cache_stats().disk_entries < len(IMAGES):
            time.sleep(0.01)
        stored.set()


def main() -> None:
    """Run both processes; the second begins when the first has stored its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu", help="one process per GPU would get cuda:0, cuda:1, ...")
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    events = [context.Event() for _ in range(3)]
    events[0].set()
    common = arguments.checkpoint, arguments.directory, arguments.device
    processes = [
        context.Process(target=serve, args=(name, *common, events[number], events[number + 1]))
        for number, name in enumerate(("first", "second"))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            for other in processes:
                other.terminate()  # it would wait for a process that is gone
            raise SystemExit(1)


if __name__ == "__main__":
    main()
