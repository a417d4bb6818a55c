"""The host process is left as it was."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

import torch
from PIL import Image

from mm_encoder import Encoder


def state(device: torch.device) -> dict[str, object]:
    """Return the process-wide settings that a library must not change."""
    found: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "random numbers": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "Pillow's limit": Image.MAX_IMAGE_PIXELS,
        "root log handlers": list(logging.getLogger().handlers),
        "signal handlers": [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)],
    }
    if device.type == "cuda":
        found["current device"] = torch.cuda.current_device()
        found["current stream"] = torch.cuda.current_stream(device).cuda_stream
        found["random numbers on the device"] = torch.cuda.get_rng_state(device).tolist()
    return found


def test_the_process_is_left_as_it_was(checkpoint: Path, device: torch.device, images: list[bytes]) -> None:
    before = state(device)
    with Encoder(checkpoint, device=device, replicas_per_gpu=2) as encoder:
        encoder.generate(images)
        assert state(device) == before
    assert state(device) == before


def test_close_leaves_no_thread_behind(checkpoint: Path, device: torch.device, images: list[bytes]) -> None:
    before = set(threading.enumerate())
    with Encoder(checkpoint, device=device) as encoder:
        encoder.generate(images)
        started = set(threading.enumerate()) - before
        assert started
    assert not [thread.name for thread in started if thread.is_alive()]
    assert set(threading.enumerate()) <= before
