"""Calls from event loops: their results, that they never block the loop, cancellation and closing."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import io
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_encoder import (
    DeadlineExceededError,
    Encoder,
    EncoderBusyError,
    EncoderClosedError,
    ImageOptions,
    ImageResult,
    MediaDecodeError,
    PlanMismatchError,
)
from mm_encoder.engine.budget import Budget
from mm_encoder.engine.job import Job
from mm_encoder.families.glm53 import Glm53, GlmTower

from ..helpers.holding import STAGES, Hold, Scene
from ..helpers.images import mixed, noise, png, saved
from ..helpers.programs import outcome_of
from ..helpers.waiting import HANG, in_flight, nothing_left, until

pytestmark = pytest.mark.usefixtures("one_compute_thread")
threads = pytest.mark.threads


async def until_async(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, f"the condition was still false after {HANG} s"
        await asyncio.sleep(0.001)


def same(results: list[ImageResult], wanted: list[ImageResult]) -> bool:
    return [r.metadata for r in results] == [w.metadata for w in wanted] and all(
        torch.equal(result.tensor, other.tensor) for result, other in zip(results, wanted, strict=True)
    )


def cpu_encoder(checkpoint: Path, **settings: Any) -> Encoder:
    return Encoder(checkpoint, device="cpu", **settings)


# --- results -----------------------------------------------------------------------------------------


@threads
def test_results_are_those_of_generate(encoder: Encoder) -> None:
    images = mixed(9)
    wanted = encoder.generate(images)

    async def main() -> None:
        assert same(await encoder.generate_async(images), wanted)
        assert same(await encoder.generate_async(image for image in images), wanted)
        assert same(await encoder.generate_async(images[2]), wanted[2:3])
        assert await encoder.generate_async([]) == []
        together = await asyncio.gather(*(encoder.generate_async(images[i : i + 3]) for i in (0, 3, 6)))
        assert same([result for results in together for result in results], wanted)
        named = await encoder.encode_image_async(images[4])
        for name, value in encoder.encode_image(images[4]).items():
            assert torch.equal(named[name], value)
            assert not named[name].is_inference()

    asyncio.run(main())
    nothing_left(encoder)


@threads
def test_every_kind_of_source_is_opened(encoder: Encoder, tmp_path: Path) -> None:
    data = png(60, 50)
    path = tmp_path / "image"
    path.write_bytes(data)
    opened = Image.open(io.BytesIO(data))
    images: list[Any] = [data, bytearray(data), memoryview(data), path, np.asarray(opened), opened]
    assert same(asyncio.run(encoder.generate_async(images)), encoder.generate(images))


@threads
def test_timings_name_the_stages(encoder: Encoder) -> None:
    (result,) = asyncio.run(encoder.generate_async(png()))
    stages = ["admission_wait", "queue_wait", "open", "hash", "decode", "patches", "replica_wait", "tower"]
    assert [stage for stage, _ in result.metadata.timings] == stages


GOOD = png(100, 60)


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(noise(90, 40), "PNG", exif=exif)


def test_image_options_and_expected_tokens_apply(encoder: Encoder) -> None:
    rows = encoder.generate(GOOD)[0].metadata.length
    stored = ImageOptions(exif_orientation=False)

    async def main() -> None:
        assert await encoder.generate_async([GOOD, GOOD], expected_tokens=[rows, rows])
        assert (await encoder.generate_async(turned()))[0].metadata.original_size == (40, 90)
        as_stored = await encoder.generate_async(turned(), image_options=stored)
        assert as_stored[0].metadata.original_size == (90, 40)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("images", "options"),
    [
        ([GOOD, GOOD, GOOD[:200], GOOD], {}),
        (b"", {}),
        ([GOOD, b"nothing"], {}),
        (Path("/no/such/file"), {}),
        (5, {}),
        ([GOOD, 7], {}),
        (io.BytesIO(GOOD), {}),
        ([io.BytesIO(GOOD)], {}),
        ([GOOD], {"expected_tokens": [99]}),
        (GOOD, {"expected_tokens": [99]}),
        ([GOOD], {"expected_tokens": []}),
        ([GOOD], {"expected_tokens": [1, 2]}),
        ([GOOD], {"expected_tokens": [0]}),
        ([GOOD], {"expected_tokens": [True]}),
        ([GOOD], {"image_options": {}}),
        ([GOOD], {"timeout": "1"}),
        (GOOD, {"timeout": -1}),
        ([GOOD], {"deadline": float("nan")}),
        ([GOOD], {"deadline": 1e-9}),
    ],
)
def test_errors_are_those_of_generate(encoder: Encoder, images: Any, options: dict[str, Any]) -> None:
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        encoder.generate(images, **options)
    with pytest.raises(wanted.type) as raised:
        asyncio.run(encoder.generate_async(images, **options))
    assert type(raised.value) is wanted.type
    if "deadline" in options:  # the messages say how long ago it was
        assert re.sub(r"[0-9.]+ s", "", str(raised.value)) == re.sub(r"[0-9.]+ s", "", str(wanted.value))
    else:
        assert str(raised.value) == str(wanted.value)
    nothing_left(encoder)
    assert len(encoder.generate(GOOD)) == 1


@pytest.mark.parametrize("image", [5, [GOOD], None, io.BytesIO(GOOD), b"", GOOD[:200]])
def test_errors_are_those_of_encode_image(encoder: Encoder, image: Any) -> None:
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        encoder.encode_image(image)
    with pytest.raises(wanted.type) as raised:
        asyncio.run(encoder.encode_image_async(image))
    assert str(raised.value) == str(wanted.value)


def test_a_plan_mismatch_raises_before_the_tower_runs(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlmTower, "forward", lambda *_: pytest.fail("the tower ran"))
    with pytest.raises(PlanMismatchError, match=r"^images\[0\]: expected 99 tokens"):
        asyncio.run(encoder.generate_async([GOOD], expected_tokens=[99]))


class Faulty:
    """A call whose first image fails while the second is being prepared, held until `patches` is released."""

    def __init__(self, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self._encoder, self._bad = encoder, b"nothing"
        self.patches = Hold(monkeypatch, Glm53, "patches")
        self._opening = Hold(monkeypatch, Glm53, "open", lambda _, image, *__: image is self._bad)

    async def begun(self) -> asyncio.Task[list[ImageResult]]:
        call = asyncio.create_task(self._encoder.generate_async([self._bad, GOOD]))
        await asyncio.to_thread(self.patches.wait)
        self._opening.release()
        await until_async(lambda: self._encoder.stats().failed == 1)
        await asyncio.sleep(0.02)
        assert not call.done()
        return call


@threads
def test_a_failed_call_raises_after_its_preparation_has_stopped(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=8, preprocess_workers=2) as encoder:
        faulty = Faulty(encoder, monkeypatch)

        async def main() -> None:
            call = await faulty.begun()
            faulty.patches.release()
            with pytest.raises(MediaDecodeError, match=r"^images\[0\]: "):
                await call
            assert in_flight(encoder) == (0, 0, 0, 0)

        asyncio.run(main())


@threads
def test_a_failed_call_can_be_cancelled_while_its_preparation_stops(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=8, preprocess_workers=2) as encoder:
        faulty = Faulty(encoder, monkeypatch)

        async def main() -> None:
            call = await faulty.begun()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            faulty.patches.release()

        asyncio.run(main())
        nothing_left(encoder)


# --- the loop is never blocked -----------------------------------------------------------------------


@asynccontextmanager
async def ticks() -> AsyncIterator[list[int]]:
    """Count the rounds of a task that runs once per millisecond: it stops when the loop is blocked."""
    count = [0]

    async def tick() -> None:
        while True:
            count[0] += 1
            await asyncio.sleep(0.001)

    task = asyncio.create_task(tick())
    try:
        yield count
    finally:
        task.cancel()


OBSTACLES = ("tower", "slots", "bytes", "opening")


@threads
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_the_event_loop_is_never_blocked(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    held = (Glm53, "open") if obstacle == "opening" else (GlmTower, "forward")
    settings = {"slots": {"queue_depth": 1}, "bytes": {"queue_bytes": 1}}.get(obstacle, {})
    with cpu_encoder(glm53_checkpoint, **settings) as encoder, Hold(monkeypatch, *held) as hold:

        async def main() -> None:
            async with ticks() as count:
                before = []
                if obstacle in ("slots", "bytes"):
                    before.append(encoder.submit(GOOD))
                    hold.wait()
                    before.append(encoder.submit(GOOD))  # this one holds every slot and byte
                call = asyncio.create_task(encoder.generate_async(GOOD))
                await until_async(lambda: encoder.stats().requests == len(before) + 1)
                if obstacle == "slots":
                    assert encoder.health().waiting == 1
                elif obstacle in ("opening", "tower"):
                    await asyncio.to_thread(hold.wait)
                start = count[0]
                await until_async(lambda: count[0] > start + 20)
                assert not call.done()
                hold.release()
                assert len(await call) == 1

        asyncio.run(main())


@threads
def test_control_generate_blocks_the_event_loop(glm53_checkpoint: Path, towers: Hold) -> None:
    # The control of the test above: generate() stops the ticks.
    with cpu_encoder(glm53_checkpoint) as encoder:
        counted: list[int] = []

        async def main() -> None:
            async with ticks() as count:
                await until_async(lambda: count[0] > 3)

                def look() -> None:
                    towers.wait()
                    for _ in range(2):
                        counted.append(count[0])
                        threading.Event().wait(0.1)
                    towers.release()

                looking = threading.Thread(target=look)
                looking.start()
                encoder.generate(GOOD)
                looking.join()

        asyncio.run(main())
        assert counted[0] == counted[1]


@threads
def test_calls_start_no_threads(glm53_checkpoint: Path, towers: Hold) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=3) as encoder, towers:

        async def main() -> None:
            first = asyncio.create_task(encoder.generate_async(GOOD))
            await until_async(lambda: encoder.health().replicas[0].busy_s is not None)
            before = threading.active_count()
            calls = [asyncio.create_task(encoder.generate_async(GOOD)) for _ in range(200)]
            await until_async(lambda: encoder.health().waiting == 197)
            assert threading.active_count() == before
            towers.release()
            assert len(await asyncio.gather(first, *calls)) == 201
            assert threading.active_count() == before

        asyncio.run(main())
        nothing_left(encoder)


# --- a full queue ------------------------------------------------------------------------------------


@threads
def test_threads_and_event_loops_share_one_fifo_queue(glm53_checkpoint: Path, towers: Hold) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=1, preprocess_workers=1) as encoder, towers:
        served: list[int] = []

        def note(number: int) -> Callable[[Any], None]:
            return lambda _: served.append(number)

        async def main() -> None:
            running = encoder.submit(GOOD)
            await asyncio.to_thread(towers.wait)
            queued = encoder.submit(GOOD)
            callers: list[threading.Thread] = []
            tasks: list[asyncio.Task[Any]] = []
            for number in range(8):
                if number % 2:
                    tasks.append(asyncio.create_task(encoder.generate_async(png(30 + 20 * number, 30))))
                    tasks[-1].add_done_callback(note(number))
                else:
                    size = 30 + 20 * number

                    def call(size: int = size, number: int = number) -> None:
                        encoder.submit(png(size, 30)).add_done_callback(note(number))

                    callers.append(threading.Thread(target=call))
                    callers[-1].start()
                await until_async(lambda number=number: encoder.health().waiting == number + 1)  # type: ignore[misc]
            numbers = [job.number for job in encoder._engine.scheduler.slots._waiters]
            assert numbers == sorted(numbers)
            towers.release()
            await asyncio.gather(*tasks)
            assert running.result()
            assert queued.result()
            for caller in callers:
                await asyncio.to_thread(caller.join)

        order: list[int] = []
        prepared = encoder._engine.scheduler.finish_preparing

        def noted(worker: Any, grant: Any = None) -> None:
            order.append(worker.job.number)
            prepared(worker, grant)

        encoder._engine.scheduler.finish_preparing = noted  # type: ignore[method-assign]
        asyncio.run(main())
        assert order == sorted(order)
        until(lambda: sorted(served) == list(range(8)))


@threads
@pytest.mark.parametrize("timeout", [0, 0.02])
def test_a_full_queue_refuses_in_time(glm53_checkpoint: Path, towers: Hold, timeout: float) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=1) as encoder, towers:
        running = encoder.submit(GOOD)
        towers.wait()

        async def main() -> None:
            # One slot is free, so the first of the two gets it.
            with pytest.raises(EncoderBusyError, match=r"^images\[1\]: the queue is full"):
                await encoder.generate_async([GOOD, GOOD], timeout=timeout)
            assert in_flight(encoder) == (1, 0, 0, 0)
            queued = asyncio.create_task(encoder.generate_async(GOOD))
            await asyncio.sleep(0)
            with pytest.raises(EncoderBusyError, match="^the queue is full"):
                await encoder.generate_async(GOOD, timeout=timeout)
            assert encoder.stats().refused == 2
            assert encoder.health().waiting == 0
            towers.release()
            assert len(await queued) == 1
            assert await encoder.generate_async(GOOD, timeout=timeout)

        asyncio.run(main())
        assert running.result()
        nothing_left(encoder)


@threads
@pytest.mark.parametrize("far", [1e8, float("inf")])
def test_very_long_timeouts_and_deadlines_wait(glm53_checkpoint: Path, towers: Hold, far: float) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=1) as encoder, towers:

        async def main() -> None:
            calls = [
                asyncio.create_task(encoder.generate_async(GOOD, timeout=far, deadline=far)) for _ in range(4)
            ]
            await until_async(lambda: encoder.health().waiting == 2)
            towers.release()
            assert len(await asyncio.gather(*calls)) == 4

        asyncio.run(main())


@threads
@pytest.mark.parametrize("asynchronous", [False, True])
def test_closing_while_the_timeout_passes_raises_encoder_closed(
    glm53_checkpoint: Path, towers: Hold, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    encoder = cpu_encoder(glm53_checkpoint, queue_depth=1)
    running = encoder.submit(GOOD)
    towers.wait()
    queued = encoder.submit(GOOD)
    cancel_wait = Budget.cancel_wait

    def closed_before(budget: Budget[Job], job: Job) -> int:
        # Not `close`: it waits for accepted jobs, so it would wait for this thread if the slot was granted
        # meanwhile.
        encoder._engine.scheduler.close()
        return cancel_wait(budget, job)

    monkeypatch.setattr(Budget, "cancel_wait", closed_before)

    def call() -> None:
        if asynchronous:
            asyncio.run(asyncio.wait_for(encoder.generate_async(GOOD, timeout=0.02), HANG))
        else:
            encoder.submit(GOOD, timeout=0.02).result(timeout=HANG)

    with pytest.raises(EncoderClosedError):
        call()
    towers.release()
    encoder.close()
    assert running.result()
    assert queued.result()
    nothing_left(encoder)


class Clock:
    """The clock of the deadlines: a deadline an hour ahead passes when `pass_it` is called."""

    def __init__(self, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self._deadlines = encoder._engine.scheduler.deadlines
        self._ahead = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._ahead)
        monkeypatch.setattr("mm_encoder.engine.deadlines.time", clock)

    def deadline(self) -> float:
        return time.monotonic() + 3600

    def pass_it(self) -> None:
        self._ahead += 7200
        self._deadlines.watch(Job(None, deadline=1e-9))  # wakes the thread, which then looks at the clock


@threads
@pytest.mark.parametrize("stage", STAGES)
def test_a_deadline_applies_at_every_stage(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    with Scene(stage, glm53_checkpoint, monkeypatch) as scene:
        clock = Clock(scene.encoder, monkeypatch)

        async def main() -> None:
            call = asyncio.create_task(scene.encoder.generate_async(scene.victim, deadline=clock.deadline()))
            await asyncio.to_thread(scene.reached)
            clock.pass_it()
            if stage == "running":  # a running job finishes
                scene.release()
                assert len(await call) == 1
                return
            await until_async(lambda: scene.encoder.stats().late == 1)
            if stage in ("opening", "decoding", "patches"):
                scene.release()  # generate_async raises once its preparation has stopped
            with pytest.raises(DeadlineExceededError, match="^the deadline passed"):
                await call

        asyncio.run(main())
        scene.check_others()
        assert scene.encoder.stats().late == (stage != "running")


# --- cancelled tasks ---------------------------------------------------------------------------------


@threads
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_cancelled_task_leaves_nothing_behind(
    glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stage: str, how: str
) -> None:
    with Scene(stage, glm53_checkpoint, monkeypatch) as scene:

        async def main() -> None:
            async def call() -> None:
                async with asyncio.timeout(None) as limit:
                    limits.append(limit)
                    await scene.encoder.generate_async(scene.victim)

            limits: list[asyncio.Timeout] = []
            task = asyncio.create_task(call())
            await asyncio.to_thread(scene.reached)
            assert not task.done()
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):  # at once, though a thread may have the image
                    await task
            else:
                limits[0].reschedule(0)
                with pytest.raises(TimeoutError):
                    await task
            assert scene.encoder.stats().cancelled == (stage != "running")
            if stage in ("waiting", "queued", "ready"):  # no thread has it, so its slot is free at once
                assert scene.encoder.health().waiting == 0
                assert scene.encoder.health().queue_length == {"waiting": 2, "queued": 3, "ready": 2}[stage]

        asyncio.run(main())
        scene.check_others()
        assert scene.encoder.stats().cancelled == (stage != "running")


@threads
def test_a_cancelled_call_cancels_all_its_images(glm53_checkpoint: Path, towers: Hold) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=4) as encoder, towers:

        async def main() -> None:
            call = asyncio.create_task(encoder.generate_async(mixed(9)))
            await until_async(lambda: in_flight(encoder)[:3] == (6, 1, 4))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until_async(lambda: in_flight(encoder) == (1, 0, 0, 0))
            stats = encoder.stats()
            assert (stats.requests, stats.cancelled) == (6, 5)  # the other three were never submitted

        asyncio.run(main())
        towers.release()
        nothing_left(encoder)


# --- context, loops, encoders ------------------------------------------------------------------------


VARIABLE = contextvars.ContextVar("VARIABLE", default="nobody's")


@threads
def test_context_variables_do_not_leak_between_tasks(glm53_checkpoint: Path) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=1) as encoder:

        async def call(name: str) -> None:
            VARIABLE.set(name)
            seen = []

            def images() -> Iterator[bytes]:
                for image in mixed(3):
                    seen.append(VARIABLE.get())
                    yield image

            for _ in range(3):
                await encoder.generate_async(images())
                assert VARIABLE.get() == name
            assert set(seen) == {name}

        async def main() -> None:
            await asyncio.gather(*(call(f"task {i}'s") for i in range(4)))
            assert VARIABLE.get() == "nobody's"

        asyncio.run(main())
        assert VARIABLE.get() == "nobody's"


@threads
def test_several_loops_share_an_encoder(glm53_checkpoint: Path) -> None:
    images = mixed(12)
    with cpu_encoder(glm53_checkpoint, replicas_per_gpu=2, queue_depth=3) as encoder:
        wanted = encoder.generate(images)
        received: list[list[ImageResult]] = []

        async def main() -> None:
            calls = [encoder.generate_async(images[start::3]) for start in range(3)]
            parts = await asyncio.gather(*calls)
            results: list[Any] = [None] * len(images)
            for start in range(3):
                results[start::3] = parts[start]
            received.append(results)

        callers = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(HANG)
        assert len(received) == 4
        assert all(same(results, wanted) for results in received)
        nothing_left(encoder)


@threads
def test_two_encoders_share_a_loop(glm53_checkpoint: Path) -> None:
    images = mixed(6)

    async def main() -> None:
        async with cpu_encoder(glm53_checkpoint) as one, cpu_encoder(glm53_checkpoint) as other:
            results = await asyncio.gather(*(e.generate_async(images) for e in (one, other) * 3))
            wanted = await asyncio.to_thread(one.generate, images)
            assert all(same(part, wanted) for part in results)
            await one.close_async()
            assert same(await other.generate_async(images), wanted)

    asyncio.run(main())


# --- loops that are closed ---------------------------------------------------------------------------


def test_closing_a_loop_with_calls_in_flight_releases_them(glm53_checkpoint: Path) -> None:
    # asyncio reports that each pending task was destroyed, which is the program's fault; nothing else may be
    # reported.
    program = """
        warnings.simplefilter("error")
        hold()
        encoder = encoder(queue_depth=2)
        said = []
        loop = asyncio.new_event_loop()
        loop.slow_callback_duration = 60
        loop.set_exception_handler(lambda loop, context: said.append(context["message"]))
        tasks = [loop.create_task(encoder.generate_async([IMAGE, IMAGE])) for _ in range(6)]
        loop.call_later(0.1, loop.stop)
        loop.run_forever()
        loop.close()
        assert encoder.health().waiting
        opened.set()
        kept = tasks[:3]
        del tasks
        gc.collect()
        assert encoder.generate([IMAGE] * 5)
        until(lambda: encoder.stats().in_flight == 0)
        del kept
        gc.collect()
        assert set(said) == {"Task was destroyed but it is pending!"}, said
        assert len(said) == 6, said
        assert encoder.generate([IMAGE] * 5)
        health, stats = encoder.health(), encoder.stats()
        assert (health.queue_length, health.queue_bytes, health.waiting, stats.in_flight) == (0, 0, 0, 0)
        encoder.close()
    """
    assert outcome_of(program, glm53_checkpoint, "-X", "dev") == (0, "", "")


def test_an_exception_out_of_asyncio_run_cancels_calls_in_flight(glm53_checkpoint: Path) -> None:
    program = """
        warnings.simplefilter("error")
        hold()
        encoder = encoder(queue_depth=2)

        async def main():
            asyncio.get_running_loop().slow_callback_duration = 60
            tasks = [asyncio.create_task(encoder.generate_async([IMAGE, IMAGE])) for _ in range(6)]
            while encoder.health().waiting < 4:
                await asyncio.sleep(0.001)
            raise KeyError("the host's")

        try:
            asyncio.run(main())
        except KeyError:
            pass
        until(lambda: (encoder.health().queue_length, encoder.health().waiting) == (0, 0))
        opened.set()
        assert encoder.generate([IMAGE] * 5)
        health, stats = encoder.health(), encoder.stats()
        assert (health.queue_length, health.queue_bytes, health.waiting, stats.in_flight) == (0, 0, 0, 0)
        encoder.close()
    """
    assert outcome_of(program, glm53_checkpoint, "-X", "dev") == (0, "", "")


def test_a_task_can_be_collected_while_the_engine_holds_a_lock(glm53_checkpoint: Path) -> None:
    # The loop is closed, the first image is done and the last two wait: collecting the task cancels these.
    program = """
        import weakref
        import mm_encoder.engine.scheduler as scheduler

        def held(tower, *arguments):
            arrived.release()
            going.acquire()
            return forward(tower, *arguments)

        going = threading.Semaphore(0)
        GlmTower.forward = held
        gc.disable()
        encoder = encoder(queue_depth=8, preprocess_workers=1)
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)
        task = loop.create_task(encoder.generate_async([IMAGE] * 4))

        async def asked():
            while encoder.stats().requests < 4:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)  # now it waits for its first image

        loop.run_until_complete(asked())
        loop.close()
        watch, more = weakref.ref(task), 0
        del task, loop
        arrived.acquire()
        going.release()
        arrived.acquire()

        def number(job):
            gc.collect()
            return job.number

        scheduler._by_number = number
        while watch() is not None:
            assert encoder.submit(IMAGE).cancel()
            more += 1
        until(lambda: encoder.stats().cancelled == 2 + more)  # in another thread
        going.release(9)
        assert encoder.generate(IMAGE)
        until(lambda: encoder.stats().in_flight == 0)
        encoder.close()
    """
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


def test_close_on_the_loop_does_not_need_the_loop_to_run(glm53_checkpoint: Path) -> None:
    program = """
        hold()

        async def main():
            with encoder(queue_depth=1) as it:
                first = asyncio.create_task(it.generate_async(IMAGE))
                await asyncio.to_thread(arrived.acquire)
                tasks = [asyncio.create_task(it.generate_async(IMAGE)) for _ in range(2)]
                while not it.health().waiting:
                    await asyncio.sleep(0.001)
                opened.set()
                until(lambda: not it.health().waiting)
                # The last task has its slot, but this loop has not run its callback yet.
            assert all(await asyncio.gather(first, *tasks))

        asyncio.run(main())
    """
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


@threads
def test_a_free_slot_is_used_while_the_loop_is_busy(glm53_checkpoint: Path, towers: Hold) -> None:
    with cpu_encoder(glm53_checkpoint, queue_depth=1) as encoder, towers:
        running = encoder.submit(GOOD)
        towers.wait()
        queued = encoder.submit(GOOD)
        passed: list[bool] = []

        async def main() -> None:
            call = asyncio.create_task(encoder.generate_async(GOOD))
            await until_async(lambda: encoder.health().waiting == 1)
            towers.release()
            # From here on this loop is blocked: the waiting call must be encoded without it.
            end = time.monotonic() + HANG
            while encoder.stats().succeeded < 3 and time.monotonic() < end:
                time.sleep(0.001)
            passed.append(encoder.stats().succeeded == 3)
            await call

        asyncio.run(main())
        assert passed == [True]
        assert running.result()
        assert queued.result()


# --- closing -----------------------------------------------------------------------------------------


@threads
def test_leaving_the_block_finishes_accepted_calls(glm53_checkpoint: Path) -> None:
    async def main() -> None:
        async with cpu_encoder(glm53_checkpoint, queue_depth=9) as encoder:
            calls = [asyncio.create_task(encoder.generate_async(image)) for image in mixed(6)]
            await until_async(lambda: encoder.stats().requests == 6)
        assert all(await asyncio.gather(*calls))
        nothing_left(encoder)

    asyncio.run(main())


@threads
def test_leaving_the_block_by_an_exception_cancels_waiting_jobs(glm53_checkpoint: Path, towers: Hold) -> None:
    async def main() -> None:
        encoder = cpu_encoder(glm53_checkpoint, queue_depth=3)
        calls: list[asyncio.Task[list[ImageResult]]] = []

        async def interrupted() -> None:
            async with encoder:
                calls.append(asyncio.create_task(encoder.generate_async(GOOD)))
                await asyncio.to_thread(towers.wait)
                calls.extend(asyncio.create_task(encoder.generate_async([GOOD])) for _ in range(7))
                await until_async(lambda: encoder.health().waiting == 4)
                asyncio.get_running_loop().call_later(0.05, towers.release)
                raise KeyError("the host's")

        with pytest.raises(KeyError, match="the host's"):
            await interrupted()
        running, *waiting = calls
        assert len(await running) == 1
        for call in waiting:
            with pytest.raises(EncoderClosedError, match=r"^images\[0\]: the encoder (was|is) closed"):
                await call
        nothing_left(encoder)
        assert (encoder.stats().cancelled, encoder.stats().refused) == (3, 4)

    asyncio.run(main())


@threads
def test_close_async_refuses_waiting_callers_and_does_not_block_the_loop(
    glm53_checkpoint: Path, towers: Hold
) -> None:
    async def main() -> None:
        encoder = cpu_encoder(glm53_checkpoint, queue_depth=1)
        running = encoder.submit(GOOD)
        await asyncio.to_thread(towers.wait)
        queued = asyncio.create_task(encoder.generate_async(GOOD))
        await asyncio.sleep(0)
        received: list[BaseException] = []

        def blocked() -> None:
            try:
                encoder.submit(GOOD)
            except EncoderClosedError as error:
                received.append(error)

        callers = [threading.Thread(target=blocked) for _ in range(3)]
        for caller in callers:
            caller.start()
        tasks = [asyncio.create_task(encoder.generate_async(GOOD)) for _ in range(3)]
        await until_async(lambda: encoder.health().waiting == 6)
        async with ticks() as count:
            closing = [asyncio.create_task(encoder.close_async()) for _ in range(2)]
            for task in tasks:
                with pytest.raises(EncoderClosedError):
                    await task
            for caller in callers:
                await asyncio.to_thread(caller.join)
            assert len(received) == 3
            start = count[0]
            await until_async(lambda: count[0] > start + 20)
            assert not any(task.done() for task in closing)  # a tower is still running
            towers.release()
            await asyncio.gather(*closing)
        assert running.result(timeout=0)
        assert len(await queued) == 1
        await encoder.close_async()
        encoder.close()
        nothing_left(encoder)

    asyncio.run(main())


@threads
def test_cancelling_close_async_does_not_stop_the_closing(glm53_checkpoint: Path, towers: Hold) -> None:
    async def main() -> None:
        encoder = cpu_encoder(glm53_checkpoint)
        running = encoder.submit(GOOD)
        await asyncio.to_thread(towers.wait)
        closing = asyncio.create_task(encoder.close_async())
        await until_async(lambda: encoder.health().state == "draining")
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await encoder.close_async()
        towers.release()
        await until_async(lambda: encoder.health().state == "closed")
        assert running.result(timeout=0)

    asyncio.run(main())
    until(lambda: not any(t.name.startswith("mm-encoder") for t in threading.enumerate()))


@threads
def test_calls_after_close_are_refused(glm53_checkpoint: Path) -> None:
    async def main() -> None:
        encoder = cpu_encoder(glm53_checkpoint)
        await encoder.close_async()
        for image in (GOOD, b"nothing"):
            for call in (encoder.generate_async, encoder.encode_image_async):
                with pytest.raises(EncoderClosedError):
                    await call(image)
        with pytest.raises(EncoderClosedError):
            await encoder.generate_async([])
        with pytest.raises(EncoderClosedError):
            async with encoder:
                await encoder.generate_async(GOOD)
        assert encoder.health().state == "closed"

    asyncio.run(main())


@threads
def test_a_finished_call_leaves_no_future_and_no_job(encoder: Encoder) -> None:
    # The callbacks between engine threads and the loop leave no future or job in a reference cycle.
    def kept() -> int:
        return sum(type(thing) in (Future, Job) for thing in gc.get_objects())

    async def main() -> None:
        await encoder.generate_async(mixed(3))
        gc.collect()
        gc.disable()
        try:
            before = kept()
            for _ in range(3):
                await encoder.generate_async(mixed(3))
            await until_async(lambda: kept() <= before)
        finally:
            gc.enable()

    asyncio.run(main())
