"""LMRA's Tables 1 and 9 from attacked runs: python benchmarks/lmra_tables.py RUN ... (runs of one data set, any seeds).

Every line is a mean over all clients of all runs with its 95 % interval (see `interval`), and the paired difference to
the floor, client by client.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy import stats

from fedsim.experiments.run_folder import RunFolder, read_rows


def interval(values: Mapping[tuple[str, str], float]) -> str:
    """Mean of values by (client, run), and half the width of its interval.

    Clients and seeds both vary, and a client holds much the same in each run: three runs of it are not three clients.
    So the squared standard errors of two means are added, that over clients (each a mean over runs) and that over runs
    (each a mean over clients), which is a little too much; Satterthwaite's degrees of freedom.
    """
    clients, runs = (sorted(set(names)) for names in zip(*values, strict=True))
    table = np.array([[values.get((client, run), np.nan) for run in runs] for client in clients])
    sides = [side for side in (np.nanmean(table, 1), np.nanmean(table, 0)) if len(side) > 1]
    errors = np.array([side.var(ddof=1) / len(side) for side in sides])
    mean = np.mean(list(values.values()))
    if not errors.sum():
        return f"{mean:.3f}"
    freedom = errors.sum() ** 2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, sides, strict=True))
    return f"{mean:.3f} ± {stats.t.ppf(0.975, freedom) * np.sqrt(errors.sum()):.3f}"


def main(paths: list[str]) -> None:
    """Print one line for each attack and metric."""
    cells: dict[tuple[str, str], dict[tuple[str, str], tuple[float, float, float]]] = defaultdict(dict)
    for path in paths:
        for row in read_rows(RunFolder(Path(path)).scores):
            if not row["missing"]:
                ceiling = float(row["ceiling"]) if row["ceiling"] else np.nan
                cells[row["attack"], row["metric"]][row["victim"], path] = (
                    float(row["value"]), float(row["floor"]), ceiling,
                )  # fmt: skip
    print(f"{'attack':26} {'metric':28} {'n':>3}  {'mean':17} {'floor':>7} {'ceiling':>8}  value minus floor")
    for (attack, metric), cell in cells.items():
        found = {place: value for place, (value, _, _) in cell.items()}
        gain = {place: value - floor for place, (value, floor, _) in cell.items()}
        _, floor, ceiling = np.mean(list(cell.values()), 0)
        means = f"{interval(found):17} {floor:7.3f} {ceiling:8.3f}"
        print(f"{attack:26} {metric:28} {len(cell):3}  {means}  {interval(gain)}")


if __name__ == "__main__":
    main(sys.argv[1:])
