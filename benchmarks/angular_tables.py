"""Our tables and figures for the angular Lipschitz paper.

`python benchmarks/kept_figures.py && python docs/paper_pages.py` writes the tables, beside the paper's;
`python benchmarks/angular_tables.py` draws docs/angular-states.svg (Figs. 2 and 4) and docs/angular-measures.svg
(Figs. 6 and 7). The study that makes the numbers is benchmarks/angular_study.py.
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
FIGURE_6 = ("all networks", "ResNets, train", "ResNets, eval")
"""The groups of which the paper has the correlation of L-tilde with the loss drop."""
Numbers = NDArray[np.float64]
Rows = Mapping[str, Mapping[str, str]]
"""By row and quantity, figures as they are printed."""
Lines = tuple[list[str], list[list[str]]]
"""The head of a table, and its lines."""


def main() -> None:
    """Both pictures."""
    found = points()
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


def table_1(found: pd.DataFrame) -> Rows:
    """ResNet18 by epochs and modes."""
    ours = found[found.model == "resnet18"]
    return {
        f"{mode}, epoch {epoch}": {
            "mse": spread(rows.mse, 2),
            "psnr": spread(rows.psnr, 1),
            "lpips": spread(rows.lpips, 3),
        }
        for (mode, epoch), rows in ours.groupby(["mode", "epoch"])
    }


def figure_6(found: pd.DataFrame) -> Rows:
    """The correlation of L-tilde with the loss drop, by group."""
    return {
        group: {"drop": interval(resampled(rows, "lipschitz.max", "loss drop"))}
        for group, rows in groups(found).items()
    }


def all_states(found: pd.DataFrame) -> Lines:
    """Means over batches of what each state of each network gives in each mode."""
    formats = dict.fromkeys((*SCORES, "loss drop"), ".3f") | {"psnr": ".1f"} | dict.fromkeys(taken(found), ".3g")
    heads = ["MSE", "of pixels", "PSNR", "LPIPS", "loss drop", *taken(found).values()]
    states = found.groupby(["model", "mode", "epoch"])
    lines = [[*map(str, state), *(shown(rows[name], how) for name, how in formats.items())] for state, rows in states]
    return ["network", "mode", "epoch", *heads], lines


def shown(values: pd.Series, how: str) -> str:
    """Their mean; nothing where a measure says nothing."""
    return "" if values.isna().all() else f"{values.mean():{how}}"


def widths(found: pd.DataFrame) -> Lines:
    """Fig. 4: the LPIPS of the epoch where it is best, for each ResNet and ConvNet."""
    lines = []
    for mode in MODES:
        chosen = [best(found, model, mode) for model in MODELS]
        lines.append([mode, *(f"{spread(rows.lpips, 3)} (epoch {epoch})" for epoch, rows in chosen)])
    return ["", *MODELS], lines


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


def correlations(found: pd.DataFrame) -> Lines:
    """Spearman's of each measure with each outcome within a batch, averaged, and its 95 % interval."""
    lines = [
        [group, str(rows[measure].count()), named, *(interval(resampled(rows, measure, of)) for of in OUTCOMES)]
        for group, rows in groups(found).items()
        for measure, named in taken(rows).items()
    ]
    return ["", "points", "measure", *OUTCOMES.values()], lines


def taken(rows: pd.DataFrame) -> dict[str, str]:
    """The measures that have values."""
    return {measure: named for measure, named in MEASURES.items() if rows[measure].notna().any()}


def against_norm(found: pd.DataFrame) -> Lines:
    """By how much each measure's correlation is stronger than that of the norm."""
    norm, *others = PICTURED
    lines = [
        [group, MEASURES[measure], *(interval(stronger(rows, measure, norm, outcome)) for outcome in OUTCOMES)]
        for group, rows in groups(found).items()
        for measure in others
    ]
    return ["stronger than the norm's by", "measure", *OUTCOMES.values()], lines


def stronger(rows: pd.DataFrame, measure: str, norm: str, outcome: str) -> Numbers:
    """The difference without signs, where both were measured."""
    mine, its = (np.abs(resampled(rows.dropna(subset=[measure]), one, outcome)) for one in (measure, norm))
    return np.asarray(mine - its)


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
