"""Hashes of files, each read once: cells of a federation share the files of its recording."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from fedsim.files import hash_file

_known: dict[tuple[int, int, int, int], str] = {}
"""By device, inode, time of change and size."""


def hash_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    about = path.stat()
    key = about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size
    if key not in _known:
        _known[key] = hash_file(path)
    return _known[key]


def hash_of_folder(path: Path) -> str:
    """A hash of the names, sizes and times of change of all files below a folder, which may be too many to be read.

    Raises:
        OSError: it cannot be read.
    """
    files = sorted(Path(parent) / name for parent, _, names in os.walk(path) for name in names)
    stamps = [(file.relative_to(path).as_posix(), (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
    return hash_of_parts(stamps)


def hash_of_parts(parts: object) -> str:
    """SHA-256 of what JSON can hold; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
