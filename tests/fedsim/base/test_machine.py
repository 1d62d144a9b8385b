"""Cores and memory that a container, or a group of processes, leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from fedsim.base import machine
from fedsim.base.errors import ConfigError
from fedsim.data.checks import memory_complaint
from fedsim.training.models.checks import limit_memory

GIB = 1 << 30
NEW = {
    "job/cpu.max": "150000 100000",
    "job/memory.max": f"{3 * GIB}",
    "job/memory.current": f"{2 * GIB}",
    "job/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7",
    "job/inner/cpu.max": "max 100000",
    "job/inner/memory.max": "max",
    "job/inner/memory.current": "1",
}
OLD = {
    "cpu/job/cpu.cfs_quota_us": "150000",
    "cpu/job/cpu.cfs_period_us": "100000",
    "cpu/job/inner/cpu.cfs_quota_us": "-1",
    "cpu/job/inner/cpu.cfs_period_us": "100000",
    "memory/job/memory.limit_in_bytes": f"{3 * GIB}",
    "memory/job/memory.usage_in_bytes": f"{2 * GIB}",
    "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
    "memory/job/inner/memory.limit_in_bytes": "9223372036854771712",
    "memory/job/inner/memory.usage_in_bytes": "1",
}


@pytest.fixture(params=[(NEW, "0::/job/inner"), (OLD, "2:cpu:/job/inner\n1:memory:/job/inner\n0::/")], ids=["v2", "v1"])
def container(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put this process into a group with 1.5 of 8 cores and 3 of 100 GiB, 1 of them used; return the root of groups."""
    files, own = request.param
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_CGROUPS_OF_PROCESS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(machine, "_proc_bytes", lambda *_: 100 * GIB)
    monkeypatch.setattr(machine, "_physical_memory", lambda: 100 * GIB)
    return tmp_path


def test_limits_of_every_group_around_this_process_count(container: Path) -> None:
    """A quota of 1.5 cores is one process at a time; files that are only cached are free."""
    assert (machine.count_cores(), machine.free_memory(), machine.total_memory()) == (1, 2 * GIB, 3 * GIB)
    (container / "own").write_text("0::/elsewhere")
    assert (machine.count_cores(), machine.free_memory(), machine.total_memory()) == (8, 100 * GIB, 100 * GIB)


@pytest.mark.usefixtures("container")
def test_what_does_not_fit_in_the_container_is_refused_before_the_system_ends_the_process() -> None:
    assert memory_complaint(2.9 * GIB) == ""
    assert memory_complaint(4e9) == "take 4.0 GB, more than the 3.2 GB of memory here"
    with pytest.raises(ConfigError, match=r"reply take 4\.0 GB, more than the 3\.2 GB"), limit_memory("mine"):
        nn.Linear(500_000, 500, bias=False, device="meta")


def test_a_quota_of_more_than_there_is_gives_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("900000 100000\n")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_CGROUPS_OF_PROCESS", tmp_path / "nothing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert machine.count_cores() == 2
    (tmp_path / "cpu.max").write_text("30000 100000\n")
    assert machine.count_cores() == 1
