"""Cores and memory that this process may use, and what it has used."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
"""Where the kernel says what limits this process; see cgroups(7), of which there are two versions."""


def cores() -> int:
    """How many processes of this machine can work at once: those that this one may run on, less what a quota takes."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([there, *(int(quota / period) for quota, period in _quotas())]))


def free_memory() -> int:
    """Bytes that are free for this process and others that it starts, as far as the system says."""
    free = [_of("/proc/meminfo", "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _cgroups():
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):  # there is no such file, or it says that there is no limit
                held = int((group / used).read_text()) - _cache(group / "memory.stat", cached)
                free.append(int((group / limit).read_text()) - held)
    return max(0, min(free))


def _quotas() -> Iterator[tuple[int, int]]:
    """Microseconds of all cores together that cgroups allow in each period of so many."""
    for group in _cgroups():
        with suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota, period
        with suppress(OSError, ValueError):
            if (quota := int((group / "cpu.cfs_quota_us").read_text())) > 0:
                yield quota, int((group / "cpu.cfs_period_us").read_text())


def _cgroups() -> set[Path]:
    """The folders of the cgroups that this process is in, each within the one before; those that are not there, too."""
    found = {_CGROUPS}
    with suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            home = _CGROUPS / controllers
            inner = home / place.lstrip("/")
            found |= {home, *(folder for folder in (inner, *inner.parents) if home in folder.parents)}
    return found


def _cache(statistics: Path, key: str) -> int:
    """Bytes of files that the system would give back when memory is short."""
    found = re.search(rf"^{key} (\d+)$", statistics.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def forget_peak() -> None:
    """Have `peak` count from now on, where the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most bytes that this process has held at once."""
    return _of("/proc/self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _of(file: str, key: str) -> int:
    """What a line of a file in /proc says, in bytes; 0 where it says nothing."""
    with suppress(OSError):
        if found := re.search(rf"^{key}:\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return 0
