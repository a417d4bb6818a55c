"""What a model family supplies, and the reading of its config files."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from ..contract import ImageSize, Patches, Plan
from ..errors import CheckpointError
from ..media.decode import Pixels
from .weights import Checkpoint

Grid: TypeAlias = tuple[int, int, int]
"""A patch grid (t, h, w), before merging."""

T = TypeVar("T")


class Tower(Protocol):
    """A built vision tower on its device; stateless, so threads may share it."""

    def __call__(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Embedding rows [rows, width] of packed images: uint8 `patches` [sum(t·h·w), bytes] on the
        tower's device, one grid an image; rows follow the images' order.
        """


class Family(ABC):
    """One checkpoint of one family: how its images become patches, and how its tower is built.

    Immutable once made, and made from config files alone: no weights, no device.
    """

    name: ClassVar[str]
    """What `family=` takes."""
    checkpoints: ClassVar[tuple[str, ...]]
    """Released checkpoints that it fits, by their published names."""

    @classmethod
    @abstractmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this family."""

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the config files. Raises CheckpointError."""

    @property
    @abstractmethod
    def preprocessing(self) -> Mapping[str, Any]:
        """Every number and rule that pixels and plan depend on, as plain JSON values."""

    @property
    def preprocessing_hash(self) -> str:
        """SHA-256, in hex, of the family's name and `preprocessing`."""
        identity = {"family": self.name, **self.preprocessing}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @abstractmethod
    def plan(self, size: ImageSize) -> Plan:
        """The plan of an image of `size` as shown. Cheap, exact, deterministic."""

    @abstractmethod
    def patches(self, pixels: Pixels, plan: Plan) -> Patches:
        """Preprocess decoded pixels [h, w, 3 or 4] by their plan."""

    @abstractmethod
    def pixel_values(self, patches: Patches, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that the reference's processor gives for these patches: values, shape and order."""

    @abstractmethod
    def token_map(self, plan: Plan) -> np.ndarray:
        """Row numbers [token rows, token columns]: which embedding row stands where in the picture."""

    @abstractmethod
    def build_tower(self, device: torch.device, dtype: torch.dtype) -> Tower:
        """Read the vision tensors and build the tower on `device`. Raises CheckpointError."""


def read_settings(
    cls: type[T], config: Mapping[str, Any], where: str, aliases: Mapping[str, str] | None = None
) -> T:
    """Make a dataclass of settings from `config`: each field under its own name or its alias, else its
    default, whose type says what it must hold.

    Numbers must be positive and finite, an int is taken where a float is wanted, and a tuple wants as
    many numbers as its default has. Raises CheckpointError naming the key, what it holds and what would
    be right.
    """
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        names = [field.name, *((aliases or {}).get(field.name, "").split())]
        name = next((n for n in names if config.get(n) is not None), field.name)
        value = config.get(name)
        values[field.name] = _checked(field.default if value is None else value, field.default, where, name)
    return cls(**values)


def _checked(value: Any, like: Any, where: str, name: str) -> Any:
    if isinstance(like, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(like):
            raise CheckpointError(f"{where}.{name} must hold {len(like)} numbers, got {value!r}")
        return tuple(_checked(v, x, where, name) for v, x in zip(value, like, strict=True))
    if type(like) is float and type(value) is int:
        value = float(value)
    if type(value) is not type(like):
        raise CheckpointError(f"{where}.{name} must be {type(like).__name__}, got {value!r}")
    if type(like) in (int, float) and not 0 < value < float("inf"):
        raise CheckpointError(f"{where}.{name} must be positive and finite, got {value!r}")
    return value


def require(config: Mapping[str, Any], name: str, wanted: Any, where: str) -> None:
    """Raise CheckpointError unless `config[name]` is absent or equals `wanted`, the only value built."""
    value = config.get(name, wanted)
    if value != wanted:
        raise CheckpointError(f"{where}.{name} is {value!r}, only {wanted!r} is supported")
