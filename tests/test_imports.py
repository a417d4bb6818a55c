"""The layers of the package: imports point to earlier layers only, and importing has no side effects."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "mm_encoder"

# Each group may import from itself and from the groups before it; see "Layers" in CONTRIBUTING.md.
LAYERS = [
    {"daemons", "errors", "locks", "logs"},
    {"contract", "_manifest"},
    {"_native"},
    {"config", "runtime"},
    {"media", "device", "numerics"},
    {"settings"},
    {"families"},
    {"compiled"},
    {"engine", "cache"},
    {"cached", "coalescer", "pipeline"},
    {"planner", "encoder"},
    {"__init__", "viz", "demo"},
    {"cli"},
    {"__main__"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# Arrows that the ranks allow and CONTRIBUTING.md does not.
FORBIDDEN = {("media", "device"), ("device", "media"), ("planner", "encoder"), ("encoder", "planner")}
FORBIDDEN |= {("engine", "families"), ("families", "device"), ("cache", "families"), ("cache", "engine")}
FORBIDDEN |= {("engine", "compiled"), ("cache", "compiled")}


def imported_parts(path: Path, package: Path) -> set[str]:
    """Return the top-level parts of mm_encoder that a module imports, at any level of nesting."""
    inside = path.relative_to(package).parts
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                # One dot is the package of the module, each further dot the parent package.
                base = list(inside[:-1])[: len(inside) - node.level]
                names = [*base, *(node.module.split(".") if node.module else [])]
                parts |= {names[0]} if names else {alias.name for alias in node.names}
            elif node.module and node.module.split(".")[0] == "mm_encoder":
                parts.add([*node.module.split("."), "__init__"][1])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mm_encoder":
                    parts.add([*alias.name.split("."), "__init__"][1])
    return {part if part in RANK else "__init__" for part in parts}


def upward(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        for other in imported_parts(path, package) - {part}:
            if RANK[other] > RANK[part] or (part, other) in FORBIDDEN:
                found.append(f"{path.relative_to(package)} imports {other}")
    return found


def test_no_import_points_upward() -> None:
    assert upward(PACKAGE) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("media/decode.py", "from ..families.glm53 import Glm53"),
        ("engine/replica.py", "from ..families import registry"),
        ("engine/replica.py", "import mm_encoder.families.registry"),
        ("errors.py", "def late():\n    from . import contract"),
        ("families/glm53.py", "from mm_encoder.engine.job import Job"),
        ("planner.py", "from .encoder import Encoder"),
    ],
)
def test_an_upward_import_is_seen(tmp_path: Path, place: str, line: str) -> None:
    for part in RANK:
        (tmp_path / f"{part}.py").write_text("")
    target = tmp_path / place
    target.parent.mkdir(exist_ok=True)
    target.write_text(line)
    assert upward(tmp_path) != []


def test_the_contributors_guide_has_the_same_layers() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Layers\n")[1]
    lines, arrows = text.split("```text\n")[1].split("```")
    assert [set(line.split(", ")) for line in lines.splitlines()] == LAYERS
    found = set()
    for left, arrow, right in re.findall(r"(\w+)\s(→|↔)\s(\w+)", arrows.split("\n\n")[1]):
        found |= {(left, right)} | ({(right, left)} if arrow == "↔" else set())
    assert found == FORBIDDEN


def test_every_part_has_a_layer() -> None:
    parts = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in PACKAGE.rglob("*.py")}
    assert parts == set(RANK)


def test_families_are_under_250_lines_and_named_only_in_families() -> None:
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text().splitlines()
        if path.parent.name == "families":
            assert len(lines) <= 250, path.name
        else:
            assert not [line for line in lines if "if family ==" in line or "family.name ==" in line], path


def test_importing_starts_no_thread_and_no_cuda() -> None:
    program = (
        "import threading, logging, warnings\n"
        "import torch\n"
        "before = threading.enumerate(), torch.get_num_threads(), torch.get_default_dtype(), "
        "torch.get_rng_state().tolist(), logging.getLogger().handlers[:], warnings.filters[:]\n"
        "import mm_encoder\n"
        "after = threading.enumerate(), torch.get_num_threads(), torch.get_default_dtype(), "
        "torch.get_rng_state().tolist(), logging.getLogger().handlers[:], warnings.filters[:]\n"
        "assert before == after\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


def imported_test_modules(source: str) -> list[str]:
    """Return the test modules that a module imports, at any level of nesting."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    files = {path.stem for path in TESTS.rglob("test_*.py")}
    return [name for name in names if files.intersection(name.split("."))]


def test_no_test_module_imports_from_another() -> None:
    """Shared parts belong to tests/helpers or a conftest.py."""
    found = {path: imported_test_modules(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path.relative_to(TESTS).as_posix(): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from .test_imports import LAYERS",
        "from . import test_imports",
        "def late():\n    from ..engine.test_worker import owner",
        "import tests.test_imports as other",
    ],
)
def test_an_import_from_a_test_module_is_seen(line: str) -> None:
    assert imported_test_modules(line) != []
