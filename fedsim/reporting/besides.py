"""What a file needs besides fedsim to make a run again: other files, by name alone, and code of other packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.errors import FedsimError
from fedsim.files import hash_file
from fedsim.plugins import registry
from fedsim.plugins.objects import is_object

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


def placeless(text: str) -> str:
    """The same text, in which of each absolute path no more than the last part is left."""
    return _FOLDERS.sub("", text)


@dataclass
class Files:
    """Files of the machine that made the run, by the names that they are given."""

    paths: dict[str, Path] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def named_in(self, tables: Any, place: str = "") -> Any:
        """The same tables, with names of files in the place of absolute paths."""
        if isinstance(tables, Mapping):
            return {key: self.named_in(inner, f"{place}.{key}".strip(".")) for key, inner in tables.items()}
        if isinstance(tables, list):
            return [self.named_in(inner, place) for inner in tables]
        if isinstance(tables, str) and tables.startswith(("/", "~")):
            return self._called(Path(tables), place)
        return tables

    def _called(self, path: Path, place: str) -> str:
        """The name of a file, which no other file has."""
        name, count = path.name, 1
        while self.paths.get(name, path) != path:
            name, count = f"{count}-{path.name}", count + 1
        self.paths[name] = path
        self.where.setdefault(name, place)
        return name

    def sentences(self) -> Iterator[str]:
        """Where each has to be put."""
        for name, path in self.paths.items():
            folder = (
                "the data folder (--data-dir)" if self.where[name].startswith("data.") else "the folder of the file"
            )
            try:
                digest = f" Its SHA-256 is {hash_file(path)}." if path.is_file() else ""
            except OSError:
                digest = ""
            yield f"{self.where[name]} is {name}: put it into {folder}.{digest}"


def code_of(files: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each plug-in that does not come with fedsim."""
    said = []
    for tables in files:
        for where, group in _GROUPS.items():
            owner = tables.get(where, [])
            for table in owner if isinstance(owner, list) else [owner]:
                said.append(_origin(group, str(table.get("name", ""))))
        written = [*tables.get("adversary", {}).get("knowledge", {}).values(), tables.get("app", {}).get("outputs")]
        said += [_of_code(value) for value in written if isinstance(value, str) and ":" in value]
    return list(dict.fromkeys(filter(None, said)))


def _origin(group: registry.Group, name: str) -> str:
    if not name:
        return ""
    if is_object(name):
        return (
            f"One of the {group} was an object of a Python program, which no file holds: hand it to fedsim.run again."
        )
    if ":" in name:
        return _of_code(name)
    try:
        owner = registry.entry(group, name).dist
    except FedsimError:
        return f"'{name}', one of the {group}, is of a package that is not installed here."
    if registry.is_own(group, name):
        return ""
    return f"'{name}', one of the {group}, is of the package {owner.name} {owner.version}." if owner else ""


def _of_code(name: str) -> str:
    return (
        f"{name} is code that does not come with fedsim: put {name.partition(':')[0]}.py into the folder of the file."
    )
