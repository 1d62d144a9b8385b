"""Command `fedsim check`."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedsim.base.errors import ConfigError, number_of
from fedsim.cli.options import console, finish
from fedsim.cli.plugins import complete_name
from fedsim.plugins import registry

_STYLES = {"passed": "green", "failed": "bold red", "does not apply": "dim", "not checked": "yellow"}


def check(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="PLUGIN...",
            help="Plug-ins of any kind: registered ones, or module:Class of a file here.",
            autocompletion=complete_name,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the plug-in that differs from its default, as size=2."),
    ] = None,
) -> None:
    """Test plug-ins against their interface on tiny cases, in seconds."""
    if settings and len(names) > 1:
        raise ConfigError(f"--set: applies to one plug-in, but {len(names)} are named; check one at a time")
    groups = {name: registry.find_groups(name) for name in names}
    values = parse_settings(settings or ())
    logging.disable(logging.WARNING)  # warnings about its tiny cases are of no use to anybody
    try:
        sentences = [_run_checks(name, groups[name], values) for name in names]
        finish(list(filter(None, sentences)))
    finally:
        logging.disable(logging.NOTSET)


def _run_checks(name: str, groups: Iterable[registry.Group], settings: dict[str, Any]) -> str:
    """Print the outcome of each check; return a sentence where one was not passed, or could not be made."""
    from fedsim.contract.checks import run_checks

    verdicts = []
    for group in groups:
        console.print(f"[bold]{escape(name)}[/]  ({group}, from {escape(registry.find_distribution(group, name))})")
        for outcome in run_checks(group, name, settings):
            style = _STYLES[outcome.verdict]
            reason = f": {outcome.reason}" if outcome.reason else ""
            console.print(
                f"[{style}]{outcome.verdict:<14}[/]  {escape(outcome.requirement + reason)}",
                highlight=False,
                soft_wrap=True,
            )
            if not outcome.is_good:
                verdicts.append(outcome.verdict)
    failed, unchecked = verdicts.count("failed"), verdicts.count("not checked")
    parts = []
    if failed:
        parts.append(f"fails {number_of(failed, 'check')}")
    if unchecked:
        parts.append(f"leaves {number_of(unchecked, 'check')} open")
    return f"'{name}' {' and '.join(parts)}" if verdicts else ""


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return the settings `key=value` by name; a value that is not TOML is a text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting}: expected key=value, as size=2")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except ValueError:
            values[key.strip()] = text
    return values
