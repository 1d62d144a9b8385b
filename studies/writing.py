"""Write what follows from the rows of studies: tables of docs/, pictures, and figures beside published ones."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import rankdata

from fedsim.api.reproduce.papers import PACKAGE_FOLDER, format_kept
from fedsim.audit.evaluation.statistics import mean_and_margin
from studies.running import PivotTable, Study, matches, read_rows

DOCS = Path(__file__).parent.parent / "docs"
KEPT_HEAD = "# Written by `python -m studies {} --write` out of studies/{}.\n"


def write_study(study: Study, *, pictures: bool) -> None:
    """Write all that follows from the rows of a study."""
    for page, marked in page_tables(study).items():
        text = page.read_text(encoding="utf-8")
        for name, table in marked.items():
            text = replace_marked(text, name, table)
        page.write_text(text, encoding="utf-8")
    if hasattr(study.module, "figures"):
        tables = study.module.figures()
        path = computed_file(study.name)
        path.write_text(KEPT_HEAD.format(study.name, study.name) + format_kept(add_kept_words(path, tables)))
    if pictures and hasattr(study.module, "draw"):
        study.module.draw(read_rows(study.results))


def page_tables(study: Study) -> dict[Path, dict[str, str]]:
    """Return the tables of a study, by page and by the name in the marks."""
    rows, pages = read_rows(study.results), defaultdict[Path, dict[str, str]](dict)
    for table in study.file.table:
        pages[DOCS / table.page][f"{study.name} {table.name}".strip()] = pivot(table, study.file.titles, rows)
    if hasattr(study.module, "tables"):
        for name, text in study.module.tables(rows).items():
            pages[DOCS / study.file.page][f"{study.name} {name}".strip()] = text.strip()
    return pages


def replace_marked(text: str, name: str, table: str) -> str:
    r"""Put a table between the two marks of a page.

    >>> replace_marked("a <!-- study x: begin --> <!-- study x: end --> b", "x", "new")
    'a <!-- study x: begin -->\n\nnew\n\n<!-- study x: end --> b'
    """
    begin, end = f"<!-- study {name}: begin -->", f"<!-- study {name}: end -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no place for the table; write '{begin}' and '{end}' where it belongs")
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]], align: str = "---") -> str:
    """Format a table in Markdown; signs of zeros go, see `drop_signs_of_zero`.

    >>> print(markdown_table(["a", "b"], [["1", "-0.0"]]))
    | a | b |
    |---|---|
    | 1 | 0.0 |
    """
    cells = [head, *([drop_signs_of_zero(text) for text in line] for line in lines)]
    first, *body = (re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in cells)
    return "\n".join([first, f"|{f'{align}|' * len(head)}", *body])


def drop_signs_of_zero(text: str) -> str:
    """Take the signs from figures that are rounded to zero, except in an interval that leaves out zero.

    >>> drop_signs_of_zero("-0.00 (-0.03, +0.00), +0.0 ± 0.2, 1e-05")
    '0.00 (-0.03, 0.00), 0.0 ± 0.2, 1e-05'
    >>> drop_signs_of_zero("-0.03 (-0.06, -0.00)")
    '-0.03 (-0.06, -0.00)'
    """
    same_signs = r"[(\[](?:\+[\d.]+(?:, | to )\+|-[\d.]+(?:, | to )-)[\d.]+[)\]]"
    sign_of_zero = r"(?<![\w.])[+-](?=0(?:\.0+)?(?!\d|\.\d))"
    return re.sub(f"({same_signs})|{sign_of_zero}", r"\1", text)


def pivot(table: PivotTable, titles: Mapping[str, str], rows: Iterable[Mapping[str, str]]) -> str:
    """Format means over clients and seeds, a line and a column for each value; empty where nothing was measured."""
    means: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[str, str], float]] = {}
    floor = (table.floor,)
    for row in rows:
        line, column = (tuple(row.get(name, "") for name in names) for names in (table.lines, table.across))
        if not matches(row, table.where) or {*line, *column} & {*table.hide}:
            continue
        who = (row[table.client], row["seed"])
        means.setdefault((line, column), {})[who] = float(row["value"])
        if table.floor:
            # Attacks on the same victims have the same floor; where they do not, the first one's is shown.
            place = (floor, column) if table.floor_is_a_line else (line, floor)
            means.setdefault(place, {}).setdefault(who, float(row["floor"]))
    order = [table.floor, *titles]

    def rank(names: tuple[str, ...]) -> list[int]:
        return [order.index(name) if name in order else len(order) for name in names]

    def title(names: Iterable[str]) -> str:
        return ", ".join(filter(None, (titles.get(name, name) for name in names)))

    columns = sorted(dict.fromkeys(column for _, column in means), key=rank)
    lines = []
    for line in sorted(dict.fromkeys(line for line, _ in means), key=rank):
        cells = [format_mean(means[line, column]) if (line, column) in means else "" for column in columns]
        lines.append([*(title([name]) for name in line), *cells])
    return markdown_table([*table.lines.values(), *map(title, columns)], lines)


def format_mean(values: Mapping[tuple[str, str], float]) -> str:
    """Return the text `mean ± margin`, see `mean_and_margin`."""
    centre, margin = mean_and_margin(values)
    return f"{centre:.3f} ± {margin:.3f}" if margin else f"{centre:.3f}"


def add_kept_words(path: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """Add to each result what is not computed: its day, and why it misses the paper's figures.

    The day is that in the file if its figures are the same, else today. The reason was written there by hand.
    """
    before = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    today = datetime.datetime.now(tz=datetime.UTC).date()
    for part in ("kept", "details"):
        for result in tables.get(part, ()):
            of_name = [old for old in before.get(part, ()) if _has_equal(old, result, "table", "name")]
            if reason := next((old["why_missed"] for old in of_name if "why_missed" in old), ""):
                result["why_missed"] = reason
            same = (old["date"] for old in of_name if _has_equal(old, result, "head", "rows"))
            result["date"] = next(same, today)
    return tables


def _has_equal(first: Mapping[str, Any], second: Mapping[str, Any], *names: str) -> bool:
    return all(first.get(name) == second.get(name) for name in names)


def computed_file(study: str) -> Path:
    """Return the file of the figures that a study computes for a paper's tables."""
    return PACKAGE_FOLDER / "kept" / f"{study.replace('_', '-')}-computed.toml"


def computed_part(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result in a file as it is computed."""
    return {key: value for key, value in result.items() if key not in ("date", "why_missed")}


def kept_result(table: str, name: str, command: str, rows: Mapping[str, Any], note: str) -> dict[str, Any]:
    """Return our results for a paper's table, as they stand in fedsim/api/reproduce/kept."""
    return {"table": table, "name": name, "command": command, "note": note, "rows": rows}


def kept_details(name: str, command: str, head: list[str], lines: list[list[str]]) -> dict[str, Any]:
    """Return a table of ours that no paper has, as it stands there."""
    return {"name": name, "command": command, "head": head, "rows": lines}


def select_rows(rows: Iterable[Mapping[str, str]], **wanted: object) -> list[Mapping[str, str]]:
    """Return the rows that have all wanted values.

    >>> select_rows([{"seed": "1"}, {"seed": "2"}], seed=2)
    [{'seed': '2'}]
    """
    return [row for row in rows if matches(row, wanted)]


def group_rows(rows: Iterable[Mapping[str, str]], *columns: str) -> dict[tuple[str, ...], list[Mapping[str, str]]]:
    """Return the rows by what they have in these columns, in the order of the first of each.

    >>> group_rows([{"seed": "1"}, {"seed": "2"}], "seed")
    {('1',): [{'seed': '1'}], ('2',): [{'seed': '2'}]}
    """
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in columns), []).append(row)
    return groups


def column_values(rows: Iterable[Mapping[str, str]], name: str) -> NDArray[np.float64]:
    """Return the numbers of a column; an empty one, of what was refused, counts as nothing."""
    return np.array([float(row[name] or 0) for row in rows])


def draw_places(count: int, times: int, seed: int = 0) -> NDArray[np.int64]:
    """Return all places in a line, below it lines of as many places drawn anew: a bootstrap."""
    drawn = np.random.default_rng(seed).integers(count, size=(times, count))
    return np.concatenate([np.arange(count)[None], drawn])


def format_drawn(values: NDArray[np.float64], form: str = "{:+.2f} ({:+.2f} to {:+.2f})") -> str:
    """Format the value of all, and where 95 % of those drawn anew are; a draw may have no value.

    >>> format_drawn(np.array([-0.001, -0.2, -0.2]))
    '0.00 (-0.20 to -0.20)'
    """
    low, high = np.nanquantile(values[1:], (0.025, 0.975))
    # A lower end that is 0 to the last digit is written as -0, for such an interval does not leave out zero.
    return drop_signs_of_zero(form.format(values[0], low or -0.0, high))


def spearman_of_rows(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlation of the ranks in each row, leaving out what is NaN in either; NaN where all are equal."""
    known = ~np.isnan(first) & ~np.isnan(second)
    centred = []
    for values in (first, second):
        ranks = np.where(known, rankdata(np.where(known, values, np.inf), axis=1), np.nan)
        centred.append(ranks - np.nanmean(ranks, 1, keepdims=True))
    squares = np.nansum(centred[0] ** 2, 1) * np.nansum(centred[1] ** 2, 1)
    return np.asarray(np.nansum(centred[0] * centred[1], 1) / np.sqrt(squares))


def set_style(size: int = 9) -> None:
    """Set the look of all pictures; the same figures give the same bytes."""
    mpl.rcParams.update(
        {"font.size": size, "svg.hashsalt": "fedsim", "axes.spines.top": False, "axes.spines.right": False}
    )


def save_picture(figure: Figure, name: str, legend_height: float = 0.0) -> None:
    """Save a picture in docs/pictures, whose axes leave a share of the height at the bottom for a legend."""
    figure.tight_layout(rect=(0, legend_height, 1, 1))
    figure.savefig(DOCS / "pictures" / name, metadata={"Date": None})
    plt.close(figure)


def cycle_marks(colours: Sequence[str], markers: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of a colour and a marker that tell many series apart."""
    for marker in markers:
        for colour in colours:
            yield colour, marker
