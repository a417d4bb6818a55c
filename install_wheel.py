#!/usr/bin/env python3
"""Install the mm-encoder wheel from a folder that fits this Python, machine and Torch.

    python install_wheel.py WHEELHOUSE [--dry-run] [--allow-pure]

Every wheel has a manifest that describes what it was built for. A wheel for exactly this Torch is preferred
to one for a range of versions; a pure wheel (no native library: the same results, slower) is the last choice
and needs --allow-pure. Nothing is downloaded, and nothing else is installed or replaced: Torch and the other
dependencies must be installed already.

Needs only pip. Exit status: 0 installed (or would be, with --dry-run), 1 wrong usage or pip failed, 2 no
wheel fits, or several fit equally well.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, NoReturn

MANIFEST = "mm_encoder/_runtime.json"
MANIFEST_BYTES = 65536


# --- the same in mm_encoder/_manifest.py; a test compares them ---------------------------------------

FORMAT = 1
"""Raised when older code would misjudge new manifests; an additional field alone does not count."""


class Mismatch(NamedTuple):
    """A manifest field whose requirement this host does not meet."""

    field: str
    built: str
    host: str


def required_fields(manifest: Mapping[str, object]) -> dict[str, str]:
    """Return the manifest fields that a host must match, by name; "?" for a missing field."""
    fields = ["python", "python_abi", "machine", "libc", "torch"]
    if manifest.get("exact"):
        fields += ["torch_version", "cuda", "cxx_abi"]
    return {field: _text(manifest.get(field)) for field in fields}


def mismatches(manifest: Mapping[str, object], host: Mapping[str, str]) -> list[Mismatch]:
    """Return all differences between a manifest and a host. Unknown fields are ignored."""
    if manifest.get("format") != FORMAT:
        return [Mismatch("format", _text(manifest.get("format")), f"{FORMAT}, the only one supported here")]
    wrong = [
        Mismatch(field, wanted, host.get(field, "unknown"))
        for field, wanted in required_fields(manifest).items()
        if not _fits(field, wanted, host.get(field, "unknown"))
    ]
    if not isinstance(manifest.get("native"), bool):
        wrong.append(Mismatch("native", _text(manifest.get("native")), "must be true or false"))
    return wrong


def host_runtime(*, import_torch: bool) -> dict[str, str]:
    """Describe this host by the fields of a manifest. Without `import_torch` it has the version in Torch's
    package metadata, but not Torch's own version, CUDA and C++ ABI.
    """
    host = {
        "python": platform.python_version(),
        "python_abi": str(sys.implementation.cache_tag),
        "machine": platform.machine(),
        "libc": _libc(),
    }
    if import_torch:
        import torch

        version = str(torch.__version__)
        abi = str(int(torch.compiled_with_cxx11_abi()))
        return host | {
            "torch": version,
            "torch_version": version,
            "cuda": str(torch.version.cuda or "none"),
            "cxx_abi": abi,
        }
    try:
        return host | {"torch": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        return host | {"torch": "not installed"}


def _fits(field: str, wanted: str, here: str) -> bool:
    if field in {"python", "torch"}:
        return _in_range(here, wanted)
    if field == "libc" and wanted.split(" ")[0] == here.split(" ")[0] == "glibc":
        return _release(here) >= _release(wanted)  # glibc is backward compatible
    return wanted == here or (field, wanted) in {("python_abi", "none"), ("machine", "any"), ("libc", "any")}


def _in_range(version: str, wanted: str) -> bool:
    """Return whether a version is in a range such as `>=2.11,<3`. 2.11.0a0 counts as 2.11: NVIDIA's images
    have Torch releases with such versions.
    """
    compare = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
    compare |= {">=": operator.ge, ">": operator.gt}
    parts = [re.fullmatch(r"\s*([<>=!]+)\s*(\d+(?:\.\d+)*)\s*", part) for part in wanted.split(",")]
    return re.match(r"\d", version) is not None and all(
        part is not None and part[1] in compare and compare[part[1]](_release(version), _release(part[2]))
        for part in parts
    )


def _release(text: str) -> tuple[int, ...]:
    """Return the release numbers without trailing zeros: (2, 11) for `2.11.0+cu130`."""
    found = re.search(r"\d+(?:\.\d+)*", text)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "not glibc"
    except (AttributeError, ValueError, OSError):
        return "not glibc"


def _text(value: object) -> str:
    """Return a field as safe text: a manifest comes from a file and may contain anything."""
    text = "?" if value is None else str(value)
    return (text if text.isprintable() else ascii(text))[:200]


# --- until here --------------------------------------------------------------------------------------


class Wheel(NamedTuple):
    """A file that has the name of a wheel of this project, and its manifest."""

    path: Path
    manifest: Mapping[str, object]
    flaw: str = ""
    """Why its manifest cannot be used; empty if it can."""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.manifest.get("native") is False:
            return "pure"
        return "exact" if self.manifest.get("exact") else "range"


KINDS = ("exact", "range", "pure")
"""The kinds of wheels, in order of preference."""


def read_wheel(path: Path) -> Wheel:
    """Read and verify a whole wheel, so that a damaged one is not installed. Runs no code from it."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
            if damaged is not None:
                return Wheel(path, {}, f"damaged: the checksum of {damaged!a} is wrong")
            if MANIFEST not in file.namelist():
                return Wheel(path, {}, f"no manifest ({MANIFEST}) in it")
            if file.getinfo(MANIFEST).file_size > MANIFEST_BYTES:
                return Wheel(path, {}, f"its manifest is larger than {MANIFEST_BYTES} bytes")
            manifest = json.loads(file.read(MANIFEST))
    except Exception as error:  # damaged archives and unknown compressions raise many types
        return Wheel(path, {}, f"cannot be read: {str(error)!a}")
    if not isinstance(manifest, dict):
        return Wheel(path, {}, f"its manifest must be a JSON object, got {type(manifest).__name__}")
    return Wheel(path, manifest)


def reasons_against(wheel: Wheel, host: Mapping[str, str], allow_pure: bool) -> list[str]:
    """Return why a wheel must not be installed here; empty if it fits."""
    if wheel.flaw:
        return [wheel.flaw]
    found = [f"{field} {built}, but here: {here}" for field, built, here in mismatches(wheel.manifest, host)]
    if wheel.kind == "pure" and not allow_pure:
        found.append("pure, without the native library; allow it with --allow-pure")
    return found


def this_host(wheels: list[Wheel]) -> dict[str, str]:
    """Describe this host; imports Torch only if a wheel for an exact Torch is present."""
    if any(wheel.kind == "exact" for wheel in wheels):  # importing Torch takes seconds
        try:
            return host_runtime(import_torch=True)
        except (ImportError, OSError) as error:
            print(f"install_wheel.py: Torch cannot be imported here: {error}", file=sys.stderr)
    return host_runtime(import_torch=False)


def format_fields(fields: Mapping[str, str]) -> str:
    """Format fields of a manifest on one line."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())


class Parser(argparse.ArgumentParser):
    """Exits with 1 on wrong usage, since 2 means that no wheel fits."""

    def error(self, message: str) -> NoReturn:
        """See `ArgumentParser.error`."""
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Select a wheel and install it."""
    about, _, more = str(__doc__).partition("\n\n")
    parser = Parser(
        prog="install_wheel.py",
        description=about,
        epilog=more.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wheelhouse", metavar="WHEELHOUSE", type=Path, help="a folder with wheels")
    parser.add_argument("--dry-run", action="store_true", help="print what would be installed, and stop")
    parser.add_argument("--allow-pure", action="store_true", help="accept a pure wheel if no other fits")
    options = parser.parse_args(arguments)
    if not options.wheelhouse.is_dir():
        parser.error(f"WHEELHOUSE must be a folder, got {options.wheelhouse}")

    wheels = [read_wheel(path) for path in sorted(options.wheelhouse.glob("mm_encoder-*.whl"))]
    host = this_host(wheels)
    against = [reasons_against(wheel, host, options.allow_pure) for wheel in wheels]
    fitting = [wheel for wheel, why in zip(wheels, against, strict=True) if not why]
    best = [wheel for kind in KINDS for wheel in fitting if wheel.kind == kind]
    best = [wheel for wheel in best if wheel.kind == best[0].kind]

    if len(best) != 1:
        several = f"{len(best)} wheels fit equally well; keep only one of them: "
        found = several + ", ".join(wheel.path.name for wheel in best) if best else "no wheel fits"
        print(f"install_wheel.py: {options.wheelhouse}: {found}", file=sys.stderr)
        print(f"  this host: {format_fields(host)}", file=sys.stderr)
        for wheel, why in zip(wheels, against, strict=True):
            print(f"  {wheel.path.name}", file=sys.stderr)
            if not wheel.flaw:
                print(f"    needs {format_fields(required_fields(wheel.manifest))}", file=sys.stderr)
            for reason in why:
                print(f"    does not fit: {reason}", file=sys.stderr)
        if not wheels:
            print("  the folder contains no mm_encoder-*.whl", file=sys.stderr)
        return 2
    for wheel in wheels:
        if wheel.flaw:
            print(f"install_wheel.py: skipped {wheel.path.name}: {wheel.flaw}", file=sys.stderr)
    print(f"install_wheel.py: {best[0].path.name} fits ({best[0].kind})", flush=True)
    if options.dry_run:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall"]
    status = subprocess.run([*command, str(best[0].path.resolve())], check=False).returncode
    if status:
        print(f"install_wheel.py: pip failed with exit status {status}", file=sys.stderr)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
