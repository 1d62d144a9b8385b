"""Tables and figures of the angular Lipschitz paper, ours beside theirs.

`python benchmarks/angular_tables.py` takes half a minute, prints Markdown and draws docs/angular-states.svg (Figs. 2
and 4) and docs/angular-measures.svg (Figs. 6 and 7). The study that makes the numbers is benchmarks/angular_study.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from angular_study import CELL, DROPS, EPOCHS, MEASURED, MODELS, MODES, QUALITY, SCORES, SEED
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from scipy.stats import rankdata

DOCS = Path(__file__).parent.parent / "docs"
COLOURS = {"eval": "#D55E00", "train": "#0072B2"}
MARKERS = dict(zip(MODELS, "os^x", strict=True))
RESNETS = [name for name in MODELS if name.startswith("resnet")]
RESAMPLED, LEAST = 1000, 3
MEASURES = {
    "gradient-norm.norm": "‖g‖",
    "lipschitz.max": "L̃",
    "lipschitz.q99": "L̃, 99 % quantile",
    "angular-lipschitz.max": "L^cos",
    "angular-lipschitz.q99": "L^cos, 99 % quantile",
    "expected-error.error": "`expected-error`",
}
PICTURED = {"gradient-norm.norm": r"$\|g\|$", "lipschitz.max": r"$\tilde{L}$", "angular-lipschitz.max": r"$L^{\cos}$"}
OUTCOMES = {"loss drop": "loss drop", "objective drop": "drop of the whole objective", "lpips": "LPIPS", "mse": "MSE"}
TABLE_1: Mapping[str, Mapping[int, tuple[str, str, str]]] = {
    "eval": {
        0: (".85 ± .20", "12.9 ± 1.2", ".123 ± .023"),
        5: ("1.50 ± .12", "10.4 ± 0.4", ".092 ± .008"),
        10: ("1.80 ± .18", "9.9 ± 0.3", ".104 ± .010"),
        25: ("1.81 ± .10", "10.0 ± 0.6", ".136 ± .026"),
        50: ("1.79 ± .33", "9.9 ± 0.6", ".145 ± .015"),
        150: ("1.74 ± .08", "10.3 ± 0.4", ".131 ± .017"),
        225: ("1.85 ± .28", "10.2 ± 0.5", ".139 ± .021"),
        300: ("1.89 ± .16", "9.8 ± 0.4", ".146 ± .004"),
    },
    "train": {
        0: ("1.90 ± .02", "8.9 ± 0.1", ".236 ± .011"),
        5: (".69 ± .16", "15.0 ± 0.9", ".046 ± .016"),
        10: ("1.14 ± .04", "12.5 ± 0.3", ".062 ± .004"),
        25: ("1.30 ± .34", "11.7 ± 1.4", ".097 ± .040"),
        50: ("1.66 ± .18", "10.0 ± 0.6", ".160 ± .041"),
        150: ("1.66 ± .31", "10.2 ± 1.1", ".144 ± .028"),
        225: ("1.85 ± .32", "9.5 ± 1.0", ".174 ± .015"),
        300: ("1.84 ± .37", "9.4 ± 0.9", ".181 ± .034"),
    },
}
FIGURE_6 = {"all networks": -0.78, "ResNets, train": -0.87, "ResNets, eval": -0.66}
"""The paper's Spearman correlation of L-tilde with the loss drop; its text has -0.85 where the figure has -0.87."""
Numbers = NDArray[np.float64]


def main() -> None:
    """All tables, then the pictures."""
    found = points()
    for lines in (table_1(found), all_states(found), widths(found), correlations(found), against_norm(found)):
        print("\n".join(lines), end="\n\n")
    mpl.rcParams["svg.hashsalt"] = "fedsim"
    draw_states(found)
    draw_measures(found)


def points() -> pd.DataFrame:
    """A row for each batch of each network, epoch and mode that was attacked; NaN where it was not measured."""
    quality = pd.read_csv(QUALITY).set_index(list(CELL))
    quality["loss drop"], quality["objective drop"] = (
        quality[before] - quality[after] for before, after in zip(DROPS[::2], DROPS[1::2], strict=True)
    )
    measured = pd.read_csv(MEASURED).pivot_table(index=list(CELL), columns="measure", values="value")
    return quality.join(measured.reindex(columns=list(MEASURES))).reset_index()


def table_1(found: pd.DataFrame) -> list[str]:
    """ResNet18 by epochs and modes."""
    head = ["| | epoch | MSE, normalised | PSNR, dB | LPIPS |", "|---|---|---|---|---|"]
    ours = found[found.model == "resnet18"]
    for mode in MODES:
        theirs = (f"| {mode}, paper | {epoch} | {' | '.join(row)} |" for epoch, row in TABLE_1[mode].items())
        rows = (
            f"| {mode}, ours | {epoch} | {spread(rows.mse, 2)} | {spread(rows.psnr, 1)} | {spread(rows.lpips, 3)} |"
            for epoch, rows in ours[ours["mode"] == mode].groupby("epoch")
        )
        head += [*theirs, *rows]
    return head


def all_states(found: pd.DataFrame) -> list[str]:
    """Means over batches of what each state of each network gives in each mode."""
    formats = dict.fromkeys((*SCORES, "loss drop"), ".3f") | {"psnr": ".1f"} | dict.fromkeys(taken(found), ".3g")
    heads = ["MSE", "of pixels", "PSNR", "LPIPS", "loss drop", *taken(found).values()]
    lines = [f"| network | mode | epoch | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for (model, mode, epoch), rows in found.groupby(["model", "mode", "epoch"]):
        cells = (f"{rows[name].mean():{how}}" for name, how in formats.items())
        lines.append(f"| {model} | {mode} | {epoch} | {' | '.join(cells)} |")
    return lines


def widths(found: pd.DataFrame) -> list[str]:
    """Fig. 4: the LPIPS of the epoch where it is best, for each ResNet and ConvNet."""
    lines = [f"| | {' | '.join(MODELS)} |", "|---" * (1 + len(MODELS)) + "|"]
    for mode in MODES:
        cells = []
        for model in MODELS:
            epoch, rows = best(found, model, mode)
            cells.append(f"{spread(rows.lpips, 3)} (epoch {epoch})")
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return lines


def best(found: pd.DataFrame, model: str, mode: str) -> tuple[int, pd.DataFrame]:
    """The epoch with the smallest mean LPIPS, and its batches."""
    rows = found[(found.model == model) & (found["mode"] == mode)]
    epoch = int(rows.groupby("epoch").lpips.mean().idxmin())
    return epoch, rows[rows.epoch == epoch]


def groups(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The points of the paper's Fig. 6, and those of ConvNet."""
    resnets = found[found.model.isin(RESNETS)]
    return {
        "all networks": found,
        "ResNets, train": resnets[resnets["mode"] == "train"],
        "ResNets, eval": resnets[resnets["mode"] == "eval"],
        "ConvNet": found[found.model == "convnet"],
    }


def correlations(found: pd.DataFrame) -> list[str]:
    """Spearman's of each measure with each outcome within a batch, averaged, and its 95 % interval."""
    lines = [f"| | points | measure | {' | '.join(OUTCOMES.values())} |", "|---" * (3 + len(OUTCOMES)) + "|"]
    for group, rows in groups(found).items():
        for measure, named in taken(rows).items():
            cells = []
            for outcome in OUTCOMES:
                drawn = resampled(rows, measure, outcome)
                is_theirs = (measure, outcome) == ("lipschitz.max", "loss drop") and group in FIGURE_6
                theirs = f"; paper {FIGURE_6[group]:+.2f}" if is_theirs else ""
                cells.append(interval(drawn) + theirs)
            lines.append(f"| {group} | {rows[measure].count()} | {named} | {' | '.join(cells)} |")
    return lines


def taken(rows: pd.DataFrame) -> dict[str, str]:
    """The measures that have values."""
    return {measure: named for measure, named in MEASURES.items() if rows[measure].notna().any()}


def against_norm(found: pd.DataFrame) -> list[str]:
    """By how much each measure's correlation is stronger than that of the norm."""
    lines = [
        f"| stronger than the norm's by | measure | {' | '.join(OUTCOMES.values())} |",
        "|---" * (2 + len(OUTCOMES)) + "|",
    ]
    for group, rows in groups(found).items():
        norm, *others = PICTURED
        for measure in others:
            cells = []
            for outcome in OUTCOMES:
                both = rows.dropna(subset=[measure])
                mine, its = (np.abs(resampled(both, one, outcome)) for one in (measure, norm))
                more = mine - its
                cells.append(interval(more))
            lines.append(f"| {group} | {MEASURES[measure]} | {' | '.join(cells)} |")
    return lines


def resampled(rows: pd.DataFrame, measure: str, outcome: str) -> Numbers:
    """The correlation over all states, then over states drawn anew."""
    grid = rows.pivot(index=list(CELL[:3]), columns="batch", values=[measure, outcome])
    some, others = grid[measure].to_numpy(), grid[outcome].to_numpy()
    drawn = np.random.default_rng(SEED).integers(len(grid), size=(RESAMPLED, len(grid)))
    return np.array([within(some[states], others[states]) for states in (np.arange(len(grid)), *drawn)])


def interval(drawn: Numbers) -> str:
    """The first value, and where 95 % of the others are."""
    if np.isnan(drawn[0]):
        return "none: always the same"
    return "{:+.2f} ({:+.2f} to {:+.2f})".format(drawn[0], *np.nanquantile(drawn[1:], (0.025, 0.975)))


def within(some: Numbers, others: Numbers) -> float:
    """Spearman's over the states of `state batch` within each batch, averaged: four images differ more than states."""
    found = np.array([spearman(*pair) for pair in zip(some.T, others.T, strict=True)])
    return float(found[np.isfinite(found)].mean()) if np.isfinite(found).any() else float("nan")


def spearman(some: Numbers, others: Numbers) -> float:
    """Of points where both are numbers; NaN of fewer than three, or where one is always the same."""
    there = np.isfinite(some) & np.isfinite(others)
    if there.sum() < LEAST:
        return float("nan")
    first, second = (rank - rank.mean() for rank in (rankdata(some[there]), rankdata(others[there])))
    size = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / size) if size else float("nan")


def spread(values: pd.Series, digits: int) -> str:
    """Mean and standard deviation over batches, where there are several."""
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{deviation}"


def draw_states(found: pd.DataFrame) -> None:
    """Figs. 2 and 4: MSE and LPIPS by epochs, best LPIPS by width, and LPIPS of all networks."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 3))
    for mode in MODES:
        for axis, score in zip(axes, ("mse", "lpips"), strict=False):
            by_epoch(axis, found, "resnet18", mode, score)
        chosen = [best(found, model, mode)[1].lpips for model in RESNETS]
        bars(axes[2], RESNETS, chosen, mode)
        for model in MODELS:
            by_epoch(axes[3], found, model, mode, "lpips", errors=False)
    titles = ("ResNet18 (Fig. 2, left)", "ResNet18 (Fig. 2, right)", "Best epoch (Fig. 4)", "All networks")
    for axis, title, label in zip(axes, titles, ("MSE, normalised", "LPIPS", "LPIPS", "LPIPS"), strict=True):
        axis.set(title=title, ylabel=label)
    for axis in (axes[0], axes[1], axes[3]):
        axis.set_xlabel("epochs of training")
    axes[0].legend(fontsize=7)
    axes[3].legend(handles=network_marks(), fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "angular-states.svg")


def by_epoch(axis: plt.Axes, found: pd.DataFrame, model: str, mode: str, score: str, *, errors: bool = True) -> None:
    """A line over the epochs that were attacked, at equal distances."""
    rows = found[(found.model == model) & (found["mode"] == mode)].groupby("epoch")[score]
    places = [EPOCHS.index(int(epoch)) for epoch in rows.mean().index]
    spreads = rows.std() if errors else None
    axis.errorbar(places, rows.mean(), spreads, color=COLOURS[mode], marker=MARKERS[model], label=mode, ms=4, lw=1)
    axis.set_xticks(places, [str(EPOCHS[place]) for place in places])


def bars(axis: plt.Axes, names: Sequence[str], values: Sequence[pd.Series], mode: str) -> None:
    """A point with its deviation for each network."""
    means, spreads = [one.mean() for one in values], [one.std() for one in values]
    axis.errorbar(range(len(names)), means, spreads, color=COLOURS[mode], marker="o", ms=4, lw=1)
    axis.set_xticks(range(len(names)), names, fontsize=7)


def network_marks() -> list[mpl.lines.Line2D]:
    """What the markers mean."""
    return [mpl.lines.Line2D([], [], color="grey", marker=mark, ls="", label=name) for name, mark in MARKERS.items()]


def draw_measures(found: pd.DataFrame) -> None:
    """Fig. 6: L-tilde against the loss drop; Fig. 7: three measures against LPIPS, train above eval."""
    figure, axes = plt.subplots(3, 3, figsize=(9, 8))
    parts = groups(found)
    for axis, group in zip(axes[0], FIGURE_6, strict=True):
        scatter(axis, parts[group], "loss drop", "lipschitz.max", group)
        axis.set(xlabel="loss drop", ylabel=PICTURED["lipschitz.max"], yscale="log")
    for line, group in zip(axes[1:], ("ResNets, train", "ResNets, eval"), strict=True):
        for axis, measure in zip(line, PICTURED, strict=True):
            scatter(axis, parts[group], measure, "lpips", group)
            axis.set(xlabel=PICTURED[measure], ylabel="LPIPS", xscale="log")
    for axis in axes.flat:
        for side in (axis.xaxis, axis.yaxis):
            side.set_minor_formatter(mpl.ticker.NullFormatter())
    axes[0][2].legend(handles=[*network_marks(), *mode_marks()], fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "angular-measures.svg")


def scatter(axis: plt.Axes, rows: pd.DataFrame, across: str, up: str, group: str) -> None:
    """Points, with their correlation within a batch in the title."""
    for (model, mode), some in rows.groupby(["model", "mode"]):
        axis.scatter(some[across], some[up], s=12, color=COLOURS[str(mode)], marker=MARKERS[str(model)], linewidths=0.8)
    axis.set_title(f"{group}, $r_s$ = {resampled(rows, across, up)[0]:+.2f}", fontsize=9)


def mode_marks() -> Iterator[mpl.lines.Line2D]:
    """What the colours mean."""
    return (mpl.lines.Line2D([], [], color=colour, lw=3, label=mode) for mode, colour in COLOURS.items())


def save(figure: plt.Figure, name: str) -> None:
    """Write a picture, the same bytes each time."""
    figure.tight_layout()
    figure.savefig(DOCS / name, metadata={"Date": None})


if __name__ == "__main__":
    main()
