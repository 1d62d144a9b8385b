"""Freed memory is kept: counted in pages that the system had to hand out anew."""

import ctypes
import os
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")

CODE = """
import resource, sys
import numpy as np
from fedsim.cli.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    tensors = [np.ones(2**18) for _ in range(10)]  # 2 MB each
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(*arguments: str, **environment: str) -> str:
    """What such a process says, in which nothing about memory is set but `environment`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, env={**clean, **environment}, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def faults(how: str, **environment: str) -> int:
    """Page faults of 20 steps that take 20 MB each and give them back."""
    return int(run(CODE, how, **environment))


@pytest.mark.thorough
@glibc
def test_freed_memory_is_used_again():
    assert faults("kept") * 10 < faults("as it is")


@pytest.mark.thorough
@glibc
@pytest.mark.parametrize(
    "own",
    [
        {"MALLOC_TRIM_THRESHOLD_": "65536"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536:glibc.malloc.mmap_threshold=65536"},
    ],
)
def test_what_the_user_has_set_is_left_alone(own: dict[str, str]) -> None:
    assert faults("kept", **own) > 10 * faults("kept")


@glibc
def test_processes_that_are_started_later_inherit_it() -> None:
    starts = (
        "import subprocess, sys; from fedsim.cli.allocator import keep_freed_memory as keep; keep();"
        "print(subprocess.run([sys.executable, '-c', sys.argv[1], ''], capture_output=True, text=True).stdout)"
    )
    assert int(run(starts, CODE)) * 10 < faults("as it is")
