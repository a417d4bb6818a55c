"""The list of families, and which of them a checkpoint belongs to."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .deepseek41 import DeepSeek41
from .family import Family
from .glm53 import Glm53
from .kimi_k3 import KimiK3
from .weights import Checkpoint

FAMILIES: tuple[type[Family], ...] = (Glm53, KimiK3, DeepSeek41)


def load_family(checkpoint: str | Path, name: str | None = None) -> tuple[Checkpoint, Family]:
    """Open a checkpoint and read its config as the family that recognises it, or as the family `name`.

    Raises ValueError for an unknown name; CheckpointError if no family recognises the config, if `name`
    contradicts it, or if the config is not supported.
    """
    by_name = {family.name: family for family in FAMILIES}
    if name is not None and name not in by_name:
        raise ValueError(f"family must be one of {', '.join(by_name)}, got {name!r}")
    opened = Checkpoint(checkpoint)
    config = opened.config
    described = f"model_type {config.get('model_type')!r}, architectures {config.get('architectures')!r}"
    matching = [family for family in FAMILIES if family.recognises(config)]
    if len(matching) > 1:
        raise CheckpointError(f"config.json is of {' and '.join(f.name for f in matching)} ({described})")
    if matching:
        (recognised,) = matching
        if name not in (None, recognised.name):
            raise CheckpointError(
                f"family={name!r} contradicts config.json, which is of {recognised.name} ({described})"
            )
        return opened, recognised(opened)
    lookalikes = [f"it looks like {f.name}, but {why}" for f in FAMILIES if (why := f.why_lookalike(config))]
    if lookalikes:
        raise CheckpointError(f"config.json is refused: {'; '.join(lookalikes)} ({described})")
    if name is None:
        known = ", ".join(name for family in FAMILIES for name in family.checkpoints)
        remedy = f"; for one of these under a name of your own pass family={' or '.join(by_name)}"
        if not isinstance(config.get("vision_config"), dict):
            remedy = ", and config.json has no vision_config"
        raise CheckpointError(f"no family fits config.json ({described}); supported are {known}{remedy}")
    return opened, by_name[name](opened)
