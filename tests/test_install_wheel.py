"""Which wheel of a folder `install_wheel.py` takes; and a real build, installed and looked into."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import install_wheel
from mm_encoder import _native
from mm_encoder._manifest import host_runtime

from .helpers.manifests import EXACT, PURE, RANGE, here

ROOT = Path(install_wheel.__file__).parent
DAMAGES = ("cut", "changed", "lzma", "empty", "a folder")
NAME = "mm_encoder-0.1.0-{}py3-none-{}.whl"


def fitting(**changes: object) -> dict[str, Any]:
    """The manifest of a wheel for a range of Torch that fits this host, but for the changes."""
    exact_fields = EXACT.keys() - RANGE.keys()
    return {
        name: value for name, value in here(**changes).items() if name not in exact_fields or name in changes
    }


def wheel(folder: Path, manifest: object, tag: str = "manylinux_2_17_x86_64", build: str = "") -> Path:
    path = folder / NAME.format(build and build + "-", tag)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("mm_encoder/__init__.py", "print('this must not be run')\n" * 50)
        if manifest is not None:
            text = manifest if isinstance(manifest, str) else json.dumps(manifest)
            file.writestr("mm_encoder/_runtime.json", text)
    return path


@pytest.fixture(autouse=True)
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would be run; none is."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 3 if "fails" in command[-1] else 0)

    monkeypatch.setattr(install_wheel, "subprocess", SimpleNamespace(run=run))
    return commands


def test_the_one_that_fits_is_installed_and_nothing_with_it(
    tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch-9.9-py3-none-any.whl").write_bytes(b"another package's, not looked at")
    wheel(tmp_path, fitting(machine="sparc"), "manylinux_2_17_sparc")
    wanted = wheel(tmp_path, fitting())
    assert install_wheel.main([str(tmp_path)]) == 0
    ((*command, path),) = pip
    assert path == str(wanted)
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert {"--no-deps", "--no-index"} <= set(command)
    output = capsys.readouterr()
    assert output.out == f"install_wheel.py: {wanted.name} fits (range)\n"
    assert output.err == ""


def test_a_dry_run_installs_nothing(
    tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = wheel(tmp_path, fitting())
    assert install_wheel.main([str(tmp_path), "--dry-run"]) == 0
    assert wanted.name in capsys.readouterr().out
    assert pip == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": "sparc"}, "machine sparc, but here: "),
        ({"libc": "glibc 9.9"}, "libc glibc 9.9, but here: "),
        ({"python": ">=4"}, "python >=4, but here: 3."),
        ({"python_abi": "cpython-27"}, "python_abi cpython-27, but here: "),
        ({"torch": ">=99"}, "torch >=99, but here: "),
        (
            {"exact": True, "torch_version": "1.0", "cuda": "1", "cxx_abi": "1"},
            "torch_version 1.0, but here: ",
        ),
        ({"exact": True, "torch_version": "1.0", "cuda": "1", "cxx_abi": "1"}, "cuda 1, but here: "),
        ({"exact": True, "torch_version": "1.0", "cuda": "1", "cxx_abi": "7"}, "cxx_abi 7, but here: "),
    ],
)
def test_none_that_fits_is_said_with_what_it_needs_and_what_there_is(
    tmp_path: Path,
    pip: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    reason: str,
) -> None:
    name = wheel(tmp_path, fitting(**changes)).name
    assert install_wheel.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"this host: python {platform.python_version()}, python_abi " in said
    assert f"  {name}\n    needs python " in said
    assert f"    does not fit: {reason}" in said
    assert pip == []


def test_an_empty_folder_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install_wheel.main([str(tmp_path)]) == 2
    assert "the folder contains no mm_encoder-*.whl" in capsys.readouterr().err


def test_two_that_fit_are_one_too_many(
    tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    two = [wheel(tmp_path, fitting(), tag).name for tag in ("manylinux_2_17_x86_64", "manylinux_2_28_x86_64")]
    assert install_wheel.main([str(tmp_path)]) == 2
    assert f"2 wheels fit equally well; keep only one of them: {', '.join(two)}\n" in capsys.readouterr().err
    assert pip == []


def test_an_exact_build_goes_before_a_range_and_a_range_before_a_pure_one(
    tmp_path: Path, pip: list[list[str]]
) -> None:
    pure = wheel(tmp_path, fitting(**PURE), "any")
    ranged = wheel(tmp_path, fitting())
    exact = wheel(tmp_path, here(), build="1torch2")
    for wanted in (exact, ranged, pure):
        assert install_wheel.main([str(tmp_path), "--allow-pure"]) == 0
        assert pip.pop()[-1] == str(wanted)
        wanted.unlink()


def test_a_pure_wheel_is_taken_where_that_is_allowed(
    tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path, fitting(**PURE), "any")
    assert install_wheel.main([str(tmp_path)]) == 2
    assert "allow it with --allow-pure" in capsys.readouterr().err
    assert install_wheel.main([str(tmp_path), "--allow-pure"]) == 0
    assert len(pip) == 1


def test_fields_that_are_not_known_do_not_matter(tmp_path: Path, pip: list[list[str]]) -> None:
    wheel(tmp_path, fitting(of_later={"deep": [1]}))
    assert install_wheel.main([str(tmp_path)]) == 0
    assert len(pip) == 1


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "changed":
        path.write_bytes(content.replace(b"must not", b"must now", 1))
    elif how == "lzma":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
            file.writestr("mm_encoder/__init__.py", "print()\n" * 500)
        packed = path.read_bytes()
        path.write_bytes(packed[:65] + bytes(15) + packed[80:])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cut", "cannot be read: "),
        ("changed", "damaged: the checksum of 'mm_encoder/__init__.py' is wrong"),
        ("lzma", "cannot be read: "),
        ("empty", "cannot be read: "),
        ("a folder", "cannot be read: "),
        (None, "no manifest (mm_encoder/_runtime.json) in it"),
        ("[1]", "its manifest must be a JSON object, got list"),
        ("{", "cannot be read: "),
        ("[" * 50_000, "cannot be read: "),
        (" " * 70_000, "its manifest is larger than 65536 bytes"),
        ("{}", "format ?, but here: 1"),
    ],
)
def test_a_wheel_that_says_nothing_is_listed_with_the_reason(
    tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str], how: str | None, reason: str
) -> None:
    bad = wheel(tmp_path, fitting() if how in DAMAGES else how, "any")
    if how in DAMAGES:
        damage(bad, str(how))
    assert install_wheel.main([str(tmp_path)]) == 2
    assert f"    does not fit: {reason}" in capsys.readouterr().err
    # Beside one that fits it is in nobody's way, and still told.
    wheel(tmp_path, fitting())
    assert install_wheel.main([str(tmp_path)]) == 0
    assert len(pip) == 1
    assert (f"skipped {bad.name}: {reason}" in capsys.readouterr().err) == (how != "{}")


def test_a_failure_of_pip_and_wrong_usage_are_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fails"
    folder.mkdir()
    wheel(folder, fitting())
    assert install_wheel.main([str(folder)]) == 1
    assert "pip failed with exit status 3" in capsys.readouterr().err
    for arguments in ([], [str(tmp_path / "nowhere")], [str(tmp_path), "--unknown"]):
        with pytest.raises(SystemExit) as ended:
            install_wheel.main(arguments)
        assert ended.value.code == 1


def test_it_needs_the_standard_library_alone(tmp_path: Path) -> None:
    shutil.copy(ROOT / "install_wheel.py", tmp_path)
    wheel(tmp_path, fitting())
    run = subprocess.run(
        [sys.executable, "-I", "-S", "install_wheel.py", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "torch >=2.11, but here: not installed" in run.stderr


# --- wheels built here -------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a wheel is built from, in a git repository of its own."""
    return tree_in(tmp_path)


def tree_in(folder: Path) -> Path:
    copy = folder / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("mm_encoder", "native"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ".gitignore").write_text("/mm_encoder/_kernels.so\n/build/\n*.egg-info/\n__pycache__/\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=copy, check=True)
    return copy


def built(tree: Path, **variables: str) -> tuple[Path, dict[str, Any], str]:
    """The wheel that the backend makes with the setuptools that is here, its manifest, and what was said."""
    program = "import backend, sys; print(backend.build_wheel(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", program, str(tree.parent / "wheels")],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": "native", "PYTHONWARNINGS": "default"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    path = tree.parent / "wheels" / run.stdout.splitlines()[-1]
    with zipfile.ZipFile(path) as file:
        assert not [name for name in file.namelist() if name.startswith(("native", "tests", "setup"))]
        for row in csv.reader(io.StringIO(file.read("mm_encoder-0.1.0.dist-info/RECORD").decode())):
            if row[1]:
                digest = base64.urlsafe_b64encode(hashlib.sha256(file.read(row[0])).digest())
                assert row[1] == "sha256=" + digest.decode().rstrip("=")
        assert json.loads(file.read("mm_encoder/_runtime.json")) == install_wheel.read_wheel(path).manifest
        return path, json.loads(file.read("mm_encoder/_runtime.json")), run.stderr


def test_an_exact_wheel_says_all_that_it_was_built_for(tree: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    path, manifest, said = built(tree, MM_ENCODER_EXACT="1")
    host = host_runtime(import_torch=True)
    assert install_wheel.mismatches(manifest, host) == []
    assert manifest["exact"] is manifest["native"] is True
    assert {name: manifest[name] for name in ("torch_version", "cuda", "cxx_abi", "machine")} == {
        name: host[name] for name in ("torch_version", "cuda", "cxx_abi", "machine")
    }
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
    assert manifest["revision"] == head.stdout.strip()
    assert re.fullmatch("sha256:[0-9a-f]{64}", manifest["settings"])
    assert manifest["torch"] == ">=2.11"
    assert manifest["version"] == "0.1.0"
    assert manifest["compiler"]
    if _native.kernels is not None:
        assert set(_native.kernels.levels) <= set(manifest["instruction_sets"])
    # Tagged for the host it was built on where auditwheel is not there, and then that is said.
    name = rf"mm_encoder-0\.1\.0-1torch{re.escape(host['torch'].replace('+', '_'))}-py3-none-(\w+)\.whl"
    tag = re.fullmatch(name, path.name)
    assert tag is not None, path.name
    if importlib.util.find_spec("auditwheel") is None:
        assert tag[1].startswith("linux_")
        assert manifest["policy"].startswith(f"none: {tag[1]}")
        assert manifest["libc"] == host["libc"]
        assert f"the wheel keeps the tag {tag[1]}, since auditwheel fails" in said
    else:
        assert tag[1] == manifest["policy"]
        assert tag[1].startswith("manylinux_")


@pytest.mark.parametrize("variables", [{"MM_ENCODER_PURE": "1"}, {"CC": "false", "CXX": "false"}])
def test_a_wheel_without_the_library_is_pure(tree: Path, variables: dict[str, str]) -> None:
    path, manifest, said = built(tree, **variables)
    assert path.name == "mm_encoder-0.1.0-py3-none-any.whl"
    assert (manifest["native"], manifest["machine"], manifest["libc"]) == (False, "any", "any")
    assert "the wheel is a pure one" in said
    with zipfile.ZipFile(path) as file:
        assert "mm_encoder/_kernels.so" not in file.namelist()


def build_in_place(tree: Path, **variables: str) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, env=os.environ | variables, check=True, capture_output=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with the library in place and in build/, which takes a while to compile."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    tree = tree_in(tmp_path_factory.mktemp("compiled"))
    build_in_place(tree)
    built(tree)
    return tree


@pytest.mark.parametrize("variables", [{"MM_ENCODER_PURE": "1"}, {"CC": "false", "CXX": "false"}])
def test_no_older_library_is_taken_for_what_was_not_built(
    compiled: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    tree = Path(shutil.copytree(compiled, tmp_path / "tree"))
    library = tree / "mm_encoder" / "_kernels.so"
    assert library.exists()
    _, manifest, _ = built(tree, **variables)  # though build/ has a library that is newer than its sources
    assert not manifest["native"]
    (tree / "native" / "level.inc").touch()
    build_in_place(tree, **variables)
    assert not library.exists()
