"""Panel of examples that their modality draws, such as series as lines."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.audit.evaluation.examples import MAX_DRAWINGS
from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.victim_groups import MAX_SHOWN_GROUPS


class DrawingsPanel(Panel):
    """Show what each attack claims, drawn over the true example that it is assigned to."""

    title = "Drawings"
    order = 35

    def render(self, run: ReportedRun) -> Markup | None:
        """Return the drawings of each finding; None where no modality draws."""
        findings = [finding for finding in run.findings if finding.drawings]
        if not findings:
            return None
        return render_fragment(
            "drawings.html.j2",
            findings=findings,
            limits={"findings": MAX_SHOWN_GROUPS, "drawings": MAX_DRAWINGS},
        )
