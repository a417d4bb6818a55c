"""Builds the native kernels, a shared library that uses neither Python nor Torch, and writes each wheel's
manifest, `mm_encoder/_runtime.json`: the runtime that it was built for.

Everything else about the package is in pyproject.toml. Without a C++20 compiler the package is installed
without the library, and does the same work, more slowly, in NumPy, Pillow and Torch.

    MM_ENCODER_PURE=1    do not build the library
    MM_ENCODER_EXACT=1   build a wheel for exactly the installed Torch (python -m build --no-isolation)
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FORMAT = 1  # version of the manifest, which mm_encoder/_manifest.py and install_wheel.py read
LIBRARY = "mm_encoder/_kernels.so"
PURE, EXACT = (os.environ.get(f"MM_ENCODER_{name}", "") not in ("", "0") for name in ("PURE", "EXACT"))

kernels = Extension(
    "mm_encoder._kernels",
    sources=sorted(str(path) for path in Path("native").glob("*.cpp")),
    depends=sorted(str(path) for path in Path("native").iterdir() if path.suffix in {".h", ".inc"}),
    language="c++",
    extra_compile_args=[
        "-std=c++20",
        "-O3",
        "-g0",
        "-ffp-contract=off",  # weights must round as in the references, on every machine
        "-fno-exceptions",
        "-fno-rtti",
        "-fvisibility=hidden",
        "-Wno-maybe-uninitialized",  # GCC 12 warns about its own headers
        "-Wno-uninitialized",
    ],
    # setuptools links the C++ library, which the kernels do not use and whose version differs between hosts.
    extra_link_args=["-Wl,--as-needed", "-ldl"] if sys.platform == "linux" else [],
    optional=not EXACT,
)


class BuildLibrary(build_ext):
    """Builds an extension as a library for `ctypes`, with a file name that is the same for every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path, relative to the folder of the package."""
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Export no PyInit function, which `ctypes` does not need."""
        return ext.export_symbols

    def build_extension(self, ext: Extension) -> None:
        """Build it. If it is not wanted or the compiler fails, remove an older library from build/: it would
        be packed into the wheel.
        """
        self.built = False
        try:
            if not PURE:
                super().build_extension(ext)
                self.built = True
        finally:
            if not self.built:
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)

    def copy_extensions_to_source(self) -> None:
        """Copy the library to the source tree (an editable install), or remove an older one from it."""
        if self.built:
            super().copy_extensions_to_source()
        else:
            Path(LIBRARY).unlink(missing_ok=True)


class BuildWheel(bdist_wheel):
    """Writes the manifest, and tags the wheel with the platform that the library needs, not with a Python."""

    def run(self) -> None:
        """Build, write the manifest for the result, and pack the wheel."""
        if PURE and EXACT:
            raise SystemExit("MM_ENCODER_PURE and MM_ENCODER_EXACT exclude each other; set only one of them")
        # A library in build/ may be from another compiler, and the manifest names this one.
        self.get_finalized_command("build_ext").force = True
        self.run_command("build")
        self.skip_build = True
        build_lib = Path(self.get_finalized_command("build").build_lib)
        library = build_lib / LIBRARY
        manifest = {
            "format": FORMAT,
            "version": self.distribution.get_version(),
            "native": library.exists(),
            "python": str(self.distribution.python_requires).replace(" ", ""),
            "python_abi": "none",
            "torch": torch_range(self.distribution.install_requires),
        }
        if library.exists():
            tag = self.plat_name.replace("-", "_").replace(".", "_")
            policy = oldest_policy(library, tag)
            self.plat_name = policy or tag
            manifest |= {
                "machine": platform.machine(),
                "libc": needed_libc(policy),
                "policy": policy or f"none: {tag} is for hosts like the one it was built on",
                "compiler": output_of(*self._compiler()[:1], "--version").splitlines()[0],
                "instruction_sets": instruction_sets(library),
            }
            if EXACT:
                manifest |= {"exact": True, "revision": revision(), "settings": self._digest()}
                manifest |= exact_torch()
                # Part of the file name, so that it can be in one folder with the wheel for a range of Torch.
                self.build_number = "1" + re.sub(r"[^0-9a-z.]+", "_", f"torch{manifest['torch_version']}")
        else:
            # The compiler may have failed: continue as a package of pure Python.
            self.distribution.ext_modules = []
            self.root_is_pure = True
            manifest |= {"machine": "any", "libc": "any", "policy": "any"}
            print("mm_encoder: no native library was built; the wheel is a pure one", file=sys.stderr)
        text = json.dumps(manifest, indent=2) + "\n"
        (build_lib / "mm_encoder" / "_runtime.json").write_text(text, encoding="utf-8")
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of any Python 3, since `ctypes` loads the library, and of the library's platform."""
        return ("py3", "none", super().get_tag()[2])

    def _compiler(self) -> list[str]:
        """Return the command that compiles a file."""
        compiler = self.get_finalized_command("build_ext").compiler
        return [*getattr(compiler, "compiler_so_cxx", compiler.compiler_so)]

    def _digest(self) -> str:
        """Return a hash of the compiler and all options that determine the library."""
        settings = [
            output_of(self._compiler()[0], "--version"),
            *self._compiler(),
            *kernels.extra_compile_args,
        ]
        settings += ["link", *kernels.extra_link_args]
        return "sha256:" + hashlib.sha256("\0".join(settings).encode()).hexdigest()


def torch_range(requirements: list[str]) -> str:
    """Return the range of Torch versions in pyproject.toml, such as `>=2.11`."""
    (found,) = [match[1] for match in (re.fullmatch(r"torch([\s<>=!].*)", r) for r in requirements) if match]
    return found.replace(" ", "")


def oldest_policy(library: Path, tag: str) -> str | None:
    """Return the oldest platform policy (manylinux_...) that the library complies with, found by auditwheel.
    None if auditwheel is not installed, does not support this system or finds none.
    """
    if not tag.startswith("linux"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        # The manifest in the wheel contains the answer, so auditwheel inspects another wheel, with only the
        # library in it.
        wheel = Path(folder, f"mm_encoder-0-py3-none-{tag}.whl")
        with zipfile.ZipFile(wheel, "w") as file:
            file.write(library, LIBRARY)
            file.writestr("mm_encoder-0.dist-info/RECORD", f"{LIBRARY},,\n")
        run = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)],
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode:
        why = (run.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"mm_encoder: the wheel keeps the tag {tag}, since auditwheel fails: {why}", file=sys.stderr)
        return None
    found = str(json.loads(run.stdout)["overall_tag"])
    return None if found == tag else found


def needed_libc(policy: str | None) -> str:
    """Return the oldest libc that suffices: the policy's, else that of this machine."""
    older = re.match(r"manylinux_(\d+)_(\d+)_", policy or "")
    if older:
        return f"glibc {older[1]}.{older[2]}"
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "not glibc"
    except (AttributeError, ValueError, OSError):
        return "not glibc"


def instruction_sets(library: Path) -> list[str]:
    """Return the library's instruction sets, named as by `mm_level`; this CPU need not support them."""
    names = sorted(path.stem.removeprefix("level_") for path in Path("native").glob("level_*.cpp"))
    names.sort(key=lambda name: name != "plain")
    content = library.read_bytes()
    return [name for name in names if name.encode() + b"\0" in content]


def exact_torch() -> dict[str, str]:
    """Return the fields that an exact build adds, named as in `mm_encoder._manifest.host_runtime`."""
    try:
        import torch
    except ImportError:
        raise SystemExit(
            "MM_ENCODER_EXACT=1 builds for the installed Torch, and none is installed here. An isolated "
            "build never has one: use `python -m build --wheel --no-isolation` in an environment with torch, "
            "setuptools and auditwheel"
        ) from None
    return {
        "torch_version": str(torch.__version__),
        "cuda": str(torch.version.cuda or "none"),
        "cxx_abi": str(int(torch.compiled_with_cxx11_abi())),
    }


def revision() -> str:
    """Return the checked-out commit, followed by `-dirty` if files differ from it."""
    try:
        return output_of("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(
            "MM_ENCODER_EXACT=1 records the git revision: build in a git checkout, with git installed"
        ) from None


def output_of(*command: str) -> str:
    """Run a program and return its output."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


setup(
    ext_modules=[kernels],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
)
