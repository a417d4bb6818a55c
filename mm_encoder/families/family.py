"""The interface of a model family, and helpers that read its config files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from ..config import ImageOptions, MediaLimits
from ..contract import ImageSize, Patches, Plan
from ..errors import CheckpointError, UnsupportedMediaError
from ..media.picture import Picture
from ..media.source import ImageInput, Source, open_source, size_of
from .layers import normalized_on_host
from .trunk import Renames, VisionTower, load_into
from .weights import Checkpoint

T = TypeVar("T")


class Family(ABC):
    """One checkpoint of one family: how its images become patches, and how its tower is built.

    Immutable, and created from the config files alone: no weights, no device.
    """

    table: torch.Tensor
    """float32 [channels, 256]: the normalised value of every byte, in the reference's arithmetic."""

    merge: int = 1
    """Side, in patches, of the block that becomes one row."""

    checkpoint: Checkpoint

    vision: Any
    """The settings of the tower, a dataclass."""

    name: ClassVar[str]
    """The value of `family=`."""
    checkpoints: ClassVar[tuple[str, ...]]
    """Published names of the released checkpoints that it supports."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """config.json names the family by its model type or by this."""
    lookalike_prefixes: ClassVar[tuple[str, str]]
    """Prefixes of the model type and architecture of related models, which it must not be confused with."""

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of this family."""
        return cls.has_name(config) and cls.why_lookalike(config) is None

    @classmethod
    def why_lookalike(cls, config: Mapping[str, Any]) -> str | None:
        """Return why a similar-looking config is not this family. None if it is, or if it is not similar."""
        kind, architectures = config.get("model_type"), config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else ""
        if kind != cls.model_type and str(kind).startswith(cls.lookalike_prefixes[0]):
            return f"model_type {kind!r} belongs to another model"
        if not cls.has_name(config) and str(first).startswith(cls.lookalike_prefixes[1]):
            return f"architecture {first!r} belongs to another model"
        return None

    @classmethod
    def has_name(cls, config: Mapping[str, Any]) -> bool:
        """Return whether the top level of a config.json names this family."""
        return config.get("model_type") == cls.model_type or config.get("architectures") == [cls.architecture]

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the config files. Raises CheckpointError."""

    @property
    @abstractmethod
    def tensor_prefixes(self) -> Sequence[str]:
        """Prefixes of the vision tensors' names. Raises CheckpointError."""

    @property
    @abstractmethod
    def preprocessing(self) -> Mapping[str, Any]:
        """Every number and rule that the pixels and the plan depend on, as plain JSON values."""

    @property
    def preprocessing_hash(self) -> str:
        """SHA-256, in hex, of the family's name and `preprocessing`."""
        identity = {"family": self.name, **self.preprocessing}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def open(self, image: ImageInput, limits: MediaLimits, options: ImageOptions | None) -> Source:
        """Call `open_source`; an error about video or audio names the family."""
        with self._named_in_errors():
            return open_source(image, limits, options)

    def size_of(self, image: ImageInput, limits: MediaLimits, options: ImageOptions | None) -> ImageSize:
        """Call `media.source.size_of`; an error about video or audio names the family."""
        with self._named_in_errors():
            return size_of(image, limits, options)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except UnsupportedMediaError as error:
            if not re.search(r"\b(video|audio|animat\w+)\b", str(error)):
                raise
            raise UnsupportedMediaError(f"{self.name} takes still images: {error}") from None

    @abstractmethod
    def plan(self, size: ImageSize) -> Plan:
        """Plan an image of display size `size`. Cheap, exact, deterministic."""

    @abstractmethod
    def patches(self, picture: Picture, plan: Plan) -> Patches:
        """Preprocess a decoded image according to its plan."""

    def pixel_values(self, patches: Patches, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that the reference's processor gives for these patches: values, shape and order.
        By default [patches, channels, patch, patch].
        """
        values = normalized_on_host(patches.data, self.table, dtype)
        side = math.isqrt(values.shape[-1])
        return values.unflatten(-1, (side, side))

    def token_map(self, plan: Plan) -> np.ndarray:
        """Return the index of the embedding row at each place of the image: [token rows, token columns]."""
        return np.arange(plan.rows).reshape(plan.grid_thw[1] // self.merge, -1)

    @property
    def tower_config(self) -> Mapping[str, Any]:
        """Every number that the tower's computation depends on, besides the shapes of its tensors."""
        return asdict(self.vision)

    @abstractmethod
    def declare_tower(self, table: torch.Tensor) -> VisionTower:
        """Return the tower without values; `table` is this family's in the tower's dtype and on its device.
        Raises CheckpointError.
        """

    @property
    @abstractmethod
    def renames(self) -> Renames:
        """The checkpoint's names of the tower's tensors. Raises CheckpointError."""

    def build_tower(self, device: torch.device, dtype: torch.dtype) -> VisionTower:
        """Read the vision tensors and build the tower on `device`. Raises CheckpointError."""
        tower = self.declare_tower(self.table.to(device, dtype))
        load_into(tower, self.checkpoint, self.renames, self.tensor_prefixes, device, dtype)
        return tower


def read_settings(
    cls: type[T],
    config: Mapping[str, Any],
    where: str,
    aliases: Mapping[str, str] | None = None,
    may_be_zero: Sequence[str] = (),
) -> T:
    """Build a settings dataclass from `config`. A field is read under its name, else its alias, else it has
    its default, whose type is required.

    Numbers must be finite and positive (or zero, for fields named in `may_be_zero`), an int is accepted for a
    float, and a tuple must have the length of its default. Raises CheckpointError with the key, its value and
    the allowed values.
    """
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        name = field.name
        if config.get(name) is None:
            name = (aliases or {}).get(name, name)
        value = config.get(name)
        values[field.name] = _checked(
            field.default if value is None else value, field.default, where, name, field.name in may_be_zero
        )
    try:
        return cls(**values)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _checked(value: Any, like: Any, where: str, name: str, may_be_zero: bool) -> Any:
    if isinstance(like, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(like):
            raise CheckpointError(f"{where}.{name} must hold {len(like)} numbers, got {value!r}")
        return tuple(_checked(v, x, where, name, may_be_zero) for v, x in zip(value, like, strict=True))
    if type(like) is float and type(value) is int:
        value = float(value)
    if type(value) is not type(like):
        raise CheckpointError(f"{where}.{name} must be {type(like).__name__}, got {value!r}")
    if may_be_zero and value == 0:
        return value
    if type(like) in (int, float) and not 0 < value < float("inf") and value != like:
        raise CheckpointError(f"{where}.{name} must be positive and finite, got {value!r}")
    return value


def section(config: Mapping[str, Any], name: str, where: str = "config.json") -> Mapping[str, Any]:
    """Return the JSON object under `name`. Raises CheckpointError if it is missing or not an object."""
    value = config.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must have a {name} object, got {value!r}")
    return value


def require(config: Mapping[str, Any], where: str, **built: Any) -> None:
    """Raise CheckpointError unless each key is absent or has a supported value: the value given here, or one
    of a tuple of values.
    """
    for name, allowed in built.items():
        allowed = allowed if isinstance(allowed, tuple) else (allowed,)
        value = config.get(name)
        if value is not None and value not in allowed:
            supported = " or ".join(map(repr, allowed)) or "null"
            raise CheckpointError(f"{where}.{name} is {value!r}, only {supported} is supported")


def check_heads(width: int, heads: int, names: str) -> None:
    """Raise CheckpointError unless the head dimension is a multiple of 4, as two-axis RoPE requires."""
    if width % heads or width // heads % 4:
        raise CheckpointError(f"{names} must be a multiple of 4, got {width} / {heads}")


def check_agreement(**pairs: tuple[int, int]) -> None:
    """Raise CheckpointError unless the processor's file and the tower's config agree."""
    for name, (processor, tower) in pairs.items():
        if processor != tower:
            raise CheckpointError(f"the processor's {name} is {processor}, the tower's {tower}")
