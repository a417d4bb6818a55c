"""A replica: one thread, one lane to the device, one tower; it takes ready jobs and makes rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ..contract import ImageMetadata, ImageResult
from ..device import Lane, open_lane, out_of_memory
from ..errors import ReplicaError
from .faults import strip_tracebacks
from .job import Job
from .scheduler import Scheduler
from .worker import Worker

TowerFunction = Callable[[torch.Tensor, Sequence[tuple[int, int, int]]], torch.Tensor]
BuildTower = Callable[[Lane], TowerFunction]
"""Builds the tower; runs in the replica's thread inside its lane, and returns when the tower is usable."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What all replicas of an encoder have in common."""

    model: str
    device: torch.device
    stream_priority: int
    handoff: str
    """"host": a result is complete when its future is; "stream": when the consumer's stream gets there."""
    build_tower: BuildTower
    to_cpu: bool = False
    """Whether results are CPU tensors wherever the tower is."""
    cache: str | None = None
    """What metadata says of the cache."""


class Replica(Worker):
    """`loaded` resolves to the granted stream priority, or to what failed, once `thread` is started."""

    def __init__(self, index: int, settings: ReplicaSettings, scheduler: Scheduler) -> None:
        super().__init__(f"mm-encoder-replica-{index}", scheduler)
        self._settings, self._scheduler = settings, scheduler
        self.loaded: Future[int] = Future()

    def run(self) -> None:
        """Load, then take jobs; whatever comes out of that ends the replica."""
        try:
            lane = open_lane(self._settings.device, self._settings.stream_priority)
            with lane.entered(), torch.no_grad():
                tower = self._settings.build_tower(lane)
                self.loaded.set_result(lane.priority)
                while (job := self._scheduler.next_to_run(self)) is not None:
                    self._run_job(lane, tower, job)
                    self.take(None)
                    del job  # an idle replica keeps no image and no result alive
                # Work handed over by the stream may still read the weights, which now go.
                lane.drain()
        except BaseException as error:
            if self.loaded.done():
                self._scheduler.on_replica_lost(self, error)
            else:
                ours = out_of_memory(error, "the weights of a replica") or error
                self.loaded.set_exception(strip_tracebacks(ours))

    def _run_job(self, lane: Lane, tower: TowerFunction, job: Job) -> None:
        job.stage_done("replica_wait")
        try:
            result = self._encode(lane, tower, job)
        except BaseException as error:
            if not lane.drain():
                raise  # every later job would fail too
            job.fail(error)
        else:
            job.succeed(result)

    def _encode(self, lane: Lane, tower: TowerFunction, job: Job) -> ImageResult:
        patches, job.patches = job.patches, None
        assert patches is not None
        plan = patches.plan
        rows = own_storage(tower(lane.upload(patches.data), [plan.grid_thw]))
        if rows.shape[0] != plan.rows:
            raise ReplicaError(
                f"the tower gave {rows.shape[0]} rows, the plan has {plan.rows}; this is a bug"
            )
        if self._settings.to_cpu:
            rows = lane.download(rows)
        else:
            if self._settings.handoff == "host":
                lane.wait()
            else:
                lane.make_consumer_wait(job.consumer)
            lane.record_stream(rows, job.consumer)
        job.stage_done("tower")
        metadata = ImageMetadata(
            model=self._settings.model,
            mm_hash=job.mm_hash,
            length=rows.shape[0],
            shape=tuple(rows.shape),
            dtype=str(rows.dtype),
            device=str(rows.device),
            strides=rows.stride(),
            embedding_offsets=plan.embedding_offsets,
            grid_thws=(plan.grid_thw,),
            original_size=(plan.source.width, plan.source.height),
            cache=self._settings.cache,
            timings=tuple(job.timings.items()),
        )
        return ImageResult(rows, metadata)


def build_once(build: BuildTower) -> BuildTower:
    """`build`, run by the first replica that gets here; the others take what it built."""
    lock, built = threading.Lock(), list[TowerFunction]()

    def build_or_take(lane: Lane) -> TowerFunction:
        with lock:
            if not built:
                built.append(build(lane))
            return built[0]

    return build_or_take


def own_storage(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, contiguous and in a storage that holds nothing else."""
    rows = rows.contiguous()
    alone = rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
    return rows if alone else rows.clone()
