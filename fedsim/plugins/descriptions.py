"""Descriptions of plug-ins, cached for those that come with fedsim.

Describing a plug-in imports its module, which takes seconds where that imports torch or Flower. The
key of the cache is made of the path, size and time of each file of fedsim and of its bibliography,
and of the versions of its dependencies.
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
from inspect import Parameter, formatannotation, getdoc, isclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from fedsim.base.constraints import list_constraints, make_check
from fedsim.base.errors import FedsimError
from fedsim.base.files import cache_folder, replace_atomically
from fedsim.base.papers import Paper, list_citations
from fedsim.plugins import registry


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a plug-in, taken from its class.

    Attributes:
        text: its docstring.
        settings: name, type and default of each setting.
        needs: facts that an attack has to be granted.
        uses: further facts that an attack reads where they are granted.
        cited: first author and year of its paper; empty without one.
        papers: full citations of the papers that its docstring quotes, and of its own.
        promises: the guarantee of a defense; empty for other plug-ins.
        against: the adversary against whom a defense protects; may be empty.
        costs: the cost of a defense; may be empty.
        facts: further sentences of the class about itself, a line each.
    """

    text: str
    settings: list[list[str]]
    needs: list[str]
    uses: list[str]
    cited: str
    papers: list[str]
    promises: str
    against: str
    costs: str
    facts: list[str]

    @property
    def statement(self) -> list[str]:
        """Return promise, adversary and cost of a defense, and further facts, a line each."""
        statements = {"promises": self.promises, "against": self.against, "costs": self.costs}
        return [f"{label}: {text}" for label, text in statements.items() if text] + self.facts


def describe_plugin(group: registry.Group, name: str) -> Description:
    """Return the description of the plug-in called `name`, from the cache if it comes with fedsim.

    Raises:
        PluginError: it does not load.
    """
    if not registry.is_builtin(group, name):
        return _describe_class(group, name)
    descriptions, key = _read_cache(), f"{group}/{name}"
    if key not in descriptions:
        description = _describe_class(group, name)
        _append_to_cache(key, description, is_first=not descriptions)
        descriptions[key] = description
    return descriptions[key]


def _describe_class(group: registry.Group, name: str) -> Description:
    cls = registry.load(group, name)
    text, paper = getdoc(cls) or "(no description)", getattr(cls, "paper", None)
    settings = []
    for key, parameter in registry.setting_parameters(cls).items():
        is_required = parameter.default is parameter.empty
        default = "required" if is_required else repr(parameter.default)
        settings.append([key, _format_type(cls, key, parameter), default])
    return Description(
        text=text,
        settings=settings,
        needs=sorted(getattr(cls, "needs", None) or ()),
        uses=sorted(getattr(cls, "uses", None) or ()),
        cited=_cite_briefly(paper) if paper else "",
        papers=_list_papers(text, paper),
        promises=getattr(cls, "promise_or_default", str)(),
        against=getattr(cls, "against", "") if group == "defenses" else "",
        costs=getattr(cls, "cost", "") if group == "defenses" else "",
        facts=getattr(cls, "describe_facts", list)(),
    )


def _list_papers(text: str, paper: Paper | None) -> list[str]:
    """List the papers that a docstring quotes, and the plug-in's own where that is none of them."""
    citations = list_citations(text)
    if paper is not None and not any(str(paper) in citation for citation in citations):
        citations.append(f"{paper} {paper.url}".rstrip())
    return citations


def _cite_briefly(paper: Paper) -> str:
    first_author, *coauthors = paper.authors.split(",")
    return f"{first_author}{' et al.' if coauthors else ''} {paper.year}"


def _format_type(cls: type, key: str, parameter: Parameter) -> str:
    """Return the type of a setting as text, with the range of its values."""
    try:
        annotation = get_type_hints(cls, include_extras=True).get(key, parameter.annotation)
    except NameError:  # an annotation that is imported for type checkers only
        annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else format_type(annotation)


def format_type(kind: Any) -> str:
    """Return a type with its constraints as text.

    >>> from fedsim.base.constraints import PositiveFloat, PositiveInt, ShareBelowOne
    >>> format_type(PositiveInt | None), format_type(PositiveFloat), format_type(ShareBelowOne)
    ('int >= 1 | None', 'finite float > 0', 'float >= 0, < 1')
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        constraints = list(list_constraints(kind))
        adjectives = [c.notation for c in constraints if callable(c.limit)]
        ranges = [c.notation for c in constraints if not callable(c.limit)]
        return " ".join([*adjectives, format_type(arguments[0]), ", ".join(ranges)]).strip()
    if origin in (Union, UnionType):
        return " | ".join(map(format_type, arguments))
    if make_check(kind) is not None and isclass(origin):
        return f"{origin.__name__}[{', '.join(map(format_type, arguments))}]"
    if kind is type(None):
        return "None"
    return "..." if kind is Ellipsis else formatannotation(kind)


@cache
def _read_cache() -> dict[str, Description]:
    """Return the cached descriptions by `group/name`; none if they are outdated or unreadable."""
    with suppress(OSError, ValueError, TypeError, FedsimError):
        cache_key, *lines = _cache_path().read_text(encoding="utf-8").splitlines()
        if cache_key == _cache_key():
            return {name: Description(**fields) for name, fields in map(json.loads, lines)}
    return {}


def _append_to_cache(key: str, description: Description, *, is_first: bool) -> None:
    """Add a line to the file of descriptions; the first begins the file anew, below the key of the cache."""
    line = json.dumps([key, dataclasses.asdict(description)]) + "\n"
    with suppress(OSError, FedsimError):  # without a cache, descriptions are made each time
        if is_first:
            _cache_path().parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(_cache_path()) as temporary:
                temporary.write_text(f"{_cache_key()}\n{line}", encoding="utf-8")
        else:
            with _cache_path().open("ab", buffering=0) as file:  # one write, whatever other processes add
                file.write(line.encode())


def _cache_path() -> Path:
    return cache_folder() / "descriptions.jsonl"


@cache
def _cache_key() -> str:
    """Return a hash over the files of fedsim and the versions of packages that plug-ins use."""
    home = Path(__file__).resolve().parents[2]
    stamps = []
    for package in ("fedsim", *registry.COMPANION_PACKAGES):
        for path in sorted((*(home / package).rglob("*.py"), *(home / package).rglob("*.bib"))):
            stat = path.stat()
            stamps.append((str(path), stat.st_size, stat.st_mtime_ns))
    versions = [find_version(name) for name in (registry.DISTRIBUTION, "flwr", "torch", "torchvision")]
    python_path = os.environ.get("PYTHONPATH", "")
    parts = [stamps, versions, registry.entry_point_texts(registry.DISTRIBUTION), sys.version, python_path]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def find_version(name: str) -> str:
    """Return the version of an installed distribution; empty where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
