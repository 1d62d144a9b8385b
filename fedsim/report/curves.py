"""Curves of a run: accuracy, loss and privacy by round, and what attacks recorded by iteration."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedsim.interfaces.metric import describe_metric, sort_metrics
from fedsim.privacy.central import CENTRAL_PRIVACY
from fedsim.privacy.distributed import DISTRIBUTED_PRIVACY
from fedsim.report import charts
from fedsim.report.charts import QUIET, Look

Numbers = NDArray[np.float64]
Curves = Mapping[str, tuple[Numbers, Numbers]]
"""Curves of one finding: a name, e.g. `objective`, to `(iteration, value)`."""

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
_EARLY_TRACES = ("objective", "distance", "l_sim")
"""Drawn before the curves of metrics; other traces come after them."""
_LOGARITHMIC = ("objective", "distance", "l_sim")
_BY_ROUND = ("score_with_property", "score_without_property")
_IN_UNIT_RANGE = (*_BY_ROUND, "alpha")


@dataclass(frozen=True, kw_only=True)
class ChartGroup:
    """Charts that share a legend.

    Attributes:
        with_floor: whether a dotted line shows the score of the best guess.
        infinite: whether infinite values were left out.
    """

    drawn: Sequence[Markup] = ()
    legend: Sequence[tuple[str, Look]] = ()
    with_floor: bool = False
    infinite: bool = False


def overlay_curves(
    name: str, look: Look, curves: Sequence[tuple[Numbers, Numbers]], level: float = math.nan
) -> charts.Curve:
    """Return the mean of several curves, each with an x of its own, in a band from the lowest to the highest.

    Args:
        level: height of a dotted line to compare with; NaN for none.
    """
    x = np.unique(np.concatenate([points for points, _ in curves]))
    y = np.full((len(curves), len(x)), np.nan)
    for row, (points, values) in zip(y, curves, strict=True):
        row[np.searchsorted(x, points)] = values
    y[~np.isfinite(y)] = np.nan
    has_value = np.isfinite(y).any(0)
    x, y = x[has_value], y[:, has_value]
    curve = charts.Curve(name=name, look=look, x=x, y=np.nanmean(y, 0) if len(x) else x, level=level)
    return replace(curve, low=np.nanmin(y, 0), high=np.nanmax(y, 0)) if len(curves) > 1 and len(x) else curve


def epsilon_columns(row: Mapping[str, str]) -> list[str]:
    """Return the columns of `metrics.csv` with spent privacy.

    These are `epsilon` with one defense, or `epsilon of NAME` with several.

    >>> epsilon_columns({"round": "1", "epsilon of update-noise": "2.5"})
    ['epsilon of update-noise']
    """
    return [name for name in row if name.split(" of ")[0] == "epsilon"]


_EXCEPTIONS = {
    CENTRAL_PRIVACY: " (not against the server)",
    DISTRIBUTED_PRIVACY: " (unless too many clients collude)",
}
"""Against whom a proof does not hold that is not of a client's own defense."""


def column_title(column: str) -> str:
    """Return the name of such a column on the page.

    >>> column_title("epsilon of update-noise")
    'ε of update-noise'
    """
    name = column.removeprefix("epsilon of ")
    return column.replace("epsilon", "ε", 1) + _EXCEPTIONS.get(name, "")


def training_charts(rows: Sequence[Mapping[str, str]]) -> ChartGroup:
    """Draw accuracy, loss and proved epsilon by round, as far as they were measured."""
    quantities = [
        ("accuracy", "Accuracy", "accuracy (fraction correct)", SERVER),
        ("loss", "Loss", "loss (mean over the test examples)", SERVER),
    ]
    for column in epsilon_columns(rows[0]) if rows else []:
        name = column_title(column)
        quantities.append((column, f"Privacy spent: largest proved {name} of a client", name, LEDGER))
    drawn, looks = [], set[Look]()
    for column, title, ylabel, look in quantities:
        if curves := _curves_by_round(rows, column, look):
            limits = (0.0, 1.0) if column == "accuracy" else None
            drawn.append(charts.draw_curves(title, curves, xlabel="round", ylabel=ylabel, limits=limits))
            looks |= {curve.look for curve in curves}
    names = dict(_NAMES)
    if any(row["client"] == "server" and row.get("model") == "personal" for row in rows):
        names[SERVER] = "the clients' own models: mean, weighted by the examples that they hold out"
    return ChartGroup(drawn=drawn, legend=[(name, look) for look, name in names.items() if look in looks])


def _curves_by_round(rows: Sequence[Mapping[str, str]], column: str, look: Look) -> list[charts.Curve]:
    """Return the curves of a column: of clients, and in `look` of the server."""
    values_by_sender: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get(column):
            values_by_sender.setdefault(row["client"], {})[int(row["round"])] = float(row[column])
    server, clients = list[tuple[Numbers, Numbers]](), list[tuple[Numbers, Numbers]]()
    for sender, values in values_by_sender.items():
        curve = np.array(list(values), float), np.array(list(values.values()))
        (server if sender == "server" else clients).append(curve)
    lines = []
    if clients:
        lines.append(overlay_curves("clients", CLIENTS, clients))
    if server:
        lines.append(overlay_curves("server" if look == SERVER else "most spent", look, server))
    return [line for line in lines if len(np.asarray(line.x))]


def attack_charts(
    findings: Sequence[tuple[str, Curves]], looks: Mapping[str, Look], floors: Mapping[tuple[str, str], float]
) -> ChartGroup:
    """Draw one chart for each kind of curve, all attacks laid over one another.

    Args:
        floors: by metric and attack, the value of the best guess, a dotted line beside a curve of that metric.
    """
    present = {name for _, curves in findings for name in curves}
    drawn, levels = [], []
    for name in _sort_curves(present):
        # One line for each attack.
        lines = []
        for attack, look in looks.items():
            attack_curves = [curves[name] for owner, curves in findings if owner == attack and name in curves]
            if attack_curves:
                level = floors.get((name, attack), math.nan) if _is_of_metric(name) else math.nan
                lines.append(overlay_curves(attack, look, attack_curves, level))
        lines = [line for line in lines if len(np.asarray(line.x))]
        # The chart of these.
        if lines:
            title, ylabel = _curve_titles(name)
            limits, log = ((0.0, 1.0) if name in _IN_UNIT_RANGE else None), name in _LOGARITHMIC
            xlabel = "round" if name in _BY_ROUND else "iteration"
            drawn.append(charts.draw_curves(title, lines, xlabel=xlabel, ylabel=ylabel, limits=limits, log=log))
            levels += [line.level for line in lines]
    infinite = any(np.isinf(values).any() for _, curves in findings for _, values in curves.values())
    return ChartGroup(
        drawn=drawn, legend=list(looks.items()), with_floor=any(map(math.isfinite, levels)), infinite=infinite
    )


def _is_of_metric(name: str) -> bool:
    """Return whether a curve is of a metric of examples, which the evaluator computed."""
    return describe_metric(name).of_examples


def _sort_curves(names: Collection[str]) -> list[str]:
    """Return what attacks minimise first, then curves of metrics, then others."""
    of_metrics = sort_metrics(name for name in names if _is_of_metric(name))
    ordered = dict.fromkeys([*_EARLY_TRACES, *of_metrics, *_TRACES, *sorted(names)])
    return [name for name in ordered if name in names]


def _curve_titles(name: str) -> tuple[str, str]:
    """Return the title of a chart and of its vertical axis."""
    if not _is_of_metric(name):
        return _TRACES.get(name, (name, "value"))
    facts = describe_metric(name)
    unit = f" ({facts.unit})" if facts.unit else ""
    return "Closeness to the truth, known to the evaluator only", f"mean {facts.title}{unit}"
