"""Why a verdict that finds no leak leaves open that there is one: scores are missing, or a mean hides a part."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from fedsim.base.errors import name_rounds, number_of
from fedsim.base.grouping import group_by
from fedsim.dossier.contents import Result
from fedsim.interfaces.metric import describe_metric
from fedsim.report import verdicts
from fedsim.report.summary import Summary, summarise
from fedsim.report.verdicts import ScoreReading, judge_summary

NO_LEAK_VERDICTS = (verdicts.GUESSING, verdicts.WORSE_THAN_IMPUTATION)
UNJUDGED = ("", verdicts.NOT_JUDGED)
_METRIC_FAILURE = re.compile(r"\bthe metric (raised|returned|gave)\b")
"""Found in the reason of a metric that failed; one that does not apply, as to small images, says so itself."""
_MIN_SHARED = 2
"""Fewest victims that a round or start has to be beyond its floor for; one is so in every second by chance."""

Rows = Sequence[Mapping[str, str]]


def explain_openness(reading: ScoreReading, rows: Rows, *, is_main: bool) -> str:
    """Say why the verdict by one metric does not exclude a leak; empty where it does, or where it shows one.

    Args:
        rows: the scores of the attack by all metrics, as rows of `scores.csv` or `sweep.csv`.
        is_main: whether the attack is judged by this metric first.
    """
    item, metric = reading.summary, describe_metric(reading.summary.metric)
    if reading.baseline or metric.meaning:
        return ""
    if reading.verdict in UNJUDGED:
        is_expected = is_main or _METRIC_FAILURE.search(item.missing)
        return f"{metric.title} has no verdict: {item.missing or reading.remark}" if is_expected else ""
    if reading.verdict not in NO_LEAK_VERDICTS:
        return ""
    rows_of_metric = [row for row in rows if row["metric"] == item.metric]
    unscored = [row for row in rows_of_metric if math.isnan(float(row["value"] or "nan"))]
    if unscored or item.num_missing:
        victims = {row["victim"] for row in unscored}
        reason = next((row["missing"] for row in unscored if row.get("missing")), item.why_missing)
        why = f": {reason}" if reason else ""
        return f"{metric.title} was not computed for {number_of(len(victims) or item.num_missing, 'victim')}{why}"
    return _find_leaking_part(item, rows_of_metric)


def _find_leaking_part(item: Summary, rows: Rows) -> str:
    """Say which single round or random start is beyond its floor for all its victims; empty for none."""
    by_round = group_by(rows, lambda row: name_rounds(row["round"]))
    by_start = group_by(rows, lambda row: f"{name_rounds(row['round'])}, random start {row['repeat']}")
    title = describe_metric(item.metric).title
    for parts in (by_round, by_start):
        for name, part in parts.items():
            if len(part) < len(rows) and _is_leaking(part, item):
                victims = {row["victim"] for row in part}
                return (
                    f"in {name} alone, {title} is beyond its floor for {_name_all(len(victims))}, which the mean hides"
                )
    return ""


def _name_all(count: int) -> str:
    return f"all {number_of(count, 'victim')}" if count > 1 else "its victim"


def _is_leaking(rows: Rows, item: Summary) -> bool:
    """Return whether scores of one round or start show a leak, or are beyond the floor for all their victims."""
    completed = []
    for row in rows:
        # A table of a sweep lacks some columns; its seeds are averaged for each victim.
        attack_columns = {"attack": "", "variant": "", "settings": "{}", "granted": ""}
        score_columns = {
            "missing": "",
            "instrument": "",
            "nearest_public": "nan",
            "higher_is_better": str(item.higher_is_better),
        }
        completed.append({**row, **attack_columns, **score_columns})
    (part,) = summarise(completed)
    if judge_summary(part)[0] == verdicts.LEAKS:
        return True
    return part.unit == "victim" and part.count >= _MIN_SHARED and part.num_beyond == part.count


def name_result(result: Result) -> str:
    """Return the attack of a result, with its setting in a sweep."""
    return f"{result.attack} ({result.setting})" if result.setting else result.attack


def list_open_reasons(results: Sequence[Result]) -> list[str]:
    """Return why results that show no leak do not exclude one, each with its attack."""
    reasons = dict[str, None]()
    for result in results:
        if result.open_reason and not result.is_baseline:
            reasons[f"{name_result(result)}: {result.open_reason}"] = None
    return list(reasons)
