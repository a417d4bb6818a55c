"""The command `mm-encoder`: encodes image files to a safetensors file of embedding rows, and related tools.

Results go to stdout, progress and errors to stderr. Exit codes: 0 success; 1 images failed, and the others
are done; 2 an argument, the checkpoint or an output file is invalid. Without the extra `cli`, `main` prints
how to install it.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch

from .. import demo as demonstration
from .. import viz
from ..compiled.choice import TowerChoice, compiled_package
from ..device import default_dtype, open_lane, parse_device
from ..encoder import Encoder
from ..families.family import Family
from ..families.registry import FAMILIES, load_family
from ..planner import MediaPlanner
from ..runtime import identity
from .files import EXPECTED_ERRORS, Encoded, Input, atomic_write, check_output, encode_all, find_images, write

# Stages in which nothing is done for the image itself.
_WAITING = ("admission_wait", "queue_wait", "replica_wait")

try:
    import typer
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from . import cache as cache_commands

    # Typer evaluates the commands' annotations, which are strings, with these names.
    from . import options
    from .terminal import (
        exit_with_code,
        open_console,
        printable,
        report_error,
        report_skipped,
        shape_of,
        table_of,
    )
except ImportError as error:
    _MISSING = str(error)
else:
    _MISSING = ""


def main() -> None:
    """Run the command line. Raises SystemExit with the exit code."""
    if _MISSING:
        need = "the command line needs more packages: install with the extra cli, see docs/install.md"
        print(f"mm-encoder: {need} ({_MISSING})", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # must not fail on a terminal without UTF-8
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    build_app()(prog_name="mm-encoder")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for the first Ctrl-C; the system ends the process at the second.

    A second exception would end the waiting for threads in native code, which the interpreter must not leave.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def build_app() -> typer.Typer:
    """Build the command line as a Typer app."""
    app = typer.Typer(
        help="Encode image files to the embedding rows of a multimodal LLM's vision tower.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    cache_app = typer.Typer(help="Inspect, verify or clear a cache directory.", no_args_is_help=True)
    commands: list[Callable[..., int]] = [encode, plan, families, doctor, demo, cache_commands.key]
    for command in commands:
        app.command()(exit_with_code(command))
    app.command("compile")(exit_with_code(compile_tower))
    for command in (cache_commands.stats, cache_commands.verify, cache_commands.clear):
        cache_app.command()(exit_with_code(command))
    app.add_typer(cache_app, name="cache")
    return app


def encode(
    checkpoint: options.CheckpointArgument,
    images: options.ImagesArgument,
    out: options.OutOption,
    preview: options.PreviewOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    replicas: options.ReplicasOption = 1,
    model: options.ModelOption = None,
    family: options.FamilyOption = None,
    cache: options.CacheOption = None,
    cache_bytes: options.CacheBytesOption = None,
) -> int:
    """Encode images to one safetensors file, one tensor of embedding rows per image, keyed by its path."""
    config = cache_commands.cache_config(cache, cache_bytes)
    inputs, skipped = find_images(images)
    _, loaded_family = load_family(checkpoint, family)  # fails before a folder is created
    check_output("--out", out, ".safetensors", inputs)
    if preview is not None:
        check_output("--preview", preview, ".png", inputs)
    report_skipped(skipped)
    with Encoder(
        checkpoint,
        model,
        options.chosen_device(device),
        family,
        dtype=options.chosen_dtype(dtype),
        cache=config,
        replicas_per_gpu=replicas,
    ) as encoder:
        encoded = _encode_and_write(encoder, inputs, out)
    if config is not None:
        cache_commands.report_losses(encoder.cache_stats(), config)
    if preview is not None and encoded:
        _draw(encoded, loaded_family, preview, encoder.model)
    return int(len(encoded) < len(inputs))


def plan(
    checkpoint: options.CheckpointArgument,
    images: options.PlannedArgument,
    family: options.FamilyOption = None,
) -> int:
    """Print how many rows each image gives, from its header; no weights are read."""
    planner = MediaPlanner(checkpoint, family=family)
    items: list[tuple[str, Path | tuple[int, int]]] = []
    skipped = 0
    for name in images:
        size = re.fullmatch(r"([0-9]{1,9})[xX]([0-9]{1,9})", name)
        if size and not os.path.exists(name):
            items.append((name, (int(size[1]), int(size[2]))))
        else:
            found = find_images([name])
            items += [(str(item.path), item.path) for item in found.inputs]
            skipped += found.skipped
    report_skipped(skipped)
    table = table_of("image", "size", "grid t·h·w", "rows")
    for name, item in items:
        try:
            planned = planner.plan(item)
        except EXPECTED_ERRORS as error:
            report_error(name, error)
        else:
            table.add_row(printable(name), *shape_of(planned), str(planned.length))
    if table.row_count:
        open_console().print(table)
    return int(table.row_count < len(items))


def families() -> int:
    """List the model families and the released checkpoints that they support."""
    table = table_of("family", "checkpoints", numbers=False)
    for family in FAMILIES:
        table.add_row(family.name, "\n".join(family.checkpoints))
    open_console().print(table)
    return 0


def compile_tower(
    checkpoint: options.CheckpointArgument,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    family: options.FamilyOption = None,
) -> int:
    """Compile a checkpoint's tower for this machine, once; encoders with tower="auto" then run it."""
    _, rules = load_family(checkpoint, family)
    target = parse_device(options.chosen_device(device))
    begun = time.perf_counter()
    with open_console(stderr=True).status("compiling, for a minute or two") as status:
        package, _ = compiled_package(
            rules,
            target,
            options.chosen_dtype(dtype) or default_dtype(target),
            lambda step: status.update(f"{step}, for a minute or two"),
        )
    print(f"compiled in {time.perf_counter() - begun:.0f} s: {printable(str(package.library))}")
    return 0


def doctor(
    checkpoint: options.DoctorArgument = None,
    device: options.DeviceOption = None,
    as_json: options.JsonOption = False,
) -> int:
    """Print versions, devices, and which tower a checkpoint gets; no weights are read."""
    target = parse_device(options.chosen_device(device))
    tower = None
    if checkpoint is not None:
        tower = str(TowerChoice.make("auto", load_family(checkpoint)[1], target, default_dtype(target)))
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    priority = open_lane(target, 1).priority if target.type == "cuda" else None
    if as_json:
        found = [
            {"name": gpu.name, "capability": [gpu.major, gpu.minor], "memory_bytes": gpu.total_memory}
            for gpu in gpus
        ]
        facts = {"device": str(target), "stream_priority": priority, "cuda_devices": found, "tower": tower}
        print(json.dumps({**facts, "identity": dict(identity())}, indent=2))
        return 0
    table = table_of("", "", numbers=False)
    for name, value in identity().items():
        table.add_row(name, value)
    for index, gpu in enumerate(gpus):
        memory = f"{gpu.total_memory / 1024**3:.0f} GiB"
        table.add_row(f"cuda:{index}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {memory}")
    if not gpus:
        table.add_row("cuda devices", "none")
    table.add_row("device", str(target))
    table.add_row("stream priority", "none: the CPU has no streams" if priority is None else str(priority))
    if tower is not None:
        table.add_row("tower", tower)
    open_console().print(table)
    return 0


def demo(folder: options.FolderOption = None, device: options.DeviceOption = None) -> int:
    """Encode photographs with a small model that has random weights, and draw a preview."""
    folder = folder or demonstration.default_folder()
    checkpoint, photos = demonstration.prepare(folder)
    inputs = [Input(path.name, path) for path in photos]
    with Encoder(checkpoint, "glm53-demo-random-weights", options.chosen_device(device)) as encoder:
        encoded = _encode_and_write(encoder, inputs, folder / "embeddings.safetensors")
    note = "The weights are random: the colours show an image's structure, not its meaning."
    _, loaded_family = load_family(checkpoint)
    if encoded:
        _draw(encoded, loaded_family, folder / "preview.png", "GLM-5.3 with random weights", note)
    print(note)
    return int(len(encoded) < len(inputs))


def _encode_and_write(encoder: Encoder, inputs: Sequence[Input], out: Path) -> list[Encoded]:
    """Encode, write `out` unless every image failed, and print a summary."""
    begun = time.perf_counter()
    encoded = _encode(encoder, inputs)
    seconds = time.perf_counter() - begun
    if not encoded:
        print(f"mm-encoder: no image could be encoded; {printable(str(out))} not written", file=sys.stderr)
        return []
    write(out, encoder, encoded)
    table = table_of("image", "size", "grid t·h·w", "rows", "ms")
    for item, (rows, metadata) in encoded:
        work = sum(ms for stage, ms in metadata.timings if stage not in _WAITING)
        table.add_row(printable(item.key), *shape_of(metadata), str(len(rows)), f"{work:.0f}")
    open_console().print(table)
    count = f"{len(encoded)} of {len(inputs)}" if len(encoded) < len(inputs) else str(len(inputs))
    total, width = sum(len(rows) for _, (rows, _) in encoded), encoded[0].result.tensor.shape[1]
    print(
        f"{count} images, {total} rows of {width} {str(encoder.dtype).removeprefix('torch.')} "
        f"in {seconds:.1f} s, {len(encoded) / seconds:.1f} images/s" + _origins(encoded)
    )
    print(f"embeddings: {printable(str(out))}")
    return encoded


def _origins(encoded: Sequence[Encoded]) -> str:
    """Format how many results came from each cache tier; empty without a cache."""
    count = Counter(result.metadata.cache for _, result in encoded)
    if count[None]:
        return ""
    return f"; {count['memory']} from memory, {count['disk']} from disk, {count['miss']} computed"


def _encode(encoder: Encoder, inputs: Sequence[Input]) -> list[Encoded]:
    """Encode with a progress bar. Returns the successful images in order; reports errors as they occur."""
    done: dict[int, Encoded] = {}
    console = open_console(stderr=True)
    columns = TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    begun = time.perf_counter()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(inputs), rate="")
        for number, (index, outcome) in enumerate(encode_all(encoder, inputs), start=1):
            if isinstance(outcome, BaseException):
                report_error(str(inputs[index].path), outcome)
            else:
                done[index] = Encoded(inputs[index], outcome)
            rate = number / (time.perf_counter() - begun)
            progress.update(task, advance=1, rate=f"{rate:.1f} images/s")
    return [done[index] for index in sorted(done)]


def _draw(encoded: Sequence[Encoded], family: Family, path: Path, title: str, note: str = "") -> None:
    """Draw each image beside the colours of its rows to a PNG file, and print its path."""
    items = [(printable(item.key), item.path, result) for item, result in encoded]
    sheet = viz.draw(items, family, printable(title), note)
    with atomic_write(path) as new:
        sheet.save(new, format="PNG")
    print(f"preview: {printable(str(path))}")
