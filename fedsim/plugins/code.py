"""Which code a plug-in is made of, and where in it something went wrong."""

from __future__ import annotations

import ast
import hashlib
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.errors import AttackCrash, PluginError

OWN = frozenset({"fedsim", "adversaries", "clients", "strategies"})
"""Packages of this distribution: findings of its own attacks outlive a new version of it."""
UNREADABLE = "unreadable"
"""The hash of code that is in no file, such as a class typed into a notebook; it is never known to be the same."""


def code_hash(plugin: Any) -> str | None:
    """SHA-256 of the files that a class, those that it derives from, or a function are made of; not fedsim's own.

    These are the files of their modules, and of what these import of the user's own code or of the same distribution,
    at any depth, also within functions. Not so Python's own modules and those of other distributions, whose versions
    are written down elsewhere, nor modules whose names a program puts together as it runs. A file counts as it is when
    this is first asked about the plug-in, so ask soon after the import.

    Returns:
        None where nothing but fedsim's own code is left, `UNREADABLE` where a class is in no file.
    """
    return _hash_of_modules(_modules(plugin))


def hash_of_references(references: Iterable[str]) -> str | None:
    """As `code_hash`, of the modules in `module:attribute`; those that nobody finds do not count."""
    named = _foreign(reference.partition(":")[0] for reference in references)
    return _hash_of_modules([name for name in named if _source(name)])


def _hash_of_modules(names: Sequence[str]) -> str | None:
    if not names:
        return None
    hashes = [_hash_of_module(name) for name in names]
    hashes += [_hash_of_module(name) for name in _imported(tuple(names), tuple(hashes))]
    if UNREADABLE in hashes:
        return UNREADABLE
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()


def _hash_of_module(name: str) -> str:
    if name in sys.modules:
        return file_hash(sys.modules[name])
    source = _source(name)
    return UNREADABLE if source is None else hashlib.sha256(source.file.read_bytes()).hexdigest()


@dataclass(frozen=True)
class _Source:
    """The file of a module, and the package that its relative imports start from."""

    file: Path
    package: str


@cache
def _imported(names: tuple[str, ...], hashes: tuple[str, ...]) -> list[str]:
    """What the modules `names`, whose files have `hashes`, import at any depth of code that belongs to them."""
    del hashes  # a module that is loaded anew after an edit may import others
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or not _foreign([name]):
            continue
        source = _source(name)
        if source is not None and (name in names or _belongs(name, source, names)):
            found[name] = None
            waiting += _imports_of(source)
    return sorted(set(found).difference(names))


def _source(name: str) -> _Source | None:
    """Where a module is found, without importing anything; None for what is in no file."""
    module = sys.modules.get(name)
    if module is not None:
        file, package = getattr(module, "__file__", None), module.__package__
    else:
        spec = _spec(name)
        file, package = (None, None) if spec is None else (spec.origin, spec.parent)
    return _Source(Path(file), package or "") if file is not None and Path(file).is_file() else None


def _spec(name: str) -> ModuleSpec | None:
    """What the finders of Python know of a module that is not imported."""
    parent = name.rpartition(".")[0]
    path = None
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", [])
    elif parent:
        above = _spec(parent)
        path = [] if above is None else above.submodule_search_locations or []
    finders = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in finders if spec is not None), None)


def _belongs(name: str, source: _Source, names: Iterable[str]) -> bool:
    """Whether a module is the user's own code, or comes with one of `names`."""
    top, theirs = name.partition(".")[0], {other.partition(".")[0] for other in names}
    if top in theirs or not {"site-packages", "dist-packages"}.intersection(source.file.parts):
        return True
    homes = _distributions()
    return any(set(homes.get(top, ())).intersection(homes.get(other, ())) for other in theirs)


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """The distributions that each top-level package is of."""
    return packages_distributions()


def _imports_of(source: _Source) -> list[str]:
    """The names in import statements anywhere in a file; each may be a module, or what a module holds."""
    if source.file.suffix != ".py":
        return []
    try:
        tree = ast.parse(source.file.read_bytes())
    except (SyntaxError, ValueError):  # Python says so where it is imported
        return []
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = source.package.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in found]
    return [".".join(name[:end]) for name in parts for end in range(1, len(name) + 1)]  # the packages run as well


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
    return _foreign(kind.__module__ for kind in kinds)


def _foreign(names: Iterable[str]) -> list[str]:
    """Those names of modules, each once, that are neither fedsim's nor Python's."""
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] not in OWN | sys.stdlib_module_names]
