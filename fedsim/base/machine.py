"""Processor cores and memory that this process may use, and the memory that it has used."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
"""Files with the limits of this process; see cgroups(7), of which there are two versions."""
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names of the limit, the usage, and the cached files in `memory.stat`, for cgroups v2 and v1."""


def describe_processor() -> str:
    """Return the model of this machine's processor, or else its architecture."""
    with suppress(OSError):  # there is no such file outside of Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, model = line.partition(":")
            if name.strip() == "model name" and model.strip():
                return model.strip()
    return platform.processor() or platform.machine()


def count_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and quotas."""
    counts = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts = [len(os.sched_getaffinity(0))]
    counts += [int(quota / period) for quota, period in _cpu_quotas()]
    return max(1, min(counts))


def total_memory() -> int:
    """Return the bytes of memory that this process and its children may take: the machine's, or their limit."""
    return min([_physical_memory(), *(limit for limit, _ in _memory_limits())])


def free_memory() -> int:
    """Return the bytes that are free for this process and its children."""
    free = [_proc_bytes("/proc/meminfo", "MemAvailable") or _physical_memory()]
    free += [limit - usage for limit, usage in _memory_limits()]
    return max(0, min(free))


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage, in bytes, of each cgroup with a limit of memory; files that are only cached are free."""
    for folder in _cgroup_folders():
        for limit_file, usage_file, cache_key in _MEMORY_FILES:
            with suppress(OSError, ValueError):  # there is no such file, or no limit
                usage = int((folder / usage_file).read_text())
                usage -= _reclaimable_bytes(folder / "memory.stat", cache_key)
                yield int((folder / limit_file).read_text()), usage


def _cpu_quotas() -> Iterator[tuple[int, int]]:
    """Yield quota and period, in microseconds, of each cgroup's limit of processor time."""
    for folder in _cgroup_folders():
        with suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota, period
        with suppress(OSError, ValueError):
            if (quota := int((folder / "cpu.cfs_quota_us").read_text())) > 0:
                yield quota, int((folder / "cpu.cfs_period_us").read_text())


def _cgroup_folders() -> set[Path]:
    """Return the folders of the cgroups of this process and their parents; some may not exist."""
    folders = {_CGROUPS}
    with suppress(OSError):
        for line in _CGROUPS_OF_PROCESS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _CGROUPS / controllers
            innermost = root / path.lstrip("/")
            folders.add(root)
            folders.update(folder for folder in (innermost, *innermost.parents) if root in folder.parents)
    return folders


def _reclaimable_bytes(statistics: Path, key: str) -> int:
    """Return the bytes of cached files, which the system frees when memory is short."""
    match = re.search(rf"^{key} (\d+)$", statistics.read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def reset_peak_memory() -> None:
    """Reset the peak memory of this process, where the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, since its start or `reset_peak_memory`."""
    return _proc_bytes("/proc/self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _proc_bytes(file: str, key: str) -> int:
    """Return the value of a line in a file of /proc in bytes; 0 where there is none."""
    with suppress(OSError):
        if match := re.search(rf"^{key}:\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE):
            return int(match[1]) * 1024
    return 0
