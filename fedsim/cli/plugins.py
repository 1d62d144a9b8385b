"""Commands `fedsim list` and `fedsim show`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedsim.base.errors import ConfigError, FedsimError, did_you_mean
from fedsim.cli.options import blank_control_characters, console, new_table
from fedsim.plugins import registry
from fedsim.plugins.descriptions import describe_plugin

if TYPE_CHECKING:
    from fedsim.api.tables import TableDescription

_MIN_TEXT_WIDTH = 30
"""Least width of a text beside a name, in columns."""


def list_plugins(
    group: Annotated[str | None, typer.Argument(help=f"{', '.join(registry.GROUPS)}; else all.")] = None,
) -> None:
    """List registered plug-ins; `fedsim list defenses` also prints the guarantee of each defense.

    A terminal breaks long lines; in a pipe each plug-in is one line. Those of others end with who brought them.
    """
    if group is not None and group not in registry.GROUPS:
        raise ConfigError(f"list: there is no kind of plug-in '{group}', {did_you_mean(group, registry.GROUPS)}")
    groups = [listed_group for listed_group in registry.GROUPS if group in (None, listed_group)]
    for listed_group in groups:
        if group is None:
            print(f"{'' if listed_group == groups[0] else chr(10)}{listed_group}:")  # noqa: T201
        names = registry.registered_names(listed_group)
        width = max(map(len, names))
        for name in names:
            print(lay_out(f"{name:<{width}}  ", _descriptions(listed_group, name, with_promise=group is not None)))  # noqa: T201


def _descriptions(group: registry.Group, name: str, *, with_promise: bool) -> list[str]:
    """Return what a plug-in declares; `with_promise`, also what a defense promises."""
    try:
        description = describe_plugin(group, name)
    except FedsimError as error:
        return [f"does not load: {error}"]
    text = ". ".join(filter(None, [description.cited, description.text.splitlines()[0]]))
    promise = f"guarantee: {description.promises}" if with_promise and description.promises else ""
    owner = registry.find_distribution(group, name)
    return list(filter(None, [text, promise, "" if owner == registry.DISTRIBUTION else f"[{owner}]"]))


def lay_out(head: str, parts: Sequence[str]) -> str:
    """Lay out a name and texts: in one line for a pipe, on a terminal in lines of its width.

    On a terminal each of `parts` begins a new line.
    """
    head, parts = blank_control_characters(head), [blank_control_characters(part) for part in parts]
    if not console.is_terminal:
        return head + "  ".join(parts)
    room = max(_MIN_TEXT_WIDTH, console.width - len(head))
    lines = [line for part in parts for line in textwrap.wrap(part, room, break_on_hyphens=False)]
    return head + f"\n{' ' * len(head)}".join(lines)


def complete_name(incomplete: str) -> list[str]:
    """Return the names of plug-ins and tables that begin with `incomplete`, for completion in a shell."""
    from fedsim.api.tables import TABLES

    names = [name for group in registry.GROUPS for name in registry.registered_names(group)]
    return [name for name in (*names, *TABLES) if name.startswith(incomplete)]


def _show_table(described: TableDescription) -> None:
    """Print what a table is about, and its keys."""
    console.print(f"[bold]{escape(described.name)}[/]  (a table of experiment files)\n")
    console.print(described.text, "", sep="\n", markup=False, highlight=False, soft_wrap=True)
    width = max((len(key.name) for key in described.keys), default=0)
    for key in described.keys:
        default = key.default if key.is_required else f"default {key.default}"
        print(lay_out(f"{key.name:<{width}}  ", [f"{key.kind}; {default}", key.meaning]))  # noqa: T201


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A plug-in of any kind, registered or module:Class, or a table of files, such as training.",
            autocompletion=complete_name,
        ),
    ],
) -> None:
    """Show a plug-in or a table of experiment files: what it does, its settings and defaults, its papers."""
    from fedsim.api.tables import TABLES, describe_table

    groups = registry.find_groups(name, TABLES)
    if name in TABLES:
        _show_table(describe_table(name))
    if name in TABLES and groups:
        console.print()
    for group in groups:
        description = describe_plugin(group, name)
        console.print(f"[bold]{escape(name)}[/]  ({group}, from {escape(registry.find_distribution(group, name))})\n")
        console.print(description.text, markup=False, highlight=False, soft_wrap=True)
        table = new_table("setting", "type", "default")
        for row in description.settings:
            table.add_row(*map(escape, row))
        console.print(table if table.rows else "no settings")
        for line in description.statement:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if description.needs:
            console.print(f"needs: {', '.join(description.needs)}")
        if description.uses:
            console.print(f"uses, if granted: {', '.join(description.uses)}", soft_wrap=True)
        for paper in description.papers:
            console.print(paper, markup=False, highlight=False, soft_wrap=True)
