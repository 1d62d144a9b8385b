"""Panel of curves: of training by round, and of attacks by iteration."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.interfaces.panel import Panel
from fedsim.report import adaptive
from fedsim.report.charts import Look
from fedsim.report.curves import ChartGroup, attack_charts, training_charts
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun


class CurvesPanel(Panel):
    """Draw accuracy, loss and spent privacy by round, and what attacks recorded by iteration."""

    title = "Curves"
    order = 110

    def render(self, run: ReportedRun) -> Markup | None:
        """Return the charts; None where nothing was measured by round or iteration."""
        training, attacking = training_charts(run.metrics), _attack_curves(run)
        if not training.drawn and not attacking.drawn:
            return None
        return render_fragment("curves.html.j2", training=training, attacking=attacking)


def _attack_curves(run: ReportedRun) -> ChartGroup:
    """Draw the curves of attacks; an adaptive attack that equals the naive one is drawn together with it."""
    # What each attack is called in the legend.
    naive_of_equal = adaptive.equal_attacks(run.readings)
    naive_names = naive_of_equal | {naive: naive for naive in naive_of_equal.values()}
    names = {}
    for title in run.attacks:
        names[title] = naive_names[title] + adaptive.EQUAL_SUFFIX if title in naive_names else title
    # Its curves, colour and floor under that name.
    curves = []
    for finding in run.findings:
        title = str(finding.about["attack"])
        if finding.curves and title in names:
            curves.append((names[title], finding.curves))
    drawn_names = dict(curves)
    looks = {names[title]: Look(number) for number, title in enumerate(run.attacks) if names[title] in drawn_names}
    floors = {}
    for reading in run.readings:
        summary = reading.summary
        if summary.attack in names:
            floors[summary.metric, names[summary.attack]] = summary.floor
    return attack_charts(curves, looks, floors)
