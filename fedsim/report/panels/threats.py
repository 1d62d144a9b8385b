"""Panel of the threat model."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.base.papers import cite
from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.knowledge_levels import list_levels
from fedsim.report.reported_run import ReportedRun


class ThreatsPanel(Panel):
    """Say what the adversary sees, what it is granted, and which attack needs what of it."""

    title = "Threat model"
    link = "Threat model"
    order = 80

    def render(self, run: ReportedRun) -> Markup | None:
        """Return the threat model in sentences and as a table; None if it is unknown."""
        if not run.granted_facts:
            return None
        config = run.config
        is_noisy = config is not None and bool(config.central_privacy or config.distributed_privacy)
        return render_fragment(
            "threats.html.j2",
            threats=run.granted_facts,
            sums=run.recording.holds_sums,
            others=run.other_attackers,
            noisy=is_noisy,
            levels=list_levels(finding.about for finding in run.findings),
            source=cite("Carletti2025"),
        )
