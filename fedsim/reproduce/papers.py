"""What the papers print, and what we got: the files in `papers/` and `kept/`, checked as they are read."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from fedsim.errors import ConfigError, did_you_mean
from fedsim.experiments.config import Table, check
from fedsim.reproduce.figures import Better, Figure, Verdict, figure, judged

HERE = Path(__file__).parent
Figures = Mapping[str, Mapping[str, Figure]]
"""By row, then by quantity."""


class Quantity(Table):
    """A quantity of a paper's table.

    Attributes:
        title: what a reader sees, with the unit.
        better: figures as good as the paper's are higher, lower, or near it on either side.
        tolerance: by how much ours may fall short, in the unit of the quantity.
        minus: two quantities, of which this is the first minus the second, where the paper does not print it itself.
    """

    title: str
    better: Better = "higher"
    tolerance: float = Field(default=0.0, ge=0)
    minus: tuple[str, str] | None = None


class Script(Table):
    """What makes our figures again where no sweep does.

    Attributes:
        command: of the repository, without its arguments; the kept results have all of it.
        minutes: of one core, all tables that it makes; None where that was not written down.
    """

    command: str
    minutes: float | None = Field(default=None, gt=0)


class PublishedTable(Table):
    """A table or figure of a paper.

    Attributes:
        title: its number and what it is about.
        setting: the paper's setting.
        spread: what stands behind ± in the paper.
        differs: what differs in ours, whatever made it.
        quantities: by the names that rows use.
        rows: by the setting of the row, figures by quantity, as printed.
        incomparable: why a row or a quantity, or "all", is not comparable with ours.
        more: ours may have rows that the paper does not have.
        script: what makes ours, where no sweep file of the table's name does.
    """

    title: str
    setting: str
    spread: str = ""
    differs: str = ""
    quantities: dict[str, Quantity]
    rows: dict[str, dict[str, str]]
    incomparable: dict[str, str] = Field(default_factory=dict)
    more: bool = False
    script: Script | None = None

    def published(self, where: str) -> Figures:
        """The figures of the paper, those included that follow from two others."""
        rows = read_figures(self.rows, self.quantities, where)
        return {row: {**figures, **self._differences(figures)} for row, figures in rows.items()}

    def _differences(self, figures: Mapping[str, Figure]) -> dict[str, Figure]:
        pairs = {name: quantity.minus for name, quantity in self.quantities.items() if quantity.minus}
        return {
            name: _minus(figures[pair[0]], figures[pair[1]])
            for name, pair in pairs.items()
            if name not in figures and set(pair) <= set(figures)
        }


class Paper(Table):
    """A paper, with those of its tables and figures that data at hand allow for."""

    title: str
    cite: str
    table: dict[str, PublishedTable]


class Kept(Table):
    """What we got in the place of a paper's table.

    Attributes:
        table: the name of the paper's table.
        name: what tells it from other results for the same table.
        date: the day on which the figures were written down.
        command: what makes them again.
        note: of the run: victims, hardware, what ± is.
        rows: as of the paper; quantities that it lacks may be there.
    """

    table: str
    name: str
    date: date
    command: str
    note: str = ""
    rows: dict[str, dict[str, str]]


class Details(Table):
    """A table of our own that no paper has: `head` and lines of text."""

    name: str
    date: date
    command: str = ""
    head: list[str]
    rows: list[list[str]]


class KeptFile(Table):
    """A file of results."""

    paper: str
    kept: list[Kept] = Field(default_factory=list)
    details: list[Details] = Field(default_factory=list)


class Compared(NamedTuple):
    """One figure of ours beside the paper's, where it has one."""

    row: str
    quantity: str
    paper: Figure | None
    ours: Figure
    verdict: Verdict | None


def read_figures(rows: Mapping[str, Mapping[str, str]], known: Mapping[str, Quantity], where: str) -> Figures:
    """Parse all figures of a table.

    Raises:
        ConfigError: a quantity that the table does not declare, or no figure.
    """
    for row, texts in rows.items():
        for strange in texts.keys() - known.keys():
            raise ConfigError(f"{where}: {row}: no quantity is called '{strange}', {did_you_mean(strange, known)}")
    return {
        row: {name: figure(text, f"{where}: {row}: {name}") for name, text in texts.items()}
        for row, texts in rows.items()
    }


def _minus(first: Figure, second: Figure) -> Figure:
    """No interval: whether the two vary together, a paper does not say."""
    value = (first.value or 0.0) - (second.value or 0.0)
    return figure(f"{value:+.{max(first.decimals, second.decimals)}f}", "a difference")


@cache
def papers() -> Mapping[str, Paper]:
    """All papers by name."""
    return {path.stem: check(Paper, read_toml(path), path.name) for path in sorted(HERE.glob("papers/*.toml"))}


@cache
def results() -> Mapping[str, KeptFile]:
    """All kept results by paper.

    Raises:
        ConfigError: a file that names no paper or no table of it.
    """
    found: dict[str, KeptFile] = {name: KeptFile(paper=name) for name in papers()}
    for path in sorted(HERE.glob("kept/*.toml")):
        file = check(KeptFile, read_toml(path), path.name)
        if file.paper not in found:
            raise ConfigError(f"{path.name}: no paper is called '{file.paper}', {did_you_mean(file.paper, found)}")
        for kept in file.kept:
            if kept.table not in papers()[file.paper].table:
                meant = did_you_mean(kept.table, papers()[file.paper].table)
                raise ConfigError(f"{path.name}: no table of {file.paper} is called '{kept.table}', {meant}")
        before = found[file.paper]
        found[file.paper] = KeptFile(
            paper=file.paper, kept=before.kept + file.kept, details=before.details + file.details
        )
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file of this package, days as text.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    return _days_as_text(tables)


def _days_as_text(tables: dict[str, Any]) -> dict[str, Any]:
    """With TOML's dates as text, for the check reads JSON."""

    def of(value: object) -> object:
        if isinstance(value, dict):
            return {key: of(inner) for key, inner in value.items()}
        return (
            [of(inner) for inner in value]
            if isinstance(value, list)
            else str(value)
            if isinstance(value, date)
            else value
        )

    return {key: of(value) for key, value in tables.items()}


def chosen(name: str) -> list[tuple[str, str]]:
    """Paper and table of `sme`, `sme/table2-femnist`, or `sme/table2`, which are all whose names begin so.

    Raises:
        ConfigError: nobody published it.
    """
    paper, _, table = name.partition("/")
    if paper not in papers():
        raise ConfigError(f"reproduce: no paper is called '{paper}', {did_you_mean(paper, papers())}")
    known = papers()[paper].table
    found = [other for other in known if table in ("", other)] or [o for o in known if o.startswith(f"{table}-")]
    if not found:
        # The nearest name would be that of another table: their names differ by numbers.
        raise ConfigError(
            f"reproduce: no table of {paper} that fedsim has is called '{table}', known: {', '.join(known)}"
        )
    return [(paper, other) for other in found]


def compared(paper: str, table: str, rows: Mapping[str, Mapping[str, str]], where: str) -> list[Compared]:
    """Ours beside the paper's, in the order of the paper's rows and quantities.

    Raises:
        ConfigError: a row or a quantity that the paper's table does not have.
    """
    asked = papers()[paper].table[table]
    published = asked.published(f"{paper}.toml: {table}")
    for strange in () if asked.more else rows.keys() - asked.rows.keys():
        raise ConfigError(f"{where}: no row of {paper}/{table} is '{strange}', {did_you_mean(strange, asked.rows)}")
    ours = read_figures(rows, asked.quantities, where)
    return [
        _beside(asked, row, name, published.get(row, {}).get(name), ours[row][name])
        for row in dict.fromkeys([*asked.rows, *rows])
        for name in asked.quantities
        if name in ours.get(row, {})
    ]


def _beside(asked: PublishedTable, row: str, name: str, paper: Figure | None, ours: Figure) -> Compared:
    quantity = asked.quantities[name]
    if paper is None:
        verdict = None
    elif asked.incomparable.keys() & {"all", row, name}:
        verdict = Verdict.NOT_COMPARABLE
    else:
        verdict = judged(ours, paper, quantity.tolerance, quantity.better)
    return Compared(row, name, paper, ours, verdict)


def verdicts(paper: str, results: Iterable[Kept]) -> str:
    """How many figures of some results are met, missed and not comparable, in words."""
    count = Counter(
        beside.verdict
        for kept in results
        for beside in compared(paper, kept.table, kept.rows, f"kept: {paper}/{kept.table}: {kept.name}")
    )
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict if count[verdict])
