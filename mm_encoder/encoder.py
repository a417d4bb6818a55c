"""The encoder: images in, embedding rows out. docs/architecture.md follows one image all the way."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from . import config
from .cached import admission_of
from .coalescer import Coalescer, NoCache
from .compiled.choice import TowerChoice
from .config import BatchConfig, CacheConfig, ImageOptions, MediaLimits
from .contract import CacheStats, EncoderStats, Health, ImageResult
from .device import consumer_stream, default_dtype, parse_device
from .engine.call import Call
from .engine.engine import Engine
from .engine.job import Job
from .errors import EncoderClosedError, ForkedProcessError
from .families.registry import load_family
from .logs import logger
from .media.source import ImageInput, check_input
from .pipeline import ImagePipeline
from .runtime import native_summary, usable_cpus
from .settings import EncoderSettings


class Encoder:
    """N replicas of one checkpoint's vision tower on one device, fed from one bounded queue. Thread-safe.

    checkpoint: directory with config.json, processor file and safetensors.
    model: name for metadata and identity; by default the config's or the directory's.
    device: "cuda", "cuda:N" or "cpu"; on a machine without a GPU pass "cpu".
    family: by default recognised from config.json.
    cache: results kept in memory and on disk, see CacheConfig; off by default.
    stream_priority: requested CUDA priority, lower is higher; `self.stream_priority` is what was granted.
    replicas_per_gpu: 1 to 32, each with its own thread, stream and copy of the weights.
    dtype: of tower and results; bfloat16 on CUDA, float32 on the CPU.
    share_weights: one read-only copy of the weights for all replicas.
    tower: "eager", in Python; "compiled", which runs without the GIL, and is compiled here if that was not
        done before; "auto": compiled if it was done before. See docs/compiled.md.
    batching: images of several callers in one run of the tower, see BatchConfig; None: one at a time.
    handoff: "host": a result is complete when its future is; "stream": the CUDA stream that was current at
        submission waits for it instead of the host. No difference on a CPU.
    queue_depth: images admitted and not yet running; by default 2 per replica, with batching 2 * max_images.
    queue_bytes: bytes of source and pixels that those images may hold.
    preprocess_workers: threads that decode and preprocess; by default min(4, usable CPUs). All encoders of a
        process together prepare at most one image per usable CPU at a time.
    limits: bytes and pixels of one image, see MediaLimits.
    wedged_after: seconds at one image, or batch, after which `health` reports a thread as wedged.

    Construction loads every replica. Raises TypeError or ValueError for an impossible argument,
    CheckpointError for an unsuitable checkpoint, RuntimeMismatchError where tower="compiled" cannot be, and
    otherwise the error of the first replica that failed, after stopping the others.
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
        tower: Literal["auto", "compiled", "eager"] = "auto",
        batching: BatchConfig | None = None,
        handoff: Literal["host", "stream"] = "host",
        queue_depth: int | None = None,
        queue_bytes: int = 1024**3,
        preprocess_workers: int | None = None,
        limits: MediaLimits | None = None,
        wedged_after: float = 120.0,
    ) -> None:
        self.device = parse_device(device)
        self.dtype = default_dtype(self.device) if dtype is None else dtype
        settings = EncoderSettings(
            device=self.device,
            dtype=self.dtype,
            cache=cache,
            limits=config.media_limits(limits),
            stream_priority=stream_priority,
            replicas_per_gpu=replicas_per_gpu,
            share_weights=share_weights,
            tower=tower,
            batching=batching,
            handoff=handoff,
            queue_depth=queue_depth,
            queue_bytes=queue_bytes,
            preprocess_workers=min(4, usable_cpus()) if preprocess_workers is None else preprocess_workers,
            wedged_after=wedged_after,
        )
        opened, rules = load_family(checkpoint, family)
        self.model, self.family = config.model_name(model, opened.name), rules.name
        self.replicas_per_gpu = replicas_per_gpu
        self._tower = TowerChoice.make(tower, rules, self.device, self.dtype)
        pipeline = ImagePipeline(rules, settings.limits, self.model, self.dtype, self._tower, settings.packed)
        with ExitStack() as undo:  # if a step fails, those before it
            self._coalescer = Coalescer.open(cache, settings, pipeline) if cache else NoCache()
            undo.callback(self._coalescer.close)
            self._engine = Engine(pipeline, self._coalescer, settings)  # loads every replica
            undo.callback(self._engine.close, drain=False)
            self._coalescer.make_keys(self._engine.torch_threads)  # of the weights that were loaded
            self._admission = admission_of(self._engine, self._coalescer, pipeline)
            self.stream_priority = self._engine.stream_priority
            self._log_ready()
            undo.pop_all()

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

        Images of one call are preprocessed in parallel and may run on different replicas. `expected_tokens`
        holds one positive int per image; a count that differs from the plan's raises PlanMismatchError before
        the tower runs. `timeout` and `deadline` hold for each image, as in `submit`. A refusal ends the call,
        else the first error in input order; raised with its index once nothing of the call runs any more.
        """
        self._engine.require_usable()
        call = Call(images, expected_tokens, self._engine.scheduler)
        try:
            for index, (image, expected) in enumerate(call.items):
                with call.naming(index):
                    asked = image, expected, image_options, timeout, deadline
                    call.add(self._admission.admit(self._job(*asked)))  # a kept job would keep its result
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

        Preprocessing threads open the images: they must not be changed until the await has finished.
        `timeout` bounds the wait for a slot only, not that for the bytes of an opened image. Cancelling the
        task cancels the images that no replica has taken yet.
        """
        self._engine.require_usable()
        call = Call(images, expected_tokens, self._engine.scheduler)
        try:
            for index, (image, expected) in enumerate(call.items):
                with call.naming(index):
                    asked = image, expected, image_options, timeout, deadline
                    call.add(await self._admission.admit_async(self._job(*asked)))
                if call.failed:
                    break
            return await call.results_async()
        except Exception:
            await call.settle_async()
            raise
        except GeneratorExit:  # from the garbage collector, maybe inside a lock that cancelling takes
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
        """Queue one image; waits at most `timeout` seconds (0: not at all) for its slot and bytes.

        `deadline` is a moment on time.monotonic()'s clock: if no replica has taken the image by then, its
        future raises DeadlineExceededError; a running one finishes. The image is copied and its header read
        before this returns: it may be changed afterwards, and an invalid header is in the future at once.
        Cancelling a queued image frees its slot; a running one finishes. Callbacks of the future run in the
        engine's threads: they should be brief, and the encoder raises RuntimeError when called from them, as
        it would deadlock. Raises EncoderBusyError, EncoderClosedError, ForkedProcessError, and ReplicaError
        when no replica is left.
        """
        self._engine.require_usable()
        if expected_tokens is not None:
            expected_tokens = config.require_count("expected_tokens", expected_tokens)
        return self._admission.admit(self._job(image, expected_tokens, image_options, timeout, deadline))

    def encode_image(self, data: ImageInput) -> dict[str, torch.Tensor]:
        """Encode one image into named tensors: `embeddings` [rows, width] on the device (with a cache of
        `results="cpu"` on the CPU), and int64 `embedding_offsets` [2] and `grid_thws` [1, 3] on the CPU.
        """
        check_input(data, None)
        return _named(self.generate(data)[0])

    async def encode_image_async(self, data: ImageInput) -> dict[str, torch.Tensor]:
        """`encode_image` for an event loop, see `generate_async`."""
        check_input(data, None)
        return _named((await self.generate_async(data))[0])

    def health(self) -> Health:
        """Report state, threads, queue and last failure; also after `close` and in callbacks."""
        self._engine.require_own_process()
        return replace(self._engine.health(), tower=str(self._tower))

    def stats(self) -> EncoderStats:
        """Return counts since construction, and percentiles of recent times by stage; at any time."""
        self._engine.require_own_process()
        return self._engine.stats()

    def cache_stats(self) -> CacheStats:
        """Return the cache's counts, all zero without one; at any time."""
        self._engine.require_own_process()
        return self._coalescer.stats()

    def bump_weights(self) -> None:
        """Invalidate all results cached by this encoder, for callers that change weights in place. Call it
        before the change, so that nothing made meanwhile is kept, and again after it.
        """
        self._engine.require_usable()
        self._coalescer.bump_weights()

    def close(self) -> None:
        """Stop admission, finish accepted images, join every thread, without a timeout. Idempotent.

        In a future's callback, and in a signal handler that interrupts a call of an encoder, it stops
        admission and returns; the threads end by themselves.
        """
        self._engine.close(drain=True)

    async def close_async(self) -> None:
        """`close` for an event loop, which is not blocked. Cancelling this does not stop the closing."""
        await self._engine.close_async(drain=True)

    def __enter__(self) -> Encoder:
        with suppress(ForkedProcessError):  # in a forked child the block does nothing, as `close` there
            self._engine.require_own_process()
            if self._engine.scheduler.closed:
                raise EncoderClosedError("the encoder is closed and stays so; create a new Encoder")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception nobody reads the results: what waits is cancelled.
        self._engine.close(drain=kind is None)

    async def __aenter__(self) -> Encoder:
        return self.__enter__()

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
            timeout = config.require_seconds("timeout", timeout)
        if deadline is not None:
            deadline = config.require_moment("deadline", deadline)
        return Job(image, options, expected, consumer_stream(self.device), timeout=timeout, deadline=deadline)

    def _log_ready(self) -> None:
        for index in range(self.replicas_per_gpu):
            logger.info(
                "ready: %s (%s) replica %d of %d on %s, %s, stream priority %d, native kernels %s, tower %s",
                self.model,
                self.family,
                index + 1,
                self.replicas_per_gpu,
                self.device,
                self.dtype,
                self.stream_priority,
                native_summary(),
                self._tower,
                extra={"mm_event": "ready", "mm_model": self.model, "mm_worker": index},
            )


def _named(result: ImageResult) -> dict[str, torch.Tensor]:
    with torch.inference_mode(False):  # ordinary tensors, wherever this is called from
        return {
            "embeddings": result.tensor,
            "embedding_offsets": torch.tensor(result.metadata.embedding_offsets, device="cpu"),
            "grid_thws": torch.tensor(result.metadata.grid_thws, device="cpu"),
        }
