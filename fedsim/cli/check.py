"""`fedsim check`."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedsim.cli.options import console, finish
from fedsim.cli.plugins import completed
from fedsim.errors import ConfigError
from fedsim.plugins import registry

_STYLES = {"passed": "green", "failed": "bold red", "does not apply": "dim", "not checked": "yellow"}


def check(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="PLUGIN...",
            help="Plug-ins of any kind: registered ones, or module:Class of a file here.",
            autocompletion=completed,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the plug-in that differs from its default, as size=2."),
    ] = None,
) -> None:
    """Check on tiny cases that plug-ins keep to what fedsim relies on, in seconds."""
    if settings and len(names) > 1:
        raise ConfigError(f"--set: of which of {len(names)} plug-ins is not said; check that one alone")
    groups = {name: registry.groups_of(name) for name in names}
    chosen = _parsed(settings or ())
    logging.disable(logging.WARNING)  # what it says of its tiny cases is of no use to anybody
    try:
        finish([sentence for name in names if (sentence := _examined(name, groups[name], chosen))])
    finally:
        logging.disable(logging.NOTSET)


def _examined(name: str, groups: Iterable[registry.Group], settings: dict[str, Any]) -> str:
    """Print the outcome of each check; a sentence where one was not passed, or could not be made."""
    from fedsim.contract.checks import examine

    bad = []
    for group in groups:
        console.print(f"[bold]{escape(name)}[/]  ({group}, from {escape(registry.owner(group, name))})")
        for outcome in examine(group, name, settings):
            style = _STYLES[outcome.verdict]
            why = f": {outcome.why}" if outcome.why else ""
            console.print(
                f"[{style}]{outcome.verdict:<14}[/]  {escape(outcome.check + why)}", highlight=False, soft_wrap=True
            )
            bad += [] if outcome.well else [outcome.verdict]
    counts = filter(None, [_fails(bad.count("failed")), _open(bad.count("not checked"))])
    return f"'{name}' {' and '.join(counts)}" if bad else ""


def _parsed(settings: Iterable[str]) -> dict[str, Any]:
    """The settings `key=value` by name; a value that is not TOML is a text."""
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting}: expected key=value, as size=2")
        try:
            chosen[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except ValueError:
            chosen[key.strip()] = text
    return chosen


def _fails(count: int) -> str:
    return f"fails {count} check{'s' * (count > 1)}" if count else ""


def _open(count: int) -> str:
    return f"leaves {count} check{'s' * (count > 1)} open" if count else ""
