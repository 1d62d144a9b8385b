"""Settings of glibc's allocator that keep freed memory for the next tensors, instead of returning it to the system."""

from __future__ import annotations

import ctypes
import os

_KEPT_BYTES = 256 * 2**20
_LARGEST_ON_HEAP = 32 * 2**20  # the most that glibc takes
_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": (-1, _KEPT_BYTES),
    "MALLOC_MMAP_THRESHOLD_": (-3, _LARGEST_ON_HEAP),
    "MALLOC_MMAP_MAX_": (-4, 0),  # tensors above that threshold would be zeroed anew each time
}


def keep_freed_memory() -> None:
    """Make this process, and those it starts, reuse freed memory: at the end of the heap, 256 MB are kept.

    A step of SGD frees tensors of the network's size and asks for as many again. By default glibc gives what is freed
    at the end of the heap back to the system, which then has to zero it once more, and that takes a large part of the
    processor time of a federation. Elsewhere than on glibc, and where the user has set glibc's allocator by environment
    variables, nothing is done.
    """
    if any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another libc
        return
    for name, (parameter, value) in _SETTINGS.items():
        mallopt(parameter, value)
        os.environ[name] = str(value)
