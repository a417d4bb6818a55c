"""Checks of the installed mm_encoder, to qualify an engine image or a machine:

    python -I -m pytest smoke [--checkpoint DIR] [--device cpu|cuda|cuda:N]
                              [--import-engine vllm|sglang|tensorrt_llm]

`-I` keeps the current directory off the path, so that the installed package is imported even in a clone.
Needs pytest, Torch, NumPy and Pillow. The folder may be copied anywhere.
"""

from __future__ import annotations

import importlib
import io
import platform
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    import torch

    from mm_encoder import Encoder

# Torch and mm_encoder are imported inside functions: an engine is imported first, as in a serving process.

ENGINES = ("vllm", "sglang", "tensorrt_llm")
DEVICE = pytest.StashKey["torch.device"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("smoke")
    group.addoption(
        "--checkpoint", type=Path, metavar="DIR", help="default: a small one with random weights, built here"
    )
    group.addoption("--device", help="cpu, cuda or cuda:N; default: cuda:0 where there is one, else cpu")
    group.addoption("--import-engine", choices=ENGINES, help="import this engine first, and run beside it")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | pytest.ExitCode | None:
    # pytest looks for settings and conftest files before it knows that --checkpoint takes a value, and would
    # treat the folder as a place of tests. In the form --checkpoint=DIR it does not.
    args = config.invocation_params.args
    if "--checkpoint" not in args:
        return None
    at = args.index("--checkpoint")
    together = [*args[:at], f"--checkpoint={args[at + 1]}", *args[at + 2 :]]
    return pytest.main(together, config.invocation_params.plugins)


def pytest_configure(config: pytest.Config) -> None:
    engine = _import_engine(config.getoption("--import-engine"))
    device = config.stash[DEVICE] = _device(config.getoption("--device"))
    checkpoint = config.getoption("--checkpoint")
    if checkpoint is not None and not checkpoint.is_dir():
        raise pytest.UsageError(f"--checkpoint {checkpoint}: no such folder")
    config.pluginmanager.register(Table(_header(device, checkpoint, engine)), "smoke-table")


def _import_engine(name: str | None) -> str:
    """Import an engine and return its name and version. A failure ends the run; it is never a skip."""
    if name is None:
        return "none imported"
    before = [other for other in ("torch", "mm_encoder") if other in sys.modules]
    order = f"after {' and '.join(before)}" if before else "first"
    try:
        module = importlib.import_module(name)
        if module.__file__ is None:
            raise ImportError("there is only a folder of that name, which is not a package")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise pytest.UsageError(
            f"--import-engine {name}: it cannot be imported here ({type(error).__name__}: {error})"
        ) from error
    return f"{name} {getattr(module, '__version__', None) or _version(name)}, imported {order}"


def _device(text: str | None) -> torch.device:
    import torch

    if text is None:
        text = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda:0" if text == "cuda" else text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise pytest.UsageError(f"--device {text}: must be cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise pytest.UsageError(f"--device {text}: Torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def _header(device: torch.device, checkpoint: Path | None, engine: str) -> dict[str, str]:
    import torch

    import mm_encoder

    on_gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
    return {
        "device": f"{device} ({machine})",
        "checkpoint": "built here: small, random weights" if checkpoint is None else str(checkpoint),
        "dtypes": ", ".join(_dtypes(device)),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "mm_encoder": f"{_version('mm-encoder')} ({Path(str(mm_encoder.__file__)).parent})",
        "engine": engine,
    }


def _dtypes(device: torch.device) -> Iterator[str]:
    """Yield the names of the dtypes in which this device multiplies matrices."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            ones = torch.ones(16, 16, dtype=dtype, device=device)
            if bool((ones @ ones == 16).all()):
                yield str(dtype).removeprefix("torch.")
        except RuntimeError:
            pass  # not supported


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


# --- the table at the end ----------------------------------------------------------------------------


@dataclass
class Row:
    """One check."""

    result: str = ""
    seconds: float = 0.0
    remark: str = ""


class Table:
    """Collects the outcome of each check and prints a table."""

    def __init__(self, header: dict[str, str]) -> None:
        self._header = header
        self._rows: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a phase of a check: setup, call or teardown. The worst of the three counts."""
        row = self._rows.setdefault(_in_words(report.nodeid), Row())
        row.seconds += report.duration
        if report.failed:
            row.result = "FAILED"
        elif report.skipped:
            row.result = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            row.remark = reason.removeprefix("Skipped: ")
        elif report.when == "call":
            row.result = "passed"
        if report.when == "call" and not row.remark:
            row.remark = ", ".join(f"{name} {value}" for name, value in report.user_properties)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the environment and the checks."""
        write = terminalreporter.write_line
        terminalreporter.section("smoke")
        for name, value in self._header.items():
            write(f"{name:<12}{value}")
        write("")
        width = max(map(len, self._rows), default=0)
        for name, row in self._rows.items():
            write(f"{name:<{width}}  {row.result:<7}  {row.seconds:6.2f} s  {row.remark}".rstrip())


def _in_words(nodeid: str) -> str:
    """Convert `test_x.py::test_it_works[so]` to `it works (so)`."""
    name = nodeid.split("::", 1)[-1].removeprefix("test_").replace("_", " ")
    return name.replace("[", " (").replace("]", ")")


# --- fixtures ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return pytestconfig.stash[DEVICE]


@pytest.fixture(scope="session")
def checkpoint(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given: Path | None = pytestconfig.getoption("--checkpoint")
    if given is not None:
        return given
    from mm_encoder.demo import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("smoke") / "checkpoint", image_tokens=(64, 256))


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Four images of different sizes and formats, the same in every run."""
    kinds = [("JPEG", 320, 240), ("PNG", 200, 300), ("JPEG", 224, 224), ("PNG", 97, 61)]
    files = []
    for seed, (kind, width, height) in enumerate(kinds):
        coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((width, height)).save(buffer, kind)
        files.append(buffer.getvalue())
    return files


@pytest.fixture(scope="session")
def encoder(checkpoint: Path, device: torch.device) -> Iterator[Encoder]:
    """An encoder with default settings: one replica."""
    from mm_encoder import Encoder

    with Encoder(checkpoint, device=device) as encoder:
        yield encoder


@pytest.fixture(scope="session")
def expected(encoder: Encoder, images: list[bytes]) -> list[torch.Tensor]:
    """The rows of `images`, encoded sequentially, as copies on the CPU."""
    return [encoder.generate(image)[0].tensor.to("cpu", copy=True) for image in images]
