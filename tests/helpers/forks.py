"""Programs that each run in a fork of one process that has imported Torch and the package.

Importing takes seconds of every program, and a fork none. The process has no thread and has computed nothing,
so a fork of it is what a new interpreter is after the same imports, and ends as one.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import json, os, socket, sys
import numpy, torch
import mm_encoder, mm_encoder.encoder, mm_encoder.families.glm53

_socket = socket.socket(fileno=int(sys.argv[1]))
while True:
    _, _files, *_ = socket.recv_fds(_socket, 1, 3)
    if not _files:
        os._exit(0)  # the tests have ended
    _child = os.fork()
    if _child == 0:
        break
    for _file in _files:
        os.close(_file)
    _socket.send(b"%9d" % _child)
    _socket.send(b"%9d" % os.waitstatus_to_exitcode(os.waitpid(_child, 0)[1]))
_socket.close()
os.setsid()
os.dup2(_files[1], 1)
os.dup2(_files[2], 2)
with open(_files[0]) as _file:
    _asked = json.load(_file)
for _file in _files[1:]:
    os.close(_file)
os.chdir(_asked["folder"])
os.environ.clear()
os.environ.update(_asked["environment"])
sys.argv = ["-c", *_asked["arguments"]]
exec(compile(_asked["source"], "<string>", "exec"))
"""


@functools.cache
def _server(tests: int) -> socket.socket:
    """Start the process that forks, once for this process of tests, and return the socket to it."""
    ours, its = socket.socketpair()
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SERVER, str(its.fileno())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, pass_fds=[its.fileno()], start_new_session=True, env=environment)
    process.returncode = 0  # it ends by itself with this process, and is not waited for
    its.close()
    return ours


def run_source(source: str, *arguments: str, limit: int, folder: Path | None = None) -> tuple[int, str, str]:
    """Run a program and return its exit code, output and errors; after `limit` seconds it is killed."""
    server = _server(os.getpid())
    asked = {
        "source": source,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": str(folder or Path.cwd()),
    }
    with (
        tempfile.TemporaryFile("w+") as request,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        json.dump(asked, request)
        request.flush()
        request.seek(0)
        socket.send_fds(server, [b"."], [file.fileno() for file in (request, output, errors)])
        child = int(_read(server))
        server.settimeout(limit)
        try:
            code = int(_read(server))
        except TimeoutError:
            os.killpg(child, signal.SIGKILL)  # and its children, such as a forked child that hangs
            server.settimeout(None)
            code = int(_read(server))
        server.settimeout(None)
        for file in (output, errors):
            file.seek(0)
        return code, output.read(), errors.read()


def _read(server: socket.socket) -> bytes:
    answer = server.recv(9, socket.MSG_WAITALL)
    assert len(answer) == 9, "the process that forks programs has ended"
    return answer
