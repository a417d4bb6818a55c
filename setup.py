"""The native kernels: a shared library in the package, built and run without Python or Torch.

Everything else about the package is in pyproject.toml. Without a C++20 compiler the package is installed
without the library and does the same work, slower, in NumPy, Pillow and Torch.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """Builds an extension as a library for `ctypes`, under a name that is the same for every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where the library lies, from the folder of the package."""
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """No PyInit, which `ctypes` does not need."""
        return ext.export_symbols


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
        "-Wno-maybe-uninitialized",  # GCC 12 in its own headers
        "-Wno-uninitialized",
    ],
    optional=True,
)

setup(ext_modules=[kernels], cmdclass={"build_ext": BuildLibrary})
