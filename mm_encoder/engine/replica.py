"""A replica: one thread, one lane to the device and one tower, which turn ready jobs into rows."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from ..contract import ImageMetadata, ImageResult
from ..device import Lane, open_lane, out_of_memory
from ..errors import ReplicaError
from ..numerics import Watch
from ..settings import EncoderSettings
from .faults import strip_tracebacks
from .job import Job
from .protocols import BuildTower, TowerFunction
from .scheduler import Scheduler
from .worker import Worker


class Replica(Worker):
    """`loaded` resolves to the granted stream priority, or to the error of loading, once `thread` runs."""

    def __init__(
        self, index: int, settings: EncoderSettings, model: str, build_tower: BuildTower, scheduler: Scheduler
    ) -> None:
        super().__init__(f"mm-encoder-replica-{index}", scheduler)
        self._settings, self._model = settings, model
        self._build_tower: BuildTower | None = build_tower
        self._scheduler, self._watch = scheduler, Watch(settings.device)
        self.loaded: Future[int] = Future()

    def run(self) -> None:
        """Build the tower, then run jobs until closed; any exception that gets here ends the replica."""
        try:
            lane = open_lane(self._settings.device, self._settings.stream_priority)
            with lane.entered(), torch.no_grad():
                # Not kept: a shared tower is held by its builder, and must go when the last replica ends.
                build, self._build_tower = self._build_tower, None
                assert build is not None
                tower = build(lane)
                del build
                self.loaded.set_result(lane.priority)
                while (job := self._scheduler.next_to_run(self)) is not None:
                    self._run_job(lane, tower, job)
                    self.take(None)
                    del job  # an idle replica keeps neither image nor result alive
                # Work that consumers' streams wait for may still read the weights, which are freed next.
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
                raise  # every later job would fail as well
            job.fail(error)
        else:
            job.succeed(result)

    def _encode(self, lane: Lane, tower: TowerFunction, job: Job) -> ImageResult:
        patches, job.patches = job.patches, None
        assert patches is not None
        plan = patches.plan
        with self._watch.run():
            rows = own_storage(tower(lane.upload(patches.data), [plan.grid_thw]))
        if rows.shape[0] != plan.rows:
            raise ReplicaError(
                f"the tower gave {rows.shape[0]} rows, the plan has {plan.rows}; this is a bug"
            )
        done = None
        if self._settings.results_on_cpu:
            rows = lane.download(rows)
        else:
            if self._settings.handoff == "host":
                lane.wait()
            else:
                done = lane.make_consumer_wait(job.consumer)
            lane.record_stream(rows, job.consumer)
        job.on_computed(self._watch.settings, done)
        job.stage_done("tower")
        metadata = ImageMetadata(
            model=self._model,
            mm_hash=job.mm_hash,
            length=rows.shape[0],
            shape=tuple(rows.shape),
            dtype=str(rows.dtype),
            device=str(rows.device),
            strides=rows.stride(),
            embedding_offsets=plan.embedding_offsets,
            grid_thws=(plan.grid_thw,),
            original_size=(plan.source.width, plan.source.height),
            cache=None if self._settings.cache is None else "miss",
            timings=tuple(job.timings.items()),
        )
        return ImageResult(rows, metadata)


def build_once(build: BuildTower) -> BuildTower:
    """Return a `build` that runs once, for the first replica that calls it; the others get its tower."""
    lock, built = threading.Lock(), list[TowerFunction]()

    def build_or_take(lane: Lane) -> TowerFunction:
        with lock:
            if not built:
                built.append(build(lane))
            return built[0]

    return build_or_take


def own_storage(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows`, contiguous and alone in their storage."""
    rows = rows.contiguous()
    alone = rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
    return rows if alone else rows.clone()
