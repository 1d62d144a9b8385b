"""Screen output of commands: log lines and progress while they work, and tables of scores at their end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Column, Table

from fedsim.api.logs import OnceFilter, listen
from fedsim.base.progress import listen_to_progress
from fedsim.cli.options import Sentence, console, new_table
from fedsim.cli.screen import PhaseDisplay, RoundFilter, VictimFilter
from fedsim.report.exposure import mean_quantities
from fedsim.report.score_ceilings import summarise_ceilings

if TYPE_CHECKING:
    from fedsim.api.pipeline import AuditResult
    from fedsim.audit.evaluation.empirical_epsilon import EpsilonComparison
    from fedsim.audit.evaluation.proved_ceilings import ProvedCeiling
    from fedsim.audit.plan import AttackJob
    from fedsim.report.next_steps import NextStep
    from fedsim.report.sweep_answer import SweepAnswer
    from fedsim.report.verdicts import ScoreReading

_STYLES = {"leaks": "bold red", "undecided": "yellow", "beyond the floor": "yellow"}


@contextmanager
def show_work(quiet: bool, verbose: bool) -> Iterator[Callable[[AttackJob, int, int, Mapping[str, float]], None]]:
    """Show the program's own log lines and progress; yields the function to call with the progress of each attack."""
    logger = logging.getLogger("fedsim")
    screen = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    screen.setFormatter(Sentence())
    if quiet:
        screen.setLevel(logging.ERROR)
    if not verbose:
        screen.addFilter(RoundFilter())
        screen.addFilter(VictimFilter())
    screen.addFilter(OnceFilter())
    with (
        PhaseDisplay(console) as phases,
        listen(logger, [screen], logging.DEBUG if verbose else logging.INFO),
        listen_to_progress(None if quiet else phases.show_progress),
    ):

        def follow(job: AttackJob, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
            phases.show_part(job.title, job.name, iteration, iterations)

        yield follow


def show_scores(done: AuditResult) -> None:
    """Print a table for each attack, and what the clients' defense is worth against each."""
    from fedsim.report.adaptive import merge_equal_attacks  # which takes seconds

    for attack, readings in groupby(merge_equal_attacks(done.readings), key=lambda reading: reading.summary.attack):
        console.print(score_table(attack, list(readings)))
    show_ceilings(done.ceilings)
    for remark in done.remarks:
        console.print(remark, markup=False, highlight=False)


def show_answer(done: AuditResult) -> None:
    """Print what leaked, how sure that is, at which accuracy, and what to do next."""
    if done.answer:
        console.print(done.answer, markup=False, highlight=False)
    show_next_steps(done.next_steps)


def show_sweep_answer(answer: SweepAnswer, steps: Sequence[NextStep]) -> None:
    """Print for each setting of a sweep what it is worth and its accuracy, and what to do next."""
    table = new_table("setting", "verdict", "accuracy,\n95 % interval", "difference to no defense", box=SIMPLE_HEAD)
    for row in answer.rows:
        table.add_row(*map(escape, (row.name, row.verdict, row.accuracy or "–", row.accuracy_change or "–")))
    if answer.rows:
        console.print(table)
    if answer.lead:
        console.print(answer.lead, markup=False, highlight=False)
    for sentence in [*answer.defense_limits, *answer.failures]:
        console.print(sentence, markup=False, highlight=False)
    show_next_steps(steps)


def show_next_steps(steps: Sequence[NextStep]) -> None:
    """Print what to do next; commands are not wrapped, so that they can be copied."""
    if steps:
        console.print("What next:")
    for step in steps:
        console.print(f"  {step.aim}:\n    {step.command}", markup=False, highlight=False, soft_wrap=True)


def show_epsilons(audited: Sequence[EpsilonComparison]) -> None:
    """Print the proved and the measured epsilon of clients with canaries, if there are any."""
    if not audited:
        return
    columns = "client", "defense", "proved: at most", "measured: at least", "right guesses"
    table = new_table(*columns, title="Epsilon", box=SIMPLE_HEAD)
    for item in audited:
        proved = f"{item.proved:.4g}" if math.isfinite(item.proved) else "nothing"
        style = "bold red" if item.is_broken else "default"
        table.add_row(
            "each" if item.client is None else str(item.client),
            escape(item.defense),
            proved,
            f"[{style}]{item.measured.epsilon:.4g}[/]",
            item.measured.evidence,
        )
    console.print(table)
    for item in audited:
        console.print(escape(f"{item.conclusion}."), highlight=False, soft_wrap=True)


def show_ceilings(ceilings: Sequence[ProvedCeiling]) -> None:
    """Print the scores that come nearest to their proved ceilings, if any ceiling is claimed."""
    summary = summarise_ceilings(ceilings)
    if all(item.reason for item in summary):
        return
    table = new_table("attack", "metric", "score", "ceiling", title="Proved ceilings", box=SIMPLE_HEAD)
    for item in summary:
        style = "bold red" if item.is_exceeded else "default"
        ceiling = f"none: {item.reason}" if item.reason else f"{item.ceiling:.4g}"
        table.add_row(escape(item.attack), item.metric, f"[{style}]{item.value:.4g}[/]", escape(ceiling))
    console.print(table)


def show_exposure(rows: Sequence[Mapping[str, Any]], when: str) -> None:
    """Print for each measure which clients and examples are exposed most and least, if anything was measured."""
    columns = "measure", "n", "most exposed", "least exposed"
    table = new_table(*columns, title=escape(f"Exposure {when}"), box=SIMPLE_HEAD)
    for item in [*mean_quantities(rows), *mean_quantities(rows, of_examples=True)]:
        ends = [(item.ranking[position], item.values[item.ranking[position]]) for position in (0, -1) if item.values]
        texts = [f"client {who[0]}{f', example {who[1]}' if who[1] else ''}: {value:.4g}" for who, value in ends]
        name = f"{escape(item.title)}\n[dim]{item.meaning}[/]"
        table.add_row(name, str(len(item.values)), *(texts or ("undefined", "undefined")))
    if table.rows:
        console.print(table)


def score_table(attack: str, readings: Sequence[ScoreReading]) -> Table:
    """Return a table of one attack's scores, the main one first, as on the page; narrow enough for 80 columns."""
    columns = Column("metric", no_wrap=True), "score,\n95 % interval", "n", "best guess", "verdict"
    table = new_table(*columns, title=escape(f"Scores of {attack}"), box=SIMPLE_HEAD)
    missing = []
    for reading in readings:
        item = reading.summary
        if item.missing:
            missing.append(f"{item.metric} {item.text}")
            continue
        score = item.interval_text.replace(" (", "\n(").replace(" ± ", "\n± ")
        count = item.count_text.removeprefix("n = ")
        floor = item.floor_text.replace(" (", " ").removesuffix(")")
        verdict = f"[{_STYLES.get(reading.verdict, 'default')}]{escape(reading.verdict)}[/]"
        # The answer below the tables says once why scores are in doubt.
        table.add_row(
            item.metric, *map(escape, (score, count, floor)), f"{verdict}\n[dim]{escape(reading.brief_remark)}[/]"
        )
    table.caption = escape("; ".join(missing))
    return table
