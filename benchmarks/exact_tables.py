"""Writes the tables of docs/exact.md, and draws its figures, from benchmarks/results/exact.csv.

`python benchmarks/exact_tables.py` takes seconds. The study that makes the file is benchmarks/exact_study.py.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from fedsim.audit.evaluation.statistics import confidence_interval

RESULTS = Path(__file__).parent / "results" / "exact.csv"
DOCS = Path(__file__).parent.parent / "docs"
BASES = {"mnist": {"N": "32", "E": "10", "rate": "0.01"}, "cifar10": {"N": "24", "E": "5", "rate": "0.01"}}
BASES["adult"] = {"N": "8", "E": "1", "rate": "0.05"}
TICKS = {"N": (4, 8, 16, 32, 64, 100), "E": (1, 5, 10, 20, 50), "rate": (0.001, 0.01, 0.1)}
REFINED = "cocktail-party, refined"
Row = dict[str, str]
BEGIN, END = "<!-- exact_tables.py: begin -->", "<!-- exact_tables.py: end -->"


def main() -> None:
    """All tables, then the figures."""
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    page = (DOCS / "exact.md").read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    (DOCS / "exact.md").write_text(f"{before}{BEGIN}\n\n{tables(rows)}\n{END}{after}")
    mpl.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "fedsim", "axes.spines.top": False, "axes.spines.right": False}
    )
    draw_steps(rows)
    draw_protection(rows)


def tables(rows: Sequence[Row]) -> str:
    """One of all cells, and one of the bases, for each data set."""
    names = list(dict.fromkeys(row["cell"] for row in rows))
    wrong = sum(float(row["false"] or 0) > 0 for row in rows)
    told = [f"Of all attacks on all clients {wrong} gave a wrong certificate.\n"]
    for data in BASES:
        found = sorted((name for name in names if name.split()[0] == data), key=order)
        told.append(
            f"| {data} | clients | exact (95 % interval) | certified | dB | `cocktail-party`, dB | refined, dB |"
        )
        told.append("|---|---|---|---|---|---|---|")
        told += [line(name, rows) for name in found]
        told.append("")
        if f"{data} base" in names:
            told.append(f"| {data} base | exact | floor | has a twin in public data | median dB | worst client, dB |")
            told.append("|---|---|---|---|---|---|")
            told += beside(f"{data} base", rows)
            told.append("")
    return "\n".join(told)


def beside(cell: str, rows: Sequence[Row]) -> list[str]:
    """A line for each attack on the same clients."""
    told = []
    for attack in dict.fromkeys(row["attack"] for row in rows if row["cell"] == cell):
        found = of(rows, cell, attack)
        dbs = [float(row["psnr"]) for row in found if row["psnr"]]
        means = [f"{shares(found, what).mean():.3f}" for what in ("exact", "floor", "twins")]
        told.append(f"| `{attack}` | {' | '.join(means)} | {median(dbs):.1f} | {min(dbs):.1f} |")
    return told


def order(cell: str) -> tuple[bool, list[tuple[float, str]]]:
    """The base first, then by words and numbers."""
    return not cell.endswith("base"), [
        (float(w), "") if w[0].isdigit() else (-1, w) for w in cell.replace(",", "").split()
    ]


def of(rows: Sequence[Row], cell: str, attack: str) -> list[Row]:
    """Those of one cell and attack."""
    return [row for row in rows if row["cell"] == cell and row["attack"] == attack]


def shares(found: Sequence[Row], what: str = "exact") -> np.ndarray:
    """Of each client; an attack that refused recovered nothing."""
    return np.array([float(row[what] or 0) for row in found])


def line(cell: str, rows: Sequence[Row]) -> str:
    """Of a table."""
    found = next(filter(None, (of(rows, cell, name) for name in ("spear-ica", "spear-ica-rounds", "spear"))), [])
    exact = shares(found)
    low, high = confidence_interval(exact, share=True)
    cells = [cell.partition(" ")[2], str(len(found)), f"{exact.mean():.3f} ({low:.2f}, {high:.2f})"]
    cells.append(f"{shares(found, 'certified').mean():.3f}")
    for attack in (found[0]["attack"], "cocktail-party", REFINED):
        dbs = [float(row["psnr"]) for row in of(rows, cell, attack) if row["psnr"]]
        refused = len(of(rows, cell, attack)) - len(dbs)
        shown = f"{median(dbs):.1f}" if dbs else "-"
        cells.append(f"{shown} ({refused} refused)" if refused else shown)
    return f"| {' | '.join(cells)} |"


def draw_steps(rows: Sequence[Row]) -> None:
    """The share of exact examples against N, E and the learning rate."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
    for axis, what in zip(axes, ("N", "E", "rate"), strict=True):
        for data, marker in zip(BASES, "os^", strict=True):
            values = {BASES[data][what]: f"{data} base"}
            for row in rows:
                words = row["cell"].split()
                if words[:2] == [data, what] and len(words) == 3:
                    values[words[2]] = row["cell"]
            places = sorted((place for place in values if of(rows, values[place], "spear-ica")), key=float)
            means = [shares(of(rows, values[place], "spear-ica")).mean() for place in places]
            axis.plot([float(place) for place in places], means, marker=marker, label=data)
        axis.set_xscale("log")
        axis.minorticks_off()
        axis.set_xticks(TICKS[what], list(map(str, TICKS[what])))
        axis.set_xlabel({"N": "examples N", "E": "local epochs E", "rate": "learning rate"}[what])
    axes[0].set_ylabel("share of examples above 40 dB")
    axes[0].set_ylim(-0.03, 1.05)
    axes[1].legend(frameon=False)
    save(figure, "exact-steps.svg")


def draw_protection(rows: Sequence[Row]) -> None:
    """What changes of the update leave, on MNIST."""
    names = ["base", "float16", "clipping 0.1", "noise 0.0001", "noise 0.001", "noise 0.01", "noise 0.1"]
    names += ["top-k 0.5", "top-k 0.1", "weight decay 0.001", "optimizer adam", "BatchNorm behind the layer"]
    names += ["width 100 100", "width 100 100, 10 rounds"]
    figure, axis = plt.subplots(figsize=(9, 3.4))
    for place, attack in enumerate(("spear-ica", REFINED, "cocktail-party", "sme")):
        heights = []
        for name in names:
            found = of(rows, f"mnist {name}", attack)
            if attack == "spear-ica" and not found:
                found = of(rows, f"mnist {name}", "spear-ica-rounds")
            dbs = [float(row["psnr"]) for row in found if row["psnr"]]
            heights.append(median(dbs) if 2 * len(dbs) >= len(found) > 0 else 0)
        axis.bar(np.arange(len(names)) + 0.2 * place - 0.3, heights, 0.2, label=attack)
    axis.axhline(40, color="grey", linewidth=0.8, linestyle=":")
    axis.text(len(names) - 0.5, 41, "exact", ha="right", color="grey")
    axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=7)
    axis.set_ylabel("median PSNR, dB (none: refused)")
    axis.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    save(figure, "exact-protection.svg")


def save(figure: plt.Figure, name: str) -> None:
    """The same bytes for the same figures."""
    figure.tight_layout()
    figure.savefig(DOCS / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
