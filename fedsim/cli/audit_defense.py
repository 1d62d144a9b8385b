"""Command `fedsim audit-defense`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from fedsim.cli.check import parse_settings
from fedsim.cli.options import console, finish
from fedsim.cli.plugins import complete_name


def audit_defense(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PLUGIN",
            help="A defense: a registered one, or module:Class of a file here.",
            autocompletion=complete_name,
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the defense, as noise_multiplier=1.5.")
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", help="Trials for each of two neighbours; more trials can show a larger epsilon.")
    ] = 1000,
    clients: Annotated[
        int, typer.Option("--clients", help="Clients whose messages are summed before the server sees them.")
    ] = 1,
    survivors: Annotated[
        int | None, typer.Option("--survivors", help="How many of these clients answer; all by default.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the trials.")] = 0,
) -> None:
    """Audit a defense with differential privacy: test its noise, sampling and epsilon against its guarantee."""
    from fedsim.plugins import registry
    from fedsim.privacy.audited_defense import AuditedDefense
    from fedsim.privacy.defense_audit import audit_defense as run_audit
    from fedsim.privacy.defense_audit import plan_audit

    defense = registry.build("defenses", name, parse_settings(settings or ()), name)
    # What the audit can find is said before it runs.
    for sentence in plan_audit(AuditedDefense.from_defense(defense, clients=clients, survivors=survivors), trials):
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    done = run_audit(defense, trials=trials, clients=clients, survivors=survivors, seed=seed)
    for result in done.results:
        verdict, style = "kept", "green"
        if result.violation:
            verdict, style = "broken", "bold red"
        elif result.unknown:
            verdict, style = "unknown", "yellow"
        reason = result.violation or result.unknown or result.seen
        text = escape(f"{result.question}: {reason}" if reason else result.question)
        console.print(f"[{style}]{verdict:<8}[/]  {text}", highlight=False, soft_wrap=True)
    console.print(escape(done.conclusion), highlight=False, soft_wrap=True)
    finish([f"'{name}' violates its guarantee: {done.violations[0]}"] if done.violations else [])
