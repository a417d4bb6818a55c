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
from mm_encoder.compiled import build, choice, packages
from mm_encoder.compiled.choice import TowerChoice, compiled_package
from mm_encoder.compiled.identity import identity, key_of
from mm_encoder.compiled.packages import VARIABLE, Package, Packages
from mm_encoder.families.family import Family
from mm_encoder.families.registry import load_family

from ..conftest import GOLDEN
from ..helpers.waiting import HANG, until

pytestmark = pytest.mark.needs_native
CPU = torch.device("cpu")
CHECKPOINT = GOLDEN / "glm53" / "checkpoint"
Built = dict[tuple[str, torch.dtype], Package]


@pytest.fixture
def family() -> Family:
    return load_family(CHECKPOINT)[1]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


@pytest.fixture
def fake_compiler(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling copies what was compiled before; returns the requests."""
    asked: list[str] = []
    library = built["glm53", torch.float32].library.read_bytes()

    def write(request: str, folder: Path, progress: Callable[[str], object]) -> None:
        asked.append(request)
        progress("compiling")
        Path(json.loads(request)["out"]).write_bytes(library)

    monkeypatch.setattr(build, "_run_child", write)
    return asked


@pytest.fixture
def compiler_of_no_library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling writes a file that cannot be loaded; returns the requests."""
    asked: list[str] = []

    def write(request: str, folder: Path, progress: Callable[[str], object]) -> None:
        asked.append(request)
        Path(json.loads(request)["out"]).write_bytes(b"no library")

    monkeypatch.setattr(build, "_run_child", write)
    return asked


def never_loaded(*_: Any) -> None:
    raise AssertionError("it was loaded")


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


def replaced(library: Path, content: bytes) -> None:
    """Write a file anew: the old one is mapped into this process."""
    library.unlink()
    library.write_bytes(content)
    library.chmod(0o600)


def cut(manifest: Path, library: Path) -> None:
    replaced(library, library.read_bytes()[:-1])


def flipped(manifest: Path, library: Path) -> None:
    replaced(library, b"N" + library.read_bytes()[1:])


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
@pytest.mark.usefixtures("fake_compiler")
def test_a_package_that_cannot_be_trusted_is_not_loaded(
    family: Family, directory: Path, spoil: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = compiled_package(family, CPU, torch.float32)
    assert Packages().find(wanted(family)) == package
    monkeypatch.setattr(choice, "Library", never_loaded)
    spoil(directory / f"{key_of(wanted(family))}.json", package.library)
    with pytest.raises(RuntimeMismatchError):
        Packages().find(wanted(family))
    with Encoder(CHECKPOINT, device="cpu") as encoder:
        assert encoder.health().tower.startswith("Python (")


@pytest.mark.usefixtures("directory")
def test_a_file_that_is_no_library_is_compiled_again_and_said_to_be_none(
    compiler_of_no_library: list[str],
) -> None:
    for count in (1, 2):
        with pytest.raises(RuntimeMismatchError, match="cannot be loaded"):
            Encoder(CHECKPOINT, device="cpu", tower="compiled")
        assert len(compiler_of_no_library) == count
    with Encoder(CHECKPOINT, device="cpu") as encoder:
        assert "cannot be loaded" in encoder.health().tower
    told = CliRunner().invoke(build_app(), ["doctor", str(CHECKPOINT), "--device", "cpu"])
    assert "cannot be loaded" in told.output
    assert CliRunner().invoke(build_app(), ["compile", str(CHECKPOINT), "--device", "cpu"]).exit_code == 2


@pytest.mark.usefixtures("directory", "fake_compiler")
def test_a_manifest_that_is_no_file_is_not_read(family: Family) -> None:
    package, _ = compiled_package(family, CPU, torch.float32)
    manifest = package.library.with_name(f"{key_of(wanted(family))}.json")
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(RuntimeMismatchError, match="not a regular file"):
        Packages().find(wanted(family))


@pytest.mark.usefixtures("fake_compiler")
def test_a_folder_above_that_others_can_replace_is_refused(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = tmp_path / "above"
    monkeypatch.setenv(VARIABLE, str(above / "compiled"))
    compiled_package(family, CPU, torch.float32)
    above.chmod(0o777)
    with pytest.raises(RuntimeMismatchError, match="could replace"):
        Packages().find(wanted(family))
    above.chmod(0o1777)  # where only owners can, as in /tmp
    Packages().find(wanted(family))


def test_without_a_home_the_python_tower_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> Path:
        raise ValueError("the home directory is not known")

    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(packages, "user_cache", unknown)
    with Encoder(CHECKPOINT, device="cpu") as encoder:
        assert "home directory is not known" in encoder.health().tower


def test_a_damaged_package_is_compiled_anew(
    family: Family, directory: Path, fake_compiler: list[str]
) -> None:
    package, _ = compiled_package(family, CPU, torch.float32)
    cut(directory, package.library)
    assert compiled_package(family, CPU, torch.float32)[0] == package
    assert len(fake_compiler) == 2
    assert Packages().find(wanted(family)) == package


# --- compiling ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("directory")
def test_who_gives_up_waiting_takes_nothing_from_who_compiles(family: Family) -> None:
    packages = Packages()
    with packages.building(wanted(family)) as folder:
        program = (
            "import sys; from mm_encoder.compiled.packages import Packages; import json\n"
            "print('waiting', flush=True)\n"
            f"with Packages().building(json.loads({json.dumps(wanted(family))!r})): print('in')\n"
        )
        waiting = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waiting\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        waiting.send_signal(signal.SIGINT)
        waiting.wait(HANG)
        assert waiting.stdout.read() == ""
        waiting.stdout.close()
        assert folder.is_dir()


@pytest.mark.usefixtures("directory")
def test_a_forked_process_does_not_keep_the_lock(family: Family) -> None:
    with Packages().building(wanted(family)):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
    try:
        entered = threading.Event()

        def enter() -> None:
            with Packages().building(wanted(family)):
                entered.set()

        threading.Thread(target=enter, daemon=True).start()
        assert entered.wait(HANG)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.usefixtures("directory")
def test_who_comes_second_waits_and_does_not_compile(
    family: Family, fake_compiler: list[str], built: Built
) -> None:
    packages = Packages()
    with packages.building(wanted(family)):
        found: list[Any] = []
        waiting = threading.Thread(
            target=lambda: found.append(compiled_package(family, CPU, torch.float32)[0]), daemon=True
        )
        waiting.start()
        waiting.join(0.2)
        assert not found
        (packages.directory / "x.so").write_bytes(built["glm53", torch.float32].library.read_bytes())
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
    assert running(directory) == []
    with Encoder(CHECKPOINT, device="cpu") as encoder:  # goes on in Python
        assert encoder.health().tower.startswith("Python (there is no compiled tower")


@pytest.mark.usefixtures("directory")
def test_a_relative_checkpoint_is_compiled_too(
    fake_compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKPOINT.parent)
    compiled_package(load_family("checkpoint")[1], CPU, torch.float32)
    assert json.loads(fake_compiler[0])["checkpoint"] == str(CHECKPOINT)


def test_white_space_in_the_directory_is_refused_at_once(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "a b"))
    with pytest.raises(RuntimeMismatchError, match="white space"):
        compiled_package(family, CPU, torch.float32)


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
