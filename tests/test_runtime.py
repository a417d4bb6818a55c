"""The number of usable CPUs, with the /proc and /sys of a machine written to a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mm_encoder.runtime import usable_cpus

MANY = 8


@pytest.fixture(autouse=True)
def _many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MANY)), raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/\n"
NESTED = "0::/kubepods/pod1/box\n"
V1 = "12:memory:/box\n5:cpu,cpuacct:/box\n1:name=systemd:/box\n0::/box\n"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, MANY),
        ({"proc/self/cgroup": V2}, MANY),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "max 100000\n"}, MANY),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, MANY),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "nonsense\n"}, MANY),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "1 0\n"}, MANY),
        ({"proc/self/cgroup": NESTED, "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": NESTED, "sys/fs/cgroup/kubepods/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": NESTED, "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/../../elsewhere\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            MANY,
        ),
    ],
)
def test_every_cgroup_quota_above_limits_the_affinity(
    tmp_path: Path, files: dict[str, str], cpus: int
) -> None:
    assert usable_cpus(write(tmp_path, files)) == cpus


def test_the_affinity_counts_and_not_the_cpus_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert usable_cpus(tmp_path) == 1
