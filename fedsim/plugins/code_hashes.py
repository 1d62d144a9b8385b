"""Code of plug-ins: hashes and files of their modules, and locations of their errors."""

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

from fedsim.base.errors import AttackCrash, AttackError, PluginError, first_line, is_device_failure, is_memory_error

OWN_PACKAGES = frozenset({"fedsim", "adversaries", "clients", "strategies"})
"""Packages of this distribution. Findings of its attacks stay valid with a new version of it."""
_RELEASED_PACKAGES = frozenset({"flwr", "torch"})
"""Packages whose versions every manifest records, and from which plug-ins derive: no code of the plug-in's own."""
UNREADABLE = "unreadable"
"""Hash of code in no file, such as a class in a notebook; it never counts as unchanged."""


def hash_plugin_code(plugin: Any) -> str | None:
    """Return the SHA-256 of the files with the code of a class, its bases, or a function.

    These are the files of their modules, and of the modules that these import, at any depth and
    also within functions, from the user's own code or the same distribution. Left out are fedsim's
    and Python's own modules; Flower and other distributions, whose versions are recorded elsewhere; and
    modules whose names are computed at run time. A file is read at the first call for the plug-in,
    so call this soon after the import.

    Returns:
        None where all code is fedsim's own or Flower's, `UNREADABLE` where a class is in no file.
    """
    return _hash_modules(_plugin_modules(plugin))


def hash_referenced_code(references: Iterable[str]) -> str | None:
    """Return `code_hash` of the modules of references `module:attribute` that are found."""
    names = _foreign_modules(reference.partition(":")[0] for reference in references)
    return _hash_modules([name for name in names if _find_source(name)])


@cache
def hash_own_checkout() -> str | None:
    """Return the SHA-256 of fedsim's own code where it runs from a checkout, which people edit; None for a release."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return None
    digest = hashlib.sha256()
    for file in sorted(file for package in OWN_PACKAGES for file in (root / package).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _hash_modules(names: Sequence[str]) -> str | None:
    if not names:
        return None
    hashes = [_hash_module(name) for name in names]
    hashes += [_hash_module(name) for name in _find_imports(tuple(names), tuple(hashes))]
    if UNREADABLE in hashes:
        return UNREADABLE
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()


def _hash_module(name: str) -> str:
    if name in sys.modules:
        return hash_module_file(sys.modules[name])
    source = _find_source(name)
    return UNREADABLE if source is None else hashlib.sha256(source.file.read_bytes()).hexdigest()


@dataclass(frozen=True)
class _ModuleSource:
    """File of a module, and the package from which its relative imports start."""

    file: Path
    package: str


@cache
def _find_imports(names: tuple[str, ...], hashes: tuple[str, ...]) -> list[str]:
    """Return the modules that `names` import at any depth, and that belong to the same code.

    Args:
        hashes: of their files; only a key of the cache, as an edited module may import others.
    """
    del hashes
    visited: dict[str, None] = {}
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in visited or not _foreign_modules([name]):
            continue
        source = _find_source(name)
        if source is not None and (name in names or _belongs_to(name, source, names)):
            visited[name] = None
            queue += _parse_imports(source)
    return sorted(set(visited).difference(names))


def _find_source(name: str) -> _ModuleSource | None:
    """Find the file of a module without importing it; None where there is none."""
    module = sys.modules.get(name)
    if module is not None:
        file, package = getattr(module, "__file__", None), module.__package__
    else:
        spec = _find_spec(name)
        file, package = (None, None) if spec is None else (spec.origin, spec.parent)
    if file is None or not Path(file).is_file():
        return None
    return _ModuleSource(Path(file), package or "")


def _find_spec(name: str) -> ModuleSpec | None:
    """Find the spec of a module; `importlib.util.find_spec` would import its packages."""
    parent = name.rpartition(".")[0]
    path = None
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", [])
    elif parent:
        parent_spec = _find_spec(parent)
        path = [] if parent_spec is None else parent_spec.submodule_search_locations or []
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _belongs_to(name: str, source: _ModuleSource, names: Iterable[str]) -> bool:
    """Return whether a module is the user's own code, or of the distribution of one of `names`."""
    package = name.partition(".")[0]
    plugin_sources = {plugin_module.partition(".")[0]: _find_source(plugin_module) for plugin_module in names}
    if package in plugin_sources or not _is_installed(source):
        return True
    # A plug-in that lies elsewhere is not of the distribution of an installed module, whose metadata takes a second.
    installed = [name for name, own_source in plugin_sources.items() if own_source and _is_installed(own_source)]
    if not installed:
        return False
    distributions = set(_distributions().get(package, ()))
    return any(distributions.intersection(_distributions().get(plugin_package, ())) for plugin_package in installed)


def _is_installed(source: _ModuleSource) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(source.file.parts)


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Return the distributions by top-level package; cached, because it reads much metadata."""
    return packages_distributions()


def _parse_imports(source: _ModuleSource) -> list[str]:
    """Return the names in import statements anywhere in a file; not all of them are modules."""
    if source.file.suffix != ".py":
        return []
    try:
        tree = ast.parse(source.file.read_bytes())
    except (SyntaxError, ValueError):  # Python reports it at the import
        return []
    # Collect the absolute names.
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = source.package.split(".")
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    # An import runs the packages above a module as well.
    with_packages: list[str] = []
    for name in names:
        parts = name.split(".")
        with_packages += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return with_packages


_hashes: dict[str, tuple[ModuleSpec | None, str]] = {}
"""Spec and file hash of each module by name."""


def hash_module_file(module: ModuleType) -> str:
    """Return the SHA-256 of the file of `module`, or `UNREADABLE` where there is none.

    The file is read at the first call after each import or `importlib.reload`, so that an edit that
    the program has not loaded does not count as the code that runs.
    """
    entry = _hashes.get(module.__name__)
    if entry is None or entry[0] is not module.__spec__:  # every reload makes a new spec
        entry = _hashes[module.__name__] = module.__spec__, _read_file_hash(module)
    return entry[1]


def _read_file_hash(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return UNREADABLE
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def locate_error(error: BaseException, cls: type) -> str:
    """Return `file:line` of the innermost frame in the plug-in's package, or else in fedsim's."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        frames.append((package, f"{frame.f_code.co_filename}:{line}"))
    plugin_packages = {name.partition(".")[0] for name in _plugin_modules(cls)}
    for packages in (plugin_packages, OWN_PACKAGES):
        locations = [location for package, location in frames if package in packages]
        if locations:
            return locations[-1]
    return frames[-1][1] if frames else "nowhere"


def make_crash_error(error: BaseException, cls: type) -> AttackError:
    """Return the error that reports an exception of a plug-in, with the location in its code.

    Where a device failed or its memory did not last, the plug-in is not to blame.
    """
    if is_memory_error(error):
        return AttackError(
            f"the device's memory does not last for one restart ({first_line(error)}); choose victims with fewer "
            "examples, or set adversary.device = 'cpu'"
        )
    if is_device_failure(error):
        return AttackError(
            f"the device failed or was lost ({first_line(error)}); findings so far are kept: run `fedsim attack` again "
            "when it works, or with adversary.device = 'cpu'"
        )
    if isinstance(error, SystemExit):
        reason = "it called sys.exit"
    else:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return AttackCrash(f"{reason} ({locate_error(error, cls)}; the traceback is in log.txt)")


def find_plugin_files(cls: type) -> dict[str, Path]:
    """Return the module files of `cls` and its bases by module name, without fedsim's and Python's.

    Raises:
        PluginError: a module has no file, or is the running program, so no other process can import
            it.
    """
    return {name: find_module_file(name) for name in reversed(_plugin_modules(cls))}


def find_module_file(name: str) -> Path:
    """Return the file of the imported module `name`.

    Raises:
        PluginError: it has no file, or is the running program, so no other process can import it.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None or not Path(file).is_file():
        raise PluginError(
            f"'{name}': a separate process cannot import what is in no module file; put it into a file next to the "
            "experiment or into a package"
        )
    return Path(file).resolve()


def _plugin_modules(plugin: Any) -> list[str]:
    """Return the modules of a class and its bases, or of a function, that are foreign."""
    definitions = plugin.__mro__ if isinstance(plugin, type) else (plugin,)
    return _foreign_modules(definition.__module__ for definition in definitions)


def _foreign_modules(names: Iterable[str]) -> list[str]:
    """Return the module names, each once, that are neither fedsim's, nor Python's, nor of a recorded release."""
    excluded = OWN_PACKAGES | _RELEASED_PACKAGES | sys.stdlib_module_names
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] not in excluded]
