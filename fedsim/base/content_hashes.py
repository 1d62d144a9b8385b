"""SHA-256 of the contents of files, cached until a file changes.

An unchanged file is recognised by its device, inode, size and times. The time of modification is
not enough: copying can keep it (`cp -p`, rsync), which the time of change of the inode reveals. A
file whose times are so recent that it could change again without changing them is not cached.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedsim.base.files import cache_folder, hash_file, replace_atomically

Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, times of modification and of change of the inode in ns."""
_MIN_AGE_NS = 2_000_000_000
"""Age from which on any change moves the times of a file, on any Linux file system."""

_hashes: dict[Stamp, str] = {}
"""Hashes that this process has computed."""


def cached_file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    stamp = _file_stamp(path)
    if (cached := _hashes.get(stamp)) is not None:
        return cached
    # Decide before reading, because a change during the read must not be cached.
    is_cacheable = _is_old_enough(stamp)
    content_hash = hash_file(path)
    if is_cacheable:
        _hashes[stamp] = content_hash
    return content_hash


def hash_files(paths: Iterable[Path], home: Path | None = None) -> str:
    """Return a hash of the names and contents of files, cached in a file for other processes.

    Args:
        paths: files; their order does not matter.
        home: a folder; files below it are named relative to it, so that its own path does not
            matter.
    """
    named_paths = []
    for path in paths:
        name = path.relative_to(home) if home and path.is_relative_to(home) else path
        named_paths.append((name, path))
    named_paths.sort()
    # Look the hash up by the stamps of the files.
    stamps = [(str(name), _file_stamp(path)) for name, path in named_paths]
    cache_file = cache_folder() / "hashes" / hash_json(stamps)
    is_cacheable = all(_is_old_enough(stamp) for _, stamp in stamps)
    if is_cacheable:
        with suppress(OSError, ValueError):
            return _check_hash(cache_file.read_text(encoding="ascii"))
    # Otherwise read the files.
    content_hash = hash_json([(str(name), cached_file_hash(path)) for name, path in named_paths])
    if is_cacheable:
        with suppress(OSError):  # a cache that cannot be written only costs time
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(cache_file) as temporary:
                temporary.write_text(content_hash, encoding="ascii")
    return content_hash


def hash_folder(path: Path) -> str:
    """Return `hash_files` of all files below a folder."""
    files = (Path(parent) / name for parent, _, names in os.walk(path) for name in names)
    return hash_files(files, path)


def hash_json(parts: object) -> str:
    """Return the SHA-256 of a value that JSON can hold; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file_stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_old_enough(stamp: Stamp) -> bool:
    return max(stamp[-2:]) < time.time_ns() - _MIN_AGE_NS


def _check_hash(text: str) -> str:
    if len(text) != 64 or int(text, 16) < 0:
        raise ValueError(text)
    return text
