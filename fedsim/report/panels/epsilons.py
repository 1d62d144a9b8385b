"""Panel of proved epsilons beside those that were measured."""

from __future__ import annotations

import math

from markupsafe import Markup

from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun


class EpsilonsPanel(Panel):
    """Show the epsilon that each client proved beside the one that its canaries show."""

    title = "Proved and measured epsilon"
    link = "Epsilon"
    order = 60

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a table of clients; None where no canaries were planted."""
        if not run.epsilon_audits:
            return None
        return render_fragment("epsilons.html.j2", epsilons=run.epsilon_audits, inf=math.inf)
