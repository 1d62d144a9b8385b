"""ROC curves of attacks that tell members from others, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fedsim.evaluation.kind import Roc
from fedsim.reporting import charts
from fedsim.reporting.charts import QUIET, Curve, Look
from fedsim.reporting.curves import Charts, Numbers, overlaid
from fedsim.reporting.evidence import Found

CHANCE = "chance"
_PER_DECADE = 20


def roc_charts(found: Sequence[Found], attacks: Iterable[str]) -> Charts:
    """One chart of all attacks: each the mean over its findings, in the band from the lowest to the highest.

    The smallest false-positive rate that is drawn is that of one candidate, and so is the smallest true-positive rate:
    a logarithmic axis has no 0.

    Args:
        attacks: titles in the order of their colours.
    """
    curves: dict[str, list[Roc]] = {}
    for item in found:
        if item.roc is not None:
            curves.setdefault(str(item.about["attack"]), []).append(item.roc)
    if not curves:
        return Charts()
    known = [roc for own in curves.values() for roc in own]
    rates = np.geomspace(least := min(_step(roc.false.numpy()) for roc in known), 1, _points(least))
    lowest = min(_step(roc.true.numpy()) for roc in known)
    looks = {title: Look(place) for place, title in enumerate(attacks) if title in curves}
    drawn = [
        overlaid(title, look, [(rates, _at(roc, rates).clip(lowest)) for roc in curves[title]])
        for title, look in looks.items()
    ]
    guess = Curve(name=CHANCE, look=QUIET, x=rates, y=rates)
    chart = charts.curves(
        "Members found at each false-positive rate (ROC)",
        [*drawn, guess],
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        log=True,
        log_across=True,
        legend=True,
    )
    return Charts(drawn=[chart])


def _step(shares: Numbers) -> float:
    """The smallest share above 0."""
    return float(shares[shares > 0].min())


def _points(least: float) -> int:
    return max(2, 1 + round(-math.log10(least) * _PER_DECADE))


def _at(roc: Roc, rates: Numbers) -> Numbers:
    """The highest share of members at thresholds that at most each of `rates` of the others reach."""
    places = np.searchsorted(roc.false.numpy(), rates * (1 + 1e-9), side="right") - 1
    return np.asarray(roc.true.numpy()[places])
