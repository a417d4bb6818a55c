"""The directory of compiled towers, and compiling: what is refused, what is left, and who waits for whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mm_encoder import Encoder, RuntimeMismatchError, _native
from mm_encoder.cli import build_app
from mm_encoder.compiled import build, choice
from mm_encoder.compiled.choice import TowerChoice, compiled_package
from mm_encoder.compiled.identity import identity, key_of
from mm_encoder.compiled.packages import VARIABLE, Packages
from mm_encoder.families.family import Family
from mm_encoder.families.registry import load_family

from ..conftest import GOLDEN
from ..helpers.waiting import HANG, until

pytestmark = pytest.mark.needs_native
CPU = torch.device("cpu")
CHECKPOINT = GOLDEN / "glm53" / "checkpoint"


@pytest.fixture
def family() -> Family:
    return load_family(CHECKPOINT)[1]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling writes a file that is no library; returns the requests."""
    asked: list[str] = []

    def write(request: str, folder: Path, progress: Callable[[str], object]) -> None:
        asked.append(request)
        progress("compiling")
        Path(json.loads(request)["out"]).write_bytes(b"no library")

    monkeypatch.setattr(build, "_run_child", write)
    return asked


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(choice, "Library", load)


def wanted(family: Family, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    return identity(family, family.declare_tower(family.table), dtype)


# --- what fits ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("directory")
def test_packages_depend_on_all_that_is_compiled_in_and_on_no_weights(family: Family) -> None:
    here = wanted(family)
    loaded = identity(family, family.build_tower(CPU, torch.float32), torch.float32)
    assert here == loaded
    assert key_of(wanted(family, torch.bfloat16)) != key_of(here)
    others = [wanted(load_family(GOLDEN / name / "checkpoint")[1]) for name in ("kimi_k3", "deepseek41")]
    assert len({key_of(fields) for fields in (here, *others)}) == 3
    for name in here:
        assert key_of({**here, name: "another"}) != key_of(here), name
    assert {"torch", "torch build", "capability", "cpu flags", "sources", "config", "tensors"} <= set(here)


def test_a_changed_config_is_another_package(family: Family, tmp_path: Path) -> None:
    for change in ({"swiglu_limit": 3.0}, {"rms_norm_eps": 1e-3}):
        copy = tmp_path / next(iter(change))
        copy.mkdir()
        for path in CHECKPOINT.iterdir():
            (copy / path.name).symlink_to(path)
        config = json.loads((CHECKPOINT / "config.json").read_text())
        config["vision_config"].update(change)
        (copy / "config.json").unlink()
        (copy / "config.json").write_text(json.dumps(config))
        assert key_of(wanted(load_family(copy)[1])) != key_of(wanted(family))


# --- what is refused before it is loaded -------------------------------------------------------------


def cut(manifest: Path, library: Path) -> None:
    library.write_bytes(library.read_bytes()[:-1])


def flipped(manifest: Path, library: Path) -> None:
    library.write_bytes(b"N" + library.read_bytes()[1:])


def missing(manifest: Path, library: Path) -> None:
    library.unlink()


def no_json(manifest: Path, library: Path) -> None:
    manifest.write_text("{")


def a_list(manifest: Path, library: Path) -> None:
    manifest.write_text("[]")


def of_another_machine(manifest: Path, library: Path) -> None:
    read = json.loads(manifest.read_text())
    read["identity"]["cpu flags"] = "others"
    manifest.write_text(json.dumps(read))


def elsewhere(manifest: Path, library: Path) -> None:
    read = json.loads(manifest.read_text())
    other = library.parent.parent / "other.so"
    other.write_bytes(library.read_bytes())
    other.chmod(0o600)
    manifest.write_text(json.dumps({**read, "library": "../other.so"}))


def link(manifest: Path, library: Path) -> None:
    other = library.with_name("other.so")
    library.rename(other)
    library.symlink_to(other)


def library_for_all(manifest: Path, library: Path) -> None:
    library.chmod(0o666)


def manifest_for_the_group(manifest: Path, library: Path) -> None:
    manifest.chmod(0o660)


def directory_for_all(manifest: Path, library: Path) -> None:
    library.parent.chmod(0o777)


def of_another_user(manifest: Path, library: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(library, 12345, 12345)


@pytest.mark.parametrize(
    "spoil",
    [
        cut,
        flipped,
        missing,
        no_json,
        a_list,
        of_another_machine,
        elsewhere,
        link,
        library_for_all,
        manifest_for_the_group,
        directory_for_all,
        of_another_user,
    ],
)
@pytest.mark.usefixtures("fake_compiler", "nothing_is_loaded")
def test_a_package_that_cannot_be_trusted_is_not_loaded(
    family: Family, directory: Path, spoil: Callable[[Path, Path], None]
) -> None:
    package = compiled_package(family, CPU, torch.float32)
    assert Packages().find(wanted(family)) == package
    spoil(directory / f"{key_of(wanted(family))}.json", package.library)
    with pytest.raises(RuntimeMismatchError):
        Packages().find(wanted(family))
    with Encoder(CHECKPOINT, device="cpu") as encoder:
        assert encoder.health().tower.startswith("Python (")


def test_a_file_that_is_no_library_is_an_error(
    family: Family, directory: Path, fake_compiler: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeMismatchError, match="cannot be loaded"):
        Encoder(CHECKPOINT, device="cpu", tower="compiled")
    assert len(fake_compiler) == 1
    with Encoder(CHECKPOINT, device="cpu") as encoder:
        assert "cannot be loaded" in encoder.health().tower
    assert [r for r in caplog.records if getattr(r, "mm_event", "") == "tower_refused"]


def test_a_damaged_package_is_compiled_anew(
    family: Family, directory: Path, fake_compiler: list[str]
) -> None:
    package = compiled_package(family, CPU, torch.float32)
    cut(directory, package.library)
    assert compiled_package(family, CPU, torch.float32) == package
    assert len(fake_compiler) == 2
    assert package.library.read_bytes() == b"no library"


# --- compiling ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("directory")
def test_who_comes_second_waits_and_does_not_compile(family: Family, fake_compiler: list[str]) -> None:
    packages = Packages()
    with packages.building(wanted(family)):
        found: list[Any] = []
        waiting = threading.Thread(
            target=lambda: found.append(compiled_package(family, CPU, torch.float32)), daemon=True
        )
        waiting.start()
        waiting.join(0.2)
        assert not found
        (packages.directory / "x.so").write_bytes(b"a library")
        first = packages.keep(wanted(family), packages.directory / "x.so")
    waiting.join(HANG)
    assert found == [first]
    assert fake_compiler == []


def test_a_failing_compiler_is_named_and_nothing_is_left(
    family: Family, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(RuntimeMismatchError, match=r"(?s)could not be compiled.*C\+\+20.*/bin/false"):
        Encoder(CHECKPOINT, device="cpu", tower="compiled")
    assert [path.suffix for path in directory.iterdir()] == [".lock"]
    with Encoder(CHECKPOINT, device="cpu") as encoder:  # goes on in Python
        assert encoder.health().tower.startswith("Python (there is no compiled tower")


def test_a_directory_that_cannot_be_written_is_named(
    family: Family, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_text("a file")
    with pytest.raises(RuntimeMismatchError, match=f"(?s){directory}.*{VARIABLE}"):
        compiled_package(family, CPU, torch.float32)


def running(folder: Path) -> list[int]:
    """Return the processes whose current directory is in `folder`."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                where = os.readlink(path / "cwd")
            except OSError:
                continue
            if where.startswith(str(folder)):
                found.append(int(path.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_compiler_does_not_outlive_who_wants_its_work(directory: Path, sent: signal.Signals) -> None:
    program = (
        "import signal, torch; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from mm_encoder.compiled.choice import compiled_package\n"
        "from mm_encoder.families.registry import load_family\n"
        f"compiled_package(load_family({str(CHECKPOINT)!r})[1], torch.device('cpu'), torch.float32)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(running(directory)) > 0)
        parent.send_signal(sent)
        assert parent.wait(HANG) != 0
        until(lambda: running(directory) == [])
    finally:
        parent.kill()
        parent.wait()
    with Packages().building(wanted(load_family(CHECKPOINT)[1])) as folder:  # nobody holds the lock
        assert list(folder.iterdir()) == []


# --- where a tower cannot be compiled ----------------------------------------------------------------


@pytest.mark.usefixtures("directory")
def test_older_releases_of_torch_run_the_python_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(RuntimeMismatchError, match=r"need Torch 2\.14 or later, this is 2\.11"):
        Encoder(CHECKPOINT, device="cpu", tower="compiled")
    with Encoder(CHECKPOINT, device="cpu") as encoder:
        assert "need Torch 2.14" in encoder.health().tower


@pytest.mark.usefixtures("directory")
def test_a_pure_install_runs_the_python_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "kernels", None)
    with pytest.raises(RuntimeMismatchError, match="native kernels"):
        Encoder(CHECKPOINT, device="cpu", tower="compiled")


def test_a_gpu_has_no_compiled_tower_yet(family: Family, directory: Path) -> None:
    with pytest.raises(RuntimeMismatchError, match="CPUs only"):
        TowerChoice.make("compiled", family, torch.device("cuda"), torch.bfloat16)
    assert "CPUs only" in TowerChoice.make("auto", family, torch.device("cuda"), torch.bfloat16).reason


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="tower must be 'auto', 'compiled' or 'eager', got 'fast'"):
        Encoder(CHECKPOINT, device="cpu", tower="fast")  # type: ignore[arg-type]


# --- the command line --------------------------------------------------------------------------------


def test_the_command_compiles_and_doctor_says_so(directory: Path, fake_compiler: list[str]) -> None:
    run = CliRunner().invoke
    told = run(build_app(), ["doctor", str(CHECKPOINT), "--device", "cpu"])
    assert "Python (there is no compiled tower" in told.output
    assert "`mm-encoder compile`" in told.output
    made = run(build_app(), ["compile", str(CHECKPOINT), "--device", "cpu"])
    assert made.exit_code == 0, made.output
    assert str(directory) in made.output.replace("\n", "")
    assert len(fake_compiler) == 1
    again = run(build_app(), ["doctor", str(CHECKPOINT), "--device", "cpu", "--json"])
    assert json.loads(again.output)["tower"] == "compiled"
