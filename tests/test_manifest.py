"""What a wheel was built for, against the host that it runs on, and what becomes of the import."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import install_wheel
from mm_encoder import RuntimeMismatchError, _manifest, _native, runtime
from mm_encoder._manifest import check, host_runtime, mismatches

from .conftest import GOLDEN
from .helpers.manifests import EXACT, PURE, RANGE, here

HOST = {
    "python": "3.12.1",
    "python_abi": "cpython-312",
    "machine": "x86_64",
    "libc": "glibc 2.28",
    "torch": "2.12.1+cu130",
    "torch_version": "2.12.1+cu130",
    "cuda": "13.0",
    "cxx_abi": "1",
}


@pytest.mark.parametrize(
    "manifest",
    [
        RANGE,
        EXACT,
        PURE,
        RANGE | {"python_abi": "cpython-312"},
        RANGE | {"libc": "glibc 2.28"},
        RANGE | {"torch": ">=2.11,<3"},
        RANGE | {"torch": ">= 2.12.0 , != 2.12"},
        RANGE | {"a field of later": {"and": ["what", "is", "in", "it"]}},
        RANGE | {"cuda": "11.8"},  # said, but only an exact build is held to it
    ],
)
def test_a_fitting_manifest_has_nothing_against_it(manifest: dict[str, Any]) -> None:
    assert mismatches(manifest, HOST) == []


@pytest.mark.parametrize(
    ("manifest", "wrong"),
    [
        (RANGE | {"machine": "aarch64"}, ("machine", "aarch64", "x86_64")),
        (RANGE | {"libc": "glibc 2.34"}, ("libc", "glibc 2.34", "glibc 2.28")),
        (RANGE | {"libc": "not glibc"}, ("libc", "not glibc", "glibc 2.28")),
        (RANGE | {"python": ">=3.13"}, ("python", ">=3.13", "3.12.1")),
        (RANGE | {"python_abi": "cpython-311"}, ("python_abi", "cpython-311", "cpython-312")),
        (RANGE | {"torch": ">=2.13"}, ("torch", ">=2.13", "2.12.1+cu130")),
        (RANGE | {"torch": ">=2.11,<2.12"}, ("torch", ">=2.11,<2.12", "2.12.1+cu130")),
        (RANGE | {"torch": "~=2.12"}, ("torch", "~=2.12", "2.12.1+cu130")),
        (EXACT | {"torch_version": "2.12.1+cpu"}, ("torch_version", "2.12.1+cpu", "2.12.1+cu130")),
        (EXACT | {"cuda": "12.8"}, ("cuda", "12.8", "13.0")),
        (EXACT | {"cuda": "none"}, ("cuda", "none", "13.0")),
        (EXACT | {"cxx_abi": "0"}, ("cxx_abi", "0", "1")),
        (RANGE | {"machine": None}, ("machine", "?", "x86_64")),
        (RANGE | {"machine": "x86\x1b[31m"}, ("machine", "'x86\\x1b[31m'", "x86_64")),
        (RANGE | {"native": "yes"}, ("native", "yes", "must be true or false")),
        (RANGE | {"format": 2}, ("format", "2", "1, the only one supported here")),
    ],
)
def test_a_field_that_differs_is_told_as_built_and_as_here(
    manifest: dict[str, Any], wrong: tuple[str, str, str]
) -> None:
    assert mismatches(manifest, HOST) == [wrong]


def test_all_that_differs_is_told() -> None:
    manifest = EXACT | {"machine": "aarch64", "libc": "glibc 2.34", "cuda": "12.8", "torch_version": "2.11.0"}
    assert [wrong.field for wrong in mismatches(manifest, HOST)] == [
        "machine",
        "libc",
        "torch_version",
        "cuda",
    ]


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11", True),
        ("2.11.0", True),
        ("2.11.0a0+5f1b2c3.nv26.02", True),
        ("3.0.0.dev20260101", True),
        ("2.10.9", False),
        ("1.99", False),
        ("not installed", False),
        ("unknown", False),
    ],
)
def test_versions_of_torch_against_a_range(version: str, fits: bool) -> None:
    assert (mismatches(RANGE, HOST | {"torch": version}) == []) == fits


def test_the_host_is_this_one_however_it_is_asked() -> None:
    plain, full = host_runtime(import_torch=False), host_runtime(import_torch=True)
    assert full["torch"] == full["torch_version"] == torch.__version__
    assert full["cuda"] == (torch.version.cuda or "none")
    assert full["cxx_abi"] in ("0", "1")
    assert full["torch"].startswith(plain["torch"])
    assert {name: full[name] for name in ("python", "python_abi", "machine", "libc")} == {
        name: plain[name] for name in ("python", "python_abi", "machine", "libc")
    }


def test_the_installer_has_the_same_rules() -> None:
    def rules(module: Any) -> str:
        source = inspect.getsource(module)
        begin, end = source.index("\nFORMAT = "), source.index("\n# --- until here")
        return source[begin:end].strip()

    assert "def mismatches" in rules(install_wheel)
    assert rules(install_wheel) == rules(_manifest)


# --- at import ---------------------------------------------------------------------------------------


def library_with(folder: Path, manifest: object, library: bool = True) -> Path:
    """A library that must not be loaded, and a manifest; text goes into the file as it is."""
    if library:
        (folder / "_kernels.so").write_bytes(b"no library")
    if manifest is not None:
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        (folder / "_runtime.json").write_text(text)
    return folder / "_kernels.so"


@pytest.mark.parametrize(
    ("manifest", "library", "native"),
    [
        (here(), True, True),
        (here(unknown=1), True, True),
        (None, True, True),  # built in place
        (None, False, False),
        (here(**PURE), False, False),
        (here(**PURE), True, False),  # left by something else
    ],
)
def test_a_library_is_loaded_where_the_manifest_says_so(
    tmp_path: Path, manifest: object, library: bool, native: bool
) -> None:
    assert check(library_with(tmp_path, manifest, library)) is native


@pytest.mark.parametrize(
    ("manifest", "library", "message"),
    [
        (
            here(machine="sparc", libc="glibc 9.9"),
            True,
            r"machine: +built for sparc;[^$]*libc: +built for glibc 9",
        ),
        (here(), False, "native: +built for _kernels.so; this host: the file is missing"),
        ({}, True, "format: +built for [?]"),
        ([], True, "must hold a JSON object, got list"),
        ('{"format": 1', True, "cannot be read"),
        ("[" * 100_000, True, "cannot be read"),
    ],
)
def test_another_host_or_a_damaged_manifest_is_refused(
    tmp_path: Path, manifest: object, library: bool, message: str
) -> None:
    with pytest.raises(RuntimeMismatchError, match=message):
        check(library_with(tmp_path, manifest, library))


def imported(folder: Path, manifest: object, library: bytes | None) -> subprocess.CompletedProcess[str]:
    """What a Python says that imports a copy of the package with this manifest and this library."""
    package = folder / "mm_encoder"
    source = Path(_manifest.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "*.json", "__pycache__"))
    library_with(package, manifest, library=False)
    if library is not None:
        (package / "_kernels.so").write_bytes(library)
    program = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from mm_encoder.runtime import native_summary; print(native_summary())"
    )
    return subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )


def test_a_mismatch_ends_the_import_before_the_library_is_loaded(tmp_path: Path) -> None:
    run = imported(tmp_path, here(machine="sparc"), b"no library")  # loading it would say so
    assert run.returncode == 1
    assert "mm_encoder.errors.RuntimeMismatchError: this mm-encoder was built for another" in run.stderr
    assert "built for sparc" in run.stderr
    assert "invalid ELF" not in run.stderr


def test_a_library_that_cannot_be_loaded_is_told_as_such(tmp_path: Path) -> None:
    run = imported(tmp_path, here(), b"no library")
    assert run.returncode == 1
    assert "RuntimeMismatchError: the native library of mm-encoder cannot be used here" in run.stderr


def test_a_pure_install_says_so_and_works(tmp_path: Path) -> None:
    run = imported(tmp_path, here(**PURE), None)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "none (a pure wheel; NumPy, Pillow and Torch do the work)\n"


def test_this_process_says_what_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = runtime.native_summary()
    assert runtime.identity()["native kernels"] == summary
    if _native.kernels is not None:
        assert summary.startswith(_native.kernels.levels[-1])
    monkeypatch.setattr(_native, "kernels", None)
    assert runtime.native_summary().startswith("none (")


def test_the_package_works_in_a_zip(tmp_path: Path) -> None:
    """As a pure install does: Spark's --py-files, zipapps."""
    package = Path(_manifest.__file__).parent
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as packed:
        for path in package.rglob("*.py"):
            packed.write(path, path.relative_to(package.parent))
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"
        "import mm_encoder\n"
        "from mm_encoder.runtime import native_summary\n"
        "with mm_encoder.Encoder(sys.argv[2], device='cpu') as encoder:\n"
        "    rows = encoder.generate(open(sys.argv[3], 'rb').read())[0].tensor\n"
        "print(mm_encoder.__file__, native_summary(), float(rows.abs().sum()), sep='|')\n"
    )
    image = next((GOLDEN / "glm53" / "images").iterdir())
    archive, checkpoint = tmp_path / "app.zip", GOLDEN / "glm53" / "checkpoint"
    run = subprocess.run(
        [sys.executable, "-c", program, archive, checkpoint, image],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert run.stderr == ""
    file, kernels, total = run.stdout.strip().split("|")
    assert file == str(archive / "mm_encoder" / "__init__.py")
    assert kernels.startswith("none (no library was built here")
    assert float(total) > 0
