"""What a model family supplies, and the reading of its config files."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

from ..config import ImageOptions, MediaLimits
from ..contract import ImageSize, Patches, Plan
from ..errors import CheckpointError, UnsupportedMediaError
from ..media.picture import Picture
from ..media.source import ImageInput, Source, open_source, size_of
from .layers import Grid, normalize_bytes
from .weights import Checkpoint

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

    table: torch.Tensor
    """float32 [channels, 256]: the reference's value of every byte, in its own arithmetic."""

    merge: int = 1
    """Patches on a side of what becomes one row."""

    checkpoint: Checkpoint

    name: ClassVar[str]
    """What `family=` takes."""
    checkpoints: ClassVar[tuple[str, ...]]
    """Released checkpoints that it fits, by their published names."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """Either names the family in config.json."""
    lookalike_prefixes: ClassVar[tuple[str, str]]
    """What its relatives' model types and architectures begin with, for which it must not be taken."""

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        return cls.has_name(config) and cls.why_lookalike(config) is None

    @classmethod
    def why_lookalike(cls, config: Mapping[str, Any]) -> str | None:
        """Why a config that looks like this family is not of it; None if it is, or does not."""
        kind, architectures = config.get("model_type"), config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else ""
        if kind != cls.model_type and str(kind).startswith(cls.lookalike_prefixes[0]):
            return f"model_type {kind!r} is another model's"
        if not cls.has_name(config) and str(first).startswith(cls.lookalike_prefixes[1]):
            return f"architecture {first!r} is another model's"
        return None

    @classmethod
    def has_name(cls, config: Mapping[str, Any]) -> bool:
        """Whether the top level of a config.json has the family's name."""
        return config.get("model_type") == cls.model_type or config.get("architectures") == [cls.architecture]

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the config files. Raises CheckpointError."""

    @property
    @abstractmethod
    def tensor_prefixes(self) -> Sequence[str]:
        """What the names of the vision tensors begin with. Raises CheckpointError."""

    @property
    @abstractmethod
    def preprocessing(self) -> Mapping[str, Any]:
        """Every number and rule that pixels and plan depend on, as plain JSON values."""

    @property
    def preprocessing_hash(self) -> str:
        """SHA-256, in hex, of the family's name and `preprocessing`."""
        identity = {"family": self.name, **self.preprocessing}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def open(self, image: ImageInput, limits: MediaLimits, options: ImageOptions | None) -> Source:
        """`open_source`; what is no still image is refused in the family's name."""
        with self._named_in_errors():
            return open_source(image, limits, options)

    def size_of(self, image: ImageInput, limits: MediaLimits, options: ImageOptions | None) -> ImageSize:
        """`media.source.size_of`, likewise."""
        with self._named_in_errors():
            return size_of(image, limits, options)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except UnsupportedMediaError as error:
            raise UnsupportedMediaError(f"{self.name} takes still images: {error}") from None

    @abstractmethod
    def plan(self, size: ImageSize) -> Plan:
        """The plan of an image of `size` as shown. Cheap, exact, deterministic."""

    @abstractmethod
    def patches(self, picture: Picture, plan: Plan) -> Patches:
        """Preprocess a decoded picture by its plan."""

    def pixel_values(self, patches: Patches, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that the reference's processor gives for these patches: values, shape and order.
        By default [patches, channels, patch, patch].
        """
        values = normalize_bytes(patches.data, self.table)
        side = math.isqrt(values.shape[-1])
        return values.unflatten(-1, (side, side)).to(dtype)

    def token_map(self, plan: Plan) -> np.ndarray:
        """Row numbers [token rows, token columns]: which embedding row stands where in the picture."""
        return np.arange(plan.rows).reshape(plan.grid_thw[1] // self.merge, -1)

    @abstractmethod
    def build_tower(self, device: torch.device, dtype: torch.dtype) -> Tower:
        """Read the vision tensors and build the tower on `device`. Raises CheckpointError."""


def read_settings(
    cls: type[T],
    config: Mapping[str, Any],
    where: str,
    aliases: Mapping[str, str] | None = None,
    may_be_zero: Sequence[str] = (),
) -> T:
    """Make a dataclass of settings from `config`: each field under its own name or its alias, else its
    default, whose type says what it must hold.

    Numbers must be finite and positive (or zero, for fields named in `may_be_zero`), an int is taken where a
    float is wanted, and a tuple wants as many numbers as its default has. Raises CheckpointError naming the
    key, what it holds and what would be right.
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
    """An object inside another. Raises CheckpointError when it is missing or no object."""
    value = config.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must have a {name} object, got {value!r}")
    return value


def require(config: Mapping[str, Any], where: str, **built: Any) -> None:
    """Raise CheckpointError unless each of the keys is absent or holds what is built: a value, or one of a
    tuple of values.
    """
    for name, allowed in built.items():
        allowed = allowed if isinstance(allowed, tuple) else (allowed,)
        value = config.get(name)
        if value is not None and value not in allowed:
            supported = " or ".join(map(repr, allowed)) or "null"
            raise CheckpointError(f"{where}.{name} is {value!r}, only {supported} is supported")


def check_heads(width: int, heads: int, names: str) -> None:
    """Raise CheckpointError unless an attention head divides into quarters, as its rotation does."""
    if width % heads or width // heads % 4:
        raise CheckpointError(f"{names} must be a multiple of 4, got {width} / {heads}")


def check_agreement(**pairs: tuple[int, int]) -> None:
    """Raise CheckpointError unless what the processor's file and the tower's config say is the same."""
    for name, (processor, tower) in pairs.items():
        if processor != tower:
            raise CheckpointError(f"the processor's {name} is {processor}, the tower's {tower}")
