"""Cores and memory that this process may use, and what it has used."""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Files of a container's limit and use of memory, of both versions of cgroups."""


def cores() -> int:
    """How many processes of this machine can work at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that are free for this process and others that it starts, as far as the system says."""
    free = [_of("/proc/meminfo", "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, used in _LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or it says that there is no limit
            free.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return max(0, min(free))


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
