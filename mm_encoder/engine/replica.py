"""A replica: one thread, one lane to the device and one tower, which turn batches of ready jobs into rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from ..contract import ImageMetadata, ImageResult
from ..device import Lane, open_lane, out_of_memory
from ..logs import logger
from ..numerics import Watch
from ..settings import EncoderSettings
from .batch import run_tower
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
        """Build the tower, then run batches until closed; any exception that gets here ends the replica."""
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
        while jobs := self._scheduler.next_to_run(self):
            self._run_batch(lane, tower, jobs)
            self.take()
            del jobs  # an idle replica keeps neither image nor result alive
        # Work that consumers' streams wait for may still read the weights, which are freed next.
        with _current(lane):
            lane.drain()

    def _end(self, error: BaseException) -> None:
        if not self.loaded.done():
            ours = out_of_memory(error, "the weights of a replica") or error
            self.loaded.set_exception(strip_tracebacks(ours))
        elif self.loaded.exception() is None:
            self._scheduler.on_replica_lost(self, error)

    def _run_batch(self, lane: Lane, tower: TowerFunction, jobs: tuple[Job, ...]) -> None:
        """Run jobs together; if that fails, one by one, so that only those fail that fail alone."""
        for job in jobs:
            job.stage_done("replica_wait")
        if not self._run_jobs(lane, tower, jobs):
            for index in range(len(jobs)):
                self.take(*jobs[index:])  # each has its own time until it counts as wedged
                self._run_jobs(lane, tower, jobs[index : index + 1])

    def _run_jobs(self, lane: Lane, tower: TowerFunction, jobs: tuple[Job, ...]) -> bool:
        """Run jobs together and give each its outcome, whose callbacks see neither the lane nor its modes.
        False, and none has an outcome, if several failed together.
        """
        try:
            with _current(lane):
                results = self._encode(lane, tower, jobs)
        except BaseException as error:
            with _current(lane):
                usable = lane.drain()
            if not usable:
                raise  # every later job would fail as well
            if len(jobs) > 1:
                fields = {"mm_event": "batch_failed", "mm_error": type(error).__name__}
                what = f"a batch of {len(jobs)} images failed, and each is run alone: {error}"
                logger.warning("%s", what, extra=fields)
                strip_tracebacks(error)  # it holds the batch's memory
                return False
            jobs[0].fail(error)
        else:
            for job, result in zip(jobs, results, strict=True):
                job.succeed(result)
        return True

    def _encode(self, lane: Lane, tower: TowerFunction, jobs: tuple[Job, ...]) -> list[ImageResult]:
        batch = [job.patches for job in jobs if job.patches is not None]
        runs = [batch] if self._settings.packed else [[patches] for patches in batch]
        with self._watch.run():
            rows = [one for run in runs for one in run_tower(lane, tower, run)]
        if not self._settings.results_on_cpu and self._settings.handoff == "host":
            lane.wait()
        return [self._hand_over(lane, job, one) for job, one in zip(jobs, rows, strict=True)]

    def _hand_over(self, lane: Lane, job: Job, rows: torch.Tensor) -> ImageResult:
        """Make the result of a job whose rows are enqueued on the lane."""
        done = None
        if self._settings.results_on_cpu:
            rows = lane.download(rows)
        else:
            if self._settings.handoff == "stream":
                done = lane.make_consumer_wait(job.consumer)
            lane.record_stream(rows, job.consumer)
        job.on_computed(self._watch.settings, done)
        job.stage_done("tower")
        assert job.plan is not None
        metadata = ImageMetadata(
            model=self._model,
            mm_hash=job.mm_hash,
            length=rows.shape[0],
            shape=tuple(rows.shape),
            dtype=str(rows.dtype),
            device=str(rows.device),
            strides=rows.stride(),
            embedding_offsets=job.plan.embedding_offsets,
            grid_thws=(job.plan.grid_thw,),
            original_size=(job.plan.source.width, job.plan.source.height),
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
