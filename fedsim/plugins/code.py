"""Which code a plug-in is made of, and where in it something went wrong."""

from __future__ import annotations

import hashlib
import sys
import traceback
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.errors import AttackCrash, PluginError

OWN = frozenset({"fedsim", "adversaries", "clients", "strategies"})
"""Packages of this distribution: findings of its own attacks outlive a new version of it."""
UNREADABLE = "unreadable"
"""The hash of code that is in no file, such as a class typed into a notebook; it is never known to be the same."""


@cache
def code_hash(plugin: Any) -> str | None:
    """SHA-256 of the files of a class and of those that it derives from, or of a function; not fedsim's and Python's.

    A file counts as it is when this is first asked about the plug-in, so ask soon after the import. Modules that these
    files import do not count.

    Returns:
        None where nothing but fedsim's own code is left, `UNREADABLE` where a class is in no file.
    """
    names = _modules(plugin)
    if not names:
        return None
    hashes = [file_hash(sys.modules[name]) if name in sys.modules else UNREADABLE for name in names]
    if UNREADABLE in hashes:
        return UNREADABLE
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()


_hashes: dict[str, tuple[ModuleSpec | None, str]] = {}


def file_hash(module: ModuleType) -> str:
    """SHA-256 of the file of `module`, or `UNREADABLE` where it is in none.

    The file counts as it is when this is first asked after each import or `importlib.reload`, so that an edit that the
    program has not loaded does not count as the code that runs.
    """
    known = _hashes.get(module.__name__)
    if known is None or known[0] is not module.__spec__:  # which every reload makes anew
        known = _hashes[module.__name__] = module.__spec__, _hash_now(module)
    return known[1]


def _hash_now(module: ModuleType) -> str:
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


def crash(error: BaseException, cls: type) -> AttackCrash:
    """The sentence for what a plug-in of `cls` raised, with the place in its code."""
    what = "it called sys.exit" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}".splitlines()[0]
    return AttackCrash(f"{what} ({place_of(error, cls)}; the traceback is in log.txt)")


def files_of(cls: type) -> dict[str, Path]:
    """The files of the modules that `cls` and the classes it derives from are in, but for fedsim's and Python's own.

    Raises:
        PluginError: one of them is in no file, or only in the program that runs, so no other process can import it.
    """
    return {name: file_of(name) for name in reversed(_modules(cls))}


def file_of(name: str) -> Path:
    """The file of the module `name`, which is imported; see `files_of`."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None or not Path(file).is_file():
        raise PluginError(
            f"'{name}': a process of its own cannot import what is in no module file; put it into a file beside the "
            "experiment or into a package"
        )
    return Path(file).resolve()


def _modules(plugin: Any) -> list[str]:
    """The modules of a class and of those that it derives from, or of a function, except fedsim's and Python's own."""
    kinds = plugin.__mro__ if isinstance(plugin, type) else (plugin,)
    names = dict.fromkeys(kind.__module__ for kind in kinds)
    return [name for name in names if name.partition(".")[0] not in OWN | sys.stdlib_module_names]
