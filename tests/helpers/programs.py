"""Programs that run in a new process, with helpers to make an encoder and a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from .forks import run_source
from .waiting import HANG

PRELUDE = """
import asyncio, atexit, faulthandler, gc, os, signal, sys, threading, time, warnings
import numpy, torch
import mm_encoder
from mm_encoder.families.glm53 import GlmTower

torch.set_num_threads(1)
faulthandler.register(signal.SIGALRM, chain=True)  # prints all stacks, then ends the program
signal.alarm(LIMIT)
CHECKPOINT = sys.argv[1]
IMAGE = numpy.zeros((50, 50, 3), numpy.uint8)
forward = GlmTower.forward
arrived, opened = threading.Semaphore(0), threading.Event()

def encoder(**settings):
    return mm_encoder.Encoder(CHECKPOINT, device="cpu", **settings)

def hold():
    def held(tower, *arguments):
        arrived.release()
        opened.wait()
        return forward(tower, *arguments)
    GlmTower.forward = held

def be_slow():
    # In and out of native code, where no thread may be when the interpreter is finalized.
    def slow(tower, *arguments):
        matrix = torch.ones(400, 400)
        for _ in range(30):
            matrix = (matrix @ matrix).clamp(-1, 1)
        return forward(tower, *arguments)
    GlmTower.forward = slow

def until(condition):
    while not condition():
        time.sleep(0.001)
"""
"""The start of every program; LIMIT is in seconds."""


def outcome_of(program: str, checkpoint: Path, *options: str, limit: int = HANG) -> tuple[int, str, str]:
    """Run a program and return its exit code, output and errors.

    If it hangs, it prints the stack of every thread after `limit` seconds and is killed. With options of the
    interpreter it runs in one of its own, without in a fork of one that has imported everything.
    """
    source = PRELUDE.replace("LIMIT", str(limit)) + textwrap.dedent(program)
    if not options:
        return run_source(source, str(checkpoint), limit=limit + HANG)
    run = subprocess.Popen(
        [sys.executable, *options, "-c", source, str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = run.communicate(timeout=limit + HANG)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # and its children, such as a forked child that hangs
        output, errors = run.communicate()
    return run.returncode, output, errors
