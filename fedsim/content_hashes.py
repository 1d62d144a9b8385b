"""SHA-256 of what is in files, each read once as long as nobody has changed it.

A file is known again by its device, inode, size and times. The time of modification alone does not do: copying can
keep it (`cp -p`, rsync), which the time of change of the inode tells. A file whose times are so young that it could
change once more without moving them is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedsim.files import cache_folder, hash_file, in_one_step

Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, times of modification and of change of the inode in ns."""
_SETTLED = 2_000_000_000
"""Age in ns from which on a further change moves the times of a file, on any file system that Linux mounts."""

_known: dict[Stamp, str] = {}
"""What this process has read."""


def hash_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    stamp = _stamp(path)
    if (known := _known.get(stamp)) is not None:
        return known
    settled = _settled(stamp)
    found = hash_file(path)
    if settled:
        _known[stamp] = found
    return found


def hash_of_files(paths: Iterable[Path], home: Path | None = None) -> str:
    """A hash of the names and the contents of files, which is kept in the cache folder for other processes.

    Args:
        paths: files; their order does not matter.
        home: a folder that their names begin from where they are below it, wherever that is.

    Raises:
        OSError: one cannot be read.
    """
    named = sorted((path.relative_to(home) if home and path.is_relative_to(home) else path, path) for path in paths)
    stamps = [(str(name), _stamp(path)) for name, path in named]
    note = cache_folder() / "hashes" / hash_of_parts(stamps)
    settled = all(_settled(stamp) for _, stamp in stamps)
    if settled:
        with suppress(OSError, ValueError):
            return _hash_in(note.read_text(encoding="ascii"))
    found = hash_of_parts([(str(name), hash_of(path)) for name, path in named])
    if settled:
        with suppress(OSError):  # a cache that cannot be written costs time, and nothing else
            note.parent.mkdir(parents=True, exist_ok=True)
            with in_one_step(note) as temporary:
                temporary.write_text(found, encoding="ascii")
    return found


def hash_of_folder(path: Path) -> str:
    """`hash_of_files` of all that is below a folder.

    Raises:
        OSError: it cannot be read.
    """
    return hash_of_files((Path(parent) / name for parent, _, names in os.walk(path) for name in names), path)


def hash_of_parts(parts: object) -> str:
    """SHA-256 of what JSON can hold; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> Stamp:
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _settled(stamp: Stamp) -> bool:
    return max(stamp[-2:]) < time.time_ns() - _SETTLED


def _hash_in(text: str) -> str:
    if len(text) != 64 or int(text, 16) < 0:
        raise ValueError(text)
    return text
