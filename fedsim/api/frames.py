"""Make data frames of the tables of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.base.errors import RunError
from fedsim.base.grouping import group_by
from fedsim.federation.failed_attacks import FailedAttack, read_failed_attacks
from fedsim.federation.run_folder import RunFolder
from fedsim.recording.manifest import ManifestFile
from fedsim.report.attack_traits import read_attack_traits, read_scores
from fedsim.report.failed_attacks import describe_failed_attacks
from fedsim.report.verdicts import ScoreReading, score_readings

if TYPE_CHECKING:
    import pandas as pd  # at run time where a frame is made, as it takes a third of a second

SUMMARY_COLUMNS = ("attack", "metric", "value", "low", "high", "floor", "victims", "verdict", "why")
"""Columns of `Run.summary`."""
FAILED_VERDICT = "failed"
"""Verdict of `Run.summary` on an attack that failed on victims."""


def read_summary(folder: RunFolder, scores: pd.DataFrame, *, trust: bool) -> pd.DataFrame:
    """Return a row for each attack and metric that is scored, and for each attack that failed on victims."""
    import pandas as pd

    rows = []
    if not scores.empty:
        score_rows = read_scores(folder)
        traits = read_attack_traits(folder, score_rows, trust=trust)
        rows = [_make_summary_row(reading) for reading in score_readings(score_rows, traits)]
    failed = read_failed_attacks(folder)
    if folder.failures.is_file() and not ManifestFile(folder.path).vouches_for(folder.failures):
        raise RunError(f"{folder.failures}: is not what this run wrote; remove it, and attack the run again")
    return pd.DataFrame(rows + _make_failure_rows(failed), columns=SUMMARY_COLUMNS)


def _make_summary_row(reading: ScoreReading) -> dict[str, Any]:
    item = reading.summary
    return {
        "attack": item.attack,
        "metric": item.metric,
        "value": item.mean,
        "low": item.low,
        "high": item.high,
        "floor": item.floor,
        "victims": item.count if item.unit == "victim" else 1,
        "verdict": reading.verdict,
        "why": reading.remark,
    }


def _make_failure_rows(failed: Sequence[FailedAttack]) -> list[dict[str, Any]]:
    """Return a row for each attack that failed on victims."""
    rows = []
    for attack, attempts in group_by(failed, lambda attempt: attempt.attack).items():
        victims = len({attempt.victim for attempt in attempts})
        why = "; ".join(describe_failed_attacks(attempts))
        rows.append({"attack": attack, "metric": "", "victims": victims, "verdict": FAILED_VERDICT, "why": why})
    return rows


def read_frame(
    folder: RunFolder, path: Path, check: Callable[[RunFolder], object], texts: Sequence[str], columns: Sequence[str]
) -> pd.DataFrame:
    """Return a CSV file of a run as a data frame, once `check` has found nothing wrong with it.

    Where the run has none, the frame has no rows, and the same `columns`.
    """
    import pandas as pd

    folder.check_exists()
    check(folder)
    manifest = ManifestFile(folder.path)
    if not path.is_file():
        if manifest.contents is not None and path.name in manifest.contents.files:
            raise RunError(f"{path}: is missing, though this run wrote it; put it back, or attack or resume the run")
        return pd.DataFrame(columns=columns)
    if not manifest.vouches_for(path):
        raise RunError(f"{path}: is not what this run wrote; remove it, and attack or resume the run")
    return pd.read_csv(path, dtype=dict.fromkeys(texts, str))
