"""The curves of a run: accuracy, loss and privacy by round, and what attacks wrote down by iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedsim.reporting import charts
from fedsim.reporting.charts import QUIET, Look

Numbers = NDArray[np.float64]
Curves = Mapping[str, tuple[Numbers, Numbers]]
"""What one finding brings: a name, e.g. `objective`, to `(iteration, value)`."""

SERVER, CLIENTS, LEDGER = Look(6), QUIET, Look(1)
_NAMES = {
    SERVER: "server, on the public test set",
    CLIENTS: "clients, each on what it holds out: mean, lowest to highest",
    LEDGER: "the client that has spent most privacy",
}
_TRACES = {
    "objective": ("What the attack minimises", "objective (dimensionless)"),
    "distance": ("Its gradient-matching part", "distance"),
    "l_sim": ("Direction of the gradient against the update", "L_sim = 1 − cosine (dimensionless)"),
    "psnr": ("Closeness to the truth, known to the evaluator only", "mean PSNR (dB)"),
    "training_error": ("How far a learned mapping misses updates it has seen", "squared error / a constant's"),
    "validation_error": ("How far it misses updates held out from it", "squared error / a constant's"),
    "training_loss": ("Training a model on dummy data", "loss (mean over the dummy examples)"),
    "residual": ("What equal updates of clients leave of the sums unexplained", "norm / that of the sums"),
    "standard_error": ("Standard error of the claimed update", "standard error / norm of the update"),
    "score_with_property": ("Messages with the property, known to the evaluator only", "how likely it is claimed"),
    "score_without_property": (
        "Messages without the property, known to the evaluator only",
        "how likely it is claimed",
    ),
    "alpha": ("Place of the surrogate: 1 broadcast state, 0 returned state", "α (dimensionless)"),
}
_LOGARITHMIC = ("objective", "distance", "l_sim")
_BY_ROUND = ("score_with_property", "score_without_property")
_IN_UNIT = (*_BY_ROUND, "alpha")


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts that share a legend.

    Attributes:
        drawn: the charts.
        legend: names and looks of what is drawn in them.
        with_floor: whether a dotted line shows what the best guess gets.
        infinite: whether infinite values were left out.
    """

    drawn: Sequence[Markup] = ()
    legend: Sequence[tuple[str, Look]] = ()
    with_floor: bool = False
    infinite: bool = False


def overlaid(name: str, look: Look, curves: Sequence[tuple[Numbers, Numbers]], level: float = math.nan) -> charts.Curve:
    """One curve out of several, each with an x of its own: their mean, in the band from the lowest to the highest."""
    x = np.unique(np.concatenate([points for points, _ in curves]))
    y = np.full((len(curves), len(x)), np.nan)
    for row, (points, values) in zip(y, curves, strict=True):
        row[np.searchsorted(x, points)] = values
    y[~np.isfinite(y)] = np.nan
    kept = np.isfinite(y).any(0)
    x, y = x[kept], y[:, kept]
    curve = charts.Curve(name=name, look=look, x=x, y=np.nanmean(y, 0) if len(x) else x, level=level)
    return replace(curve, low=np.nanmin(y, 0), high=np.nanmax(y, 0)) if len(curves) > 1 and len(x) else curve


def epsilons(row: Mapping[str, str]) -> list[str]:
    """The columns of `metrics.csv` that say what was spent: `epsilon`, or `epsilon of NAME` of several defenses."""
    return [name for name in row if name.split(" of ")[0] == "epsilon"]


def called(column: str) -> str:
    """`epsilon of update-noise` as the page writes it."""
    return column.replace("epsilon", "ε", 1)


def training_charts(rows: Sequence[Mapping[str, str]]) -> Charts:
    """Accuracy, loss and proved epsilon per round out of the rows of `metrics.csv`; none of what was not measured."""
    wanted = [
        ("accuracy", "Accuracy", "accuracy (fraction correct)", SERVER),
        ("loss", "Loss", "loss (mean over the test examples)", SERVER),
    ]
    for column in epsilons(rows[0]) if rows else []:
        name = called(column)
        wanted.append((column, f"Privacy spent: largest proved {name} of a client", name, LEDGER))
    drawn, looks = [], set[Look]()
    for column, title, ylabel, look in wanted:
        if curves := _over_rounds(rows, column, look):
            limits = (0.0, 1.0) if column == "accuracy" else None
            drawn.append(charts.curves(title, curves, xlabel="round", ylabel=ylabel, limits=limits))
            looks |= {curve.look for curve in curves}
    return Charts(drawn=drawn, legend=[(name, look) for look, name in _NAMES.items() if look in looks])


def _over_rounds(rows: Sequence[Mapping[str, str]], column: str, look: Look) -> list[charts.Curve]:
    """What `column` says of clients, and in `look` of the server."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get(column):
            found.setdefault(row["client"], {})[int(row["round"])] = float(row[column])
    drawn = [(who, (np.array(list(c), float), np.array(list(c.values())))) for who, c in found.items()]
    server = [curve for who, curve in drawn if who == "server"]
    clients = [curve for who, curve in drawn if who != "server"]
    named = (("clients", CLIENTS, clients), ("server" if look == SERVER else "most spent", look, server))
    lines = [overlaid(name, own, some) for name, own, some in named if some]
    return [line for line in lines if len(np.asarray(line.x))]


def attack_charts(
    findings: Sequence[tuple[str, Curves]], looks: Mapping[str, Look], floor: Mapping[str, float]
) -> Charts:
    """One chart for each kind of curve, all attacks laid over one another.

    Args:
        findings: the attack and the curves of each finding.
        looks: how each attack is drawn.
        floor: PSNR of the best guess for each attack, a dotted line.
    """
    present = {name for _, curves in findings for name in curves}
    drawn, levels = [], []
    for name in [known for known in _TRACES if known in present] + sorted(present - set(_TRACES)):
        title, ylabel = _TRACES.get(name, (name, "value"))
        found = []
        for attack, look in looks.items():
            if own := [curves[name] for owner, curves in findings if owner == attack and name in curves]:
                found.append(overlaid(attack, look, own, floor.get(attack, math.nan) if name == "psnr" else math.nan))
        if found := [curve for curve in found if len(np.asarray(curve.x))]:
            limits, log = ((0.0, 1.0) if name in _IN_UNIT else None), name in _LOGARITHMIC
            xlabel = "round" if name in _BY_ROUND else "iteration"
            drawn.append(charts.curves(title, found, xlabel=xlabel, ylabel=ylabel, limits=limits, log=log))
            levels += [curve.level for curve in found]
    infinite = any(np.isinf(values).any() for _, curves in findings for _, values in curves.values())
    return Charts(
        drawn=drawn, legend=list(looks.items()), with_floor=any(map(math.isfinite, levels)), infinite=infinite
    )
