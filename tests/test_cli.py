"""The command as it is run: exit codes, what is written and what is printed where."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mm_encoder import CacheConfig, Encoder, ImageResult, MediaPlanner
from mm_encoder.cli import build_app, files
from mm_encoder.cli.terminal import printable
from mm_encoder.families.registry import FAMILIES

from .helpers.command import COMMAND, GOLDEN_IMAGES, call, picture, run
from .helpers.forks import run_source
from .helpers.waiting import HANG

pytestmark = pytest.mark.usefixtures("plain_output")


def records_of(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    return metadata, json.loads(metadata["images"])


# encode


def test_a_folder_with_one_corrupt_file(tmp_path: Path, glm53_checkpoint: Path) -> None:
    good = [picture(tmp_path / "in" / name, seed=i) for i, name in enumerate(["b.PNG", "sub/a.png"])]
    (tmp_path / "in" / "c.jpg").write_bytes(b"\xff\xd8\xff\xe0 this is no picture")
    (tmp_path / "in" / "notes.txt").write_text("not an image")
    out = tmp_path / "out.safetensors"
    done = run("encode", glm53_checkpoint, tmp_path / "in", "--out", out, "--device", "cpu")
    assert done.returncode == 1
    skipped, line = done.stderr.splitlines()
    assert "1 other file skipped" in skipped
    assert line.startswith(f"{tmp_path / 'in' / 'c.jpg'}: ")
    assert "2 of 3 images" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr

    tensors = load_file(out)
    assert list(tensors) == ["b.PNG", "sub/a.png"]
    metadata, records = records_of(out)
    assert [record["key"] for record in records] == list(tensors)
    assert metadata["model"] == "checkpoint"
    assert metadata["family"] == "glm53"
    assert metadata["mm_encoder_version"] == "0.1.0"
    with Encoder(glm53_checkpoint, device="cpu") as encoder:
        for path, record, result in zip(good, records, encoder.generate(good), strict=True):
            rows, about = result
            assert path.as_posix().endswith(record["key"])
            assert torch.equal(tensors[record["key"]], rows)
            assert record["mm_hash"] == about.mm_hash
            assert tuple(map(tuple, record["grid_thws"])) == about.grid_thws
            assert tuple(record["embedding_offsets"]) == about.embedding_offsets
            assert tuple(record["original_size"]) == about.original_size == (61, 37)


def test_golden_images_give_the_reference_s_rows(tmp_path: Path, glm53_checkpoint: Path) -> None:
    out = tmp_path / "out.safetensors"
    done = call("encode", glm53_checkpoint, GOLDEN_IMAGES, "--out", out, "--device", "cpu")
    assert (done.exit_code, done.stderr) == (0, "")
    expected = load_file(GOLDEN_IMAGES.parent / "expected.safetensors")
    tensors = load_file(out)
    assert len(tensors) == len(list(GOLDEN_IMAGES.glob("*.png")))
    for key, rows in tensors.items():
        name = key.removesuffix(".png")
        torch.testing.assert_close(rows, expected[f"{name}.embedding"], rtol=0, atol=2e-5)
    line = next(line for line in done.stdout.splitlines() if line.strip().startswith("a.png"))
    t, h, w = expected["a.grid"].flatten().tolist()
    assert line.split()[2:4] == [f"{t}·{h}·{w}", str(len(tensors["a.png"]))]
    assert f"{len(tensors)} images, {sum(map(len, tensors.values()))} rows of 48 float32" in done.stdout


def test_options_reach_the_encoder(tmp_path: Path, glm53_checkpoint: Path) -> None:
    image, out = picture(tmp_path / "a.png"), tmp_path / "o.safetensors"
    options = ["--dtype", "bfloat16", "--replicas", 2, "--model", "me/mine", "--family", "glm53"]
    done = call("encode", glm53_checkpoint, image, "--out", out, "--device", "cpu", *options)
    assert done.exit_code == 0
    [rows] = load_file(out).values()
    assert rows.dtype == torch.bfloat16
    metadata, [record] = records_of(out)
    assert metadata["model"] == "me/mine"
    with Encoder(glm53_checkpoint, "me/mine", device="cpu") as encoder:
        [(_, about)] = encoder.generate(image)
    assert record["mm_hash"] == about.mm_hash


def test_without_a_device_it_finds_one(tmp_path: Path, glm53_checkpoint: Path) -> None:
    out = tmp_path / "o.safetensors"
    assert call("encode", glm53_checkpoint, picture(tmp_path / "a.png"), "--out", out).exit_code == 0
    [rows] = load_file(out).values()
    assert rows.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def test_a_preview_is_drawn(tmp_path: Path, glm53_checkpoint: Path) -> None:
    images = [picture(tmp_path / "in" / f"{i}.png", 60 + 50 * i, 40) for i in range(3)]
    drawn = tmp_path / "new" / "drawn.png"
    out = tmp_path / "new" / "rows.safetensors"
    done = call("encode", glm53_checkpoint, *images, "--out", out, "--preview", drawn, "--device", "cpu")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"preview: {drawn}" in done.stdout
    with Image.open(drawn) as opened:
        assert opened.size[0] == 1440
        colours = opened.getcolors(10**6)
    assert colours is not None
    assert len(colours) > 100
    assert sorted(p.name for p in drawn.parent.iterdir()) == ["drawn.png", "rows.safetensors"]


def test_no_preview_is_drawn_if_every_image_failed(tmp_path: Path, glm53_checkpoint: Path) -> None:
    out, drawn = tmp_path / "o.safetensors", tmp_path / "o.png"
    done = call(
        "encode", glm53_checkpoint, tmp_path / "gone.png", "--out", out, "--preview", drawn, "--device", "cpu"
    )
    assert done.exit_code == 1
    assert "gone.png" in done.stderr
    assert "no image could be encoded" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["faults", "disk"])
def test_what_was_there_is_replaced_only_by_a_whole_file(
    tmp_path: Path, glm53_checkpoint: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.safetensors"
    save_file({"old": torch.ones(1)}, out)
    before = out.read_bytes()
    if how == "faults":
        image = tmp_path / "a.png"
        image.write_bytes(b"nothing of use")
    else:
        image = picture(tmp_path / "a.png")

        def full(tensors: object, path: Path, metadata: object) -> None:
            path.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "save_file", full)
    done = call("encode", glm53_checkpoint, image, "--out", out, "--device", "cpu")
    assert done.exit_code == {"faults": 1, "disk": 2}[how]
    assert len(done.stderr.splitlines()) == {"faults": 2, "disk": 1}[how]
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "o.safetensors"]

    monkeypatch.undo()
    again = call("encode", glm53_checkpoint, picture(image), "--out", out, "--device", "cpu")
    assert again.exit_code == 0
    assert list(load_file(out)) == [image.as_posix()]


def test_the_output_is_as_readable_as_any_new_file(tmp_path: Path, glm53_checkpoint: Path) -> None:
    out, other = tmp_path / "o.safetensors", tmp_path / "other"
    other.touch()
    call("encode", glm53_checkpoint, picture(tmp_path / "a.png"), "--out", out, "--device", "cpu")
    assert out.stat().st_mode == other.stat().st_mode


def test_odd_names_are_shown_as_they_are_and_harmless(tmp_path: Path, glm53_checkpoint: Path) -> None:
    names = [
        "[red]x.png",
        ":smile:.png",
        "写真 ü.png",
        "\x1b[31mred.png",
        "two\nlines.png",
        "-n.png",
        "__metadata__",
    ]
    for seed, name in enumerate(names):
        picture(tmp_path / name, seed=seed)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.png")).write_bytes((tmp_path / "-n.png").read_bytes())
    (tmp_path / "[blue]bad.png").write_bytes(b"not a picture")
    done = run(
        *["encode", "--out", "o.safetensors", "--preview", "p.png", "--device", "cpu", "--"],
        *[glm53_checkpoint, ".", "__metadata__"],
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == ["[blue]bad.png"]
    for shown in (
        "[red]x.png",
        ":smile:.png",
        "写真 ü.png",
        r"\x1b[31mred.png",
        r"two\nlines.png",
        "-n.png",
        r"bad\udcff.png",
    ):
        assert f"\n {shown} " in done.stdout
    assert "\x1b" not in done.stdout
    keys = {*names[:-1], "__metadata__#2", r"bad\udcff.png"}
    assert set(load_file(tmp_path / "o.safetensors")) == keys
    assert (tmp_path / "p.png").is_file()


def test_a_stream_that_cannot_say_it_all_is_no_failure(tmp_path: Path, glm53_checkpoint: Path) -> None:
    image = picture(tmp_path / "写真.png")
    done = subprocess.run(
        [*COMMAND, "plan", glm53_checkpoint, image],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert r"\u5199\u771f.png" in done.stdout


def test_long_names_are_not_cut_where_no_terminal_reads(tmp_path: Path, glm53_checkpoint: Path) -> None:
    image = picture(tmp_path / ("n" * 180 + ".png"))
    done = call("plan", glm53_checkpoint, image)
    assert str(image) in done.stdout


def test_progress_is_for_terminals(tmp_path: Path, glm53_checkpoint: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    mine, theirs = pty.openpty()
    shown = b""

    def read() -> None:
        nonlocal shown
        try:
            while chunk := os.read(mine, 65536):
                shown += chunk
        except OSError:
            pass  # how Linux says that the other side is closed

    reader = threading.Thread(target=read)
    reader.start()
    done = subprocess.run(
        [
            *COMMAND,
            "encode",
            glm53_checkpoint,
            tmp_path,
            "--out",
            tmp_path / "o.safetensors",
            "--device",
            "cpu",
        ],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        check=False,
    )
    os.close(theirs)
    reader.join()
    os.close(mine)
    assert done.returncode == 1
    assert b"images/s" in shown
    assert b"bad.png: " in shown
    assert b"\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone", "IMAGE", "--out", "o.safetensors"], "must be a directory"),
        (["EMPTY", "IMAGE", "--out", "o.safetensors"], "no config.json"),
        (["CHECKPOINT", "EMPTY", "--out", "o.safetensors"], "no images"),
        (["CHECKPOINT", "", "--out", "o.safetensors"], "no images"),
        (["CHECKPOINT", "IMAGE", "--out", "o.npz"], "must end in .safetensors"),
        (["CHECKPOINT", "IMAGE", "--out", "o"], "must end in .safetensors"),
        (["CHECKPOINT", "IMAGE", "--out", "o.safetensors", "--preview", "o.jpg"], "must end in .png"),
        (["CHECKPOINT", "IMAGE", "--out", "o.safetensors", "--preview", "IMAGE"], "one of the images"),
        (["CHECKPOINT", "IMAGE", "--out", "FOLDER.safetensors"], "is a folder"),
        (["CHECKPOINT", "IMAGE", "--out", "IMAGE/o.safetensors"], "exists"),
        (["CHECKPOINT", "IMAGE", "--out", "o.safetensors", "--device", "gpu"], "device must be"),
        (["CHECKPOINT", "IMAGE", "--out", "o.safetensors", "--device", "cuda:99"], "no device"),
        (["CHECKPOINT", "IMAGE", "--out", "o.safetensors", "--family", "clip"], "family must be one of"),
        (["CHECKPOINT", "IMAGE", "--out", "o.safetensors", "--replicas", "0"], "replicas_per_gpu must be"),
    ],
)
def test_what_cannot_begin_is_said_in_one_line(
    tmp_path: Path, glm53_checkpoint: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.safetensors").mkdir()
    stand_ins = {
        "CHECKPOINT": str(glm53_checkpoint), "IMAGE": "a.png", "EMPTY": "empty", "FOLDER": "folder",
    }  # fmt: skip
    for name, value in stand_ins.items():
        arguments = [a.replace(name, value) for a in arguments]
    before = (tmp_path / "a.png").read_bytes()
    done = call("encode", *arguments)
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("mm-encoder: ")
    assert said in line
    assert done.stdout == ""
    assert (tmp_path / "a.png").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "empty", "folder.safetensors"]


@pytest.mark.parametrize(
    "arguments",
    ["", "encode", "encode x", "encode x y", "encode x y --out z --dtype int8", "plan x", "nonsense"],
)
def test_a_wrong_command_line_is_2(arguments: str) -> None:
    assert call(*arguments.split()).exit_code == 2


def test_faults_leave_no_traceback_in_the_real_command(tmp_path: Path, glm53_checkpoint: Path) -> None:
    done = run("encode", tmp_path, tmp_path, "--out", "o.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "processor_config.json"):
        (broken / name).write_bytes((glm53_checkpoint / name).read_bytes())
    (broken / "model.safetensors").write_bytes(b"garbage")
    done = run("encode", broken, picture(tmp_path / "a.png"), "--out", tmp_path / "o.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "model.safetensors cannot be read" in line


def test_encoding_leaves_the_process_as_it_was(tmp_path: Path, glm53_checkpoint: Path) -> None:
    def state() -> list[object]:
        return [
            torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(),
            Image.MAX_IMAGE_PIXELS, sys.stdout, sys.stderr, threading.active_count(),
        ]  # fmt: skip

    before = state()
    options = ["--out", tmp_path / "o.safetensors", "--preview", tmp_path / "p.png", "--device", "cpu"]
    assert call("encode", glm53_checkpoint, picture(tmp_path / "a.png"), *options).exit_code == 0
    assert state() == before


# which files


def test_folders_are_taken_at_any_depth_and_files_whatever_their_name(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    for name in ("z.jpg", "b/c.PNG", "b/a.webp", "a.JpEg", "no.txt", "b/deep/er/x.bmp", "png", ".y.gif"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    plain = tmp_path / "plain"
    plain.touch()
    inputs, skipped = files.find_images([str(folder), str(plain), str(folder)])
    assert skipped == 2
    expected = ["a.JpEg", "b/a.webp", "b/c.PNG", "b/deep/er/x.bmp", "z.jpg"]
    assert [item.key for item in inputs] == [*expected, plain.as_posix()]
    assert [item.path for item in inputs] == [*(folder / name for name in expected), plain]


def test_every_usual_end_of_an_images_name_is_known(tmp_path: Path) -> None:
    ends = Image.registered_extensions()
    usual = {
        end for end, kind in ends.items() if kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
    }
    usual |= {".dib", ".heic", ".heif", ".hif"}
    assert set(files.SUFFIXES) == usual
    for end in usual:
        (tmp_path / f"a{end.upper()}").touch()
    assert len(files.find_images([str(tmp_path)]).inputs) == len(usual)


@pytest.mark.parametrize("command", ["encode", "plan"])
def test_how_many_files_of_a_folder_were_skipped_is_said(
    command: str, tmp_path: Path, glm53_checkpoint: Path
) -> None:
    picture(tmp_path / "photos" / "a.jfif")
    options = ["--out", tmp_path / "o.safetensors", "--device", "cpu"] if command == "encode" else []
    given = [command, glm53_checkpoint, tmp_path / "photos", *options]
    assert call(*given).stderr == ""
    for count, words in ((1, "1 other file skipped"), (2, "2 other files skipped")):
        (tmp_path / "photos" / f"{count}.txt").touch()
        done = call(*given)
        assert (done.exit_code, done.stderr.count("\n"), words in done.stderr) == (0, 1, True)
    assert ".jfif" in call(command, "--help").stdout


def test_links_in_circles_pipes_and_links_to_nothing(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up.png").symlink_to(tmp_path)
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "gone")
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    os.mkfifo(tmp_path / "pipe.png")
    keys = [item.key for item in files.find_images([str(tmp_path)]).inputs]
    assert keys == ["a.png", "link.png", "nowhere.png", "self.png"]


def test_a_folder_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "locked").mkdir()
    real = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root, as whom tests may run, reads everything
    with pytest.raises(PermissionError, match="locked"):
        files.find_images([str(tmp_path)])


def test_keys_are_unique_and_the_same_file_counts_once(
    tmp_path: Path, glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one/x.png", "two/x.png", "x.png", "x.png#2")):
        picture(tmp_path / name, width=40 + seed)
    given = ["one", "two", "x.png", "./x.png", "x.png#2", "one"]
    inputs = files.find_images(given).inputs
    assert [(item.key, item.path.as_posix()) for item in inputs] == [
        ("x.png", "one/x.png"),
        ("x.png#2", "two/x.png"),
        ("x.png#3", "x.png"),
        ("x.png#2#2", "x.png#2"),
    ]
    assert (
        call("encode", glm53_checkpoint, *given, "--out", "o.safetensors", "--device", "cpu").exit_code == 0
    )
    _, records = records_of(tmp_path / "o.safetensors")
    assert [(r["key"], r["original_size"][0]) for r in records] == [
        ("x.png", 40), ("x.png#2", 41), ("x.png#3", 42), ("x.png#2#2", 43),
    ]  # fmt: skip
    assert set(load_file(tmp_path / "o.safetensors")) == {r["key"] for r in records}


def test_images_overlap_and_are_taken_as_they_finish() -> None:
    class Eager:
        """Finishes an image when the next but one comes; the first fails, the last are last."""

        def __init__(self) -> None:
            self.open: list[Future[ImageResult]] = []
            self.most = 0

        def submit(self, path: Path) -> Future[ImageResult]:
            if path.name == "refused":
                raise ValueError("no")
            self.open.append(Future())
            future = self.open[-1]
            self.most = max(self.most, sum(not f.done() for f in self.open))
            if len(self.open) == 3:
                self.open[1].set_result(ImageResult(torch.ones(1), cast("Any", None)))
            if len(self.open) == 4:
                self.open[0].set_exception(ValueError("bad"))
                threading.Timer(0.05, self.finish).start()
            return future

        def finish(self) -> None:
            for future in self.open[2:]:
                future.set_result(ImageResult(torch.ones(1), cast("Any", None)))

    encoder = Eager()
    inputs = [files.Input(name, Path(name)) for name in ("a", "b", "refused", "c", "d")]
    outcomes = list(files.encode_all(cast("Encoder", encoder), inputs))
    assert encoder.most == 3
    assert [index for index, _ in outcomes[:3]] == [2, 1, 0]
    assert sorted(index for index, _ in outcomes) == [0, 1, 2, 3, 4]
    assert {index for index, outcome in outcomes if isinstance(outcome, ValueError)} == {0, 2}


# plan, families, doctor


def test_plan_says_what_the_planner_says(
    tmp_path: Path, glm53_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "f" / "a.png", 300, 200)
    picture(tmp_path / "640x480", 30, 40)  # a file, so no size
    weightless = tmp_path / "weightless"
    weightless.mkdir()
    for name in ("config.json", "processor_config.json"):
        (weightless / name).write_bytes((glm53_checkpoint / name).read_bytes())
    done = call("plan", weightless, "1920x1080", "f", "640x480", "7X9")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()][2:]
    planner = MediaPlanner(glm53_checkpoint)
    sizes = {"1920x1080": (1920, 1080), "f/a.png": (300, 200), "640x480": (30, 40), "7X9": (7, 9)}
    assert [line[0] for line in lines] == list(sizes)
    for name, size, grid, rows in lines:
        planned = planner.plan(sizes[name])
        assert size == "{}x{}".format(*sizes[name])
        assert grid == "·".join(map(str, planned.grid_thws[0]))
        assert int(rows) == planned.length


def test_plan_reports_faults_and_goes_on(tmp_path: Path, glm53_checkpoint: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"GIF89a")
    done = call("plan", glm53_checkpoint, "0x5", tmp_path / "bad.png", "9999999999x1", "5x5")
    assert done.exit_code == 1
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == [
        "0x5", str(tmp_path / "bad.png"), "9999999999x1",
    ]  # fmt: skip
    assert "5x5" in done.stdout
    empty = tmp_path / "empty"
    empty.mkdir()
    assert call("plan", glm53_checkpoint, empty).exit_code == 2
    assert call("plan", empty, "5x5").exit_code == 2
    assert call("plan", glm53_checkpoint).exit_code == 2


def test_families_names_them_with_their_checkpoints() -> None:
    done = call("families")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "glm53" in done.stdout
    assert "zai-org/GLM-5.3-Flash" in done.stdout


def test_doctor_says_the_same_for_people_and_programs() -> None:
    done = run("doctor", "--device", "cpu", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["device"] == "cpu"
    assert facts["stream_priority"] is None
    assert facts["identity"]["torch"] == torch.__version__
    assert len(facts["cuda_devices"]) == torch.cuda.device_count()
    table = call("doctor", "--device", "cpu")
    assert table.exit_code == 0
    assert "the CPU has no streams" in table.stdout
    for value in facts["identity"].values():
        assert value in table.stdout
    assert call("doctor", "--device", "tpu").exit_code == 2


@pytest.mark.needs_cuda
def test_doctor_knows_the_gpu() -> None:
    facts = json.loads(call("doctor", "--json").stdout)
    assert facts["device"] == "cuda:0"
    assert type(facts["stream_priority"]) is int
    assert facts["cuda_devices"][0]["name"] == torch.cuda.get_device_name(0)
    assert torch.cuda.get_device_name(0) in call("doctor").stdout


# demo


def check_demo(folder: Path, photos: int) -> None:
    tensors = load_file(folder / "embeddings.safetensors")
    _, records = records_of(folder / "embeddings.safetensors")
    assert len(tensors) == len(records) == photos
    assert {record["key"] for record in records} == set(tensors)
    assert all(bool(rows.isfinite().all()) for rows in tensors.values())
    with Image.open(folder / "preview.png") as image:
        image.load()
        assert image.width == 1440
    assert not any(path.name.endswith(".tmp") for path in folder.iterdir())


def test_demo_says_where_to_look_and_that_its_weights_are_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # test_readme.py encodes all photographs.
    monkeypatch.setattr("mm_encoder.demo._PHOTOS", ("astronaut.png", "camera.png"))
    done = call("demo", "--device", "cpu")
    assert (done.exit_code, done.stderr) == (0, "")
    folder = tmp_path / ".cache" / "mm-encoder" / "demo"
    assert f"embeddings: {folder / 'embeddings.safetensors'}" in done.stdout
    assert f"preview: {folder / 'preview.png'}" in done.stdout
    assert "weights are random" in done.stdout
    assert "astronaut.png" in done.stdout
    check_demo(folder, photos=len(list((folder / "photos").glob("*.*g"))))


def test_two_demos_at_once_and_a_third_after_one_that_died(tmp_path: Path) -> None:
    # One photograph is enough here, and takes a sixth of the time.
    begin = "import os, mm_encoder.demo as demo; demo._PHOTOS = ('chelsea.png',); "
    command = "from mm_encoder.cli import main; main()"
    dying = "demo.save_file = lambda *_, **__: os._exit(9); "
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "mm-encoder" / "demo"

    def start(program: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, "demo", "--device", "cpu"],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    died = start(begin + dying + command)
    died.communicate()
    assert died.returncode == 9
    for process in [start(begin + command), start(begin + command)]:
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        assert "\x1b" not in out
    check_demo(folder, photos=1)


def test_demo_in_a_folder_of_choice_and_not_in_somebody_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One photograph is enough here, and takes a sixth of the time.
    monkeypatch.setattr("mm_encoder.demo._PHOTOS", ("chelsea.png",))
    assert call("demo", "--folder", tmp_path / "a" / "b", "--device", "cpu").exit_code == 0
    assert list(load_file(tmp_path / "a" / "b" / "embeddings.safetensors")) == ["chelsea.png"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "preview.png").write_bytes(b"mine")
    done = call("demo", "--folder", mine, "--device", "cpu")
    assert done.exit_code == 2
    assert "holds other files" in done.stderr
    assert [path.name for path in mine.iterdir()] == ["preview.png"]


# paths with a tilde, which a shell expands at the start of a word only


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glm53_checkpoint: Path) -> Path:
    """A home directory with a checkpoint and an image; the working directory is another one."""
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    shutil.copytree(glm53_checkpoint, home / "checkpoint")
    picture(home / "a.png")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    return home


def test_every_path_may_be_in_the_home_directory(home: Path) -> None:
    options = ["--out=~/new/rows.safetensors", "--preview=~/new/rows.png", "--cache=~/rows"]
    done = call("encode", "~/checkpoint", "~/a.png", *options, "--cache-bytes=4M", "--device=cpu")
    assert (done.exit_code, done.stderr) == (0, "")
    assert {path.name for path in (home / "new").iterdir()} == {"rows.safetensors", "rows.png"}
    for arguments in (
        ["cache", "stats", "~/rows"],
        ["cache", "verify", "~/rows"],
        ["cache", "clear", "~/rows"],
        ["key", "~/checkpoint", "~/a.png", "--device=cpu"],
        ["plan", "~/checkpoint", "~/a.png"],
    ):
        assert call(*arguments).exit_code == 0, arguments
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "option", ["--out=~/b.safetensors", "--preview=~/b.png", "--cache=~/b", "~/checkpoint"]
)
@pytest.mark.parametrize("unknown", ["no HOME", "no such user"])
def test_a_home_that_is_not_known_is_said_before_anything_is_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, option: str, unknown: str
) -> None:
    def nobody(*_: object) -> None:
        raise KeyError("uid not found")

    if unknown == "no HOME":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", nobody)
    else:
        option = option.replace("~", "~no-such-user")
    checkpoint = home / "checkpoint"
    arguments = [option] if option.startswith("~") else [checkpoint]
    given = [*arguments, home / "a.png", "--out=rows.safetensors", "--device=cpu"]
    done = call("encode", *given, *([] if option.startswith("~") else [option]))
    assert done.exit_code == 2
    assert "is not known (is HOME" in " ".join(done.stderr.replace("│", " ").split())
    assert list(Path.cwd().iterdir()) == []


def test_an_image_may_have_a_name_that_begins_with_a_tilde(home: Path) -> None:
    picture(Path("~a.png"))
    assert call("plan", "~/checkpoint", "~a.png").exit_code == 0


def test_a_folder_that_is_named_like_home_is_not_the_home_directory(home: Path) -> None:
    picture(Path("~/a.png").absolute(), width=77)
    done = call("plan", "~/checkpoint", ".")
    assert (done.exit_code, "77x" in done.stdout) == (0, True)


def test_the_api_has_the_same_rule(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Encoder("~/checkpoint", device="cpu") as encoder:
        assert encoder.model == "checkpoint"
    planner = MediaPlanner(Path("~/checkpoint"))
    assert planner.model == "checkpoint"
    assert planner.plan(Path("~/a.png")) == planner.plan(home / "a.png")
    for cache in (None, CacheConfig(disk_path="~no-such-user/rows", disk_bytes=2**31)):
        with pytest.raises(ValueError, match=r"'~no-such-user/.*' is not known"):
            Encoder("~/checkpoint" if cache else "~no-such-user/checkpoint", device="cpu", cache=cache)


# Ctrl-C

INTERRUPTED = """
import signal, threading
from mm_encoder.cli import main
from mm_encoder.encoder import Encoder
from mm_encoder.engine.engine import Engine
from mm_encoder.families.glm53 import GlmTower

signal.alarm(LIMIT)
close = Engine.close

def held(*_):
    print("running", flush=True)
    if "ends" not in sys.argv[0]:
        threading.Event().wait()
    opened.wait()
    raise ZeroDivisionError

def closing(*arguments, **options):
    print("closing", flush=True)
    opened.set()
    close(*arguments, **options)

opened = threading.Event()
GlmTower.forward, Engine.close = held, closing
main()
"""


@pytest.mark.parametrize("tower", ["ends", "hangs"])
def test_the_second_ctrl_c_ends_the_process_by_itself(
    tmp_path: Path, glm53_checkpoint: Path, tower: str
) -> None:
    """The first one waits for a tower, which is in native code; no exception may end that waiting."""
    picture(tmp_path / "a.png")
    out = tmp_path / "rows.safetensors"
    out.write_bytes(b"before")
    program = f"import sys; sys.argv[0] = {tower!r}" + INTERRUPTED.replace("LIMIT", str(HANG))
    arguments = ["encode", glm53_checkpoint, tmp_path / "a.png", "--out", out, "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "closing\n"
    if tower == "hangs":
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == (130 if tower == "ends" else -signal.SIGINT)
    if tower == "ends":
        assert errors == "mm-encoder: interrupted; files are written whole or not at all\n"
    assert out.read_bytes() == b"before"


# what it is made of


@pytest.mark.parametrize("missing", ["typer", "rich", "rich.table"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from mm_encoder.cli import main; main()"
    code, output, errors = run_source(program, limit=HANG)
    assert (code, output) == (2, "")
    [line] = errors.splitlines()
    assert "install with the extra cli, see docs/install.md" in line


def test_the_package_never_imports_what_only_the_command_needs() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import mm_encoder; "
        "print({'typer', 'rich', 'click', 'skimage'} & (set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_help_names_every_option() -> None:
    text = CliRunner().invoke(build_app(), ["encode", "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("--out", "--preview", "--device", "--dtype", "--replicas", "--model", "--family"):
        assert option in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 写", "plain ü 写"),
        ("a\x1b[2J\r\n", r"a\x1b[2J\r\n"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\udcff", r"\udcff"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mm_encoder", "families"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(family.name in done.stdout for family in FAMILIES)
