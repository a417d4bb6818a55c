"""The encoder: images in, embedding rows out. The main path, from top to bottom."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from .config import ImageOptions, MediaLimits, require_int
from .contract import ImageResult
from .device import Lane, consumer_stream, default_dtype, parse_device
from .engine.job import Job
from .engine.preprocess import start_preprocessing
from .engine.replica import BuildTower, Replica, ReplicaSettings, TowerFunction
from .engine.scheduler import Scheduler
from .errors import MediaError, MMEncoderError, PlanMismatchError
from .families.family import Family
from .families.registry import load_family
from .media.source import ImageInput, is_image
from .runtime import usable_cpus

logger = logging.getLogger("mm_encoder")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_REPLICAS = 32


class Encoder:
    """N replicas of one checkpoint's vision tower on one device, fed from one bounded queue.

    checkpoint: directory with config.json, processor file and safetensors.
    model: name for metadata and identity; by default the config's or the directory's.
    device: "cuda", "cuda:N" or "cpu".
    family: by default recognised from config.json.
    stream_priority: requested CUDA priority, lower is higher; `self.stream_priority` is what was granted.
    replicas_per_gpu: 1 to 32, each with its own thread, stream and copy of the weights.
    dtype: of tower and results; bfloat16 on CUDA, float32 on the CPU.
    share_weights: one read-only copy of the weights for all replicas.
    queue_depth: jobs admitted and not yet running; 2 a replica.
    queue_bytes: bytes of source and pixels those may hold.
    preprocess_workers: threads that decode and cut images; min(4, usable CPUs).
    limits: what one image may weigh.

    Construction loads every replica. It raises TypeError or ValueError for an impossible argument,
    CheckpointError for an unsuitable checkpoint, and otherwise what the first failing replica raised,
    after stopping the others. Threads may share an encoder.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        model: str | None = None,
        device: str | torch.device = "cuda:0",
        family: str | None = None,
        *,
        cache: None = None,
        stream_priority: int = 1,
        replicas_per_gpu: int = 1,
        dtype: torch.dtype | None = None,
        share_weights: bool = False,
        batching: None = None,
        queue_depth: int | None = None,
        queue_bytes: int = 1024**3,
        preprocess_workers: int | None = None,
        limits: MediaLimits | None = None,
    ) -> None:
        _require_absent(cache=cache, batching=batching)
        if type(stream_priority) is not int:
            raise TypeError(f"stream_priority must be an int, got {type(stream_priority).__name__}")
        self.replicas_per_gpu = require_int("replicas_per_gpu", replicas_per_gpu, 1, _MAX_REPLICAS)
        depth = 2 * replicas_per_gpu if queue_depth is None else queue_depth
        workers = min(4, usable_cpus()) if preprocess_workers is None else preprocess_workers
        require_int("preprocess_workers", workers, 1)
        self._scheduler = Scheduler(
            require_int("queue_depth", depth, 1), require_int("queue_bytes", queue_bytes, 1)
        )
        self._limits = MediaLimits() if limits is None else limits
        if not isinstance(self._limits, MediaLimits):
            raise TypeError(f"limits must be a MediaLimits, got {type(limits).__name__}")
        self.device = parse_device(device)
        self.dtype = default_dtype(self.device) if dtype is None else dtype
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
        opened, self._family = load_family(checkpoint, family)
        self.model = opened.name if model is None else model
        self.family = self._family.name

        build = _tower_builder(self._family, self.dtype)
        settings = ReplicaSettings(
            self.model, self.device, stream_priority, _once(build) if share_weights else build
        )
        replicas = [Replica(i, settings, self._scheduler) for i in range(replicas_per_gpu)]
        self._threads = [replica.thread for replica in replicas]
        # An encoder that is dropped, or alive at interpreter exit, ends its threads all the same.
        weakref.finalize(self, _end, self._scheduler, self._threads)
        try:
            self.stream_priority = [replica.loaded.result() for replica in replicas].pop()
        except BaseException:
            self.close()
            raise
        self._threads += start_preprocessing(workers, self._scheduler, self._preparation())
        for index in range(replicas_per_gpu):
            logger.info(
                "ready: %s (%s) replica %d of %d on %s, %s, stream priority %d",
                *(self.model, self.family, index + 1, replicas_per_gpu),
                *(self.device, self.dtype, self.stream_priority),
            )

    def generate(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        expected_tokens: Iterable[int] | None = None,
        image_options: ImageOptions | None = None,
    ) -> list[ImageResult]:
        """Encode one image, or an iterable of them, into (rows, metadata) pairs in input order.

        Images of one call are preprocessed side by side and may run on different replicas.
        `expected_tokens` holds one positive int an image; a count that differs from the plan's raises
        PlanMismatchError before the tower runs. If an image is at fault its error is raised, with its
        index in the message, once nothing of the call is running any more.
        """
        single = is_image(images)
        futures: list[Future[ImageResult]] = []
        fault = threading.Event()

        def watch(future: Future[ImageResult]) -> None:
            if _failed(future):
                fault.set()

        try:
            for image, expected in _with_expected([images] if single else images, expected_tokens):
                futures.append(self.submit(image, expected_tokens=expected, image_options=image_options))
                futures[-1].add_done_callback(watch)
                if fault.is_set():
                    break  # its error is raised below; nothing more needs to begin
            return [future.result() for future in futures]
        except (MMEncoderError, TypeError) as error:
            if single:
                raise
            index = next((i for i, future in enumerate(futures) if _failed(future)), len(futures))
            message = f"images[{index}]: {error}"
            raise type(error)(message) from error.__cause__ or error
        finally:
            wait([future for future in futures if not future.cancel()])

    def submit(
        self,
        image: ImageInput,
        *,
        expected_tokens: int | None = None,
        image_options: ImageOptions | None = None,
    ) -> Future[ImageResult]:
        """Queue one image; waits for a slot when the queue is full.

        The image is copied and its header read before this returns: it may be changed afterwards, and
        one that can be seen to be at fault fails its future without entering the queue. Cancelling a
        queued job frees its slot; a running one finishes. Raises EncoderClosedError.
        """
        try:
            source = self._family.open(image, self._limits, image_options)
            plan = self._family.plan(source.size)
            if expected_tokens is not None and expected_tokens != plan.rows:
                raise PlanMismatchError(
                    f"expected {expected_tokens} tokens, but this image makes {plan.rows}"
                )
        except (MediaError, PlanMismatchError) as error:
            failed: Future[ImageResult] = Future()
            failed.set_exception(error)
            return failed
        job = Job(source, plan, consumer_stream(self.device), nbytes=source.nbytes)
        self._scheduler.admit(job)
        return job.future

    def _preparation(self) -> Any:
        """What a preprocessing thread does with a job; it must not keep the encoder alive."""
        family, limits, model = self._family, self._limits, self.model

        def prepare(job: Job) -> None:
            source, job.source = job.source, None
            assert source is not None
            job.mm_hash = source.mm_hash(model)
            job.stage_done("hash")
            picture = source.decode(limits)
            job.stage_done("decode")
            job.patches = family.patches(picture, job.plan)
            job.stage_done("patches")

        return prepare

    def encode_image(self, data: ImageInput) -> dict[str, torch.Tensor]:
        """Encode one image into named tensors: `embeddings` [rows, width] on the device, and int64
        `embedding_offsets` [2] and `grid_thws` [1, 3] on the CPU. Raises as `generate`.
        """
        rows, metadata = self.submit(data).result()
        return {
            "embeddings": rows,
            "embedding_offsets": torch.tensor(metadata.embedding_offsets, device="cpu"),
            "grid_thws": torch.tensor(metadata.grid_thws, device="cpu"),
        }

    def close(self) -> None:
        """Stop admission, finish what was accepted, join every thread. Results live on; twice is fine."""
        _end(self._scheduler, self._threads)

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_absent(**later: object) -> None:
    for name, value in later.items():
        if value is not None:
            raise NotImplementedError(f"{name}= is not built yet; leave it out or pass None")


def _with_expected(items: Any, expected: Iterable[int] | None) -> Iterator[tuple[Any, int | None]]:
    if expected is None:
        return zip(items, repeat(None))
    items, counts = list(items), list(expected)
    if len(items) != len(counts):
        raise ValueError(
            f"expected_tokens must have one count an image: got {len(counts)} for {len(items)} images"
        )
    for count in counts:
        require_int("expected_tokens", count, 1)
    return zip(items, counts, strict=True)


def _failed(future: Future[ImageResult]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


def _tower_builder(family: Family, dtype: torch.dtype) -> BuildTower:
    def build(lane: Lane) -> TowerFunction:
        tower = family.build_tower(lane.device, dtype)
        lane.wait()
        return tower

    return build


def _once(build: BuildTower) -> BuildTower:
    """`build`, run by the first replica that gets here; the others take what it built."""
    lock, built = threading.Lock(), list[TowerFunction]()

    def build_once(lane: Lane) -> TowerFunction:
        with lock:
            if not built:
                built.append(build(lane))
            return built[0]

    return build_once


def _end(scheduler: Scheduler, threads: list[threading.Thread]) -> None:
    scheduler.close()
    for thread in threads:
        if thread is not threading.current_thread():  # close() may be called from a result's callback
            thread.join()
