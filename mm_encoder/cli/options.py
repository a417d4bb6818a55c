"""Arguments and options of the commands, with their help. Needs Typer."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..config import expand_home
from .files import SUFFIXES


class Dtype(StrEnum):
    """Values of `--dtype`: names of Torch dtypes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def chosen_device(device: str | None) -> str:
    """Return `--device`, or its default if it was not given."""
    return device or ("cuda:0" if torch.cuda.is_available() else "cpu")


def chosen_dtype(dtype: Dtype | None) -> torch.dtype | None:
    """Return the Torch dtype that `--dtype` names, None if it was not given."""
    return None if dtype is None else getattr(torch, dtype.value)


def parse_bytes(text: str) -> int:
    """Parse a size: `4096`, `512M` or `4G` (also `4GiB`) in powers of 1024, `4GB` in powers of 1000."""
    match = re.fullmatch(r"([0-9]{1,15})(?:([KMGT])(I?B)?)?", text.strip().upper())
    if match is None:
        raise typer.BadParameter(f"a size must be written like 4096, 512M or 4G, got {text!r}")
    unit = 1000 if match[3] == "B" else 1024
    return int(match[1]) * (1, unit, unit**2, unit**3, unit**4)[" KMGT".index(match[2] or " ")]


def parse_path(text: str) -> Path:
    """Parse a path in which `~` is the home directory: shells expand it only at the start of a word, and so
    not in `--out=~/rows.safetensors`.
    """
    try:
        return expand_home("a path", text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        parser=parse_path,
        metavar="PATH",
        help="Directory with config.json and safetensors files.",
        show_default=False,
    ),
]
DoctorArgument = Annotated[
    Path | None,
    typer.Argument(
        parser=parse_path,
        metavar="[PATH]",
        help="A checkpoint, to say whether its tower runs compiled or in Python, and why.",
        show_default=False,
    ),
]
_FOLDERS = f"folders to search at any depth for names that end in {' '.join(SUFFIXES)}"
ImagesArgument = Annotated[
    list[str], typer.Argument(help=f"Image files of any name, and {_FOLDERS}.", show_default=False)
]
PlannedArgument = Annotated[
    list[str],
    typer.Argument(
        help=f"Image files of any name, sizes like 1920x1080, and {_FOLDERS}.", show_default=False
    ),
]
ImageArgument = Annotated[
    Path, typer.Argument(parser=parse_path, metavar="PATH", help="An image file.", show_default=False)
]
DirectoryArgument = Annotated[
    Path, typer.Argument(parser=parse_path, metavar="PATH", help="A cache directory.", show_default=False)
]
OutOption = Annotated[
    Path,
    typer.Option(
        "--out", parser=parse_path, metavar="PATH", help="The .safetensors file to write.", show_default=False
    ),
]
PreviewOption = Annotated[
    Path | None,
    typer.Option(
        "--preview",
        parser=parse_path,
        metavar="PATH",
        help="Also draw the images and their embeddings to this .png file.",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda:N. Default: cuda:0 if available, else cpu.")
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Dtype of the model. Default: bfloat16 on CUDA, float32 on CPU."),
]
ReplicasOption = Annotated[int, typer.Option("--replicas", help="Copies of the model that run in parallel.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model name in metadata and hashes.")]
FamilyOption = Annotated[str | None, typer.Option("--family", help="Default: recognised from config.json.")]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        parser=parse_path,
        metavar="PATH",
        help="Directory that keeps results for later runs; created if missing.",
    ),
]
CacheBytesOption = Annotated[
    int | None,
    typer.Option(
        "--cache-bytes",
        parser=parse_bytes,
        metavar="BYTES",
        help="Size limit of the cache, like 512M or 4G. Default: 4G. Results larger than a quarter of it, or "
        "than 256M, are not kept.",
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        parser=parse_path,
        metavar="PATH",
        help="Default: mm-encoder/demo in the user's cache directory.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
