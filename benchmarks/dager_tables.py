"""Writes the tables of docs/dager.md, and draws its figure, from benchmarks/results/dager.csv.

`python benchmarks/dager_tables.py` takes seconds. The study that makes the file is benchmarks/dager_study.py.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from fedsim.audit.evaluation.statistics import confidence_interval

RESULTS = Path(__file__).parent / "results" / "dager.csv"
DOCS = Path(__file__).parent.parent / "docs"
METRICS = ("exact", "floor", "rouge_1", "rouge_2", "labels")
KINDS = ("network", "weights")
PANELS = tuple(product(("decoder", "encoder"), ("fresh", "trained")))
Row = dict[str, str]
BEGIN, END = "<!-- dager_tables.py: begin -->", "<!-- dager_tables.py: end -->"


def main() -> None:
    """All tables, then the figure."""
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    page = (DOCS / "dager.md").read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    told = "\n".join(tables(rows))
    (DOCS / "dager.md").write_text(f"{before}{BEGIN}\n{told}\n\n{END}{after}")
    mpl.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "fedsim", "axes.spines.top": False, "axes.spines.right": False}
    )
    draw(rows)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of the tables: shares and ROUGE in percent, and CPU seconds, means over batches."""
    for attack, name, weights in sorted({(row["attack"], *(row[kind] for kind in KINDS)) for row in rows}):
        yield f"\n`{attack}`, {name}, {weights} weights:\n"
        yield "| b | length | width | batches | whole | exact % | floor % | ROUGE-1 | ROUGE-2 | labels % | seconds |"
        yield "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
        for length, size in settings(rows, attack, name, weights):
            found = of(rows, attack, name, weights, length, size)
            refused = sum(row["refused"] == "1" for row in found)
            batches = f"{len(found)} ({refused} refused)" if refused else str(len(found))
            exact, *others = (values(found, metric) for metric in METRICS)
            told = f"{100 * exact.mean():.0f}"
            if len(exact) > 1:
                low, high = confidence_interval(exact, share=True)
                told += f" ({100 * low:.0f} to {100 * high:.0f})"
            figures = " | ".join(f"{100 * of_each.mean():.0f}" for of_each in others)
            seconds = fmean(float(row["seconds"]) for row in found)
            width, whole = found[0]["dim"], sum(exact == 1)
            yield f"| {size} | {length} | {width} | {batches} | {whole} | {told} | {figures} | {seconds:.1f} |"


def settings(rows: Sequence[Row], *kind: str) -> list[tuple[int, int]]:
    """Length and number of texts of all batches of a kind, ascending."""
    return sorted({(int(r["length"]), int(r["size"])) for r in rows if (r["attack"], *(r[k] for k in KINDS)) == kind})


def of(rows: Sequence[Row], attack: str, name: str, weights: str, length: int, size: int) -> list[Row]:
    """All batches of one setting."""
    wanted = {"attack": attack, "network": name, "weights": weights, "length": str(length), "size": str(size)}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def values(found: Sequence[Row], metric: str) -> np.ndarray:
    """Of each batch; one that the attack refused counts as nothing found."""
    return np.array([float(row[metric] or 0) for row in found])


def draw(rows: Sequence[Row]) -> None:
    """What comes back against the number of texts, for each length."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 2.8), sharey=True)
    for axis, (name, weights) in zip(axes, PANELS, strict=True):
        kind = ("dager", name, weights)
        for length, marker, colour in zip((8, 16, 32), "os^", ("C0", "C1", "C2"), strict=True):
            sizes = [size for own, size in settings(rows, *kind) if own == length]
            for metric, line in (("exact", "-"), ("rouge_1", ":")):
                shares = [values(of(rows, *kind, length, size), metric).mean() for size in sizes]
                label = f"{length} words" if metric == "exact" else None
                axis.plot(sizes, shares, line, marker=marker, color=colour, label=label, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks((1, 2, 4, 8, 16), ["1", "2", "4", "8", "16"])
        axis.set_xlim(0.9, 18)
        axis.set_title(f"{name}, {weights}", fontsize=9)
        axis.set_xlabel("texts b")
    axes[0].set_ylabel("share")
    axes[0].set_ylim(-0.03, 1.05)
    axes[0].legend(frameon=False)
    axes[-1].plot([], [], "k-", label="exact")
    axes[-1].plot([], [], "k:", label="ROUGE-1")
    axes[-1].legend(frameon=False, handles=axes[-1].get_lines()[-2:])
    figure.tight_layout()
    figure.savefig(DOCS / "dager.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
