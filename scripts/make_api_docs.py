"""Write docs/api.md from the docstrings of the public names: python scripts/make_api_docs.py [--check]

With --check nothing is written, and the exit code is 1 if the file differs from the code.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mm_encoder

TARGET = Path(__file__).parent.parent / "docs" / "api.md"
GROUPS = (
    ("Encoding", "Encoder ImageResult ImageMetadata"),
    ("Planning", "MediaPlanner MediaPlan ImageSize"),
    ("Settings", "BatchConfig CacheConfig MediaLimits ImageOptions"),
    ("What an encoder reports", "Health EncoderState WorkerHealth EncoderStats StageTimes CacheStats"),
)
HEAD = """<!-- Made by scripts/make_api_docs.py from the docstrings. Edit those, then run `make docs`. -->

# API

Every public name of `mm_encoder`, with its docstring. Tables of settings are in
[configuration.md](configuration.md), of reported fields in [observability.md](observability.md), remedies
for errors in [troubleshooting.md](troubleshooting.md), words in [glossary.md](glossary.md).

`ImageInput` is anything that [an image may be](quickstart.md#what-an-image-may-be).
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in GROUPS:
        parts.append(f"## {title}\n")
        for name in names.split():
            parts += section(name, getattr(mm_encoder, name))
    parts.append("## Errors\n")
    parts.append(text_of(inspect.getdoc(sys.modules["mm_encoder.errors"]) or "") + "\n")
    for error in errors():
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        parts.append(
            f"### {error.__name__}\n\nDerives from {bases}. {text_of(inspect.getdoc(error) or '')}\n"
        )
    return "\n".join(parts)


def errors() -> list[type[Exception]]:
    """The public exceptions, in the order in which errors.py has them."""
    public = [getattr(mm_encoder, name) for name in mm_encoder.__all__]
    found = [value for value in public if isinstance(value, type) and issubclass(value, Exception)]
    return sorted(found, key=lambda error: inspect.getsourcelines(error)[1])


def section(name: str, cls: Any) -> Iterator[str]:
    """A class: its call, its docstring, its fields or members, its methods."""
    yield f"### {name}\n"
    if issubclass(cls, enum.Enum):
        yield text_of(inspect.getdoc(cls) or "") + "\n"
        yield "\n".join(f"- `{name}.{member.name}` = `{str(member)!r}`" for member in cls) + "\n"
        return
    if issubclass(cls, tuple):
        kinds = {field: kind_of(cls.__annotations__[field]) for field in cls._fields}
        yield fenced(name, [f"{field}: {kind}" for field, kind in kinds.items()])
    elif dataclasses.is_dataclass(cls):
        yield fenced(name, [field_of(field) for field in dataclasses.fields(cls)])
    else:
        yield fenced(name, parameters(cls.__init__))
    yield text_of(inspect.getdoc(cls) or "") + "\n"
    for method, value in vars(cls).items():
        if method.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
            continue
        yield f"#### {name}.{method}\n"
        if isinstance(value, property):
            yield f"A property: `{kind_of(inspect.signature(value.fget).return_annotation)}`.\n"  # type: ignore[arg-type]
        else:
            start = "await " if inspect.iscoroutinefunction(value) else ""
            end = f" -> {kind_of(inspect.signature(value).return_annotation)}"
            yield fenced(start + method, parameters(value), end)
        yield text_of(inspect.getdoc(value) or "") + "\n"


def fenced(name: str, arguments: list[str], end: str = "") -> str:
    """A call as a code block: on one line where it fits."""
    line = f"{name}({', '.join(arguments)}){end}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){end}"
    return f"```text\n{line}\n```\n"


def parameters(function: Any) -> list[str]:
    """Parameters with their types and defaults."""
    found = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            found.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        found.append(f"{parameter.name}: {kind_of(parameter.annotation)}{default}")
    return found


def field_of(field: dataclasses.Field[Any]) -> str:
    """A dataclass's field with its type and default."""
    default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
    return f"{field.name}: {kind_of(field.type)}{default}"


def kind_of(annotation: Any) -> str:
    """An annotation as it is written in the source."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return str(text if isinstance(text, str) else getattr(text, "__name__", text))


def text_of(docstring: str) -> str:
    """A docstring as Markdown: what is indented is a code block, `name: ...` lines are a list."""
    blocks = []
    for block in docstring.split("\n\n"):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines if line):
            blocks.append("```text\n" + "\n".join(line[4:] for line in lines) + "\n```")
        elif re.match(r"\w+: ", lines[0] if lines else ""):
            blocks.append("\n".join(re.sub(r"^(\w+): ", r"- `\1`: ", line) for line in lines))
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def main() -> int:
    """Write the page, or compare it."""
    made = document()
    if sys.argv[1:] == ["--check"]:
        return int(TARGET.read_text(encoding="utf-8") != made)
    TARGET.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
