"""What reproducing a run needs apart from fedsim: other files, by name without folder, and code of other packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.base.errors import FedsimError
from fedsim.base.files import hash_file
from fedsim.plugins import registry
from fedsim.plugins.inline import is_object
from fedsim.sweeps.file import CASE

_GROUPS: Mapping[str, registry.Group] = {
    "data": "datasets",
    "partition": "partitions",
    "model": "models",
    "strategy": "strategies",
    "defense": "defenses",
    "measure": "measures",
    "attack": "attacks",
}


_FOLDERS = re.compile(r"(?<![\w:/.~])~?/(?:[^\s/'\"]+/)+")
"""Folders of an absolute path, up to its last part."""


def strip_folders(text: str) -> str:
    """Replace each absolute path in a text by its last part.

    >>> strip_folders("reads /home/ada/data/images.npy")
    'reads images.npy'
    """
    return _FOLDERS.sub("", text)


@dataclass
class ReferencedFiles:
    """Files of the machine that made the run, each under a name of its own.

    Attributes:
        paths: by name, the path on that machine.
        keys: by name, the first key, such as `data.path`, whose value the file is.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def replace_paths(self, tables: Any, key: str = "") -> Any:
        """Return `tables` with each absolute path replaced by a name, and note which file that is."""
        if isinstance(tables, Mapping):
            return {name: self.replace_paths(inner, f"{key}.{name}".strip(".")) for name, inner in tables.items()}
        if isinstance(tables, list):
            return [self.replace_paths(inner, key) for inner in tables]
        if isinstance(tables, str) and tables.startswith(("/", "~")):
            return self._add(Path(tables), key)
        return tables

    def _add(self, path: Path, key: str) -> str:
        """Note a file and return its name, which no other file has."""
        name, count = path.name, 1
        while self.paths.get(name, path) != path:
            name, count = f"{count}-{path.name}", count + 1
        self.paths[name] = path
        self.keys.setdefault(name, key)
        return name

    def sentences(self) -> Iterator[str]:
        """Yield for each file a sentence that says where to put it."""
        for name, path in self.paths.items():
            key = self.keys[name]
            folder = "the data folder (--data-dir)" if key.startswith("data.") else "the folder of the file"
            try:
                digest = f" Its SHA-256 is {hash_file(path)}." if path.is_file() else ""
            except OSError:
                digest = ""
            yield f"{key} is {name}: put it into {folder}.{digest}"


def plugin_origins(files: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each plug-in that does not come with fedsim."""
    sentences = []
    for tables in files:
        # Plug-ins by their tables.
        for key, group in _GROUPS.items():
            entry = tables.get(key, [])
            for table in _list_tables(entry):
                sentences.append(_origin(group, str(table.get("name", ""))))
        engine = _find_table(tables, "federation").get("engine", "")
        sentences.append(_origin("engines", str(engine.get("name", "") if isinstance(engine, Mapping) else engine)))
        sentences.append(_origin("modalities", str(_find_table(tables, "data").get("modality", ""))))
        # Code that is named as module:callable outside of plug-ins' tables.
        facts = _find_table(tables, "adversary", "knowledge").values()
        for value in (*facts, _find_table(tables, "app").get("outputs")):
            if isinstance(value, str) and ":" in value:
                sentences.append(_code_sentence(value))
    return list(dict.fromkeys(filter(None, sentences)))


def sweep_origins(tables: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each plug-in of a sweep, in its experiment or its axes, that does not come with fedsim.

    Args:
        tables: of a sweep file that holds its experiment.
    """
    files = [{key: table for key, table in tables.items() if key != "sweep"}]
    for axis, values in _find_table(tables, "sweep", "axes").items():
        for value in values if isinstance(values, list) else []:
            # A case is a table of several keys.
            entries = value if axis == CASE and isinstance(value, Mapping) else {axis: value}
            files += [_nest(key, entry) for key, entry in entries.items()]
    return plugin_origins(files)


def _nest(key: str, value: Any) -> dict[str, Any]:
    """Return the tables in which the key, such as `model.name`, has this value."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def metric_origins(names: Iterable[str]) -> list[str]:
    """Return a sentence for each metric that does not come with fedsim."""
    foreign = [name for name in dict.fromkeys(names) if registry.find_builtin_entry_point("metrics", name) is None]
    return [_origin("metrics", name) for name in foreign]


def _find_table(tables: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the table under these keys; an empty one where there is none."""
    inner: Any = tables
    for key in keys:
        inner = inner.get(key) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _list_tables(entry: Any) -> list[Mapping[str, Any]]:
    entries = entry if isinstance(entry, list) else [entry]
    return [table for table in entries if isinstance(table, Mapping)]


def _origin(group: registry.Group, name: str) -> str:
    """Return a sentence on where a plug-in comes from; empty for one of fedsim."""
    if not name:
        return ""
    if is_object(name):
        return (
            f"One of the {group} was an object of a Python program, which no file holds: hand it to fedsim.run again."
        )
    if ":" in name:
        return _code_sentence(name)
    try:
        package = registry.find_entry_point(group, name).dist
    except FedsimError:
        return f"'{name}', one of the {group}, is of a package that is not installed here."
    if registry.is_builtin(group, name) or not package:
        return ""
    return f"'{name}', one of the {group}, is of the package {package.name} {package.version}."


def _code_sentence(name: str) -> str:
    return (
        f"{name} is code that does not come with fedsim: put {name.partition(':')[0]}.py into the folder of the file."
    )
