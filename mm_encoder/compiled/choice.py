"""Which tower an encoder runs, the Python or the compiled one, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from ..errors import RuntimeMismatchError
from ..families.family import Family
from ..families.trunk import VisionTower
from ..logs import logger
from .build import build
from .container import Library, require_usable
from .identity import identity
from .packages import Package, Packages
from .tower import CompiledTower


class TowerChoice:
    """The choice for one encoder: all its replicas run the same kind of tower.

    package, library: what is to run, and it loaded; None for the Python tower.
    reason: why the Python tower runs.
    strict: whether a package that cannot be used is an error.
    """

    @classmethod
    def make(cls, mode: str, family: Family, device: torch.device, dtype: torch.dtype) -> TowerChoice:
        """Choose by mode: "eager", the Python tower; "compiled", which is compiled here if there is no
        package; "auto", the compiled one if there is a package that fits.

        Raises RuntimeMismatchError where mode "compiled" cannot be.
        """
        if mode == "eager":
            return cls()
        try:
            if mode == "compiled":
                return cls(*compiled_package(family, device, dtype), strict=True)
            return cls(*_find(Packages(), _identity(family, device, dtype)))
        except RuntimeMismatchError as error:
            if mode == "compiled":
                raise
            remedy = "" if device.type != "cpu" else "; `mm-encoder compile` makes one"
            return cls(reason=f"{error}{remedy}")

    def __init__(
        self,
        package: Package | None = None,
        library: Library | None = None,
        *,
        reason: str = 'tower="eager"',
        strict: bool = False,
    ) -> None:
        self._package, self._library = package, library
        self.reason, self._strict = reason, strict
        self._checked = False
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        """What rows depend on: "eager", or the digest of the compiled code."""
        return "eager" if self._package is None else f"compiled {self._package.digest}"

    def __str__(self) -> str:
        return f"Python ({self.reason})" if self._package is None else "compiled"

    def apply(self, tower: VisionTower) -> VisionTower | CompiledTower:
        """Return the tower to run in place of a loaded one; the first is compared with it.

        Raises RuntimeMismatchError if they differ and the choice is strict.
        """
        with self._lock:
            if self._library is None:
                return tower
            if self._checked:  # the others must not differ in kind
                return CompiledTower(tower, self._library)
            try:
                compiled = CompiledTower(tower, self._library)
                compiled.check()
            except (RuntimeMismatchError, RuntimeError) as error:
                if self._strict:
                    raise RuntimeMismatchError(str(error)) from error
                self._package, self._library, self.reason = None, None, str(error)
                logger.warning(
                    "the tower runs in Python: %s", self.reason, extra={"mm_event": "tower_refused"}
                )
                return tower
            self._checked = True
            return compiled


def compiled_package(
    family: Family,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[str], object] = lambda step: None,
) -> tuple[Package, Library]:
    """Return the package of a family's tower, loaded; compile it first, for a minute or two, where there is
    none that can be loaded.

    `progress` is called with each step's name. Raises RuntimeMismatchError where that cannot be.
    """
    packages, wanted = Packages(), _identity(family, device, dtype)
    try:
        return _find(packages, wanted)
    except RuntimeMismatchError:
        build(family, dtype, wanted, packages, partial(_find, packages, wanted), progress)
        return _find(packages, wanted)


def _find(packages: Packages, wanted: dict[str, str]) -> tuple[Package, Library]:
    package = packages.find(wanted)
    return package, Library(package.library)


def _identity(family: Family, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    if device.type != "cpu":
        raise RuntimeMismatchError(f"towers are compiled for CPUs only so far, not for {device}")
    require_usable()
    return identity(family, family.declare_tower(family.table), dtype)
