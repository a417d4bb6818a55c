"""The state of the process (Torch, Pillow, NumPy, signals, ...): it changes no result and is not changed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .conftest import GOLDEN
from .helpers.waiting import HANG

PROGRAM = """
    import asyncio, gc, hashlib, io, logging, os, random, signal, sys, threading, warnings
    from pathlib import Path
    import numpy as np
    import torch
    from PIL import Image, ImageFile

    # The order of additions in a matrix product depends on it, so both processes set it.
    torch.set_num_threads(1)

    def files():
        image = np.random.RandomState(0).randint(0, 256, (90, 120, 3), np.uint8)
        for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, kind)
            yield buffer.getvalue()
        yield image
        yield Image.fromarray(image)
        yield image.astype(np.float32) / 255

    def refuse(*_):
        raise SystemExit("a hook was called")

    IMAGES = list(files())
    if sys.argv[2] == "hostile":
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        torch.set_grad_enabled(True)
        torch.manual_seed(7)
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        Image.MAX_IMAGE_PIXELS = 1
        Image.init = Image.preinit = refuse
        np.seterr(all="raise")
        random.seed(7)
        np.random.seed(7)
        sys.excepthook = threading.excepthook = refuse
        signal.signal(signal.SIGUSR1, refuse)
        logging.basicConfig(level=logging.ERROR, handlers=[logging.NullHandler()])
        logging.raiseExceptions = True
        warnings.simplefilter("error")
        sys.setrecursionlimit(400)
        sys.setswitchinterval(1e-4)
        gc.disable()
        os.chdir("/")

    def state():
        return {
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "grad": torch.is_grad_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "precision": torch.get_float32_matmul_precision(),
            "torch rng": torch.get_rng_state().tolist(),
            "numpy rng": str(np.random.get_state()),
            "rng": random.getstate(),
            "numpy errors": np.geterr(),
            "pillow": (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, sorted(Image.OPEN)),
            "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
            "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
            "root log": (logging.root.level, list(logging.root.handlers), logging.raiseExceptions),
            "library log": (logging.getLogger("mm_encoder").level, logging.getLogger("mm_encoder").propagate),
            "warnings": list(warnings.filters),
            "python": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), list(sys.path)),
            "process": (os.getcwd(), dict(os.environ), os.umask(os.umask(0o22))),
            "threads alive": [thread.name for thread in threading.enumerate()],
            "files": sorted(os.listdir("/proc/self/fd")),
            "cuda": torch.cuda.is_initialized(),
        }

    import mm_encoder
    before = state()
    digest = hashlib.sha256()

    def note(results):
        for rows, metadata in results:
            assert rows.dtype is torch.float32 and rows.device.type == "cpu"
            digest.update(rows.detach().view(torch.uint8).numpy().tobytes())
            digest.update(repr(metadata.grid_thws).encode())

    for family in ("glm53", "kimi_k3", "deepseek41"):
        checkpoint = Path(sys.argv[1]) / family / "checkpoint"
        planner = mm_encoder.MediaPlanner(checkpoint)
        with mm_encoder.Encoder(checkpoint, device="cpu", replicas_per_gpu=2) as encoder:
            note(encoder.generate(IMAGES))
            note([encoder.submit(image).result() for image in IMAGES])
            note(asyncio.run(encoder.generate_async(IMAGES)))
            for image in IMAGES:
                plan, inputs = planner.prepare_inputs(image)
                digest.update(inputs["pixel_values"].float().numpy().tobytes())
                rows = encoder.encode_image(image)["embeddings"]
                assert rows.shape[0] == plan.length
            bad = IMAGES[1][: len(IMAGES[1]) // 2]
            try:
                encoder.generate(bad)
            except mm_encoder.MediaDecodeError as error:
                digest.update(str(error).encode())
            else:
                sys.exit("a truncated image was accepted")
    after = state()
    changed = [name for name in before if before[name] != after[name]]
    print(digest.hexdigest(), *changed)
"""


def outcome(host: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(GOLDEN), host],
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


@pytest.fixture(scope="module")
def friendly() -> str:
    return outcome("friendly")


def test_the_default_state_of_a_process_is_unchanged(friendly: str) -> None:
    assert len(friendly.split()) == 1  # the digest, and no name of a changed state


def test_unusual_process_state_gives_the_same_bits_and_is_unchanged(friendly: str) -> None:
    assert outcome("hostile") == friendly
