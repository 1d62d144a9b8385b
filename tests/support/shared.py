"""What is made once for a whole session, by whichever of its workers comes first."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this session, which `make` has filled once; nobody writes there afterwards."""
    base = factory.getbasetemp()
    room = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # each worker has a folder of its own below
    folder, mark = room / f"once-{name}", room / f"once-{name}.made"
    with (room / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a worker left that failed
            folder.mkdir()
            make(folder)
            mark.touch()
    return folder
