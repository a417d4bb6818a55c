"""Interpreter exit and fork, each in a new process.

The process must end with the right exit code and an empty output and error stream.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ..helpers.programs import outcome_of
from ..helpers.waiting import HANG

pytestmark = pytest.mark.usefixtures("one_compute_thread")
threads = pytest.mark.threads
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

IMAGE = np.zeros((50, 50, 3), np.uint8)
CLEAN = (0, "", "")


# --- interpreter exit --------------------------------------------------------------------------------

AT_EXIT = {
    "a full queue and callers that wait": """
        be_slow()
        refused = []

        @atexit.register  # registered before the encoder, so it runs after the encoder has stopped
        def last():
            until(lambda: len(refused) == 8)

        encoder = encoder(queue_depth=2)

        def call(function):
            try:
                for _ in range(50):
                    function(IMAGE)
            except mm_encoder.EncoderClosedError:
                refused.append(function)

        for function in (encoder.generate, encoder.submit, encoder.encode_image, encoder.generate) * 2:
            threading.Thread(target=call, args=(function,), daemon=True).start()
        until(lambda: encoder.health().waiting > 3)
    """,
    "callers in non-daemon threads": """
        be_slow()
        encoder, results = encoder(queue_depth=1), []

        @atexit.register  # registered after the encoder, so it runs before the encoder stops
        def first():
            assert len(results) == 4, results
            assert encoder.generate(IMAGE)
            encoder.close()

        for _ in range(4):
            threading.Thread(target=lambda: results.append(encoder.generate([IMAGE] * 2))).start()
    """,
    "atexit hooks that call close()": """
        be_slow()
        opened = []

        @atexit.register
        def last():
            opened[0].close()
            assert opened[0].health().state == "closed"

        opened.append(encoder())

        @atexit.register
        def first():
            opened[0].close()
            assert all(future.result(timeout=0) for future in futures)

        futures = [opened[0].submit(IMAGE) for _ in range(6)]
    """,
    "a loop with pending tasks": """
        be_slow()
        encoder = encoder(queue_depth=2)

        async def main():
            global tasks
            tasks = [asyncio.create_task(encoder.generate_async([IMAGE] * 3)) for _ in range(9)]
            while encoder.stats().succeeded < 2:
                await asyncio.sleep(0.001)

        asyncio.run(main())
    """,
    "a loop that was only stopped": """
        be_slow()
        encoder = encoder(queue_depth=2)
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # asyncio reports that its tasks were destroyed
        tasks = [loop.create_task(encoder.generate_async([IMAGE] * 3)) for _ in range(9)]
        loop.call_later(0.05, loop.stop)
        loop.run_forever()
        loop.close()
    """,
    "close() in another thread": """
        be_slow()
        encoder = encoder(queue_depth=30)
        futures = [encoder.submit(IMAGE) for _ in range(30)]
        threading.Thread(target=encoder.close, daemon=True).start()
        until(lambda: encoder.health().state == "draining")
    """,
    "close_async() that a loop does not wait for": """
        be_slow()
        encoder = encoder(queue_depth=30)
        futures = [encoder.submit(IMAGE) for _ in range(30)]

        async def main():
            try:
                async with asyncio.timeout(0.05):
                    await encoder.close_async()
            except TimeoutError:
                pass

        asyncio.run(main())
    """,
    "close() in a callback": """
        be_slow()
        encoder = encoder(queue_depth=30)
        futures = [encoder.submit(IMAGE) for _ in range(30)]
        closed = threading.Event()
        futures[0].add_done_callback(lambda _: (encoder.close(), closed.set()))
        closed.wait()
    """,
    "close() in several callbacks": """
        be_slow()
        encoder = encoder(queue_depth=30, replicas_per_gpu=2)
        futures = [encoder.submit(IMAGE) for _ in range(30)]
        closed = threading.Semaphore(0)

        def close(_):
            encoder.close()
            closed.release()

        for future in futures[:20]:
            future.add_done_callback(close)
        for _ in range(3):
            closed.acquire()
    """,
    "a daemon thread that waits for several futures": """
        from concurrent.futures import wait
        be_slow()
        encoder = encoder(queue_depth=30)
        futures = [encoder.submit(IMAGE) for _ in range(30)]
        threading.Thread(target=wait, args=(futures,), daemon=True).start()
        until(lambda: futures[-1]._waiters)
    """,
    "close() in a signal handler inside submit": """
        from mm_encoder.pipeline import ImagePipeline
        open_image = ImagePipeline.open
        be_slow()
        encoder = encoder(queue_depth=30)
        signal.signal(signal.SIGUSR1, lambda *_: encoder.close())
        futures = [encoder.submit(IMAGE) for _ in range(9)]

        def interrupted(*arguments):
            signal.raise_signal(signal.SIGUSR1)
            open_image(*arguments)

        ImagePipeline.open = interrupted
        futures.append(encoder.submit(IMAGE))
        assert all(future.result() for future in futures)
        until(lambda: encoder.health().state == "closed")
    """,
    "close() in a signal handler inside generate, and sys.exit()": """
        be_slow()
        encoder = encoder(queue_depth=30)

        def leave(*_):
            encoder.close()
            sys.exit(0)

        signal.signal(signal.SIGUSR1, leave)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        encoder.generate([IMAGE] * 500)
    """,
    "an encoder that was dropped": """
        be_slow()
        encoder = encoder(queue_depth=30)
        futures = [encoder.submit(IMAGE) for _ in range(30)]
        del encoder
        gc.collect()
    """,
    "an owner that calls close() in __del__": """
        be_slow()

        class Owner:
            def __init__(self):
                self.encoder = encoder(queue_depth=30)
                self.futures = [self.encoder.submit(IMAGE) for _ in range(5)]

            def __del__(self):
                self.encoder.close()

        one, other, third = Owner(), Owner(), Owner()
        del one  # closes it
        other.itself = other  # closed by the garbage collector, at the latest when modules are torn down
        del other
    """,
    "an encoder under construction": """
        from mm_encoder.families.glm53 import Glm53
        build = Glm53.build_tower

        def slow(*arguments):
            arrived.release()
            matrix = torch.ones(400, 400)
            for _ in range(200):
                matrix = (matrix @ matrix).clamp(-1, 1)
            return build(*arguments)

        Glm53.build_tower = slow

        def make():
            try:
                encoder(replicas_per_gpu=2)
            except Exception:
                pass

        threading.Thread(target=make, daemon=True).start()
        arrived.acquire()
    """,
}


@pytest.mark.parametrize("with_", AT_EXIT)
def test_the_interpreter_exits_cleanly_with(glm53_checkpoint: Path, with_: str) -> None:
    assert outcome_of(AT_EXIT[with_], glm53_checkpoint) == CLEAN


def test_the_exit_code_of_the_program_is_kept(glm53_checkpoint: Path) -> None:
    program = """
        be_slow()
        encoder = encoder(queue_depth=30)
        futures = [encoder.submit(IMAGE) for _ in range(30)]
        sys.exit(3)
    """
    assert outcome_of(program, glm53_checkpoint) == (3, "", "")


@pytest.mark.parametrize("interrupted", [False, True])
def test_only_the_traceback_of_the_program_is_printed(glm53_checkpoint: Path, interrupted: bool) -> None:
    end = "encoder.generate([IMAGE] * 500)" if interrupted else "raise KeyError('of the program')"
    program = f"""
        be_slow()
        encoder = encoder(queue_depth=30)
        futures = [encoder.submit(IMAGE) for _ in range(30)]
        if {interrupted}:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        {end}
    """
    code, output, errors = outcome_of(program, glm53_checkpoint)
    assert (code, output) == (-2 if interrupted else 1, "")
    assert errors.startswith("Traceback (most recent call last):")
    assert errors.count("Traceback") == 1
    last = errors.rstrip().splitlines()[-1]
    assert last == ("KeyboardInterrupt" if interrupted else "KeyError: 'of the program'")


def test_the_interpreter_exits_after_failed_constructions(glm53_checkpoint: Path, tmp_path: Path) -> None:
    program = """
        from mm_encoder.families.glm53 import Glm53
        start, build = threading.Thread.start, Glm53.build_tower
        turn = threading.Semaphore(1)

        def all_but_one_fail(*arguments):
            if not turn.acquire(blocking=False):
                raise MemoryError("no memory for a second tower")
            return build(*arguments)

        def refuse(thread):
            if thread.name.endswith("prep-1"):
                raise RuntimeError("can't start new thread")
            start(thread)

        def fails(error, **settings):
            try:
                encoder(**settings)
            except error:
                return
            raise AssertionError("it was constructed")

        Glm53.build_tower = all_but_one_fail
        fails(mm_encoder.DeviceOutOfMemoryError, replicas_per_gpu=3)
        Glm53.build_tower = build
        threading.Thread.start = refuse
        fails(RuntimeError, preprocess_workers=3)
        threading.Thread.start = start
        assert threading.active_count() == 1
    """
    assert outcome_of(program, glm53_checkpoint) == CLEAN


def test_an_encoder_alive_at_interpreter_exit_exits_cleanly(glm53_checkpoint: Path) -> None:
    program = (
        "import sys, numpy, mm_encoder\n"
        "encoder = mm_encoder.Encoder(sys.argv[1], device='cpu', replicas_per_gpu=2)\n"
        "image = numpy.zeros((50, 50, 3), numpy.uint8)\n"
        "futures = [encoder.submit(image) for _ in range(5)]\n"
    )
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


# --- fork --------------------------------------------------------------------------------------------

FORK = f"""
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def in_a_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm({HANG // 2})  # a child does not inherit its parent's alarm; this one is the first to end
        work()
        sys.exit(7)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 7, status

def refused(it):
    calls = [lambda f=f: f(IMAGE) for f in (it.generate, it.submit, it.encode_image)]
    calls += [lambda f=f: asyncio.run(f(IMAGE)) for f in (it.generate_async, it.encode_image_async)]
    for call in (*calls, it.health, it.stats):
        try:
            call()
        except mm_encoder.ForkedProcessError as error:
            assert "before fork()" in str(error)
        else:
            os._exit(1)
    it.close()
    asyncio.run(it.close_async())
    with it:
        pass
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_gets_an_error_in_every_state(glm53_checkpoint: Path) -> None:
    program = """
        from mm_encoder.families.glm53 import Glm53
        from mm_encoder.media.source import Source

        def blocked(owner, name, going):
            call = getattr(owner, name)

            def held(*arguments):
                arrived.release()
                going.wait()
                return call(*arguments)

            setattr(owner, name, held)
            return lambda: setattr(owner, name, call)

        for state in ("idle", "queue full", "opening", "decoding", "running", "closing", "closed"):
            it, futures, going, undo = encoder(queue_depth=1), [], threading.Event(), lambda: None
            held = {"opening": (Glm53, "open"), "decoding": (Source, "decode")}
            stage, callers = held.get(state, (GlmTower, "forward")), []
            while arrived.acquire(blocking=False):
                pass

            def call():
                futures.append(it.submit(IMAGE))

            def begin():
                callers.append(threading.Thread(target=call))
                callers[-1].start()

            if state not in ("idle", "closed"):
                undo = blocked(*stage, going)
                begin()
                arrived.acquire()
            if state == "queue full":
                begin()
                until(lambda: it.health().queue_length == 1)
                begin()
                begin()
                until(lambda: it.health().waiting == 2)
            if state in ("closing", "closed"):
                callers.append(threading.Thread(target=it.close))
                callers[-1].start()
                until(lambda: it.health().state in ("draining", "closed"))
            in_a_child(lambda: refused(it))
            going.set()
            for caller in callers:
                caller.join()
            undo()
            assert all(future.result() for future in futures)
            if state not in ("closing", "closed"):
                assert it.generate([IMAGE] * 3)
            it.close()
            assert it.health().state == "closed" and it.stats().in_flight == 0
    """
    assert outcome_of(_with_fork(program), glm53_checkpoint) == CLEAN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_forked_while_a_lock_is_held_does_not_block(glm53_checkpoint: Path) -> None:
    # A lock that another thread holds at the fork stays locked in the child, which lacks that thread.
    # The child may still cancel or collect its copies of futures and tasks, and drop its copy of the encoder.
    program = """
        hold()
        it = encoder(queue_depth=2)

        def locks():
            lock = it._engine.scheduler._lock
            return {"lock": lock, "following": lock._following, "threads": it._engine._threads._lock}

        async def main():
            running = it.submit(IMAGE)
            await asyncio.to_thread(arrived.acquire)
            future = it.submit(IMAGE, deadline=time.monotonic() + 3600)
            tasks = [asyncio.create_task(it.generate_async([IMAGE] * 2)) for _ in range(3)]
            while it.health().waiting < 2:
                await asyncio.sleep(0.001)
            for name, part in locks().items():
                inside, leave = threading.Event(), threading.Event()

                def stay():
                    with part:
                        inside.set()
                        leave.wait()

                holder = threading.Thread(target=stay)
                holder.start()
                inside.wait()

                def work():
                    global it
                    future.cancel()
                    for task in tasks:
                        task.get_coro().close()  # as the garbage collector does
                    it.close()
                    it = None
                    gc.collect()
                    os._exit(7)

                try:
                    in_a_child(work)
                except AssertionError as error:
                    raise AssertionError(name) from error
                finally:
                    leave.set()
                    holder.join()
            opened.set()
            assert await asyncio.gather(*tasks)
            assert future.result() and running.result()

        asyncio.run(main())
        it.close()
    """
    assert outcome_of(_with_fork(program), glm53_checkpoint) == CLEAN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_can_make_and_use_another_encoder(glm53_checkpoint: Path) -> None:
    program = """
        with encoder() as it:
            wanted = it.generate(IMAGE)[0].tensor
            hold()
            running = it.submit(IMAGE)
            arrived.acquire()

            def work():
                GlmTower.forward = forward
                with encoder() as own:
                    assert torch.equal(own.generate([IMAGE] * 5)[4].tensor, wanted)
                    assert own.health().state == "ready"
                    assert asyncio.run(own.generate_async(IMAGE))
                never_closed = encoder()
                never_closed.submit(IMAGE)
                refused(it)

            try:
                in_a_child(work)
            finally:
                opened.set()
            assert torch.equal(running.result().tensor, wanted)
    """
    assert outcome_of(_with_fork(program), glm53_checkpoint) == CLEAN


def test_a_forked_child_gets_an_error_and_exits(glm53_checkpoint: Path) -> None:
    program = (
        "import os, sys, numpy, warnings, mm_encoder\n"
        "warnings.simplefilter('ignore')\n"
        "image = numpy.zeros((50, 50, 3), numpy.uint8)\n"
        "encoder = mm_encoder.Encoder(sys.argv[1], device='cpu')\n"
        "with encoder._engine.scheduler._lock:\n"  # the lock stays held in the child
        "    child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (encoder.generate, encoder.submit):\n"
        "        try:\n"
        "            call(image)\n"
        "        except mm_encoder.ForkedProcessError:\n"
        "            continue\n"
        "        sys.exit(1)\n"
        "    try:\n"
        "        with encoder:\n"
        "            encoder.submit(image)\n"
        "    except mm_encoder.ForkedProcessError:\n"
        "        sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert encoder.generate(image)\n"
    )
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


def test_a_child_forked_while_pillow_loads_can_plan(glm53_checkpoint: Path) -> None:
    program = (
        "import os, sys, warnings, mm_encoder\n"
        "from mm_encoder.media import source\n"
        "from PIL import Image\n"
        "warnings.simplefilter('ignore')\n"
        "image = Image.new('RGB', (30, 30))\n"
        "with source._lock_of(image):\n"
        "    child = os.fork()\n"
        "if child == 0:\n"
        "    planner = mm_encoder.MediaPlanner(sys.argv[1])\n"
        "    assert planner.plan(image).length\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    assert outcome_of(program, glm53_checkpoint) == (0, "", "")


def _with_fork(program: str) -> str:
    # The programs are indented, FORK is not.
    return "\n".join(" " * 8 + line for line in FORK.splitlines()) + program
