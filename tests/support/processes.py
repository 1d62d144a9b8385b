"""What processes a test has started, and waiting for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def find_descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, those that they started, and so on, by /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = stat.read_text().rpartition(")")[2].split()[1]
            parents.setdefault(int(parent), []).append(int(stat.parent.name))
    descendants: list[int] = []
    for child in parents.get(pid, []):
        descendants += [child, *find_descendants(child)]
    return descendants


def is_alive(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended, by /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], seconds: float = 30, pause: float = 0.02) -> None:
    """Wait until `condition()` is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(pause)
