"""What the screen shows while a command works, and the tables of scores at its end."""

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

from fedsim.cli.options import console, harmless
from fedsim.cli.screen import Phases, Seldom
from fedsim.progress import LOGGER
from fedsim.reporting.exposure import quantities
from fedsim.workflow.logs import Once, listening

if TYPE_CHECKING:
    from fedsim.auditing.plan import Job
    from fedsim.evaluation.empirical_epsilon import Epsilons
    from fedsim.reporting.summary import Line
    from fedsim.workflow.work import Done

_STYLES = {"leaks": "bold red", "undecided": "yellow", "beyond the floor": "yellow"}


@contextmanager
def shown(quiet: bool = False, verbose: bool = False) -> Iterator[Callable[[Job, int, int, Mapping[str, float]], None]]:
    """Show the program's own log lines and how far it is; the value is to be told how far each attack is."""
    logger, progress = logging.getLogger("fedsim"), logging.getLogger(LOGGER)
    screen = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    screen.setFormatter(_Sentence())
    if quiet:
        screen.setLevel(logging.ERROR)
    if not verbose:
        screen.addFilter(Seldom())
    screen.addFilter(Once())
    with (
        Phases(console) as phases,
        listening(logger, [screen], logging.DEBUG if verbose else logging.INFO),
        listening(progress, [] if quiet else [phases], logging.CRITICAL if quiet else logging.DEBUG),
    ):

        def follow(job: Job, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
            phases.part(job.title, job.name, iteration / max(iterations, 1))

        yield follow


def show_scores(done: Done) -> None:
    """Print a table for each attack, and what the clients' defense is worth against each."""
    from fedsim.reporting.adaptive import told_once  # which takes seconds

    for attack, found in groupby(told_once(done.lines), key=lambda line: line.summary.attack):
        console.print(score_table(attack, list(found)))
    for remark in done.remarks:
        console.print(remark, markup=False, highlight=False)


def show_epsilons(found: Sequence[Epsilons]) -> None:
    """Print what is proved and what is measured of the privacy of clients with canaries, if there are any."""
    if not found:
        return
    columns = "client", "defense", "proved: at most", "measured: at least", "right guesses"
    table = Table(*columns, title="Epsilon", box=SIMPLE_HEAD)
    for item in found:
        proved = f"{item.proved:.4g}" if math.isfinite(item.proved) else "nothing"
        style = "bold red" if item.broken else "default"
        guesses = f"{item.measured.right} of {item.measured.guesses}"
        table.add_row(
            str(item.client), escape(item.defense), proved, f"[{style}]{item.measured.epsilon:.4g}[/]", guesses
        )
    console.print(table)


def show_exposure(rows: Sequence[Mapping[str, Any]], when: str) -> None:
    """Print for each measure who is exposed most and least, of clients and of examples, if anything was measured."""
    columns = "measure", "n", "exposed most", "exposed least"
    table = Table(*columns, title=escape(f"Exposure {when}"), box=SIMPLE_HEAD)
    for item in [*quantities(rows), *quantities(rows, each=True)]:
        ends = [(item.ranked[place], item.values[item.ranked[place]]) for place in (0, -1) if item.values]
        told = [f"client {who[0]}{f', example {who[1]}' if who[1] else ''}: {value:.4g}" for who, value in ends]
        name = f"{escape(item.title)}\n[dim]{item.meaning}[/]"
        table.add_row(name, str(len(item.values)), *(told or ("undefined", "undefined")))
    if table.rows:
        console.print(table)


def score_table(attack: str, found: Sequence[Line]) -> Table:
    """One attack's scores, the main one first, in the words of the page; narrow enough for 80 columns."""
    columns = Column("metric", no_wrap=True), "score", "n", "best guess", "reading"
    table = Table(*columns, title=escape(f"What leaked to {attack}"), box=SIMPLE_HEAD)
    for line in found:
        item = line.summary
        if not item.missing:
            score = item.interval_text.replace(" [", "\n[").replace(" ± ", "\n± ")
            says = f"[{_STYLES.get(line.verdict, 'default')}]{escape(line.verdict)}[/]"
            texts = (score, item.count_text.removeprefix("n = "), item.floor_text.replace(" (", " ").removesuffix(")"))
            table.add_row(item.metric, *map(escape, texts), f"{says}\n[dim]{escape(line.remark)}[/]")
    missing = [f"{line.summary.metric} {line.summary.text}" for line in found if line.summary.missing]
    table.caption = escape("; ".join(missing))
    return table


class _Sentence(logging.Formatter):
    """A line for the screen; a traceback is for the file alone."""

    def format(self, record: logging.LogRecord) -> str:
        """The sentence alone."""
        return harmless(record.getMessage())
