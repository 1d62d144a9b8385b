"""Writes the table of docs/defenses.md, and draws its picture, from benchmarks/results/defenses.csv.

`python benchmarks/defense_tables.py` takes seconds. The study that makes the file is benchmarks/defense_study.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from defense_study import METRICS, NONE, RESULTS, cells, read
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from fedsim.report.adaptive import FAILS, HOLDS, ONLY_NAIVE, UNDECIDED_OUTCOME, NaiveAdaptivePair, at_floor
from fedsim.report.summary import LEAKS, ScoreReading, score_readings

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- defense_tables.py: begin -->", "<!-- defense_tables.py: end -->"
ATTACKS = ("sme", "ig")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SHORT = {HOLDS: "holds", ONLY_NAIVE: "**naive only**", FAILS: "fails", UNDECIDED_OUTCOME: "undecided"}
DEFENDED = {cell.name for cell in cells() if "defense" in cell.set}
SUMS = "secure-aggregation"
TICKS = (-4, -2, -1, 0, 1, 2, 5, 10, 20, 50)
NEAR = 0.8
"""dB above the floor up to which cells are named in the picture."""
Row = Mapping[str, str]


def main() -> None:
    """The table, then the picture."""
    found = {name: list(rows) for name, rows in groupby(ordered(read(RESULTS)), key=lambda row: row["cell"])}
    page = (DOCS / "defenses.md").read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    (DOCS / "defenses.md").write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")
    draw(found)


def ordered(rows: Iterable[Row]) -> list[Row]:
    """In the order of the cells, the present ones alone."""
    place = {cell.name: number for number, cell in enumerate(cells())}
    keys = {cell.key(knows=knows) for cell in cells() for knows in (False, True)}
    return sorted((row for row in rows if row["key"] in keys), key=lambda row: place[row["cell"]])


def table(found: Mapping[str, Sequence[Row]]) -> str:
    """A line for each cell."""
    plain = int(found[NONE][0]["bytes"])
    head = ("defense", "accuracy", "ε", "bytes", *(f"{attack}: {what}" for attack in ATTACKS for what in ("naive",
            "adaptive", "defense")))  # fmt: skip
    told = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, rows in found.items():
        naive = next(row for row in rows if row["knows"] == "False")
        cost = [f"{float(naive['accuracy']):.1%}", promised(naive["epsilon"])]
        cost.append("–" if family(name) == SUMS else f"{int(naive['bytes']) / plain:.2f}")
        says = [text for attack in ATTACKS for text in scores(rows, attack, found[NONE])]
        told.append(f"| {' | '.join([name, *cost, *says])} |")
    return "\n".join(told)


def promised(epsilon: str) -> str:
    """ε of the whole run; a figure that promises nothing is told by its size."""
    if not epsilon:
        return "–"
    return f"{float(epsilon):.3g}" if float(epsilon) < 1000 else f"10^{math.log10(float(epsilon)):.0f}"


def scores(rows: Sequence[Row], attack: str, undefended: Sequence[Row]) -> list[str]:
    """Mean dB above the floor with the 95 % interval: naive, adaptive, and what the defense is worth."""
    naive, adaptive = both(rows, attack)
    if naive is None:
        return ["refuses", "–", "–"]
    cell = rows[0]["cell"]
    by_psnr, by_ssim = (
        worth(cell, *both(rows, attack, metric), both(undefended, attack, metric)[0]) for metric in METRICS
    )
    says = by_psnr if by_psnr == by_ssim else f"{by_psnr}, by SSIM {by_ssim}"
    return [above(naive), above(adaptive) if adaptive else "–", says]


def both(rows: Sequence[Row], attack: str, metric: str = "psnr") -> tuple[ScoreReading | None, ScoreReading | None]:
    """What a report would read of the naive attack and of the adaptive one."""
    found = {line.summary.attack_key[0]: line for line in make_readings(rows, metric)}
    return found.get(attack), found.get(f"{attack} adaptive")


def worth(cell: str, naive: ScoreReading | None, adaptive: ScoreReading | None, control: ScoreReading | None) -> str:
    """What the defense is worth beside the attack without it; of the protocol's settings nobody has to know more."""
    if naive is None or cell == NONE or (adaptive is None and cell in DEFENDED):
        return "–"
    if adaptive is None:
        leaks = {LEAKS: "fails"}.get(naive.verdict, "undecided")
        return "holds" if at_floor(naive.summary) and control is not None and control.verdict == LEAKS else leaks
    return SHORT[NaiveAdaptivePair(naive=naive, adaptive=adaptive, control=control).outcome]


def make_readings(rows: Sequence[Row], metric: str) -> list[ScoreReading]:
    """The readings that a report would give, by one metric."""
    full: list[dict[str, Any]] = [
        {**row, "granted": "defenses" if row["knows"] == "True" else ""} | dict.fromkeys(("variant", "missing"), "")
        | {"round": 1, "settings": "{}", "ceiling": "", "nearest_public": "nan", "higher_is_better": True}
        for row in rows
        if row["metric"] == metric
    ]  # fmt: skip
    return score_readings(full, {})


def above(line: ScoreReading) -> str:
    """How far its score is above the floor, with half the width of the score's interval."""
    item = line.summary
    return f"{item.gain:+.1f} ± {(item.high - item.low) / 2:.1f}"


def draw(found: Mapping[str, Sequence[Row]]) -> None:
    """What IG and SME get above the floor, by lost accuracy: naive open, adaptive filled, joined by a line."""
    mpl.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "fedsim", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(1, 2, figsize=(11, 6.6), sharey=True)
    styles = dict(zip(families(found), places(), strict=False))
    for axis, attack in zip(axes, ("ig", "sme"), strict=True):
        for place, (name, rows) in enumerate(found.items()):
            below = (3, -6 if place % 2 else 2)
            points(axis, rows, accuracy(found[NONE]) - accuracy(rows), attack, *styles[family(name)], below)
        axis.axhline(0, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xscale("symlog", linthresh=2, linscale=1)
        axis.minorticks_off()
        axis.set_xticks(TICKS, list(map(str, TICKS)))
        axis.set_xlabel("accuracy lost against no defense, percentage points")
        axis.set_title({"ig": "IG", "sme": "SME"}[attack])
    axes[0].set_ylabel("PSNR above the floor, dB (more is more leakage)")
    handles = [Line2D([], [], color=c, marker=m, linestyle="", label=n) for n, (c, m) in styles.items()]
    handles += [
        Line2D([], [], color="grey", marker="o", fillstyle="none", linestyle="", label="open: naive"),
        Line2D([], [], color="grey", marker="o", linestyle="", label="filled: knows all"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=6, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(DOCS / "defense-study.svg", metadata={"Date": None})


def accuracy(rows: Sequence[Row]) -> float:
    """Of the federation, in per cent."""
    return next(float(row["accuracy"]) for row in rows if row["knows"] == "False") * 100


def points(
    axis: Any, rows: Sequence[Row], lost: float, attack: str, colour: str, marker: str, offset: tuple[int, int]
) -> None:
    """One cell, named where the attack gets little; of what every adversary knows there is a filled point alone."""
    cell, (naive, adaptive) = rows[0]["cell"], both(rows, attack)
    if naive is None:
        return
    best = adaptive or naive
    if adaptive or cell in DEFENDED:
        axis.plot([lost] * 2, [naive.summary.gain, best.summary.gain], color=colour, linewidth=0.8)
        axis.plot(lost, naive.summary.gain, marker, color=colour, fillstyle="none", markersize=5)
    if adaptive or cell not in DEFENDED:
        axis.plot(lost, best.summary.gain, marker, color=colour, markersize=5)
    if (most := max(naive.summary.gain, best.summary.gain)) < NEAR:
        axis.annotate(cell, (lost, most), offset, textcoords="offset points", fontsize=6, color="#333333")


def family(name: str) -> str:
    """The defense of a cell."""
    return name.split()[0]


def families(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """All, in their order."""
    return list(dict.fromkeys(map(family, found)))


def places() -> Iterator[tuple[str, str]]:
    """Colours and markers that tell them apart."""
    for marker in "osD^v":
        for colour in COLOURS:
            yield colour, marker


if __name__ == "__main__":
    main()
