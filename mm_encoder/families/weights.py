"""A checkpoint directory: its JSON files and its safetensors shards, read tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..config import expand_home
from ..errors import CheckpointError
from ..runtime import usable_cpus

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs.github.com/spec/"
_PLAIN = ("F64", "F32", "F16", "BF16")  # other dtypes under a tower's prefix are quantised weights
_LISTED = 8  # names of each kind that an error lists


class Checkpoint:
    """A directory with config.json, processor files and safetensors; `~` is the home directory. Raises
    CheckpointError.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"the checkpoint must be a path, got {type(path).__name__}")
        self.path = expand_home("checkpoint", path)
        if not self.path.is_dir():
            what = "which is none" if self.path.exists() else "which does not exist; nothing is downloaded"
            raise CheckpointError(f"the checkpoint must be a directory, got {str(path)!r}, {what}")
        config = self.read_json("config.json")
        if config is None:
            raise CheckpointError(f"no config.json in {str(path)!r}")
        self.config: Mapping[str, Any] = config
        self.loaded: set[str] = set()
        """The digest of what `load` has read."""

    @property
    def name(self) -> str:
        """The model's name in its config, else the directory's name."""
        return str(self.config.get("_name_or_path") or self.path.resolve().name)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file of the directory, None if there is no such file."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable(name, error) from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{name} must hold an object, got {type(value).__name__}")
        return value

    def only_prefix(self, prefixes: Sequence[str]) -> str:
        """Return the one of `prefixes` that has tensors. Raises CheckpointError if none or several do."""
        present = [p for p in prefixes if any(name.startswith(p) for name in self.files)]
        if len(present) != 1:
            found = "none of" if not present else f"{len(present)} of"
            raise CheckpointError(
                f"the vision tensors lie under one of the prefixes {', '.join(prefixes)}; "
                f"found {found} them among {len(self.files)} tensors"
            )
        return present[0]

    def load(
        self,
        wanted: Mapping[str, torch.Tensor],
        prefixes: Sequence[str],
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Read tensors by name, once, as copies on `device`, each with the shape and dtype in `wanted`.

        `wanted` must have every name that begins with one of `prefixes`: missing, unexpected, misshapen and
        quantised tensors raise one CheckpointError that lists them all. Another one is raised if they are not
        the tensors of an earlier call.
        """
        names = {name for name in self.files if name.startswith(tuple(prefixes))}
        missing, unexpected = sorted(wanted.keys() - names), sorted(names - wanted.keys())
        misshapen: list[str] = []
        quantised: list[str] = []
        tensors: dict[str, torch.Tensor] = {}
        digests: dict[str, bytes] = {}
        for file, inside in self._by_file(wanted.keys() & names).items():
            with self._open(file) as shard:
                there = set(shard.keys())
                missing += [f"{name} in {file}" for name in inside if name not in there]
                for name in sorted(there.intersection(inside)):
                    entry = shard.get_slice(name)
                    shape, kind = tuple(entry.get_shape()), entry.get_dtype()
                    if shape != wanted[name].shape:
                        misshapen.append(f"{name} {list(shape)}, not {list(wanted[name].shape)}")
                    elif kind not in _PLAIN:
                        quantised.append(f"{name} {kind}")
                if not (missing or unexpected or misshapen or quantised):
                    for name, tensor, digest in _read(shard, inside):
                        tensors[name], digests[name] = tensor.to(device, wanted[name].dtype), digest
        if missing or unexpected or misshapen or quantised:
            raise CheckpointError(
                _describe(missing=missing, unexpected=unexpected, misshapen=misshapen, quantised=quantised)
            )
        self.loaded.add(_combined(digests))
        if len(self.loaded) > 1:
            raise CheckpointError("the weights changed while they were loaded; load the checkpoint again")
        return tensors

    def digest(self, prefixes: Sequence[str]) -> str:
        """Return the SHA-256, in hex, of the names, dtypes, shapes and bytes of the tensors whose names begin
        with one of `prefixes`, independent of their order and files: of those that were loaded, if any were.
        """
        if self.loaded:
            return next(iter(self.loaded))
        digests: dict[str, bytes] = {}
        names = [name for name in self.files if name.startswith(tuple(prefixes))]
        for file, inside in self._by_file(names).items():
            with self._open(file) as shard:
                digests.update((name, digest) for name, _, digest in _read(shard, inside))
        return _combined(digests)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape, None if there is no such tensor."""
        if name not in self.files:
            return None
        with self._open(self.files[name]) as shard:
            return tuple(shard.get_slice(name).get_shape())

    @cached_property
    def files(self) -> Mapping[str, str]:
        """File names by the names of the tensors that they contain."""
        # One whole file counts before an index and before siblings, which conversions leave behind.
        whole = (self.path / _WHOLE).exists()
        index = None if whole else self.read_json(_INDEX)
        if index is not None:
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{_INDEX} has no weight_map")
            for file in weight_map.values():
                if not isinstance(file, str) or Path(file).name != file:
                    raise CheckpointError(f"{_INDEX} names {file!r}, which is not a file beside it")
            return weight_map
        files: dict[str, str] = {}
        for name in [_WHOLE] if whole else sorted(path.name for path in self.path.glob("*.safetensors")):
            with self._open(name) as shard:
                for tensor in shard.keys():
                    if tensor in files:
                        raise CheckpointError(f"{tensor} is in both {files[tensor]} and {name}")
                    files[tensor] = name
        if not files:
            raise CheckpointError(
                f"no safetensors file with tensors in {str(self.path)!r}: the weights are missing; finish "
                "the download (MediaPlanner needs none)"
            )
        return files

    def _by_file(self, names: Iterable[str]) -> Mapping[str, Sequence[str]]:
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names):
            by_file[self.files[name]].append(name)
        return by_file

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        """Return the error for a file that cannot be read; names a git-lfs pointer."""
        try:
            with open(self.path / file, "rb") as opened:
                pointer = opened.read(len(_LFS)) == _LFS
        except OSError:
            pointer = False
        if pointer:
            return CheckpointError(f"{file} is a git-lfs pointer and not the file itself; run `git lfs pull`")
        return CheckpointError(f"{file} cannot be read: {error}; if the file is cut, download it again")


def _read(shard: Any, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor, bytes]]:
    """Yield tensors of an open file, by name, with the digest of what is in them. Reads in parallel."""

    def read(name: str) -> tuple[str, torch.Tensor, bytes]:
        mapped = shard.get_tensor(name)
        # A copy first: the mapping would keep the file open, and shows what is written to it meanwhile.
        data = torch.empty(mapped.nbytes, dtype=torch.uint8, device="cpu")
        np.copyto(data.numpy(), mapped.contiguous().flatten().view(torch.uint8).numpy())
        head = json.dumps([name, str(mapped.dtype), list(mapped.shape)]).encode()
        hasher = hashlib.sha256(len(head).to_bytes(8, "little") + head)
        hasher.update(data.numpy())
        return name, data.view(mapped.dtype).view(mapped.shape), hasher.digest()

    at_once = usable_cpus()
    with ThreadPoolExecutor(at_once) as pool:  # copying and hashing release the GIL
        for begin in range(0, len(names), at_once):  # no more is read ahead, for the sake of host memory
            yield from pool.map(read, names[begin : begin + at_once])


def _combined(digests: Mapping[str, bytes]) -> str:
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _describe(**faults: Sequence[str]) -> str:
    parts = []
    for kind, names in faults.items():
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            parts.append(f"{len(names)} {kind} ({', '.join(names[:_LISTED])}{more})")
    return "vision tensors: " + "; ".join(parts)
