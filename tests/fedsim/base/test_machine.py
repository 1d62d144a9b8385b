"""Cores and memory that a container, or a group of processes, leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedsim.base import machine

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


@pytest.mark.parametrize(
    ("files", "own"),
    [(NEW, "0::/job/inner"), (OLD, "2:cpu:/job/inner\n1:memory:/job/inner\n0::/")],
    ids=["version 2", "version 1"],
)
def test_limits_of_every_group_around_this_process_count(
    files: dict[str, str], own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota of 1.5 cores is one process at a time; files that are only cached are free."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_CGROUPS_OF_PROCESS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(machine, "_proc_bytes", lambda *_: 100 * GIB)
    assert (machine.count_cores(), machine.free_memory()) == (1, 2 * GIB)
    (tmp_path / "own").write_text("0::/elsewhere")
    assert (machine.count_cores(), machine.free_memory()) == (8, 100 * GIB)


def test_a_quota_of_more_than_there_is_gives_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("900000 100000\n")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_CGROUPS_OF_PROCESS", tmp_path / "nothing")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert machine.count_cores() == 2
    (tmp_path / "cpu.max").write_text("30000 100000\n")
    assert machine.count_cores() == 1
