"""Command `fedsim compare`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from fedsim.base.grouping import group_by
from fedsim.cli.options import console, finish, new_table

if TYPE_CHECKING:
    from fedsim.api.comparing import Comparison
    from fedsim.report.differences import Difference


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders; the first is the base.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with pictures.")] = None,
) -> None:
    """Compare runs with the first one: settings that differ, accuracy, and scores paired by victim."""
    from fedsim.api.comparing import compare as compare_runs

    comparison = compare_runs(*runs)
    _show_settings(comparison)
    _show_quality(comparison)
    for name, differences in comparison.found.items():
        _show_scores(comparison, name, differences)
    if out is not None:
        console.print(f"page: {comparison.report(out).path}", soft_wrap=True, markup=False)
    finish(comparison.failures)


def _show_settings(comparison: Comparison) -> None:
    names = (side.name for side in comparison.sides)
    # Folded, because a key that is cut short names no setting.
    columns = [Column(escape(name)) for name in ("setting", *names)]
    table = new_table(*columns, title="Settings that differ", box=SIMPLE_HEAD)
    for key, values in comparison.differing_settings.items():
        table.add_row(escape(key), *("not set" if value is None else escape(str(value)) for value in values))
    if table.rows:
        console.print(table)
    for sentence in comparison.about_settings:
        _print_plain(sentence)


def _show_quality(comparison: Comparison) -> None:
    for side in comparison.sides:
        if side.quality:
            last = max(side.quality)
            _print_plain(f"{side.name}: {side.measured} {side.quality[last]:.4g} after round {last}")
        else:
            _print_plain(f"{side.name}: the server did not evaluate the model")


def _show_scores(comparison: Comparison, name: str, differences: Sequence[Difference]) -> None:
    from fedsim.report.differences import explain_equality
    from fedsim.report.summary import join_titles

    base = comparison.sides[0].name
    equality = explain_equality(differences)
    if equality:
        _print_plain(f"{name} compared with {base}: {equality}")
    else:
        for attack, items in group_by(differences, attrgetter("attack")).items():
            console.print(_score_table(attack, base, name, items))
    for run, attacks in zip((base, name), comparison.unshared_attacks(name), strict=True):
        if attacks:
            _print_plain(
                f"Only {run} has scores of: {join_titles(attacks)}. In the other run each of them failed, "
                "or was not made."
            )
    for sentence in comparison.incomparable_attacks(name):
        _print_plain(sentence)
    if not differences:
        _print_plain(f"{name} and {base} have scores of no attack in common")


def _score_table(attack: str, base: str, name: str, differences: Sequence[Difference]) -> Table:
    from fedsim.report.differences import difference_text, score_beside_floor

    table = new_table(
        Column("metric", no_wrap=True),
        escape(base),
        escape(name),
        "difference",
        Column("verdict"),
        title=escape(f"{attack}: {name} compared with {base}"),
        box=SIMPLE_HEAD,
    )
    missing = []
    for item in differences:
        if item.missing:
            missing.append(f"{item.base.metric}: {item.remark}")
            continue
        difference = difference_text(item).replace(" (", "\n(").replace(" ± ", "\n± ")
        scores = score_beside_floor(item.first, item.base), score_beside_floor(item.value, item.other)
        first, second = (score.replace(" (", "\n(") for score in scores)
        texts = item.base.metric, first, second, difference
        table.add_row(*map(escape, texts), f"{escape(item.verdict)}\n[dim]{escape(item.remark)}[/]")
    table.caption = escape("; ".join(missing))
    return table


def _print_plain(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
