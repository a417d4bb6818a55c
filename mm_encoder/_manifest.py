"""The manifest of a wheel: what it was built for. Compared with this host before the library is loaded.

`setup.py` writes it into every wheel, as `_runtime.json` beside the library. An editable install has none:
its library was built in place, on the host that it runs on.

`install_wheel.py` applies the same rules before it installs a wheel. It must run without this package, so it
contains a copy of the part between the two lines; a test compares them.
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


def read(library: Path) -> Mapping[str, object] | None:
    """Return the manifest beside a library, None if there is none."""
    path = library.with_name(NAME)
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # the latter in a zip on sys.path
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeMismatchError(
            f"mm_encoder/{NAME}, which describes what this install was built for, cannot be read ({error}); "
            "reinstall mm-encoder"
        ) from error
    if not isinstance(found, dict):
        raise RuntimeMismatchError(
            f"mm_encoder/{NAME} must hold a JSON object, got {type(found).__name__}; reinstall mm-encoder"
        )
    return found


def check(library: Path) -> bool:
    """Return whether there is a library that this host may load; False for a pure install. Raises
    RuntimeMismatchError if the manifest and this host differ.
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
            "Install a wheel that fits this host (install_wheel.py selects it from a folder of wheels), or "
            "build one here with `python -m build`.",
        ]
    )
