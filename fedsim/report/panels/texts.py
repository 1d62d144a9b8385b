"""Panel of the texts that attacks claim."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.audit.evaluation.texts import MAX_TEXTS, MAX_WORDS
from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.victim_groups import MAX_SHOWN_GROUPS, group_by_truth


class TextsPanel(Panel):
    """Show the texts of each victim: the true one, and below it what each attack claims."""

    title = "Texts"
    order = 20

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a table for each victim; None where no attack claims texts."""
        findings = [finding for finding in run.findings if finding.texts]
        if not findings:
            return None
        limits = {"findings": MAX_SHOWN_GROUPS, "texts": MAX_TEXTS, "words": MAX_WORDS}
        return render_fragment("texts.html.j2", texts_by_victim=group_by_truth(findings), limits=limits)
