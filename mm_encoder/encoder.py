"""The encoder: images in, embedding rows out. The main path, from top to bottom."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from .config import ImageOptions, MediaLimits, media_limits, model_name, require_int
from .contract import ImageResult
from .device import Lane, consumer_stream, default_dtype, parse_device
from .engine.engine import Engine
from .engine.job import Job, without_frames
from .engine.preprocess import Prepare
from .engine.replica import BuildTower, ReplicaSettings, TowerFunction, build_once
from .errors import EncoderClosedError, MediaError, MMEncoderError, PlanMismatchError
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
        require_int("queue_depth", depth, 1)
        require_int("queue_bytes", queue_bytes, 1)
        self._limits = media_limits(limits)
        self.device = parse_device(device)
        self.dtype = default_dtype(self.device) if dtype is None else dtype
        if type(share_weights) is not bool:
            raise TypeError(f"share_weights must be a bool, got {type(share_weights).__name__}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
        opened, self._family = load_family(checkpoint, family)
        self.model = model_name(model, opened.name)
        self.family = self._family.name

        build = _tower_builder(self._family, self.dtype)
        self._engine = Engine(
            ReplicaSettings(
                self.model, self.device, stream_priority, build_once(build) if share_weights else build
            ),
            _preparation(self._family, self._limits, self.model),
            replicas=replicas_per_gpu,
            workers=workers,
            depth=depth,
            max_bytes=queue_bytes,
        )
        self.stream_priority = self._engine.stream_priority
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
        self._engine.require_usable()
        single = is_image(images) or hasattr(images, "read")  # an open file is no iterable of images
        jobs: list[Job] = []
        job = None
        fault = threading.Event()

        def watch(done: Future[ImageResult]) -> None:
            if not done.cancelled() and done.exception() is not None:
                fault.set()

        try:
            for image, expected in _with_expected([images] if single else images, expected_tokens):
                with _naming(None if single else len(jobs)):
                    job = self._admit(image, expected, image_options)
                jobs.append(job)
                job.future.add_done_callback(watch)
                if fault.is_set():
                    break  # its error is raised below; nothing more needs to begin
            for index, job in enumerate(jobs):
                with _naming(None if single else index):
                    job.future.result()
            return [job.future.result() for job in jobs]
        finally:
            wait([job.future for job in jobs if not job.future.cancel()])
            self._engine.scheduler.wait_prepared(jobs)
            # What is raised holds this frame, which must not hold it, nor the results of the others.
            jobs.clear()
            del job

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
        queued job frees its slot; a running one finishes. Callbacks on the future run in the engine's
        threads: they should be brief, and calling the encoder from them raises RuntimeError, since waiting
        there would be waiting for themselves. Raises EncoderClosedError, ForkedProcessError.
        """
        self._engine.require_usable()
        if expected_tokens is not None:
            require_int("expected_tokens", expected_tokens, 1)
        try:
            return self._admit(image, expected_tokens, image_options).future
        except (MediaError, PlanMismatchError) as error:
            return _failed(without_frames(error))

    def _admit(self, image: ImageInput, expected: int | None, options: ImageOptions | None) -> Job:
        """Take a snapshot, plan it, and wait for a slot."""
        source = self._family.open(image, self._limits, options)
        plan = self._family.plan(source.size)
        if expected is not None and expected != plan.rows:
            raise PlanMismatchError(f"expected {expected} tokens, but this image makes {plan.rows}")
        nbytes = source.nbytes + 3 * plan.canvas.width * plan.canvas.height
        job = Job(source, plan, consumer_stream(self.device), nbytes)
        self._engine.scheduler.admit(job)
        return job

    def encode_image(self, data: ImageInput) -> dict[str, torch.Tensor]:
        """Encode one image into named tensors: `embeddings` [rows, width] on the device, and int64
        `embedding_offsets` [2] and `grid_thws` [1, 3] on the CPU. Raises as `generate`.
        """
        rows, metadata = self.submit(data).result()
        with torch.inference_mode(False):  # ordinary tensors, wherever this is called from
            return {
                "embeddings": rows,
                "embedding_offsets": torch.tensor(metadata.embedding_offsets, device="cpu"),
                "grid_thws": torch.tensor(metadata.grid_thws, device="cpu"),
            }

    def close(self) -> None:
        """Stop admission, finish what was accepted, join every thread. Results live on; twice is fine.

        From a result's callback it stops admission and returns; the threads end by themselves.
        """
        self._engine.close(drain=True)

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception nobody is left to read the results.
        self._engine.close(drain=kind is None)


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


@contextmanager
def _naming(index: int | None) -> Iterator[None]:
    """Put an image's index before the message of what is raised for it."""
    try:
        yield
    except CancelledError:  # nobody but an encoder that is being left by an exception cancels these
        raise EncoderClosedError("the encoder was closed before it came to this image") from None
    except (MMEncoderError, TypeError) as error:
        if index is None:
            raise
        named = type(error)(f"images[{index}]: {error}")
        named.__notes__ = list(getattr(error, "__notes__", ()))
        raise named from error.__cause__ or error


def _failed(error: BaseException) -> Future[ImageResult]:
    future: Future[ImageResult] = Future()
    future.set_exception(error)
    return future


def _preparation(family: Family, limits: MediaLimits, model: str) -> Prepare:
    """What a preprocessing thread does with a job."""

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


def _tower_builder(family: Family, dtype: torch.dtype) -> BuildTower:
    def build(lane: Lane) -> TowerFunction:
        tower = family.build_tower(lane.device, dtype)
        lane.wait()
        return tower

    return build
