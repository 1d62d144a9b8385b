"""Panel of how each attack was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from fedsim.interfaces.panel import Panel
from fedsim.report.finding_views import FindingView
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun


class AttacksPanel(Panel):
    """List the attacks that found something: their settings, commands and warnings."""

    title = "Attacks"
    order = 90

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a table of the attacks; None where none found anything."""
        if not run.findings:
            return None
        return render_fragment("attacks.html.j2", attack_rows=_attack_rows(run.findings))


def _attack_rows(findings: Sequence[FindingView]) -> list[dict[str, Any]]:
    """Describe each attack: settings other than its defaults, its command, its warnings."""
    attacks: dict[str, dict[str, Any]] = {}
    for finding in findings:
        settings = finding.about["changed"]
        description = {
            "plugin": finding.about["plugin"],
            "changed": ", ".join(f"{key} = {value}" for key, value in sorted(settings.items())),
            "knows_defenses": "defenses" in finding.about["granted"],
            "tuned": finding.about["tuned"],
            "command": finding.about["command"],
            "warnings": {},
        }
        counts = attacks.setdefault(str(finding.about["attack"]), description)["warnings"]
        for warning in finding.about["warnings"]:
            text = str(warning).partition(": ")[2] or str(warning)  # without the victim that it is about
            counts[text] = counts.get(text, 0) + 1
    return [{"name": name} | description for name, description in attacks.items()]
