"""Findings about the same examples, which the page shows together: the truth once, and below it each claim."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.report.finding_views import FindingView

MAX_SHOWN_GROUPS = 12
"""Most groups whose texts or records a page shows."""


def group_by_truth(findings: Sequence[FindingView]) -> list[list[FindingView]]:
    """Group findings with the same true examples; findings without truth and bags of words stay single."""
    groups: dict[tuple[object, ...], list[FindingView]] = {}
    for position, finding in enumerate(findings):
        texts = tuple(pair.true for pair in finding.texts)
        rows = tuple(map(tuple, finding.rows.true if finding.rows else ()))
        key: tuple[object, ...] = (position,)
        if finding.has_truth and not finding.bag:
            key = (finding.about["who"], finding.about["round"], texts + rows)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())
