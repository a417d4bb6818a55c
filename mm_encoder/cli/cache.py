"""The cache on the command line: the key of an image, and maintenance of a cache directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..cache import regions, upkeep
from ..cache.directory import LOCK, require_cache
from ..compiled.choice import TowerChoice
from ..config import CacheConfig, MediaLimits, model_name
from ..contract import CacheStats
from ..device import default_dtype, parse_device
from ..errors import CacheError
from ..families.registry import load_family
from ..pipeline import ImagePipeline
from . import options
from .files import EXPECTED_ERRORS
from .terminal import bytes_of, open_console, printable, report_error, table_of

_DEFAULT_BYTES = 4 * 1024**3
_LEAST_BYTES = 1024**2  # less is probably a missing unit, such as 4 for 4G


def cache_config(directory: Path | None, max_bytes: int | None) -> CacheConfig | None:
    """Return the cache settings of `--cache` and `--cache-bytes`. Raises ValueError."""
    if directory is None:
        if max_bytes is not None:
            raise ValueError("--cache-bytes needs --cache, the directory that it limits")
        return None
    budget = _DEFAULT_BYTES if max_bytes is None else max_bytes
    if budget < _LEAST_BYTES:
        raise ValueError(f"--cache-bytes must be at least 1M ({_LEAST_BYTES}), got {budget}")
    largest = min(CacheConfig().max_entry_bytes, budget // 4)
    return CacheConfig(disk_path=directory, disk_bytes=budget, max_entry_bytes=largest)


def report_losses(stats: CacheStats, config: CacheConfig) -> None:
    """Report results that the closed cache did not store, if any; cache errors never stop a run."""
    counts = {
        f"results larger than {bytes_of(config.max_entry_bytes)}, not stored": stats.bypasses,
        "results not written": stats.dropped,
        "errors": stats.errors,
    }
    lost = [f"{what}: {count}" for what, count in counts.items() if count]
    if lost:
        report_error("mm-encoder", f"cache: {'; '.join(lost)}")


def key(
    checkpoint: options.CheckpointArgument,
    image: options.ImageArgument,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    model: options.ModelOption = None,
    family: options.FamilyOption = None,
    as_json: options.JsonOption = False,
) -> int:
    """Print an image's cache key and every field it covers; reads the weights, but builds no model."""
    opened_checkpoint, rules = load_family(checkpoint, family)
    target = parse_device(options.chosen_device(device))
    try:
        source = rules.open(image, MediaLimits(), None)
    except EXPECTED_ERRORS as error:
        report_error(str(image), error)
        return 1
    name, chosen = (
        model_name(model, opened_checkpoint.name),
        options.chosen_dtype(dtype) or default_dtype(target),
    )
    tower = TowerChoice.make("auto", rules, target, chosen)
    pipeline = ImagePipeline(rules, MediaLimits(), name, chosen, tower)
    mm_hash, keys = source.mm_hash(name), pipeline.cache_keys(target)
    fields, hexadecimal = keys.fields(mm_hash, None), keys.key(mm_hash, None).hex()
    if as_json:
        print(json.dumps({"key": hexadecimal, "fields": fields}, indent=2))
        return 0
    # Plain lines, which a narrow terminal does not fold: users compare and copy the values.
    width = max(map(len, fields))
    for label, value in (*fields.items(), ("key", hexadecimal)):
        print(f"{label:{width}}  {printable(value)}".rstrip())
    return 0


def stats(directory: options.DirectoryArgument) -> int:
    """Show what a cache directory contains, in use or not."""
    table = table_of("", "", numbers=False)
    for name, value in _foyer_facts(directory) if _is_foyer(directory) else _files_facts(directory):
        table.add_row(name, value)
    open_console().print(table)
    return 0


def verify(directory: options.DirectoryArgument) -> int:
    """Read and check every entry without changes; exit code 1 if one is damaged."""
    if _is_foyer(directory):
        raise CacheError(
            f"{directory} is a foyer cache, whose entries cannot be listed or verified here; an encoder "
            "verifies every entry whenever it reads it"
        )
    found = upkeep.verify(directory)
    for name, reason in found.damaged:
        report_error(str(directory / name), reason)
    print(f"{found.intact} intact entries, {bytes_of(found.bytes)}; {len(found.damaged)} damaged")
    return int(bool(found.damaged))


def clear(directory: options.DirectoryArgument) -> int:
    """Remove all entries of a cache, and no other files; refused while an encoder uses it."""
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
        ("budget", "not recorded: each encoder sets its own when it opens the directory"),
    ]
    if found.temporaries:
        facts.append(("unfinished", f"{found.temporaries} files: being written, or left by a killed writer"))
    if found.foreign:
        facts.append(("foreign", f"{found.foreign} files, never touched"))
    return facts


def _is_foyer(directory: Path) -> bool:
    """Return whether a directory is a foyer cache. Raises CacheError if it is no cache at all."""
    if regions.is_foyer_directory(directory) and not (directory / LOCK).exists():
        return True
    require_cache(os.fspath(directory))
    return False


def _foyer_facts(directory: Path) -> list[tuple[str, str]]:
    return [
        ("backend", "foyer"),
        ("entries", "not known: foyer cannot list them"),
        ("bytes", bytes_of(regions.allocated_bytes(directory))),
        ("budget", "the same: fully allocated when the directory is opened"),
    ]
