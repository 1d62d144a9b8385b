"""What leaks in a sweep without a defense: without any, nothing can be concluded about defenses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fedsim.base.errors import number_of
from fedsim.interfaces.metric import explain_no_verdict, sort_metrics
from fedsim.report.adaptive import is_judged
from fedsim.report.defense_outcomes import read_scores
from fedsim.report.sweep_groups import Row
from fedsim.report.verdicts import LEAKS, ScoreReading

REMEDY = "attack more victims, take fewer local steps, choose another attack, or run more iterations"


def explain_no_leak(rows: Iterable[Row], axes: Sequence[str]) -> str:
    """Say that no attack is shown to leak without a defense, and what to change; empty where one is.

    Args:
        rows: rows of `sweep.csv`, of which those without a defense count; empty where there are none.
    """
    readings = list(_undefended_readings(rows, axes))
    if not readings or any(reading.verdict == LEAKS for reading in readings):
        return ""
    names = dict.fromkeys(reading.summary.attack for reading in readings)
    most = max(reading.summary.count if reading.summary.unit == "victim" else 1 for reading in readings)
    return (
        f"without a defense no attack shows a leak ({', '.join(names)}; {number_of(most, 'victim')}), so that "
        f"nothing can be concluded about defenses; {REMEDY}"
    )


def find_main_metric(rows: Iterable[Row], axes: Sequence[str]) -> str:
    """Return the first metric by which something leaks without a defense, or else the first one; empty for none."""
    several = list(rows)
    names = sort_metrics({row["metric"] for row in several if row["metric"]})
    metrics = [metric for metric in names if not explain_no_verdict(metric)]
    leaking = {reading.summary.metric for reading in _undefended_readings(several, axes) if reading.verdict == LEAKS}
    return next((metric for metric in metrics if metric in leaking), metrics[0] if metrics else "")


def _undefended_readings(rows: Iterable[Row], axes: Sequence[str]) -> Iterator[ScoreReading]:
    """Yield the readings of all attacks without a defense, by each metric in each setting."""
    by_attack_and_setting: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["cell"] == row["control"] and row["baseline"] != "1":
            by_attack_and_setting[row["attack"], *(row[axis] for axis in axes)].append(row)
    for several in by_attack_and_setting.values():
        for metric in dict.fromkeys(row["metric"] for row in several if row["metric"]):
            scores = read_scores(several, metric, adaptive=False)
            if scores is not None and is_judged(scores.reading):
                yield scores.reading
