"""Published figures of papers and our kept results: the files in `papers/` and `kept/`, checked as they are read."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import Field

from fedsim.api.reproduce.figures import Better, Figure, FigureVerdict, judge_figure, parse_figure
from fedsim.base.errors import ConfigError, did_you_mean
from fedsim.federation.table import Table
from fedsim.federation.table_validation import validate_tables

PACKAGE_FOLDER = Path(__file__).parent
FigureTable = Mapping[str, Mapping[str, Figure]]
"""Figures by row, then by quantity."""


class PublishedQuantity(Table):
    """Quantity of a paper's table.

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
    """Script that makes our figures again where no sweep does.

    Attributes:
        command: of the repository, without its arguments; the kept results have all of it.
        minutes: of one core, all tables that it makes; None where that was not written down.
    """

    command: str
    minutes: float | None = Field(default=None, gt=0)


class PublishedTable(Table):
    """Table or figure of a paper.

    Attributes:
        spread: what stands behind ± in the paper.
        differs: what differs in ours, whatever made it.
        quantities: by the names that rows use.
        rows: by the setting of the row, figures by quantity, as printed; none where attacks of several papers are
            compared.
        incomparable: why a row or a quantity, or "all", is not comparable with ours.
        more: ours may have rows that the paper does not have.
        script: what makes ours, where no sweep file of the table's name does.
    """

    title: str
    setting: str
    spread: str = ""
    differs: str = ""
    quantities: dict[str, PublishedQuantity]
    rows: dict[str, dict[str, str]] = Field(default_factory=dict)
    incomparable: dict[str, str] = Field(default_factory=dict)
    more: bool = False
    script: Script | None = None

    def published_figures(self, where: str) -> FigureTable:
        """Return the figures of the paper, those included that follow from two others."""
        rows = read_figures(self.rows, self.quantities, where)
        return {row: {**figures, **self._differences(figures)} for row, figures in rows.items()}

    def _differences(self, figures: Mapping[str, Figure]) -> dict[str, Figure]:
        differences = {}
        for name, quantity in self.quantities.items():
            if quantity.minus and name not in figures and set(quantity.minus) <= set(figures):
                first, second = quantity.minus
                differences[name] = _subtract(figures[first], figures[second])
        return differences


class PublishedPaper(Table):
    """Paper with those of its tables and figures that the available data allow for.

    Attributes:
        title: the name that the field uses for it.
        key: its key in the bibliography, `papers.bib`; empty for tables of our own, which compare attacks of several
            papers.
        table: its tables and figures by name.
    """

    title: str
    key: str = ""
    table: dict[str, PublishedTable]


class KeptResult(Table):
    """Our results for a paper's table.

    Attributes:
        name: what distinguishes it from other results for the same table.
        command: what makes them again.
        commit: of the repository, where the command names files that only this commit has.
        note: of the run: victims, hardware, what ± is.
        rows: as of the paper; quantities that it lacks may be there.
        reasons: by row, why an attack has no figures there, where attacks have rows of their own.
        why_missed: why figures miss the paper's, as far as that is known.
    """

    table: str
    name: str
    date: date
    command: str
    commit: str = ""
    note: str = ""
    rows: dict[str, dict[str, str]]
    reasons: dict[str, str] = Field(default_factory=dict)
    why_missed: str = ""


class Details(Table):
    """Table of our own that no paper has: `head` and lines of text."""

    name: str
    date: date
    command: str = ""
    commit: str = ""
    head: list[str]
    rows: list[list[str]]


class KeptFile(Table):
    """File of kept results."""

    paper: str
    kept: list[KeptResult] = Field(default_factory=list)
    details: list[Details] = Field(default_factory=list)


def format_kept(tables: Mapping[str, Any]) -> str:
    """Format the tables of a `KeptFile` as TOML, each row of a paper's table in one line.

    >>> kept = {"table": "table1", "rows": {"Adult, N = 1": {"psnr": "12.1", "ssim": "0.5"}}}
    >>> print(format_kept({"paper": "dlg", "kept": [kept]}))
    paper = "dlg"
    <BLANKLINE>
    [[kept]]
    table = "table1"
    <BLANKLINE>
    [kept.rows]
    "Adult, N = 1" = { psnr = "12.1", ssim = "0.5" }
    <BLANKLINE>
    """
    parts = [tomli_w.dumps({name: value for name, value in tables.items() if name not in ("kept", "details")})]
    for result in tables.get("kept", ()):
        values = {name: value for name, value in result.items() if not isinstance(value, Mapping)}
        parts.append("[[kept]]\n" + tomli_w.dumps(values))
        lines = ["[kept.rows]\n"]
        for row, figures in result["rows"].items():
            cells = ", ".join(tomli_w.dumps({name: figure}).strip() for name, figure in figures.items())
            name = tomli_w.dumps({row: ""}).removesuffix(' = ""\n')
            lines.append(f"{name} = {{ {cells} }}\n")
        parts.append("".join(lines))
        if result.get("reasons"):
            parts.append(f"[kept.reasons]\n{tomli_w.dumps(result['reasons'])}")
    for details in tables.get("details", ()):
        rows = [f"    {json.dumps(row, ensure_ascii=False)},\n" for row in details["rows"]]
        text = tomli_w.dumps(details | {"head": [], "rows": []})
        text = text.replace("head = []", f"head = {json.dumps(details['head'], ensure_ascii=False)}")
        parts.append("[[details]]\n" + text.replace("rows = []", f"rows = [\n{''.join(rows)}]"))
    return "\n".join(parts)


class FigureComparison(NamedTuple):
    """One of our figures with the paper's, where it has one."""

    row: str
    quantity: str
    paper: Figure | None
    ours: Figure
    verdict: FigureVerdict | None


def commit_sentence(results: Iterable[KeptResult | Details]) -> str:
    """Say that figures were made by another commit, whose files their command names; empty where they were not."""
    commits = dict.fromkeys(result.commit for result in results if result.commit)
    return f"Made by commit {' and '.join(commits)}, whose files the command names." if commits else ""


def read_figures(
    rows: Mapping[str, Mapping[str, str]], known: Mapping[str, PublishedQuantity], where: str
) -> FigureTable:
    """Parse all figures of a table."""
    for row, texts in rows.items():
        for unknown in texts.keys() - known.keys():
            raise ConfigError(f"{where}: {row}: no quantity is called '{unknown}', {did_you_mean(unknown, known)}")
    return {
        row: {name: parse_figure(text, f"{where}: {row}: {name}") for name, text in texts.items()}
        for row, texts in rows.items()
    }


def _subtract(first: Figure, second: Figure) -> Figure:
    """Return a difference without an interval: a paper does not say whether the two figures vary together."""
    value = (first.value or 0.0) - (second.value or 0.0)
    return parse_figure(f"{value:+.{max(first.decimals, second.decimals)}f}", "a difference")


@cache
def read_papers() -> Mapping[str, PublishedPaper]:
    """Return all papers by name."""
    return {
        path.stem: validate_tables(PublishedPaper, read_toml(path), path.name)
        for path in sorted(PACKAGE_FOLDER.glob("papers/*.toml"))
    }


@cache
def read_results() -> Mapping[str, KeptFile]:
    """Return all kept results by paper."""
    files: dict[str, KeptFile] = {name: KeptFile(paper=name) for name in read_papers()}
    for path in sorted(PACKAGE_FOLDER.glob("kept/*.toml")):
        file = validate_tables(KeptFile, read_toml(path), path.name)
        if file.paper not in files:
            raise ConfigError(f"{path.name}: no paper is called '{file.paper}', {did_you_mean(file.paper, files)}")
        for kept in file.kept:
            if kept.table not in read_papers()[file.paper].table:
                meant = did_you_mean(kept.table, read_papers()[file.paper].table)
                raise ConfigError(f"{path.name}: no table of {file.paper} is called '{kept.table}', {meant}")
        before = files[file.paper]
        files[file.paper] = KeptFile(
            paper=file.paper, kept=before.kept + file.kept, details=before.details + file.details
        )
    return files


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a file of this package, dates as text."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    return _dates_as_text(tables)


def _dates_as_text(tables: dict[str, Any]) -> dict[str, Any]:
    """Convert TOML's dates to text, since the check reads JSON."""

    def convert(value: object) -> object:
        if isinstance(value, dict):
            return {key: convert(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [convert(inner) for inner in value]
        return str(value) if isinstance(value, date) else value

    return {key: convert(value) for key, value in tables.items()}


def find_tables(name: str) -> list[tuple[str, str]]:
    """Return paper and table of `sme`, `sme/table2-femnist`, or `sme/table2`: all tables whose names begin so."""
    paper, _, table = name.partition("/")
    if paper not in read_papers():
        raise ConfigError(f"reproduce: no paper is called '{paper}', {did_you_mean(paper, read_papers())}")
    tables = read_papers()[paper].table
    matches = [table_name for table_name in tables if table in ("", table_name)]
    if not matches:
        matches = [table_name for table_name in tables if table_name.startswith(f"{table}-")]
    if not matches:
        # The nearest name would be that of another table: their names differ by numbers.
        raise ConfigError(
            f"reproduce: no table of {paper} that fedsim has is called '{table}', known: {', '.join(tables)}"
        )
    return [(paper, table_name) for table_name in matches]


def compare_figures(
    paper: str, table: str, rows: Mapping[str, Mapping[str, str]], where: str
) -> list[FigureComparison]:
    """Compare our figures with the paper's, in the order of the paper's rows and quantities."""
    published_table = read_papers()[paper].table[table]
    published = published_table.published_figures(f"{paper}.toml: {table}")
    for unknown in () if published_table.more else rows.keys() - published_table.rows.keys():
        meant = did_you_mean(unknown, published_table.rows)
        raise ConfigError(f"{where}: no row of {paper}/{table} is '{unknown}', {meant}")
    ours = read_figures(rows, published_table.quantities, where)
    comparisons = []
    for row in dict.fromkeys([*published_table.rows, *rows]):
        for name in published_table.quantities:
            if name in ours.get(row, {}):
                paper_figure = published.get(row, {}).get(name)
                comparisons.append(_compare(published_table, row, name, paper_figure, ours[row][name]))
    return comparisons


def _compare(table: PublishedTable, row: str, name: str, paper: Figure | None, ours: Figure) -> FigureComparison:
    quantity = table.quantities[name]
    if paper is None:
        verdict = None
    elif table.incomparable.keys() & {"all", row, name}:
        verdict = FigureVerdict.NOT_COMPARABLE
    else:
        verdict = judge_figure(ours, paper, quantity.tolerance, quantity.better)
    return FigureComparison(row, name, paper, ours, verdict)


def count_verdicts(paper: str, results: Iterable[KeptResult]) -> str:
    """Count how many figures of some results are met, missed and not comparable, in words."""
    counts = Counter[FigureVerdict | None]()
    for kept in results:
        where = f"kept: {paper}/{kept.table}: {kept.name}"
        counts.update(comparison.verdict for comparison in compare_figures(paper, kept.table, kept.rows, where))
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in FigureVerdict if counts[verdict])
