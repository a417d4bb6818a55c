"""What a wheel was built for, held against this host before the native library in it is loaded.

`setup.py` writes it into every wheel, as `_runtime.json` beside the library. An editable install has none:
its library was built in place, by the host that it runs on.

`install_wheel.py` judges a wheel by the same rules before it installs one. It has to run without this
package, and so has what stands between the two lines word for word; a test compares them.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from .errors import RuntimeMismatchError

NAME = "_runtime.json"


# --- the same in install_wheel.py --------------------------------------------------------------------

FORMAT = 1
"""Grows when manifests can no longer be judged by the rules before; a field more does not count."""


class Mismatch(NamedTuple):
    """Something that a wheel was built for, and this host is not."""

    field: str
    built: str
    host: str


def required_fields(manifest: Mapping[str, object]) -> dict[str, str]:
    """The fields of a manifest that a host must fit, by name; "?" for what it should say and does not."""
    fields = ["python", "python_abi", "machine", "libc", "torch"]
    if manifest.get("exact"):
        fields += ["torch_version", "cuda", "cxx_abi"]
    return {field: _text(manifest.get(field)) for field in fields}


def mismatches(manifest: Mapping[str, object], host: Mapping[str, str]) -> list[Mismatch]:
    """Where a manifest and a host differ, all of it. Fields that are not known are not looked at."""
    if manifest.get("format") != FORMAT:
        return [Mismatch("format", _text(manifest.get("format")), f"{FORMAT}, the only one known here")]
    wrong = [
        Mismatch(field, wanted, host.get(field, "unknown"))
        for field, wanted in required_fields(manifest).items()
        if not _fits(field, wanted, host.get(field, "unknown"))
    ]
    if not isinstance(manifest.get("native"), bool):
        wrong.append(Mismatch("native", _text(manifest.get("native")), "must be true or false"))
    return wrong


def host_runtime(*, import_torch: bool) -> dict[str, str]:
    """This host, in the words of a manifest. Torch's own version, CUDA and C++ ABI are known once it is
    imported; until then there is the version that it was installed as.
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
        return _release(here) >= _release(wanted)  # a newer glibc runs what was built for an older one
    return wanted == here or (field, wanted) in {("python_abi", "none"), ("machine", "any"), ("libc", "any")}


def _in_range(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as `>=2.11,<3`. 2.11.0a0 counts as 2.11: NVIDIA's images have
    releases of Torch that are named so.
    """
    compare = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
    compare |= {">=": operator.ge, ">": operator.gt}
    parts = [re.fullmatch(r"\s*([<>=!]+)\s*(\d+(?:\.\d+)*)\s*", part) for part in wanted.split(",")]
    return re.match(r"\d", version) is not None and all(
        part is not None and part[1] in compare and compare[part[1]](_release(version), _release(part[2]))
        for part in parts
    )


def _release(text: str) -> tuple[int, ...]:
    """The first number with dots in it, without zeros at its end: of `2.11.0+cu130` it is (2, 11)."""
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
    """A field as it may be shown: it is what a file says, and might say anything."""
    text = "?" if value is None else str(value)
    return (text if text.isprintable() else ascii(text))[:200]


# --- until here --------------------------------------------------------------------------------------


def read(library: Path) -> Mapping[str, object] | None:
    """The manifest beside a library, or None where there is none."""
    path = library.with_name(NAME)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeMismatchError(
            f"mm_encoder/{NAME} says what this install was built for, and cannot be read ({error}); install "
            "mm-encoder again"
        ) from error
    if not isinstance(found, dict):
        raise RuntimeMismatchError(
            f"mm_encoder/{NAME} must hold a JSON object, got {type(found).__name__}; install mm-encoder again"
        )
    return found


def check(library: Path) -> bool:
    """Whether there is a library that this host may load; False for a pure install. Raises
    RuntimeMismatchError where the manifest and this host differ.
    """
    manifest = read(library)
    if manifest is None:
        return library.exists()
    wrong = mismatches(manifest, host_runtime(import_torch=True))
    native = manifest.get("native") is True
    if native and not library.exists():
        wrong.append(Mismatch("native", library.name, "the file is missing"))
    if wrong:
        raise RuntimeMismatchError(_explain(wrong))
    return native


def _explain(wrong: list[Mismatch]) -> str:
    lines = [f"  {field + ':':15}built for {built}; this host: {host}" for field, built, host in wrong]
    return "\n".join(
        [
            "this mm-encoder was built for another runtime:",
            *lines,
            "Install a wheel that fits this host (install_wheel.py picks it out of a folder of wheels), or "
            "build one here with `python -m build`.",
        ]
    )
