"""Which code a plug-in is made of, and where in it something went wrong."""

from __future__ import annotations

import hashlib
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

OWN = frozenset({"fedsim", "adversaries", "clients", "strategies"})
"""Packages of this distribution: findings of its own attacks outlive a new version of it."""
UNREADABLE = "unreadable"
"""The hash of code that is in no file, as of a class typed into a notebook; such code is never known to be the same."""


@cache
def code_hash(cls: type) -> str | None:
    """SHA-256 of the files of `cls` and of the classes that it derives from, but for fedsim's and Python's own.

    A file counts as it is when this is first asked about the class, so ask soon after the import. Modules that these
    files import do not count.

    Returns:
        None where nothing but fedsim's own code is left, `UNREADABLE` where a class is in no file.
    """
    names = _modules(cls)
    if not names:
        return None
    hashes = [file_hash(sys.modules[name]) if name in sys.modules else UNREADABLE for name in names]
    if UNREADABLE in hashes:
        return UNREADABLE
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()


@cache
def file_hash(module: ModuleType) -> str:
    """SHA-256 of the file of `module` as it is when this is first asked, or `UNREADABLE` where it is in none."""
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return UNREADABLE
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def place_of(error: BaseException, cls: type) -> str:
    """`file:line` of the innermost frame of `error` in the package of `cls`, a plug-in, or else in fedsim's."""
    frames = [
        (str(frame.f_globals.get("__name__")).partition(".")[0], f"{frame.f_code.co_filename}:{line}")
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    theirs = {name.partition(".")[0] for name in _modules(cls)}
    for packages in (theirs, OWN):
        if found := [place for package, place in frames if package in packages]:
            return found[-1]
    return frames[-1][1] if frames else "nowhere"


def _modules(cls: type) -> list[str]:
    """The modules of `cls` and of the classes it derives from, but for fedsim's and Python's own."""
    names = dict.fromkeys(kind.__module__ for kind in cls.__mro__)
    return [name for name in names if name.partition(".")[0] not in OWN | sys.stdlib_module_names]
