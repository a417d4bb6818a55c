"""The encoder: images in, embedding rows out. The main path, from top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import torch

from .cached import admission_of
from .coalescer import Coalescer, NoCache
from .config import (
    CacheConfig,
    ImageOptions,
    MediaLimits,
    model_name,
    require_int,
    require_moment,
    require_seconds,
)
from .contract import CacheStats, EncoderStats, Health, ImageResult
from .device import consumer_stream
from .engine.call import Call
from .engine.engine import Engine
from .engine.job import Job
from .families.registry import load_family
from .media.source import ImageInput, check_input
from .pipeline import ImagePipeline
from .runtime import native_summary
from .settings import EncoderSettings

logger = logging.getLogger("mm_encoder")


class Encoder:
    """N replicas of one checkpoint's vision tower on one device, fed from one bounded queue.

    checkpoint: directory with config.json, processor file and safetensors.
    model: name for metadata and identity; by default the config's or the directory's.
    device: "cuda", "cuda:N" or "cpu".
    family: by default recognised from config.json.
    cache: results kept in memory and on disk, see CacheConfig; off by default.
    stream_priority: requested CUDA priority, lower is higher; `self.stream_priority` is what was granted.
    replicas_per_gpu: 1 to 32, each with its own thread, stream and copy of the weights.
    dtype: of tower and results; bfloat16 on CUDA, float32 on the CPU.
    share_weights: one read-only copy of the weights for all replicas.
    handoff: "host": a result is complete when it is handed over; "stream": at once, and the stream that
        was current where the image was submitted waits for it instead of the host. No difference on a CPU.
    queue_depth: jobs admitted and not yet running; 2 a replica.
    queue_bytes: bytes of source and pixels those may hold.
    preprocess_workers: threads that decode and cut images; min(4, usable CPUs). All encoders of a process
        together prepare no more images at a time than it may use CPUs.
    limits: what one image may weigh.
    wedged_after: seconds at one image after which `health` calls a thread wedged.

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
        cache: CacheConfig | None = None,
        stream_priority: int = 1,
        replicas_per_gpu: int = 1,
        dtype: torch.dtype | None = None,
        share_weights: bool = False,
        batching: None = None,
        handoff: Literal["host", "stream"] = "host",
        queue_depth: int | None = None,
        queue_bytes: int = 1024**3,
        preprocess_workers: int | None = None,
        limits: MediaLimits | None = None,
        wedged_after: float = 120.0,
    ) -> None:
        settings = EncoderSettings.checked(
            device=device,
            dtype=dtype,
            cache=cache,
            limits=limits,
            stream_priority=stream_priority,
            replicas_per_gpu=replicas_per_gpu,
            share_weights=share_weights,
            batching=batching,
            handoff=handoff,
            queue_depth=queue_depth,
            queue_bytes=queue_bytes,
            preprocess_workers=preprocess_workers,
            wedged_after=wedged_after,
        )
        opened, rules = load_family(checkpoint, family)
        self.model, self.family = model_name(model, opened.name), rules.name
        self.device, self.dtype = settings.device, settings.dtype
        self.replicas_per_gpu = settings.replicas
        pipeline = ImagePipeline(rules, settings.limits, self.model, self.dtype)
        self._coalescer = Coalescer.open(cache, settings, pipeline) if cache else NoCache()
        self._engine = Engine(pipeline, self._coalescer, settings)  # loads every replica
        self._admission = admission_of(self._engine, self._coalescer, pipeline)
        self.stream_priority = self._engine.stream_priority
        self._log_ready()

    def generate(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        expected_tokens: Iterable[int] | None = None,
        image_options: ImageOptions | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> list[ImageResult]:
        """Encode one image, or an iterable of them, into (rows, metadata) pairs in input order.

        Images of one call are preprocessed side by side and may run on different replicas.
        `expected_tokens` holds one positive int an image; a count that differs from the plan's raises
        PlanMismatchError before the tower runs. `timeout` and `deadline` count for each image, as in
        `submit`. If an image is at fault its error is raised, with its index in the message, once nothing
        of the call is running any more.
        """
        self._engine.require_usable()
        call = Call(images, expected_tokens, self._engine.scheduler)
        try:
            for index, (image, expected) in enumerate(call.items):
                with call.naming(index):
                    job = self._job(image, expected, image_options, timeout, deadline)
                    call.add(self._admission.admit(job))
                if call.failed:
                    break  # its error is raised below
            return [call.result(index) for index in range(len(call.futures))]
        finally:
            call.settle()

    async def generate_async(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        expected_tokens: Iterable[int] | None = None,
        image_options: ImageOptions | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> list[ImageResult]:
        """`generate` for an event loop, which is never blocked; no thread waits for the call.

        The images are opened in preprocessing threads: they must not be changed before this returns.
        `timeout` is for a slot in the queue; where only the bytes of an opened image do not fit yet, it waits
        without it. When the task is cancelled, so is what no replica has taken yet.
        """
        self._engine.require_usable()
        call = Call(images, expected_tokens, self._engine.scheduler)
        try:
            for index, (image, expected) in enumerate(call.items):
                with call.naming(index):
                    job = self._job(image, expected, image_options, timeout, deadline)
                    call.add(await self._admission.admit_async(job))
                if call.failed:
                    break
            return await call.results_async()
        except Exception:
            await call.settle_async()
            raise
        except GeneratorExit:  # by garbage collection, maybe inside a lock that cancelling takes
            call.cancel_elsewhere()
            raise
        except BaseException:
            call.cancel()
            raise
        finally:
            call.futures.clear()

    def submit(
        self,
        image: ImageInput,
        *,
        expected_tokens: int | None = None,
        image_options: ImageOptions | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> Future[ImageResult]:
        """Queue one image; waits for room when the queue is full, at most `timeout` seconds (0: not at all).

        `deadline` is a moment on time.monotonic()'s clock: an image that no replica has taken by then is
        dropped, and its future raises DeadlineExceededError; one that is running finishes.
        The image is copied and its header read before this returns: it may be changed afterwards, and
        what can be seen to be wrong with it is in the future at once. Cancelling a
        queued job frees its slot; a running one finishes. Callbacks on the future run in the engine's
        threads: they should be brief, and calling the encoder from them raises RuntimeError, since waiting
        there would be waiting for themselves. Raises EncoderBusyError, EncoderClosedError,
        ForkedProcessError, and ReplicaError when no replica is left.
        """
        self._engine.require_usable()
        if expected_tokens is not None:
            require_int("expected_tokens", expected_tokens, 1)
        return self._admission.admit(self._job(image, expected_tokens, image_options, timeout, deadline))

    def encode_image(self, data: ImageInput) -> dict[str, torch.Tensor]:
        """Encode one image into named tensors: `embeddings` [rows, width] on the device, and int64
        `embedding_offsets` [2] and `grid_thws` [1, 3] on the CPU. Raises as `generate`.
        """
        check_input(data, None)
        return _named(self.generate(data)[0])

    async def encode_image_async(self, data: ImageInput) -> dict[str, torch.Tensor]:
        """`encode_image` for an event loop, see `generate_async`."""
        check_input(data, None)
        return _named((await self.generate_async(data))[0])

    def health(self) -> Health:
        """State, threads, queue and last fault at this moment; answers after `close` and in callbacks too."""
        self._engine.require_own_process()
        return self._engine.health()

    def stats(self) -> EncoderStats:
        """Counts since construction, and percentiles of recent times by stage. Answers as `health` does."""
        self._engine.require_own_process()
        return self._engine.stats()

    def cache_stats(self) -> CacheStats:
        """The cache's counts, all zero without one. Answers as `health` does."""
        self._engine.require_own_process()
        return self._coalescer.stats()

    def bump_weights(self) -> None:
        """Have the cache serve no result that it has now, for callers who change weights in place. Call it
        before the change begins, so that nothing made during it is kept for good, and again once it is done.
        """
        self._engine.require_usable()
        self._coalescer.bump_weights()

    def close(self) -> None:
        """Stop admission, finish what was accepted, join every thread. Results live on; twice is fine.

        From a result's callback it stops admission and returns; the threads end by themselves.
        """
        self._engine.close(drain=True)

    async def close_async(self) -> None:
        """`close` for an event loop, which goes on meanwhile. Cancelling the waiting does not stop it."""
        await self._engine.close_async(drain=True)

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception nobody is left to read the results.
        self._engine.close(drain=kind is None)

    async def __aenter__(self) -> Encoder:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._engine.close_async(drain=kind is None)

    def _job(
        self,
        image: ImageInput,
        expected: int | None,
        options: ImageOptions | None,
        timeout: float | None,
        deadline: float | None,
    ) -> Job:
        check_input(image, options)
        if timeout is not None:
            timeout = require_seconds("timeout", timeout)
        if deadline is not None:
            require_moment("deadline", deadline)
        consumer = consumer_stream(self.device)
        return Job(image, options, expected, consumer, timeout=timeout, deadline=deadline)

    def _log_ready(self) -> None:
        for index in range(self.replicas_per_gpu):
            logger.info(
                "ready: %s (%s) replica %d of %d on %s, %s, stream priority %d, native kernels %s",
                self.model,
                self.family,
                index + 1,
                self.replicas_per_gpu,
                self.device,
                self.dtype,
                self.stream_priority,
                native_summary(),
                extra={"mm_event": "ready", "mm_model": self.model, "mm_worker": index},
            )


def _named(result: ImageResult) -> dict[str, torch.Tensor]:
    rows, metadata = result
    with torch.inference_mode(False):  # ordinary tensors, wherever this is called from
        return {
            "embeddings": rows,
            "embedding_offsets": torch.tensor(metadata.embedding_offsets, device="cpu"),
            "grid_thws": torch.tensor(metadata.grid_thws, device="cpu"),
        }
