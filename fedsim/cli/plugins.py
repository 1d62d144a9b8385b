"""`fedsim list` and `fedsim show`."""

from __future__ import annotations

from inspect import Parameter, formatannotation, getdoc
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape
from rich.table import Table

from fedsim.cli.options import console
from fedsim.errors import ConfigError, FedsimError, PluginError, did_you_mean
from fedsim.plugins import registry


def list_plugins(
    group: Annotated[
        str | None, typer.Argument(help="attacks, defenses, strategies, datasets, partitions or models; else all.")
    ] = None,
) -> None:
    """List registered plug-ins, one a line, name first."""
    if group is not None and group not in registry.GROUPS:
        raise ConfigError(f"list: nothing is called '{group}', {did_you_mean(group, registry.GROUPS)}")
    chosen = [known for known in registry.GROUPS if group in (None, known)]
    for known in chosen:
        if group is None:
            print(f"{'' if known == chosen[0] else chr(10)}{known}:")  # noqa: T201
        names = registry.names(known)
        width = max(map(len, names))
        for name in names:
            print(f"{name:<{width}}  {_one_line(known, name)}")  # noqa: T201


def _one_line(group: registry.Group, name: str) -> str:
    try:
        cls = registry.load(group, name)
    except FedsimError as error:
        return f"does not load: {error}"
    paper = getattr(cls, "paper", None)
    about = f"{paper.authors.split(',')[0]}{' et al.' * (',' in paper.authors)} {paper.year}. " if paper else ""
    owner = registry.entry(group, name).dist
    return f"{about}{_docstring(cls).splitlines()[0]}  [{owner.name if owner else '?'}]"


def show(name: Annotated[str, typer.Argument(help="A plug-in of any kind.")]) -> None:
    """Show a plug-in: what it does, its settings and defaults, its paper, what it needs."""
    groups = [group for group in registry.GROUPS if name in registry.names(group)]
    if not groups:
        everything = [known for group in registry.GROUPS for known in registry.names(group)]
        raise PluginError(f"nothing is called '{name}', {did_you_mean(name, everything)}")
    for group in groups:
        cls = registry.load(group, name)
        owner = registry.entry(group, name).dist
        console.print(f"[bold]{name}[/]  ({group}, from {owner.name if owner else '?'})\n")
        console.print(_docstring(cls), markup=False, highlight=False, soft_wrap=True)
        table = Table("setting", "type", "default")
        for key, parameter in registry.parameters(cls).items():
            default = "required" if parameter.default is parameter.empty else repr(parameter.default)
            table.add_row(key, escape(_kind(cls, key, parameter)), escape(default))
        console.print(table if table.rows else "no settings")
        if needs := getattr(cls, "needs", None):
            console.print(f"needs: {', '.join(sorted(needs))}")
        if uses := getattr(cls, "uses", None):
            console.print(f"uses, where granted: {', '.join(sorted(uses))}", soft_wrap=True)
        if paper := getattr(cls, "paper", None):
            console.print(f"paper: {paper} {paper.url}", markup=False, soft_wrap=True)


def _kind(cls: type, key: str, parameter: Parameter) -> str:
    """What a setting may be, with the words it may be one of."""
    try:
        kind = get_type_hints(cls).get(key, parameter.annotation)
    except NameError:  # an annotation that is imported for type checkers alone
        kind = parameter.annotation
    return kind if isinstance(kind, str) else formatannotation(kind)


def _docstring(cls: Any) -> str:
    return getdoc(cls) or "(no description)"
