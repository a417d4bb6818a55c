"""The device seam: names, the CPU's lane, and the CUDA lane's order of events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mm_encoder.device import CudaLane, consumer_stream, default_dtype, open_lane, parse_device


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_device("cuda") == torch.device("cuda:0")
    assert parse_device("cuda:1") == torch.device("cuda:1")
    assert parse_device(torch.device("cuda", 1)) == torch.device("cuda:1")
    for wrong in ("", "cuda:", "cuda:-1", "cuda:1x", "CPU", "mps", "meta", "cpu:0", "1"):
        with pytest.raises(ValueError, match="device must be 'cpu', 'cuda' or 'cuda:N'"):
            parse_device(wrong)
    with pytest.raises(ValueError, match=r"no device 'cuda:2': this process sees 2 CUDA devices$"):
        parse_device("cuda:2")


def test_defaults_by_device() -> None:
    assert default_dtype(torch.device("cpu")) == torch.float32
    assert default_dtype(torch.device("cuda:0")) == torch.bfloat16
    assert consumer_stream(torch.device("cpu")) is None


def test_the_cpu_lane_copies_nothing() -> None:
    lane = open_lane(torch.device("cpu"), 1)
    host = torch.arange(6, dtype=torch.uint8).view(2, 3)
    with lane.entered():
        assert lane.upload(host) is host
        lane.wait()
        lane.hand_over(host, None)
    assert lane.priority == 0


class FakeGpu:
    """CUDA with a clock: copies happen when the stream is waited for, as late as the contract allows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.recorded: list[tuple[Any, Any]] = []
        gpu = self

        class Stream:
            def __init__(self, device: torch.device, priority: int) -> None:
                self.device, self.priority = device, min(priority, 0)  # Torch clamps positive ones to 0

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking
                self.due = 0

            def record(self, stream: Stream) -> None:
                self.due = len(gpu.pending)

            def synchronize(self) -> None:
                for source, target in gpu.pending[: self.due]:
                    target.copy_(source)
                del gpu.pending[: self.due]

        @contextmanager
        def entered(_: Any) -> Iterator[None]:
            yield

        def late_copy(source: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
            assert non_blocking
            target = torch.zeros_like(source)
            gpu.pending.append((source, target))
            return target

        empty = torch.empty
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", Stream)
        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "device", entered)
        monkeypatch.setattr(cuda, "stream", entered)
        monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
        monkeypatch.setattr(torch.Tensor, "to", late_copy)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.recorded.append((tensor, stream))
        )


def upload_three(lane: CudaLane, *, waiting: bool) -> bool:
    """Whether three uploads through one staging buffer all arrive as they were."""
    hosts = [torch.full((4, 3), value, dtype=torch.uint8) for value in (1, 2, 3)]
    arrived = []
    with lane.entered():
        for host in hosts:
            arrived.append(lane.upload(host))
            if waiting:
                lane.wait()
    lane.wait()
    return all(torch.equal(got, host) for got, host in zip(arrived, hosts, strict=True))


def test_staging_is_reused_only_after_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch)
    assert upload_three(CudaLane(torch.device("cuda:0"), 1), waiting=True)
    assert not upload_three(CudaLane(torch.device("cuda:0"), 1), waiting=False)  # the control


def test_staging_grows_and_serves_smaller_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch)
    lane = CudaLane(torch.device("cuda:0"), 1)
    for size in (5, 50, 7):
        host = torch.arange(size, dtype=torch.uint8)
        arrived = lane.upload(host)
        lane.wait()
        assert torch.equal(arrived, host)


def test_a_result_is_registered_with_its_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    lane = CudaLane(torch.device("cuda:0"), 5)
    rows, consumer = torch.zeros(1), object()
    lane.hand_over(rows, consumer)
    assert gpu.recorded == [(rows, consumer)]
    assert lane.priority == 0


@pytest.mark.needs_cuda
def test_a_real_lane_uploads_and_leaves_the_callers_stream_alone() -> None:
    device = torch.device("cuda:0")
    before = torch.cuda.current_stream(device)
    lane = open_lane(device, -1)
    with lane.entered():
        assert torch.cuda.current_stream(device) != before
        arrived = lane.upload(torch.arange(1000, dtype=torch.uint8))
        lane.wait()
    assert torch.cuda.current_stream(device) == before
    assert arrived.device == device
    assert arrived.cpu().tolist() == torch.arange(1000, dtype=torch.uint8).tolist()
    assert lane.priority <= 0
