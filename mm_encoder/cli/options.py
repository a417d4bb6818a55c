"""Arguments and options of the commands, with their help. Needs Typer."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """What `--dtype` takes: names of Torch's."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


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
OutOption = Annotated[Path, typer.Option("--out", help="The .safetensors file to write.", show_default=False)]
PictureOption = Annotated[
    Path | None, typer.Option("--picture", help="A .png file to draw the embeddings into.")
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
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="By default mm-encoder/demo in the user's cache.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the same as JSON.")]
