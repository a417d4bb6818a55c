"""The helper that runs programs in forks of one process: each is as good as an interpreter of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .helpers.forks import run_source
from .helpers.waiting import HANG, until


def test_a_program_has_its_arguments_folder_environment_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "ü")
    program = "import os, sys; print(sys.argv, os.environ['OF_THIS_TEST'], os.getcwd()); sys.exit('end')"
    output = f"['-c', 'x', 'y'] ü {tmp_path}\n"
    assert run_source(program, "x", "y", limit=HANG, folder=tmp_path) == (1, output, "end\n")


def test_programs_see_nothing_of_each_other() -> None:
    program = "import torch; print(hasattr(torch, 'mine')); torch.mine = 1"
    assert [run_source(program, limit=HANG) for _ in range(2)] == [(0, "False\n", "")] * 2


def test_a_program_has_one_thread_and_ends_as_an_interpreter_does() -> None:
    program = "import threading; print(threading.active_count()); raise KeyboardInterrupt"
    code, output, errors = run_source(program, limit=HANG)
    assert (code, output) == (-signal.SIGINT, "1\n")
    assert errors.startswith("Traceback")


def test_what_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "child"
    program = f"""
import os, time
child = os.fork()
if child:
    open({str(file)!r}, "w").write(str(child))
time.sleep({HANG})
"""
    for limit in (2, 20, 200):  # on a busy machine the first may end it before it has begun
        if not file.exists():
            assert run_source(program, limit=limit)[0] == -signal.SIGKILL
    until(lambda: has_ended(int(file.read_text())))
    assert run_source("print('next')", limit=HANG) == (0, "next\n", "")


def has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
