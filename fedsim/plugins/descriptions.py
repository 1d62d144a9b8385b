"""Descriptions of plug-ins. To read one, its module is imported: seconds, where that imports torch or Flower.

So descriptions of the plug-ins that come with fedsim are kept in the cache. The key of the cache is made of the path,
size and time of each file of fedsim and of the versions of its dependencies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, formatannotation, getdoc
from pathlib import Path
from typing import get_type_hints

from fedsim.errors import FedsimError
from fedsim.files import cache_folder, in_one_step
from fedsim.plugins import registry

_OWN = "fedsim-curious"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a plug-in says of itself.

    Attributes:
        text: its docstring.
        settings: name, type and default of each.
        needs: what an attack has to be granted.
        uses: what an attack reads where it is granted.
        cited: the first author and the year of its paper; empty without one.
        paper: where the paper was published.
        promises: what a defense proves; empty of any other plug-in.
        against: against whom a defense is, where it says so.
        costs: what a defense costs, where it says so.
    """

    text: str
    settings: list[list[str]]
    needs: list[str]
    uses: list[str]
    cited: str
    paper: str
    promises: str
    against: str
    costs: str

    @property
    def statement(self) -> list[str]:
        """What a defense says that it promises, against whom and at what cost, a line each, where it says so."""
        said = {"promises": self.promises, "against": self.against, "costs": self.costs}
        return [f"{word}: {told}" for word, told in said.items() if told]


def described(group: registry.Group, name: str) -> Description:
    """What the plug-in called `name` says of itself.

    Raises:
        PluginError: it does not load.
    """
    if not registry.is_own(group, name):
        return _imported(group, name)
    known = _read()
    if (found := known.get(f"{group}/{name}")) is not None:
        return found
    known[f"{group}/{name}"] = _imported(group, name)
    _write(known)
    return known[f"{group}/{name}"]


def _imported(group: registry.Group, name: str) -> Description:
    cls = registry.load(group, name)
    paper = getattr(cls, "paper", None)
    return Description(
        text=getdoc(cls) or "(no description)",
        settings=[
            [key, _kind(cls, key, setting), "required" if setting.default is setting.empty else repr(setting.default)]
            for key, setting in registry.parameters(cls).items()
        ],
        needs=sorted(getattr(cls, "needs", None) or ()),
        uses=sorted(getattr(cls, "uses", None) or ()),
        cited=f"{paper.authors.split(',')[0]}{' et al.' * (',' in paper.authors)} {paper.year}" if paper else "",
        paper=f"{paper} {paper.url}" if paper else "",
        promises=getattr(cls, "promised", str)(),
        against=getattr(cls, "against", "") if group == "defenses" else "",
        costs=getattr(cls, "cost", "") if group == "defenses" else "",
    )


def _kind(cls: type, key: str, parameter: Parameter) -> str:
    """What a setting may be, with the words it may be one of."""
    try:
        kind = get_type_hints(cls).get(key, parameter.annotation)
    except NameError:  # an annotation that is imported for type checkers alone
        kind = parameter.annotation
    return kind if isinstance(kind, str) else formatannotation(kind)


@cache
def _read() -> dict[str, Description]:
    """The kept descriptions by `group/name`; none where they are of other files, or cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, FedsimError):
        kept = json.loads(_path().read_text(encoding="utf-8"))
        if kept["of"] == _key():
            return {name: Description(**found) for name, found in kept["descriptions"].items()}
    return {}


def _write(known: dict[str, Description]) -> None:
    text = json.dumps({"of": _key(), "descriptions": {name: dataclasses.asdict(d) for name, d in known.items()}})
    with suppress(OSError, FedsimError):  # then they are made anew each time
        _path().parent.mkdir(parents=True, exist_ok=True)
        with in_one_step(_path()) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _path() -> Path:
    return cache_folder() / "descriptions.json"


@cache
def _key() -> str:
    """Of each file of fedsim, and of the versions of what plug-ins derive from or quote."""
    home = Path(__file__).resolve().parents[2]
    files = [path for room in ("fedsim", *registry.ROOMS) for path in sorted((home / room).rglob("*.py"))]
    stamps = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    versions = [_version(name) for name in (_OWN, "flwr", "torch", "torchvision")]
    told = [stamps, versions, registry.values(_OWN), sys.version, os.environ.get("PYTHONPATH", "")]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
