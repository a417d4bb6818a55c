"""Compiling a tower in a child process, so that no compiler is ever imported into the host's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import RuntimeMismatchError
from ..families.family import Family
from ..logs import logger
from .packages import Packages


def build(
    family: Family,
    dtype: torch.dtype,
    identity: Mapping[str, str],
    packages: Packages,
    find: Callable[[], object],
    progress: Callable[[str], object] = lambda step: None,
) -> None:
    """Compile the package of an identity, unless another process has meanwhile: `find` raises
    RuntimeMismatchError while there is none that can be used.

    `progress` is called with each step's name. Raises RuntimeMismatchError with the compiler's last words.
    """
    with packages.building(identity) as folder:
        with suppress(RuntimeMismatchError):
            find()
            return
        begun = time.monotonic()
        logger.info(
            "compiling the tower of %s for %s; it takes a minute or two, once",
            family.name,
            dtype,
            extra={"mm_event": "compile_begin"},
        )
        library = folder / "tower.so"
        asked = {
            "checkpoint": str(family.checkpoint.path.absolute()),
            "family": family.name,
            "dtype": str(dtype).removeprefix("torch."),
            "out": str(library),
        }
        _run_child(json.dumps(asked), folder, progress)
        package = packages.keep(identity, library)
        logger.info(
            "compiled the tower of %s in %.0f s: %s",
            family.name,
            time.monotonic() - begun,
            package.library,
            extra={"mm_event": "compile_end"},
        )


def _run_child(request: str, folder: Path, progress: Callable[[str], object]) -> None:
    with tempfile.TemporaryFile(dir=folder) as errors:
        try:
            # -P: a file of the current directory must not be imported in place of a module.
            child = subprocess.Popen(
                [sys.executable or "python3", "-P", "-m", "mm_encoder.compiled.export"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(folder),
                cwd=folder,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise RuntimeMismatchError(f"no process could be started to compile in: {error}") from error
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended already
                child.stdin.write(request + "\n")
                child.stdin.flush()
            for line in child.stdout:
                progress(line.strip())
            status = child.wait()
        finally:
            if child.returncode is None:  # interrupted: it must not go on with its compilers in the folder
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
            with suppress(BrokenPipeError):
                child.stdin.close()
        if status != 0:
            errors.seek(0)
            raise RuntimeMismatchError(_reason(status, errors.read()))


def _environment(folder: Path) -> dict[str, str]:
    """Return the child's environment: the same modules, and no file outside `folder`."""
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str) and path]
    ours = str(Path(__file__).parents[2])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR_", "AOT_INDUCTOR"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths if ours in paths else [*paths, ours]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }


def _reason(status: int, errors: bytes) -> str:
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    said = "\n".join(lines[-15:]) or "it said nothing"
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
    return (
        f"the tower could not be compiled: the compiling process {how}. It needs a C++20 compiler "
        f"(g++, or the one that CXX names), about 90 s and 1 GiB of memory. Its last lines:\n{said}"
    )
