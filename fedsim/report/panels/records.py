"""Panel of the rows of tables that attacks claim."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.base.table_metrics import ROUNDING, TOLERANCE
from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.victim_groups import MAX_SHOWN_GROUPS, group_by_truth


class RecordsPanel(Panel):
    """Show the records of each victim: the true one, and below it what each attack claims."""

    title = "Records"
    order = 30

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a table for each victim; None where no attack claims rows of tables."""
        findings = [finding for finding in run.findings if finding.rows]
        if not findings:
            return None
        return render_fragment(
            "records.html.j2",
            rows_by_victim=group_by_truth(findings),
            limits={"findings": MAX_SHOWN_GROUPS},
            tolerance=TOLERANCE,
            rounding=ROUNDING,
        )
