"""Manifests of wheels: for a range of hosts, for exactly one, without native code, and for this host."""

from __future__ import annotations

from typing import Any

from mm_encoder._manifest import host_runtime

RANGE: dict[str, Any] = {
    "format": 1,
    "version": "0.1.0",
    "native": True,
    "python": ">=3.11",
    "python_abi": "none",
    "torch": ">=2.11",
    "machine": "x86_64",
    "libc": "glibc 2.17",
    "policy": "manylinux_2_17_x86_64",
}
EXACT = RANGE | {"exact": True, "torch_version": "2.12.1+cu130", "cuda": "13.0", "cxx_abi": "1"}
PURE = RANGE | {"native": False, "machine": "any", "libc": "any", "policy": "any"}


def here(**changes: object) -> dict[str, Any]:
    """Return a manifest that fits this host, except for the changes."""
    host = host_runtime(import_torch=True)
    return EXACT | {name: host[name] for name in EXACT.keys() & host.keys() - {"python", "torch"}} | changes
