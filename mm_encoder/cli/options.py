"""Arguments and options of the commands, with their help. Needs Typer."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer


class Dtype(StrEnum):
    """What `--dtype` takes: names of Torch's."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def chosen_device(device: str | None) -> str:
    """The device that `--device` stands for, left out or not."""
    return device or ("cuda:0" if torch.cuda.is_available() else "cpu")


def chosen_dtype(dtype: Dtype | None) -> torch.dtype | None:
    """Torch's dtype of what `--dtype` says."""
    return None if dtype is None else getattr(torch, dtype.value)


def parse_bytes(text: str) -> int:
    """`4096`, `512M` or `4G` (also `4GiB`) in powers of 1024, `4GB` of 1000; K, M, G and T."""
    match = re.fullmatch(r"([0-9]{1,15})(?:([KMGT])(I?B)?)?", text.strip().upper())
    if match is None:
        raise typer.BadParameter(f"bytes are written like 4096, 512M or 4G, got {text!r}")
    unit = 1000 if match[3] == "B" else 1024
    return int(match[1]) * (1, unit, unit**2, unit**3, unit**4)[" KMGT".index(match[2] or " ")]


CheckpointArgument = Annotated[
    Path, typer.Argument(help="Directory with config.json and safetensors.", show_default=False)
]
ImagesArgument = Annotated[
    list[str],
    typer.Argument(help="Files, and folders whose images are taken at any depth.", show_default=False),
]
PlannedArgument = Annotated[
    list[str], typer.Argument(help="Files, folders, or sizes like 1920x1080.", show_default=False)
]
ImageArgument = Annotated[Path, typer.Argument(help="An image file.", show_default=False)]
DirectoryArgument = Annotated[Path, typer.Argument(help="A cache's directory.", show_default=False)]
OutOption = Annotated[Path, typer.Option("--out", help="The .safetensors file to write.", show_default=False)]
PreviewOption = Annotated[
    Path | None, typer.Option("--preview", help="A .png file to draw the embeddings into.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda:N; by default cuda:0 where there is one.")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="By default bfloat16 on CUDA and float32 on the CPU.")
]
ReplicasOption = Annotated[
    int, typer.Option("--replicas", help="Copies of the model that work side by side.")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Name of the model in metadata and hashes.")]
FamilyOption = Annotated[str | None, typer.Option("--family", help="By default recognised from config.json.")]
CacheOption = Annotated[
    Path | None, typer.Option("--cache", help="Directory that keeps results for later runs; made if need be.")
]
CacheBytesOption = Annotated[
    int | None,
    typer.Option(
        "--cache-bytes",
        parser=parse_bytes,
        metavar="BYTES",
        help="What its files may take, like 512M or 4G; by default 4G. A result may take a quarter of it, "
        "and 256M at most.",
    ),
]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="By default mm-encoder/demo in the user's cache.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the same as JSON.")]
