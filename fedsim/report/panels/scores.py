"""Panel of scores beside floors, with a verdict on each attack and on the clients' defenses."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedsim.base.grouping import group_by
from fedsim.interfaces.metric import describe_metric, sort_metrics
from fedsim.interfaces.panel import Panel
from fedsim.report import adaptive
from fedsim.report.finding_views import FindingView
from fedsim.report.headline import largest_victim_count
from fedsim.report.html import render_fragment
from fedsim.report.recording_summary import Recording
from fedsim.report.reported_run import ReportedRun
from fedsim.report.verdicts import MIN_VICTIMS, ScoreReading


class ScoresPanel(Panel):
    """Show the score of each attack by each metric, the best guess, and what follows from both."""

    title = "What leaked"
    link = "Scores"
    order = 50

    def render(self, run: ReportedRun) -> Markup:
        """Return the table of scores with how to read it, or say why there is none."""
        pairs = [pair for pair in adaptive.pair_readings(run.readings) if pair.outcome]
        return render_fragment(
            "scores.html.j2",
            leaks=group_by(run.merged_readings, lambda reading: reading.summary.attack),
            explanations=_explain_metrics(run.merged_readings),
            fewest=MIN_VICTIMS if largest_victim_count(run.readings) < MIN_VICTIMS else 0,
            can_attack_more=largest_victim_count(run.readings) < _count_recorded(run.recording),
            groups=any(finding.about["members"] for finding in run.findings),
            others=run.other_attackers,
            single=_example_noun(run.findings),
            remarks=adaptive.defense_remarks(run.readings, run.audit),
            pairs=group_by(pairs, lambda pair: pair.naive.summary.attack),
            found=run.findings,
            has_experiment=run.experiment is not None,
        )


def _count_recorded(recording: Recording) -> int:
    """Return how many clients, or groups of them, were recorded."""
    return len({reply.client for header in recording.headers for reply in header.replies})


def _explain_metrics(readings: Sequence[ScoreReading]) -> list[str]:
    """Return how to read the metrics and their floors, each sentence once."""
    explanations: dict[str, None] = {}
    for name in sort_metrics({reading.summary.metric for reading in readings}):
        explanations |= dict.fromkeys(describe_metric(name).explanations)
    return list(explanations)


def _example_noun(findings: Sequence[FindingView]) -> tuple[str, str] | None:
    """Return what an example is called and where to look at it; None where no finding claims examples."""
    if any(finding.pictured for finding in findings):
        return "image", "the pictures"
    if any(finding.texts for finding in findings):
        return "text", "the texts"
    return ("example", "image-scores.csv") if any(finding.num_examples for finding in findings) else None
