"""Panel of scores beside the ceilings that the mechanism proves."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.score_ceilings import summarise_ceilings


class CeilingsPanel(Panel):
    """Show for each attack and metric the score nearest to what its defense lets anybody reach."""

    title = "Scores and proved ceilings"
    link = "Ceilings"
    order = 61

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a table of scores; None where no defense proves anything."""
        ceilings = run.score_ceilings
        if not ceilings:
            return None
        exceeded = [item for item in ceilings if item.is_exceeded]
        return render_fragment("ceilings.html.j2", ceilings=summarise_ceilings(ceilings), exceeded=exceeded)
