"""smoke/ as its users run it, and faults that it must find.

Run as a script, this file patches each fault into the package and runs smoke/ on it, all in one process.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

import mm_encoder
from mm_encoder import Encoder, ImageResult, MediaError, MediaPlan, MediaPlanner
from mm_encoder.families.glm53 import GlmTower

TESTS = Path(__file__).parent
SMOKE = TESTS.parent / "smoke"
NO_GPU = "needs a GPU (--device cuda)"
ROW = re.compile(r"(.+?) +(passed|FAILED|skipped) +[0-9.]+ s(?:  (.*))?")


def run(*command: object, cwd: Path = SMOKE.parent) -> subprocess.CompletedProcess[str]:
    """Run `python -I COMMAND...` without the environment variables that change a pytest run."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-I", *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,  # only ends a hang; a script cannot import helpers/waiting.py
        check=False,
    )


def table(output: str) -> dict[str, tuple[str, str]]:
    """Return result and remark of each check, from the table at the end of the output."""
    matches = map(ROW.fullmatch, output.splitlines())
    return {match[1]: (match[2], match[3] or "") for match in matches if match}


def header(output: str) -> dict[str, str]:
    names = "device|checkpoint|dtypes|torch|mm_encoder|engine"
    return dict(re.findall(rf"^({names}) {{2,}}(.+)$", output, re.MULTILINE))


def failing(rows: dict[str, tuple[str, str]]) -> set[str]:
    return {name for name, (result, _) in rows.items() if result == "FAILED"}


def test_a_copy_of_the_folder_passes_on_the_cpu_and_names_what_it_skips(tmp_path: Path) -> None:
    shutil.copytree(SMOKE, tmp_path / "smoke", ignore=shutil.ignore_patterns("__pycache__"))
    done = run("-m", "pytest", "smoke", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout)
    assert Counter(result for result, _ in rows.values()) == {"passed": 12, "skipped": 8}
    skipped = {name: remark for name, (result, remark) in rows.items() if result == "skipped"}
    assert set(skipped.values()) == {NO_GPU}
    assert "a late consumer reads the right rows" in skipped
    head = header(done.stdout)
    assert head.pop("device").startswith("cpu (")
    assert head.pop("checkpoint").startswith("built here")
    assert head.pop("dtypes").startswith("float32, bfloat16")
    assert head.pop("torch").startswith(torch.__version__)
    assert head.pop("mm_encoder").endswith(f"({Path(mm_encoder.__file__).parent})")
    assert head == {"engine": "none imported"}
    assert not list(tmp_path.rglob(".pytest_cache"))


def test_settings_and_fixtures_beside_a_checkpoint_are_ignored(glm53_checkpoint: Path) -> None:
    done = run("-m", "pytest", "smoke", "--checkpoint", glm53_checkpoint, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^rootdir: .*smoke\nconfigfile: pytest.ini$", done.stdout, re.MULTILINE)
    assert header(done.stdout)["checkpoint"] == str(glm53_checkpoint)
    assert failing(table(done.stdout)) == set()


def test_an_engine_that_is_not_installed_fails_the_run() -> None:
    done = run("-m", "pytest", "smoke", "--device", "cpu", "--import-engine", "sglang")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--import-engine sglang: it cannot be imported here (ModuleNotFoundError: " in done.stderr
    assert table(done.stdout) == {}


# An engine that warns on import and detects that torch was imported before it.
ENGINE = """
import sys, warnings
warnings.warn("from an engine", DeprecationWarning)
late = {"torch", "mm_encoder"} & set(sys.modules)
__version__ = f"after {late}" if late else "1.2.3"
"""


@pytest.mark.parametrize("body", [ENGINE, "raise SystemExit('no GPU here')"], ids=["imports", "exits"])
def test_an_engine_is_imported_first(tmp_path: Path, body: str) -> None:
    (tmp_path / "vllm.py").write_text(body)
    # -I ignores PYTHONPATH, so the stand-in is put on the path from inside.
    program = "import sys, pytest; sys.path.append(sys.argv[1]); sys.exit(pytest.main(sys.argv[2:]))"
    options = ("--device", "cpu", "--import-engine", "vllm", "-k", "planner")
    done = run("-c", program, tmp_path, "smoke", *options)
    if body == ENGINE:
        assert done.returncode == 0, done.stdout + done.stderr
        assert header(done.stdout)["engine"] == "vllm 1.2.3, imported first"
        assert table(done.stdout).keys() == {"the planner knows the number of rows"}
    else:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "--import-engine vllm: it cannot be imported here (SystemExit: no GPU here)" in done.stderr


def test_a_missing_device_fails_the_run() -> None:
    done = run("-m", "pytest", "smoke", "--device", "cuda:99")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device cuda:99: Torch sees" in done.stderr


# --- faults ------------------------------------------------------------------------------------------

Around = Callable[..., Any]


def around(owner: Any, name: str, wrapper: Around) -> Any:
    """Patch `owner.name(...)` to call `wrapper(original, ...)`."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


calls = itertools.count()


def never_twice_the_same(forward: Around, *args: Any) -> torch.Tensor:
    rows: torch.Tensor = forward(*args)
    return rows + 1e-3 * next(calls)


def reversed_in_bfloat16(forward: Around, *args: Any) -> torch.Tensor:
    rows: torch.Tensor = forward(*args)
    return rows.flip(1) if rows.dtype == torch.bfloat16 else rows


def one_row_too_many(plan: Around, *args: Any, **kwargs: Any) -> MediaPlan:
    planned: MediaPlan = plan(*args, **kwargs)
    return replace(planned, length=planned.length + 1)


def another_error(generate: Around, *args: Any, **kwargs: Any) -> list[ImageResult]:
    try:
        results: list[ImageResult] = generate(*args, **kwargs)
    except MediaError as error:
        raise RuntimeError("something went wrong") from error
    return results


def views(generate: Around, *args: Any, **kwargs: Any) -> list[ImageResult]:
    results = generate(*args, **kwargs)
    return [ImageResult(torch.cat([rows, rows])[: len(rows)], metadata) for rows, metadata in results]


given: list[torch.Tensor] = []


def remembered(generate: Around, *args: Any, **kwargs: Any) -> list[ImageResult]:
    results: list[ImageResult] = generate(*args, **kwargs)
    given.extend(rows for rows, _ in results)
    return results


def wiped(close: Around, encoder: Encoder) -> None:
    close(encoder)
    for rows in given:
        rows.zero_()


def untidy(init: Around, *args: Any, **kwargs: Any) -> None:
    Image.MAX_IMAGE_PIXELS = (Image.MAX_IMAGE_PIXELS or 0) + 1
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    init(*args, **kwargs)


MALFORMED = {
    f"a malformed image is a media error and changes nothing ({kind})"
    for kind in ("empty", "truncated", "text", "header only")
}
STORAGE = "a result is an ordinary tensor with storage of its own"
FAULTS: dict[str, tuple[list[tuple[Any, str, Around]], set[str]]] = {
    "rows differ from call to call": (
        [(GlmTower, "forward", never_twice_the_same)],
        {
            "two threads at once get the bits of a sequential run",
            "results outlive the encoder",
            "a result goes through dlpack and back",
            STORAGE,
            *MALFORMED,
        },
    ),
    "bfloat16 rows are reversed": (
        [(GlmTower, "forward", reversed_in_bfloat16)],
        {"float32 and bfloat16 rows are finite and agree"},
    ),
    "plans are a row too long": (
        [(MediaPlanner, "plan", one_row_too_many)],
        {"the planner knows the number of rows"},
    ),
    "bad images raise something else": ([(Encoder, "generate", another_error)], MALFORMED),
    "results are views": ([(Encoder, "generate", views)], {STORAGE}),
    "close wipes the results": (
        [(Encoder, "generate", remembered), (Encoder, "close", wiped)],
        {"results outlive the encoder"},
    ),
    "a thread and a changed limit are left": (
        [(Encoder, "__init__", untidy)],
        {"the process is left as it was", "close leaves no thread behind"},
    ),
}


def test_each_fault_fails_its_checks_and_no_others(glm53_checkpoint: Path) -> None:
    done = run(__file__, SMOKE, "--device", "cpu", f"--checkpoint={glm53_checkpoint}")
    _, *runs = done.stdout.split("fault: ")
    found = dict(one.split("\n", 1) for one in runs)
    assert found.keys() == FAULTS.keys(), done.stdout + done.stderr
    for fault, (_, wanted) in FAULTS.items():
        assert "exit code 1" in found[fault]
        assert failing(table(found[fault])) == wanted, fault


def run_with_faults(command: list[str]) -> None:
    for fault, (patches, _) in FAULTS.items():
        print(f"fault: {fault}")
        with ExitStack() as stack:
            for owner, name, wrapper in patches:
                stack.enter_context(around(owner, name, wrapper))
            code = pytest.main([*command, "--tb=no"])
        print(f"exit code {int(code)}", flush=True)


if __name__ == "__main__":
    run_with_faults(sys.argv[1:])
