"""A replica: one thread, one lane to the device and one tower, which turn ready jobs into rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

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
        self.torch_threads = 0
        """Torch's number of threads in this thread, once it has loaded."""

    def run(self) -> None:
        """Build the tower, then run jobs until closed; any exception that gets here ends the replica."""
        try:
            self._work()
        except BaseException as error:
            try:
                self._end(error)
            except BaseException:
                self._end(error)  # does what the first attempt has left undone

    def _work(self) -> None:
        # Before its first operation: from here on the thread keeps the number, whatever others set.
        self.torch_threads = torch.get_num_threads()
        lane = open_lane(self._settings.device, self._settings.stream_priority)
        # Not kept: a shared tower is held by its builder, and must go when the last replica ends.
        build, self._build_tower = self._build_tower, None
        assert build is not None
        with _current(lane):
            tower = build(lane)
        del build
        self.loaded.set_result(lane.priority)
        while (job := self._scheduler.next_to_run(self)) is not None:
            self._run_job(lane, tower, job)
            self.take(None)
            del job  # an idle replica keeps neither image nor result alive
        # Work that consumers' streams wait for may still read the weights, which are freed next.
        with _current(lane):
            lane.drain()

    def _end(self, error: BaseException) -> None:
        if not self.loaded.done():
            ours = out_of_memory(error, "the weights of a replica") or error
            self.loaded.set_exception(strip_tracebacks(ours))
        elif self.loaded.exception() is None:
            self._scheduler.on_replica_lost(self, error)

    def _run_job(self, lane: Lane, tower: TowerFunction, job: Job) -> None:
        """Run a job and give it its outcome, whose callbacks see neither the lane nor its modes."""
        job.stage_done("replica_wait")
        try:
            with _current(lane):
                result = self._encode(lane, tower, job)
        except BaseException as error:
            with _current(lane):
                usable = lane.drain()
            if not usable:
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


@contextmanager
def _current(lane: Lane) -> Iterator[None]:
    with lane.entered(), torch.no_grad():
        yield


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
