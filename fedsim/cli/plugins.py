"""`fedsim list` and `fedsim show`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedsim.cli.options import console
from fedsim.errors import ConfigError, FedsimError, did_you_mean
from fedsim.plugins import registry
from fedsim.plugins.descriptions import described

_NARROWEST = 30
"""Columns that a text beside a name has at least."""


def list_plugins(
    group: Annotated[str | None, typer.Argument(help=f"{', '.join(registry.GROUPS)}; else all.")] = None,
) -> None:
    """List registered plug-ins, name first; defenses, where only these, with what each promises.

    A terminal breaks long lines; in a pipe each plug-in is one line. Those of others end with who brought them.
    """
    if group is not None and group not in registry.GROUPS:
        raise ConfigError(f"list: nothing is called '{group}', {did_you_mean(group, registry.GROUPS)}")
    chosen = [known for known in registry.GROUPS if group in (None, known)]
    for known in chosen:
        if group is None:
            print(f"{'' if known == chosen[0] else chr(10)}{known}:")  # noqa: T201
        names = registry.names(known)
        width = max(map(len, names))
        for name in names:
            print(laid_out(f"{name:<{width}}  ", _told(known, name, stated=group is not None)))  # noqa: T201


def _told(group: registry.Group, name: str, *, stated: bool) -> list[str]:
    """What a plug-in says of itself; with `stated`, also what a defense promises."""
    try:
        found = described(group, name)
    except FedsimError as error:
        return [f"does not load: {error}"]
    text = ". ".join(filter(None, [found.cited, found.text.splitlines()[0]]))
    promise = f"promises: {found.promises}" if stated and found.promises else ""
    owner = registry.owner(group, name)
    return list(filter(None, [text, promise, "" if owner == registry.OWNER else f"[{owner}]"]))


def laid_out(head: str, parts: Sequence[str]) -> str:
    """One line for whatever reads a pipe; on a terminal lines of its width, a new one for each of `parts`."""
    if not console.is_terminal:
        return head + "  ".join(parts)
    room = max(_NARROWEST, console.width - len(head))
    lines = [line for part in parts for line in textwrap.wrap(part, room, break_on_hyphens=False)]
    return head + f"\n{' ' * len(head)}".join(lines)


def completed(incomplete: str) -> list[str]:
    """What a shell may make of the beginning of a name."""
    return [name for group in registry.GROUPS for name in registry.names(group) if name.startswith(incomplete)]


def show(
    name: Annotated[
        str, typer.Argument(help="A plug-in of any kind, registered or module:Class.", autocompletion=completed)
    ],
) -> None:
    """Show a plug-in: what it does, its settings and defaults, its paper, what it needs."""
    for group in registry.groups_of(name):
        found = described(group, name)
        console.print(f"[bold]{escape(name)}[/]  ({group}, from {escape(registry.owner(group, name))})\n")
        console.print(found.text, markup=False, highlight=False, soft_wrap=True)
        table = Table("setting", "type", "default")
        for row in found.settings:
            table.add_row(*map(escape, row))
        console.print(table if table.rows else "no settings")
        for line in found.statement:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if found.needs:
            console.print(f"needs: {', '.join(found.needs)}")
        if found.uses:
            console.print(f"uses, where granted: {', '.join(found.uses)}", soft_wrap=True)
        if found.paper:
            console.print(f"paper: {found.paper}", markup=False, soft_wrap=True)
