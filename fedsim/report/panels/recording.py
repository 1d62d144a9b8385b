"""Panel of the rounds that were recorded."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.run_facts import missing_updates_text, traffic_text

_MAX_ROUNDS = 200
"""Most rounds that are listed."""


class RecordingPanel(Panel):
    """List the rounds that were recorded, what was sent in each, and who sent nothing."""

    title = "What was recorded"
    link = "Recording"
    order = 120

    def render(self, run: ReportedRun) -> Markup:
        """Return a table of rounds."""
        return render_fragment(
            "recording.html.j2",
            recording=run.recording,
            sums=run.recording.holds_sums,
            traffic=traffic_text(run.recording),
            missing_updates=missing_updates_text(run.recording),
            limits={"rounds": _MAX_ROUNDS},
        )
