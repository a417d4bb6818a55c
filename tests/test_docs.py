"""The documents against the code: states, settings, stages, events, errors, families, commands and links."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import logging
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import mm_encoder
from benchmarks.__main__ import TABLES
from mm_encoder import (
    BatchConfig,
    CacheConfig,
    CacheStats,
    Encoder,
    EncoderState,
    EncoderStats,
    Health,
    ImageOptions,
    MediaLimits,
    MediaPlanner,
    StageTimes,
    WorkerHealth,
    errors,
)
from mm_encoder.cli import build_app
from mm_encoder.engine.admission import admit
from mm_encoder.engine.job import Job, JobState
from mm_encoder.engine.scheduler import Scheduler
from mm_encoder.engine.worker import Worker
from mm_encoder.errors import DeadlineExceededError
from mm_encoder.families.family import Family
from mm_encoder.families.registry import FAMILIES

from .helpers.jobs import enter, job, opened, run_one, take
from .helpers.threads import started
from .helpers.waiting import until

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SOURCES = sorted((ROOT / "mm_encoder").rglob("*.py"))
Steps = set[tuple[str, str]]


def diagram(of: type[StrEnum]) -> Steps:
    """The arrows of the diagram whose states are those of an enum."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for block in re.findall(r"stateDiagram-v2\n(.*?)```", text, re.DOTALL):
        arrows = set(re.findall(r"^ *(\S+) --> (\S+)", block, re.MULTILINE))
        if {state for arrow in arrows for state in arrow} - {"[*]"} == {s.name.lower() for s in of}:
            return arrows
    raise AssertionError(f"no diagram has the states {', '.join(of)}")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Every step that a job takes while the test runs."""
    steps: Steps = set()
    moved, end = Job.move_to, Job.mark_done

    def ended(one: Job) -> JobState | None:
        before = end(one)
        if before is not None:
            steps.add((before.name.lower(), "done"))
        return before

    def noted(one: Job, state: JobState) -> None:
        before = one.state
        moved(one, state)
        if one.state is not before:
            steps.add((before.name.lower(), one.state.name.lower()))

    monkeypatch.setattr(Job, "move_to", noted)
    monkeypatch.setattr(Job, "mark_done", ended)
    return steps


def test_a_job_takes_the_steps_that_are_drawn_and_no_other(seen: Steps) -> None:
    for stage in ("waiting", "opening", "bytes", "queued", "preparing", "ready", "running", "loop", "file"):
        go_and_end(stage, Scheduler(1 if stage == "waiting" else 9, 100, replicas=1), job(90))
    assert seen == {step for step in diagram(JobState) if "[*]" not in step}


def go_and_end(stage: str, scheduler: Scheduler, one: Job) -> None:
    """Take a job as far as a stage, or past one, and end it there."""

    def late_when_opened(one: Job) -> None:
        opened(one)
        one.fail_if_pending(DeadlineExceededError())

    first = enter(scheduler, job(90)) if stage in ("waiting", "bytes", "loop") else None
    if stage == "loop":
        from_a_loop(scheduler, one)
    elif stage == "file":
        enter(scheduler, one)
        worker = take(scheduler)
        scheduler.hand_to_opener(worker, one)
        scheduler.finish_preparing(worker)
    elif stage == "opening":
        admit(scheduler, one, late_when_opened)
    else:
        started(lambda: enter(scheduler, one))
        until(lambda: scheduler.slots.waiting + scheduler.bytes.waiting + len(scheduler._queued) > 0)
    if stage == "bytes":
        assert first is not None
        first.future.cancel()
        until(lambda: one.state is JobState.QUEUED)
    if stage == "running":
        run_one(scheduler).fail(ValueError())
    elif stage in ("preparing", "ready"):
        worker = take(scheduler)
        if stage == "ready":
            scheduler.finish_preparing(worker)
    one.fail_if_pending(DeadlineExceededError())
    until(lambda: one.state is JobState.DONE)


def from_a_loop(scheduler: Scheduler, one: Job) -> None:
    """What admit_async and a preprocessing thread do where the bytes do not fit yet."""
    scheduler.register(one)
    assert scheduler.slots.acquire(one, 1) is None
    scheduler.enqueue(one)
    workers = [take(scheduler), take(scheduler)]
    opened(one)
    grant = scheduler.bytes.acquire(one, one.nbytes)
    assert grant is not None
    scheduler.finish_preparing(workers[1], grant)
    scheduler.finish_preparing(workers[0])
    scheduler.next_to_run(Worker("test", scheduler))
    assert one.state is JobState.QUEUED


def test_every_state_of_an_encoder_is_drawn_and_can_be_left() -> None:
    arrows = diagram(EncoderState)
    for state in EncoderState:
        assert any(start == state.value for start, _ in arrows)
        assert any(end == state.value for _, end in arrows)


def test_waiting_for_a_diagram_that_is_not_there_fails() -> None:
    class Other(StrEnum):
        NEW = "new"

    with pytest.raises(AssertionError, match="no diagram has the states new"):
        diagram(Other)


def test_the_clock_of_deadlines_is_the_one_that_is_documented() -> None:
    """`deadline` is a moment of time.monotonic(): one of the past is late whatever the wall clock says."""
    scheduler = Scheduler(1, 100, replicas=1)
    late = enter(scheduler, job(deadline=time.monotonic() - 0.001))
    assert isinstance(late.future.exception(timeout=0), DeadlineExceededError)


# --- facts in tables ---------------------------------------------------------------------------------


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def table(text: str, heading: str) -> list[list[str]]:
    """The rows, as cells, of the first table below a heading."""
    lines = iter(text.splitlines())
    assert any(re.fullmatch(f"#+ {re.escape(heading)}", line) for line in lines), heading
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows or line.startswith("#"):
            break
    assert len(rows) > 2, f"no table below {heading!r}"
    return rows[2:]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names_in(text: str, heading: str) -> list[str]:
    """What the first column of a table names."""
    return [name for row in table(text, heading) for name in codes(row[0])]


def settings_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("self", "image", "images")}


@pytest.mark.parametrize(
    ("heading", "function"),
    [
        ("Encoder", Encoder.__init__),
        ("Per call", Encoder.generate),
        ("Per call", Encoder.generate_async),
        ("Per call", Encoder.submit),
        ("MediaPlanner", MediaPlanner.__init__),
        ("MediaLimits", MediaLimits),
        ("ImageOptions", ImageOptions),
        ("BatchConfig", BatchConfig),
        ("CacheConfig", CacheConfig),
    ],
)
def test_every_setting_is_listed_with_its_default(heading: str, function: Callable[..., Any]) -> None:
    listed = {}
    for name, default, _ in table(page("configuration.md"), heading):
        listed[codes(name)[0]] = inspect.Parameter.empty if default == "required" else eval(codes(default)[0])
    assert listed == settings_of(function)


@pytest.mark.parametrize("cls", [Health, WorkerHealth, EncoderStats, StageTimes, CacheStats])
def test_every_field_that_is_reported_is_listed(cls: Any) -> None:
    known = {field.name for field in fields(cls)} | {
        n for n, v in vars(cls).items() if isinstance(v, property)
    }
    listed = names_in(page("observability.md"), cls.__name__)
    assert sorted(listed) == sorted(known)


def test_every_timing_stage_is_listed() -> None:
    booked = {stage for path in SOURCES for stage in re.findall(r"stage_done\(\"(\w+)\"\)", path.read_text())}
    assert sorted(names_in(page("observability.md"), "Timing stages")) == sorted(booked | {"total"})


def log_fields() -> tuple[dict[str, set[str]], set[str]]:
    """The fields beside each event in the sources, and all fields, as the dicts that they stand in."""
    events: dict[str, set[str]] = {}
    everything: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Dict):
                continue
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            if not keys or not all(isinstance(key, str) and key.startswith("mm_") for key in keys):
                continue  # it is no record's `extra`
            names = {str(key): value for key, value in zip(keys, node.values, strict=True)}
            everything |= names.keys()
            event = names.get("mm_event")
            if isinstance(event, ast.Constant):
                events.setdefault(str(event.value), set()).update(names.keys() - {"mm_event"})
    return events, everything


def test_every_log_event_is_listed_with_its_fields() -> None:
    listed = {
        codes(event)[0]: set(codes(found))
        for event, _, found, _ in table(page("observability.md"), "Log events")
    }
    events, everything = log_fields()
    assert listed.keys() == events.keys()
    for event, found in events.items():
        assert found <= listed[event], event
    assert everything - {"mm_event"} == set().union(*listed.values())


def test_every_error_has_its_cause_and_its_remedy() -> None:
    text = page("troubleshooting.md")
    known = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert re.findall(r"^## (\w+Error)$", text, re.MULTILINE) == known
    for name in known[1:]:
        section = text.split(f"## {name}\n")[1].split("\n## ")[0]
        assert "**Cause:**" in section, name
        assert "**Remedy:**" in section, name


def test_every_family_and_checkpoint_is_listed() -> None:
    listed = {codes(row[0])[0]: tuple(codes(row[1])) for row in table(page("families.md"), "Families")}
    assert listed == {family.name: family.checkpoints for family in FAMILIES}


def test_what_a_family_supplies_is_what_the_class_asks_for() -> None:
    rows = re.findall(r"^ +\| (`.*?) \|", page("families.md"), re.MULTILINE)
    listed = {name.partition("(")[0] for row in rows for name in codes(row)}
    assert listed <= {*dir(Family), *Family.__annotations__}
    assert Family.__abstractmethods__ <= listed


def test_every_native_function_is_listed() -> None:
    declared = re.findall(
        r"^MM_API .*?\b(mm_\w+)\(", (ROOT / "native" / "kernels.h").read_text(), re.MULTILINE
    )
    assert sorted(names_in(page("native.md"), "Native kernels")) == sorted(declared)


def defined() -> set[str]:
    """Functions of the package, and `Class.method`."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, FUNCTIONS)}
            elif isinstance(node, FUNCTIONS):
                found.add(node.name)
    return found


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_the_functions_on_an_images_way_are_those_of_the_code() -> None:
    text = page("architecture.md")
    rows = table(text, "What happens to my image") + table(text, "With a cache")
    assert {name for row in rows for name in codes(row[1])} <= defined()


def test_every_thread_is_listed() -> None:
    pattern = r"(?:name=|[Tt]hread.*|Pool\(.*|__init__\()f?\"mm-encoder-([a-z-]+?)-?[{\"]"
    started = {name for path in SOURCES for name in re.findall(pattern, path.read_text(encoding="utf-8"))}
    listed = {re.sub(r"[-_]N$", "", name) for name in names_in(page("architecture.md"), "Threads")}
    assert listed == {f"mm-encoder-{name}" for name in started}


# --- commands, files, links --------------------------------------------------------------------------


def code_of(text: str) -> Iterator[str]:
    """Lines of code blocks, and code in lines of text."""
    for index, part in enumerate(re.split(r"^ *```.*$", text, flags=re.MULTILINE)):
        if index % 2:
            yield from part.splitlines()
        else:
            yield from codes(part)


CODE = sorted({line for path in PAGES for line in code_of(path.read_text(encoding="utf-8"))})


def test_commands_and_options_exist() -> None:
    app: Any = typer.main.get_command(build_app())
    used = 0
    for line in CODE:
        for call in re.findall(r"\bmm-encoder ([a-z].*)", line.partition("#")[0]):
            words = call.split()
            command = app.commands[words.pop(0)]
            if words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert {word for word in words if word.startswith("-")} <= options, line
            used += 1
    assert used > 5


def test_make_targets_and_tables_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(CODE)
    assert set(re.findall(r"\bmake (\w+)", text)) <= targets
    assert set(re.findall(r"TABLE=(\w+)", text)) <= set(TABLES)


def test_files_that_are_named_exist() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        pytest.skip("this is no git checkout")
    missing = []
    for line in CODE:
        for name in re.findall(r"(?<![\w*/.-])(?:\w[\w-]*/)*[\w-]+\.(?:py|cpp|inc|h|sh)\b", line):
            if "NAME" not in name and not re.search(rf"(^|/){re.escape(name)}$", listed, re.MULTILINE):
                missing.append(name)
        missing += [name for name in re.findall(r"tests/\w+(?![\w/.-])", line) if not (ROOT / name).exists()]
    assert missing == []


def test_documents_that_sources_cite_exist() -> None:
    cited = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), ROOT / "setup.py", ROOT / "install_wheel.py"]
    for path in cited:
        for name in re.findall(r"\b((?:docs/)?\w+\.md)\b", path.read_text(encoding="utf-8")):
            places = (ROOT / name, DOCS / name, path.parent / name)
            assert any(place.exists() for place in places), f"{path.name} cites {name}"


def anchors(text: str) -> set[str]:
    """GitHub's names for a page's headings."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_every_page_and_example_is_linked_from_another() -> None:
    linked = {
        (path.parent / link).resolve()
        for path in PAGES
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
    }
    assert [path for path in PAGES[1:] if path not in linked] == []
    assert ROOT / "examples" in linked


# --- code in pages, and the page made from code ------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart.md", "integration.md", "cache.md", "observability.md"])
def test_python_blocks_run(
    name: str, encoder: Encoder, glm53_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, each with the names of those before it, and with those that pages assume."""
    image = (glm53_checkpoint.parent / "images" / "a.png").read_bytes()
    names: dict[str, Any] = {"checkpoint": glm53_checkpoint, "encoder": encoder, "jpeg": image, "png": image}
    names |= {"folder": tmp_path / "rows", "__name__": name}
    handlers = logging.getLogger("mm_encoder").handlers[:]
    blocks = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    assert blocks
    try:
        for block in blocks:
            code = compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = eval(code, names)
            if inspect.iscoroutine(running):
                asyncio.run(running)
    finally:
        logging.getLogger("mm_encoder").handlers[:] = handlers
    printed = capsys.readouterr().out
    if name == "quickstart.md":
        assert "refused: " in printed
    if name == "cache.md":
        assert printed == "['miss', 'memory']\n1 tower run for 64 callers\n"
    if name == "integration.md":
        assert names["ready"]
        assert names["alive"]
        assert names["status"] == 200
        assert len(names["later"].result().tensor) == names["rows"]
    if name == "observability.md":
        record = logging.makeLogRecord({"mm_event": "ready"})
        names["events"].emit(record)
        assert names["events"].counts == {"ready": 1}
        numbers = {f.name for cls in (EncoderStats, CacheStats) for f in fields(cls) if f.type == "int"}
        assert names["GAUGES"] < numbers
        types = [line for line in names["lines"] if line.startswith("# TYPE")]
        assert {re.sub(r"^# TYPE mm_(encoder|cache)_|(_total)? \w+$", "", line) for line in types} == numbers


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api_docs", ROOT / "scripts" / "make_api_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_is_what_the_docstrings_say() -> None:
    made = script().document()
    assert page("api.md") == made, "run `make docs` (scripts/make_api_docs.py) and commit docs/api.md"


def test_the_api_page_leaves_no_public_name_out() -> None:
    headings = re.findall(r"^### (\w+)$", page("api.md"), re.MULTILINE)
    assert sorted(headings) == sorted(mm_encoder.__all__)
