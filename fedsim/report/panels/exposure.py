"""Panel of how exposed clients were before they sent, by the measures that they computed."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.federation.run_folder import read_exposures
from fedsim.interfaces.panel import Panel
from fedsim.report.exposure import exposure_table
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun


class ExposurePanel(Panel):
    """Show what each client measured of its own exposure beside what attacks found out of it."""

    title = "How exposed the clients were before sending"
    link = "Exposure"
    order = 70

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a table of clients; None where none measured its exposure."""
        names = {key: traits.name for key, traits in run.attack_traits.items()}
        table = exposure_table(read_exposures(run.folder), run.readings, run.scores, names)
        return None if table is None else render_fragment("exposure.html.j2", exposure=table)
