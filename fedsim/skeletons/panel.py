"""Skeleton, a section of reports for fedsim.

Install it, and `report.html` of every run has it: `fedsim run skeleton.toml` writes one, and `fedsim
report RUN` writes that of an earlier run anew.
"""

from __future__ import annotations

from statistics import fmean

from markupsafe import Markup

from fedsim.interfaces.panel import Panel
from fedsim.report.charts import QUIET, Curve, draw_curves
from fedsim.report.reported_run import ReportedRun


class Skeleton(Panel):
    """Show how many examples clients trained on in each round."""

    # The heading of the section, and a shorter text for the navigation of the page.
    title = "Examples in each round"
    link = "Examples"
    # Where it stands: after the scores, which have 50. Further down are larger numbers.
    order = 55

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a sentence and a chart; None where nothing was recorded."""
        # `run` has all that the page has read: `run.recording`, `run.findings`, `run.scores`,
        # `run.readings`, `run.metrics`, and `run.experiment`, which is None where somebody else
        # recorded. Show nothing by returning None. A panel that raises is left out of the page.
        totals = {}
        for header in run.recording.headers:
            totals[header.round] = sum(reply.num_examples for reply in header.replies)
        if not totals:
            return None
        # `format` escapes what it puts in. A plain text is escaped as a whole.
        mean = Markup("<p>{:.1f} examples a round on average, in the run {}.</p>")
        sentence = mean.format(fmean(totals.values()), run.name)
        curve = Curve(name="", look=QUIET, x=list(totals), y=list(totals.values()))
        chart = draw_curves("Examples by round", [curve], xlabel="round", ylabel="examples")
        return sentence + chart
