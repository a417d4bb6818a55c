"""Which families there are, and which one a checkpoint is of."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .family import Family
from .glm53 import Glm53
from .weights import Checkpoint

FAMILIES: tuple[type[Family], ...] = (Glm53,)


def load_family(checkpoint: str | Path, name: str | None = None) -> tuple[Checkpoint, Family]:
    """Open a checkpoint and read it as the family it is of, or as `name` says.

    Raises ValueError for an unknown name, CheckpointError when no family recognises the config, when the
    name contradicts it, or when the config is not supported.
    """
    names = ", ".join(family.name for family in FAMILIES)
    if name is not None and name not in {family.name for family in FAMILIES}:
        raise ValueError(f"family must be one of {names}, got {name!r}")
    opened = Checkpoint(checkpoint)
    recognised = next((f for f in FAMILIES if f.recognises(opened.config)), None)
    described = (
        f"model_type {opened.config.get('model_type')!r}, "
        f"architectures {opened.config.get('architectures')!r}"
    )
    if name is None:
        if recognised is None:
            raise CheckpointError(f"no family fits config.json ({described}); there are {names}")
        return opened, recognised(opened)
    if recognised is not None and recognised.name != name:
        raise CheckpointError(
            f"family={name!r} contradicts config.json, which is of {recognised.name} ({described})"
        )
    return opened, next(f for f in FAMILIES if f.name == name)(opened)
