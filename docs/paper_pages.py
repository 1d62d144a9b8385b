"""Writes studies/papers/*.md, studies/paper-numbers.md and reference/bibliography.md: `python docs/paper_pages.py`.

A test sees that they are up to date. Figures come from `fedsim/api/reproduce/papers` (what is
published) and `fedsim/api/reproduce/kept` (what we got), citations from `fedsim/base/papers.bib`,
words from the templates `studies/papers/*.md.j2`, in which `setting`, `comparison` and `details` stand for
tables. Figures in `kept/` that follow from the rows of studies are written by
`python -m studies lavp angular lmra lmra_defenses lmra_models --write`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from fedsim.api.reproduce.figures import FigureVerdict, difference_text
from fedsim.api.reproduce.papers import (
    Details,
    FigureComparison,
    KeptResult,
    PublishedPaper,
    PublishedTable,
    commit_sentence,
    compare_figures,
    count_verdicts,
    read_papers,
    read_results,
)
from fedsim.api.reproduce.recipes import describe_reproduction, find_recipe
from fedsim.base.errors import ConfigError, join_first
from fedsim.base.papers import cite, read_bibliography

DOCS = Path(__file__).parent
PAPERS = DOCS / "studies" / "papers"
INDEX = DOCS / "studies" / "paper-numbers.md"
BIBLIOGRAPHY = DOCS / "reference" / "bibliography.md"
BIBLIOGRAPHY_HEAD = """<!-- Written by `python docs/paper_pages.py` from fedsim/base/papers.bib. -->
# Bibliography

What fedsim builds on. Docstrings cite a paper by its key, as in `[Zhu2019], Sect. 4`; a report has the BibTeX of the
papers that its run used.
"""
WRITTEN = "<!-- Written by `python docs/paper_pages.py`; words are in {}.md.j2, figures in fedsim/api/reproduce. -->\n"
HEAD = """# Reproduction of published figures

Each page has a paper's tables and figures, as far as the available data allow: the published figure, ours, the
difference, and a verdict by a tolerance that was written down with the published figure. **Met** means equal up to the
tolerance. *Above* means better by more than the tolerance, which points to another setting and is no reproduction.
**Missed** figures are kept, with the reason as far as we know it. *Not comparable* are figures whose setting differs by
too much; the page says how. Every result has the command that repeats it.

`fedsim reproduce` lists the same tables, `fedsim reproduce PAPER/TABLE` shows one and, with `--scale quick` or `full`,
runs it; finished runs are not repeated. The other tables are made by a study of `studies/`. If figures come from files
that only an older commit has, their page names the commit.

**All {count} quick runs together take about {minutes} minutes of one core, the longest {longest}**, and less on two
cores, which run cells in parallel. The targets are two hours on two cores, and 15 minutes for each. These are sums of
processor time (user and system) on a shared EPYC of two cores, without a GPU, as are the times of scripts; those of
full runs are estimates from it. Wall time on a busy machine is longer.
"""
TABLES = [(name, table) for name, paper in read_papers().items() for table in paper.table]
Found = Mapping[tuple[str, str], FigureComparison]
"""By row and quantity."""
WIDEST = 6
"""Quantities that have a column each; more have a line each."""
SHOWN = {
    FigureVerdict.MET: "met",
    FigureVerdict.ABOVE: "*above*",
    FigureVerdict.MISSED: "**missed**",
    FigureVerdict.NOT_COMPARABLE: "not comparable",
}


class Page:
    """The tables of one paper's page, and which of its results have been shown."""

    def __init__(self, name: str) -> None:
        self.name, self.paper, self.results = name, read_papers()[name], read_results()[name]
        self.shown: set[tuple[str, str]] = set()

    def setting(self, table: str) -> str:
        """What the paper did, and what differs in ours."""
        asked = self.paper.table[table]
        parts = [f"*{'In the paper' if asked.rows else 'Setting'}:* {asked.setting}."]
        parts += [f"± is the {asked.spread}."] if asked.spread else []
        parts += [f"*What differs:* {asked.differs.strip()}"] if asked.differs else []
        reasons = dict.fromkeys(asked.incomparable.values())
        parts += [f"*Not comparable:* {'; '.join(map(self._reason(asked), reasons))}."] if reasons else []
        return textwrap.fill(" ".join(parts), 120, break_long_words=False, break_on_hyphens=False)

    @staticmethod
    def _reason(asked: PublishedTable) -> Callable[[str], str]:
        """What is not comparable for one reason, with the reason."""

        def name_reason(reason: str) -> str:
            names = [name for name, why in asked.incomparable.items() if why == reason]
            titles = [asked.quantities[name].title if name in asked.quantities else name for name in names]
            return f"{join_first(titles, 6)} ({reason})"

        return name_reason

    def comparison(self, table: str, *names: str, commands: bool = True) -> str:
        """The paper's figures beside those of some results for the table, or of all; notes and commands below."""
        chosen = [kept for kept in self.results.kept if kept.table == table and kept.name in (names or (kept.name,))]
        if len(chosen) < max(len(names), 1):
            raise ConfigError(f"{self.name}.md.j2: {table}: expected results called {names or 'anything'}")
        self.shown |= {(table, kept.name) for kept in chosen}
        lines = [*self._compared(table, chosen), "", *_notes(chosen)]
        return "\n".join([*lines, *(_commands(chosen) if commands else ())]).strip()

    def details(self, name: str) -> str:
        """A table of our own."""
        found = next((other for other in self.results.details if other.name == name), None)
        if found is None:
            raise ConfigError(f"{self.name}.md.j2: there is no table '{name}' in kept/")
        self.shown.add(("", name))
        return "\n".join([*_table(found.head, found.rows), *(["", *_commands([found])] if found.command else [])])

    def _compared(self, table: str, chosen: Sequence[KeptResult]) -> list[str]:
        found = {kept.name: {(one.row, one.quantity): one for one in self.compared(kept)} for kept in chosen}
        every = {place: one for column in found.values() for place, one in column.items()}
        rows = list(dict.fromkeys([*self.paper.table[table].rows, *(row for row, _ in every)]))
        titles = {name: of.title for name, of in self.paper.table[table].quantities.items()}
        titles = {name: title for name, title in titles.items() if any(name == shown for _, shown in every)}
        if not self.paper.table[table].rows:
            return [line for kept in chosen for line in (*_by_attack(kept, titles), "")]
        return (_wide if len(titles) <= WIDEST else _long)(found, every, rows, titles)

    def compared(self, kept: KeptResult) -> list[FigureComparison]:
        """Ours beside the paper's."""
        return compare_figures(self.name, kept.table, kept.rows, f"kept: {self.name}: {kept.table}: {kept.name}")

    def text(self) -> str:
        """The whole page.

        Raises:
            ConfigError: a result that the template does not show.
        """
        template = (PAPERS / f"{self.name}.md.j2").read_text(encoding="utf-8")
        made = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True).from_string(
            template
        )
        text = made.render(
            cite=cite(self.paper.key) if self.paper.key else "",
            title=lambda table: self.paper.table[table].title,
            measured=dict.fromkeys(kept.table for kept in self.results.kept),
            setting=self.setting,
            comparison=self.comparison,
            details=self.details,
        )
        every = {(k.table, k.name) for k in self.results.kept} | {("", d.name) for d in self.results.details}
        if left := every - self.shown:
            raise ConfigError(f"{self.name}.md.j2: shows no {sorted(left)}")
        return WRITTEN.format(self.name) + text


def _long(found: Mapping[str, Found], every: Found, rows: Sequence[str], titles: Mapping[str, str]) -> list[str]:
    """A line for each figure of the paper, a column for each result."""
    lines, before = [], ""
    for row, name in product(rows, titles):
        if (row, name) in every:
            cells = [_cell(column.get((row, name))) for column in found.values()]
            lines.append(["" if row == before else row, titles[name], _paper(every[row, name]), *cells])
            before = row
    return _table(["", "", "paper", *(f"ours: {name}" for name in found)], lines)


def _wide(found: Mapping[str, Found], every: Found, rows: Sequence[str], titles: Mapping[str, str]) -> list[str]:
    """A line for the paper and one for each result, a column for each quantity."""
    lines = []
    for row in rows:
        of_row = {name: every[row, name] for name in titles if (row, name) in every}
        if not of_row:
            continue
        paper = [_paper(of_row[name]) if name in of_row else "" for name in titles]
        ours = [
            ["", f"ours: {result}", *(_cell(column.get((row, name))) for name in titles)]
            for result, column in found.items()
            if any((row, name) in column for name in titles)
        ]
        both = [["", "paper", *paper], *ours] if any(paper) else ours
        both[0][0] = row
        lines += both
    return _table(["", "", *titles.values()], lines)


def _by_attack(kept: KeptResult, titles: Mapping[str, str]) -> list[str]:
    """A line for each attack, with the reason where it has no figures; attacks of a setting stand together."""
    lines = {row: [row, *(texts.get(name, "") for name in titles)] for row, texts in kept.rows.items()}
    lines |= {row: [row, reason, *[""] * (len(titles) - 1)] for row, reason in kept.reasons.items()}
    settings = list(dict.fromkeys(row.partition(": ")[0] for row in lines))
    ordered = sorted(lines.values(), key=lambda line: settings.index(line[0].partition(": ")[0]))
    return _table([kept.name, *titles.values()], ordered)


def _paper(one: FigureComparison) -> str:
    return one.paper.text if one.paper else ""


def _cell(one: FigureComparison | None) -> str:
    if one is None or one.paper is None or one.verdict is None:
        return one.ours.text if one else ""
    return f"{one.ours.text}; {', '.join(filter(None, [difference_text(one.ours, one.paper), SHOWN[one.verdict]]))}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _notes(chosen: Sequence[KeptResult]) -> Iterator[str]:
    for kept in chosen:
        yield from [f"*{kept.name}* ({kept.date}): {kept.note.strip() or 'as above.'}", ""]
        if kept.why_missed:
            yield from [f"*Missed* by {kept.name}: {kept.why_missed}.", ""]


def _commands(chosen: Sequence[KeptResult | Details]) -> list[str]:
    lines = ["```sh", *dict.fromkeys(one.command.strip() for one in chosen), "```"]
    return [*lines, "", sentence] if (sentence := commit_sentence(chosen)) else lines


def index() -> str:
    """The page that leads to all papers."""
    quick = [made.recipe.quick.minutes for place in TABLES if (made := find_recipe(*place))]
    parts = [HEAD.format(count=len(quick), minutes=f"{sum(quick):.0f}", longest=f"{max(quick):.0f}")]
    for name, paper in read_papers().items():
        origin = cite(paper.key) if paper.key else "Tables of our own, which compare attacks of several papers."
        parts.append(f"\n## [{paper.title}](papers/{name}.md)\n\n{origin}\n\n" + "\n".join(_result_table(name, paper)))
    return WRITTEN.format("papers/*") + "\n".join(parts) + "\n"


def _result_table(name: str, paper: PublishedPaper) -> list[str]:
    rows = []
    for table, published in paper.table.items():
        kept = [one for one in read_results()[name].kept if one.table == table]
        quick = [one for one in kept if one.name == "quick"]
        others = [one for one in kept if one not in quick]
        latest = str(max(one.date for one in kept)) if kept else "not measured"
        counts = count_verdicts(name, others), count_verdicts(name, quick)
        rows.append([f"`{name}/{table}`", published.title, latest, *counts, describe_reproduction(name, table)])
    return _table(["", "", "last result", "kept", "quick run", "reproduced by"], rows)


def format_bibliography() -> str:
    """Write out all papers that fedsim builds on, each under its key."""
    sections = [BIBLIOGRAPHY_HEAD]
    for key, paper in read_bibliography().items():
        address = f" <{paper.url}>" if paper.url else ""
        sections.append(f"## {key}\n\n{paper}{address}\n")
    return "\n".join(sections)


def pages() -> dict[Path, str]:
    """Every page by its place."""
    of_papers = {PAPERS / f"{name}.md": Page(name).text() for name in read_papers()}
    return {INDEX: index(), BIBLIOGRAPHY: format_bibliography(), **of_papers}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
