"""Panel of attacks that tell members from others: ROC curves on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from markupsafe import Markup

from fedsim.audit.evaluation.display import RocCurve
from fedsim.audit.evaluation.proved_ceilings import ProvedCeiling
from fedsim.interfaces.panel import Panel
from fedsim.report import charts
from fedsim.report.charts import QUIET, Curve, Look
from fedsim.report.curves import Numbers, overlay_curves
from fedsim.report.finding_views import FindingView
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.score_ceilings import find_highest_rates

CHANCE = "chance"
_POINTS_PER_DECADE = 20
_CEILING_LOOK = Look(6)


class MembershipsPanel(Panel):
    """Draw how many members each attack finds at each rate of false alarms."""

    title = "Members among candidates"
    link = "Members"
    order = 40

    def render(self, run: ReportedRun) -> Markup | None:
        """Return the chart; None if no attack distinguishes members from non-members."""
        chart = draw_roc_chart(run.findings, run.attacks, run.score_ceilings)
        return None if chart is None else render_fragment("memberships.html.j2", chart=chart)


def draw_roc_chart(
    findings: Sequence[FindingView], attacks: Iterable[str], ceilings: Sequence[ProvedCeiling] = ()
) -> Markup | None:
    """Draw one chart of all attacks; None if no attack distinguishes members from non-members.

    Each line is the mean over an attack's findings, in the band from the lowest to the highest. The
    smallest false-positive rate that is drawn is that of one candidate, and so is the smallest
    true-positive rate: a logarithmic axis has no 0.

    Args:
        ceilings: of the scores; the proved trade-off curve is drawn where all victims have one.
    """
    rocs_by_attack: dict[str, list[RocCurve]] = {}
    for finding in findings:
        if finding.roc is not None:
            rocs_by_attack.setdefault(str(finding.about["attack"]), []).append(finding.roc)
    if not rocs_by_attack:
        return None
    rocs = [roc for attack_rocs in rocs_by_attack.values() for roc in attack_rocs]
    lowest_false = min(_smallest_share(roc.false_positive_rates.numpy()) for roc in rocs)
    lowest_true = min(_smallest_share(roc.true_positive_rates.numpy()) for roc in rocs)
    rates = np.geomspace(lowest_false, 1, max(2, 1 + round(-math.log10(lowest_false) * _POINTS_PER_DECADE)))
    looks = {title: Look(number) for number, title in enumerate(attacks) if title in rocs_by_attack}
    lines = []
    for title, look in looks.items():
        curves = [(rates, _true_positive_rates(roc, rates).clip(lowest_true)) for roc in rocs_by_attack[title]]
        lines.append(overlay_curves(title, look, curves))
    guess = Curve(name=CHANCE, look=QUIET, x=rates, y=rates)
    highest = find_highest_rates(ceilings, rates)
    if highest is not None:
        lines.append(Curve(name="proved ceiling", look=_CEILING_LOOK, x=rates, y=highest.clip(lowest_true)))
    return charts.draw_curves(
        "Members found at each false-positive rate (ROC)",
        [*lines, guess],
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        log=True,
        log_across=True,
        legend=True,
    )


def _smallest_share(shares: Numbers) -> float:
    """Return the smallest share above 0."""
    return float(shares[shares > 0].min())


def _true_positive_rates(roc: RocCurve, rates: Numbers) -> Numbers:
    """Return the true-positive rate at each false-positive rate, with the lowest threshold that keeps that rate."""
    positions = np.searchsorted(roc.false_positive_rates.numpy(), rates * (1 + 1e-9), side="right") - 1
    return np.asarray(roc.true_positive_rates.numpy()[positions])
