"""The cache from a shell: an image's key, and what may be asked of a cache's directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..cache import regions, upkeep
from ..cache.directory import LOCK, require_ours
from ..config import CacheConfig, MediaLimits, model_name
from ..contract import CacheStats
from ..device import default_dtype, parse_device
from ..errors import CacheError
from ..families.registry import load_family
from ..pipeline import ImagePipeline
from .files import FAULTS
from .options import (
    CheckpointArgument,
    DeviceOption,
    DirectoryArgument,
    DtypeOption,
    FamilyOption,
    ImageArgument,
    JsonOption,
    ModelOption,
    chosen_device,
    chosen_dtype,
)
from .terminal import bytes_of, complain, open_console, printable, table_of

_DEFAULT_BYTES = 4 * 1024**3
_LEAST_BYTES = 1024**2  # less is a slip of the unit, such as 4 for 4G


def configured(directory: Path | None, max_bytes: int | None) -> CacheConfig | None:
    """The cache that `--cache` and `--cache-bytes` ask for. Raises ValueError."""
    if directory is None:
        if max_bytes is not None:
            raise ValueError("--cache-bytes is of the cache that --cache names; there is none")
        return None
    budget = _DEFAULT_BYTES if max_bytes is None else max_bytes
    if budget < _LEAST_BYTES:
        raise ValueError(f"--cache-bytes must be at least 1M ({_LEAST_BYTES}), got {budget}")
    largest = min(CacheConfig().max_entry_bytes, budget // 4)
    return CacheConfig(disk_path=directory, disk_bytes=budget, max_entry_bytes=largest)


def complain_of_losses(stats: CacheStats, config: CacheConfig) -> None:
    """Say what of a run the cache, closed by now, did not keep, if anything: its faults stop nothing."""
    counts = {
        f"results larger than {bytes_of(config.max_entry_bytes)}, not kept": stats.bypasses,
        "results not written": stats.dropped,
        "errors": stats.errors,
    }
    lost = [f"{what}: {count}" for what, count in counts.items() if count]
    if lost:
        complain("mm-encoder", f"cache: {'; '.join(lost)}")


def key(
    checkpoint: CheckpointArgument,
    image: ImageArgument,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    model: ModelOption = None,
    family: FamilyOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say what an image's key in the cache is, and all that it covers; reads the weights, builds nothing."""
    opened_checkpoint, rules = load_family(checkpoint, family)
    target = parse_device(chosen_device(device))
    try:
        source = rules.open(image, MediaLimits(), None)
    except FAULTS as error:
        complain(str(image), error)
        return 1
    name, chosen = model_name(model, opened_checkpoint.name), chosen_dtype(dtype) or default_dtype(target)
    mm_hash, keys = source.mm_hash(name), ImagePipeline(rules, MediaLimits(), name, chosen).cache_keys(target)
    fields, hexadecimal = keys.fields(mm_hash, None), keys.key(mm_hash, None).hex()
    if as_json:
        print(json.dumps({"key": hexadecimal, "fields": fields}, indent=2))
        return 0
    # Plain lines: values are compared and copied, so not even a narrow terminal may fold them.
    width = max(map(len, fields))
    for label, value in (*fields.items(), ("key", hexadecimal)):
        print(f"{label:{width}}  {printable(value)}".rstrip())
    return 0


def stats(directory: DirectoryArgument) -> int:
    """Say what lies in a cache's directory, in use or not."""
    table = table_of("", "", numbers=False)
    for name, value in _foyer_facts(directory) if _is_foyer(directory) else _files_facts(directory):
        table.add_row(name, value)
    open_console().print(table)
    return 0


def verify(directory: DirectoryArgument) -> int:
    """Read and check every entry, and change nothing; exit code 1 if one is damaged."""
    if _is_foyer(directory):
        raise CacheError(
            f"{directory} is of the foyer backend, which lists no entries, so that there is nothing to go "
            "through; an encoder verifies every entry whenever it reads it"
        )
    found = upkeep.verify(directory)
    for name, reason in found.damaged:
        complain(str(directory / name), reason)
    print(f"{found.whole} whole entries, {bytes_of(found.bytes)}; {len(found.damaged)} damaged")
    return int(bool(found.damaged))


def clear(directory: DirectoryArgument) -> int:
    """Remove a cache's entries, and nothing else; refused while an encoder uses it."""
    if _is_foyer(directory):
        print(f"{bytes_of(regions.clear(directory))} freed")
    else:
        before = upkeep.clear(directory)
        print(f"{before.entries} entries removed, {bytes_of(before.bytes)} freed")
    return 0


def _files_facts(directory: Path) -> list[tuple[str, str]]:
    found = upkeep.describe(directory)
    facts = [
        ("backend", "files"),
        ("entries", str(found.entries)),
        ("bytes", bytes_of(found.bytes)),
        ("budget", "not recorded: whoever opens the directory says its own"),
    ]
    if found.temporaries:
        facts.append(("unfinished", f"{found.temporaries} files: being written, or of a writer that died"))
    if found.strangers:
        facts.append(("not the cache's", f"{found.strangers} files, left alone"))
    return facts


def _is_foyer(directory: Path) -> bool:
    """Whether a directory is of the foyer backend. Raises CacheError for what is no cache's directory."""
    if regions.is_foyers(directory) and not (directory / LOCK).exists():
        return True
    require_ours(os.fspath(directory))
    return False


def _foyer_facts(directory: Path) -> list[tuple[str, str]]:
    return [
        ("backend", "foyer"),
        ("entries", "not known: foyer keeps no list of them"),
        ("bytes", bytes_of(regions.weight(directory))),
        ("budget", "the same: all of it is allocated when the directory is opened"),
    ]
