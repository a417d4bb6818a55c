"""Foyer tiers in forked, exiting and killed processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from ...helpers.programs import outcome_of
from ...helpers.waiting import HANG
from .conftest import Open, entry, key, needs_foyer

PROGRAM = """
import random, resource
from mm_encoder.cache.entry import Entry
from mm_encoder.cache.foyer import FoyerTier
from mm_encoder.contract import ImageMetadata
from mm_encoder.errors import CacheLockedError
warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads is forked

def key(name):
    return str(name).encode().rjust(32, b".")

def entry(nbytes, seed):
    noise = torch.randint(-2**15, 2**15, (nbytes // 2, 1), generator=torch.Generator().manual_seed(seed))
    rows = noise.to(torch.int16).view(torch.bfloat16)
    return Entry(rows, ImageMetadata("m", str(seed), 1, (1,), "bfloat16", "cpu", (1,), (0, 1), (), (3, 4)))

def same(one, other):
    rows = [each.rows.view(torch.int16) for each in (one, other)]
    return one.metadata == other.metadata and torch.equal(*rows)
"""


def outcome(program: str, path: Path, limit: int = HANG) -> tuple[int, str, str]:
    return outcome_of(f"{PROGRAM}{program}", path, limit=limit)


@needs_foyer
def test_a_forked_child_neither_reads_nor_writes(tmp_path: Path) -> None:
    program = """
tier = FoyerTier(CHECKPOINT, 2**26)
assert tier.put(key("a"), entry(1000, 0))

def drop():
    global tier
    del tier
    gc.collect()

for end in (sys.exit, tier.close, drop, lambda: os._exit(0)):
    child = os.fork()
    if child == 0:
        assert tier.get(key("a")) is None
        assert not tier.put(key("b"), entry(1000, 1))
        assert tier.stats().errors == 0
        end()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    try:
        FoyerTier(CHECKPOINT, 2**26)
    except CacheLockedError:
        print("locked")
assert tier.put(key("c"), entry(1000, 2))
assert same(tier.get(key("a")), entry(1000, 0)) and same(tier.get(key("c")), entry(1000, 2))
del end
tier.close()
tier = FoyerTier(CHECKPOINT, 2**26)
assert same(tier.get(key("a")), entry(1000, 0)) and same(tier.get(key("c")), entry(1000, 2))
assert tier.get(key("b")) is None
"""
    assert outcome(program, tmp_path) == (0, "locked\n" * 4, "")


@needs_foyer
def test_a_forked_child_may_open_its_own_tier(tmp_path: Path) -> None:
    program = """
tier = FoyerTier(CHECKPOINT + "/parent", 2**26)
child = os.fork()
if child == 0:
    tier = FoyerTier(CHECKPOINT + "/child", 2**26)
    assert tier.put(key("a"), entry(1000, 0)) and same(tier.get(key("a")), entry(1000, 0))
    sys.exit()
print(os.waitpid(child, 0)[1])
"""
    assert outcome(program, tmp_path) == (0, "0\n", "")


@needs_foyer
@pytest.mark.parametrize("busy", ["nothing", "get", "put"])
def test_the_interpreter_exits_with_an_open_tier(opened: Open, tmp_path: Path, busy: str) -> None:
    # A thread that returns from foyer after the interpreter is finalized would abort the process.
    program = f"""
tier = FoyerTier(CHECKPOINT, 2**26)
first, large = entry(4_150_000, 0), entry(4_150_000, 1)
assert tier.put(key("a"), first)
results = []

def get():
    # Kept in `results`: tensors must not be freed after the interpreter is finalized, either.
    for _ in range(30):
        results.append(tier.get(key("a")))

def put():
    while tier.put(key(len(results)), large):
        results.append(None)

def nothing():
    results.extend([None] * 3)

for _ in range(2 if "{busy}" == "get" else 1):
    threading.Thread(target={busy}, daemon=True).start()
until(lambda: len(results) >= 3)
print("end")
"""
    assert outcome(program, tmp_path / "cache") == (0, "end\n", "")
    found = opened().get(key("a"))
    if busy != "put":  # its puts may have evicted the entry
        assert found is not None
        assert torch.equal(found.rows.view(torch.int16), entry(4_150_000, 0).rows.view(torch.int16))


@needs_foyer
def test_the_interpreter_exits_while_close_hangs(tmp_path: Path) -> None:
    program = """
import foyer, types
import mm_encoder.cache.foyer_handle as handles
handles._CLOSE_TIMEOUT_S = 0.05

class Hangs:
    def __init__(self, *arguments, **settings):
        self.cache = real(*arguments, **settings)
    def __getattr__(self, name):
        return getattr(self.cache, name)
    def close(self):
        time.sleep(1000)

real, foyer.HybridCache = foyer.HybridCache, Hangs
tier = FoyerTier(CHECKPOINT, 2**26)
assert tier.put(key("a"), entry(1000, 0))
tier.close()
print("end")
"""
    assert outcome(program, tmp_path) == (0, "end\n", "")


@needs_foyer
def test_confirmed_entries_survive_a_kill_at_any_moment(tmp_path: Path) -> None:
    """Every confirmed entry is there afterwards, and no wrong one."""
    rounds = 60 if os.environ.get("FUZZ") else 5
    program = f"""
import shutil
chance = random.Random(0)

def rows_of(number):
    return entry(2 * random.Random(number).randrange(5_000_000), number)

def write(path, pipe, first):
    tier = FoyerTier(path, 2**28)
    for number in range(first, first + 12):
        each = rows_of(number)
        os.write(pipe, b"." if tier.put(key(number), each) else b"x")

def check(path, put):
    tier = FoyerTier(path, 2**28)
    for number in range(put + 12):
        found = tier.get(key(number))
        assert same(found, rows_of(number)) if found else number >= put, number
    assert tier.put(key("after"), rows_of(0)) and same(tier.get(key("after")), rows_of(0))
    tier.close()

def forked(work, *arguments):
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

killed = 0
for number in range({rounds}):
    path = f"{{CHECKPOINT}}/{{number}}"
    put = 0
    for _ in range(2):  # the second time after a kill
        output, pipe = os.pipe()
        child = forked(write, path, pipe, put)
        os.close(pipe)
        time.sleep(chance.uniform(0.01, 0.4))
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        while done := os.read(output, 100):
            assert set(done) == {{ord(".")}}
            put += len(done)
        os.close(output)
    child = forked(check, path, put)
    assert os.waitpid(child, 0)[1] == 0
    shutil.rmtree(path)
print("killed", killed > 0)
"""
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert outcome(program, tmp_path) == (0, "killed True\n", "")
