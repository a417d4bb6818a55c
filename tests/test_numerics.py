"""What changes the bits of a result is described, read anew, and watched while a tower runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.backends import cuda, mkldnn

from mm_encoder import numerics
from mm_encoder.numerics import Watch, describe, read_settings, sample

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
C: Any = torch._C


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("properties")
def test_device_and_libraries_are_described() -> None:
    on_gpu, on_cpu = describe(GPU), describe(CPU)
    assert (on_gpu["device"], on_gpu["capability"]) == ("NVIDIA H200", "9.0")
    assert on_gpu["torch"] == on_cpu["torch"] == torch.__version__
    assert dict(read_settings(CPU))["torch threads"] == str(torch.get_num_threads())
    if torch.version.cuda:
        assert int(on_gpu["cudnn"]) > 8000
        assert re.fullmatch(r"\d+\.\d+\.\d+ \d+\.\d+\.\d+|unknown", on_gpu["cublas"])
    for description in (on_gpu, on_cpu, dict(read_settings(GPU)), dict(read_settings(CPU))):
        assert all(type(value) is str for value in description.values())


@pytest.mark.parametrize(
    "name", ["MKL_CBWR", "ONEDNN_DEFAULT_FPMATH_MODE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"]
)
def test_variables_that_the_libraries_read_are_described(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    before = describe(CPU)
    monkeypatch.setenv(name, "1")
    assert describe(CPU) != before


# How to switch each setting, as the host does: by device, a name, a setter and two values.
Setter = Callable[[Any], object]


def attribute(owner: Any, name: str) -> Setter:
    return lambda value: setattr(owner, name, value)


ATTENTION: list[tuple[str, Setter, Any, Any]] = [
    ("flash attention", cuda.enable_flash_sdp, False, True),
    ("memory-efficient attention", cuda.enable_mem_efficient_sdp, False, True),
    ("cudnn attention", cuda.enable_cudnn_sdp, False, True),
    ("math attention", cuda.enable_math_sdp, False, True),
    ("math attention reductions", cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
    ("deterministic", torch.use_deterministic_algorithms, True, False),
]
SWITCHES = [(device, *switch) for device in (CPU, GPU) for switch in ATTENTION]
SWITCHES += [
    (CPU, "matmul precision", attribute(mkldnn.matmul, "fp32_precision"), "tf32", "ieee"),  # type: ignore[attr-defined]
    (CPU, "matmul precision", torch.set_float32_matmul_precision, "medium", "highest"),
    (CPU, "mkldnn", C._set_mkldnn_enabled, False, True),
    (GPU, "matmul precision", attribute(cuda.matmul, "fp32_precision"), "tf32", "ieee"),
    (GPU, "matmul precision", attribute(cuda.matmul, "allow_tf32"), True, False),
    (GPU, "bf16 reductions", attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction"), False, True),
    (GPU, "fp16 reductions", attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction"), False, True),
    (GPU, "fp16 accumulation", attribute(cuda.matmul, "allow_fp16_accumulation"), True, False),
]


@contextmanager
def precision_kept() -> Iterator[None]:
    """Torch does not report a precision that was never set; give back what it reports."""
    kept = [(owner, owner.fp32_precision) for owner in (cuda.matmul, mkldnn.matmul)]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for owner, value in kept:
            owner.fp32_precision = value


@pytest.mark.parametrize(("device", "name", "switch", "value", "usual"), SWITCHES)
def test_every_setting_of_torch_is_read_anew(
    device: torch.device, name: str, switch: Setter, value: Any, usual: Any
) -> None:
    with precision_kept():
        switch(usual)
        before = dict(read_settings(device))
        try:
            switch(value)
            changed = dict(read_settings(device))
        finally:
            switch(usual)
        assert {setting for setting in changed if changed[setting] != before[setting]} == {name}
        assert dict(read_settings(device)) == before


def test_the_preferred_library_of_products_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numerics._CUDA, "blas library", lambda: "another")
    assert dict(read_settings(GPU))["blas library"] == "another"
    for name in ("blas library", "tuned products", "cudnn enabled", "attention order"):
        assert dict(read_settings(GPU))[name] not in ("", "unknown", "()")


# --- a watch -----------------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The value of a setting."""
    host = ["a"]
    monkeypatch.setattr(numerics, "_CPU", {"setting": lambda: host[0]})
    return host


def test_a_run_under_one_setting_has_it(host: list[str]) -> None:
    watch = Watch(CPU)
    for value in ("a", "b"):
        host[0] = value
        with watch.run():
            sample()
        assert watch.settings == read_settings(CPU)
        assert dict(watch.settings)["setting"] == value


def test_a_setting_that_is_switched_and_back_is_seen_inside(host: list[str]) -> None:
    watch = Watch(CPU)
    with watch.run():
        host[0] = "b"
        sample()
        host[0] = "a"
    assert watch.settings is None
    with watch.run():  # the control: nothing is read in between
        host[0] = "b"
        host[0] = "a"
    assert watch.settings is not None


@pytest.mark.parametrize("fails", [False, True])
def test_outside_a_run_nothing_is_noted(host: list[str], fails: bool) -> None:
    watch = Watch(CPU)
    try:
        with watch.run():
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    before = watch.settings
    host[0] = "b"
    sample()
    assert watch.settings == before
