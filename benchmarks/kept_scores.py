"""What each victim scored, kept as a table in `results/`, so that figures can be computed from it again."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from fedsim.audit.evaluation.statistics import format_mean, mean_and_margin
from fedsim.federation.run_folder import RunFolder, read_rows

COLUMNS = ("run", "attack", "metric", "what", "clients 0, 1, ...")
Scores = dict[tuple[str, str, str, str], list[float | None]]
"""By run, attack, metric and `value` or `floor`: of each client one number, None where there is none."""


def scored(name: str, run: Path) -> Scores:
    """What each client of a run scored, and the best guess."""
    rows = [row for row in read_rows(RunFolder(run).scores) if row["metric"]]
    clients = 1 + max(int(row["victim"]) for row in rows)
    found: Scores = {}
    for row in rows:
        for what in ("value", "floor"):
            values = found.setdefault((name, row["attack"], row["metric"], what), [None] * clients)
            if not row["missing"] and row[what]:
                values[int(row["victim"])] = float(row[what])
    return found


def read(path: Path) -> Scores:
    """What has been kept so far."""
    if not path.exists():
        return {}
    with path.open() as file:
        rows = [[row[column] for column in COLUMNS] for row in csv.DictReader(file)]
    return {
        (run, attack, metric, what): [None if text == "-" else float(text) for text in values.split()]
        for run, attack, metric, what, values in rows
    }


def write(path: Path, scores: Scores) -> None:
    """Keep everything measured so far."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key, values in scores.items():
            writer.writerow([*key, " ".join("-" if value is None else f"{value:.4g}" for value in values)])


def cell(values: Iterable[float | None], *, scale: int = 1) -> str:
    """Mean and 95 % interval over victims, and over how many if an attack failed on some; `scale` 100 is in %."""
    every = list(values)
    known = {(str(place), ""): scale * value for place, value in enumerate(every) if value is not None}
    if not known:
        return "refused" if every else "-"
    text = format_mean(known) if scale == 1 else _percent(*mean_and_margin(known))
    return text + (f" ({len(known)} of {len(every)})" if len(known) < len(every) else "")


def _percent(centre: float, margin: float) -> str:
    return f"{centre:.1f} ± {margin:.1f}" if margin else f"{centre:.1f}"
