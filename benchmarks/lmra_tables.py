"""LMRA's Tables 1 and 9 from attacked runs: python benchmarks/lmra_tables.py RUN ... (runs of one data set, any seeds).

Every line is a mean over all clients of all runs with its 95 % interval (Student's t), and the paired difference to the
floor, which for local models is the better of the two proxies, client by client.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

from fedsim.run_folder import RunFolder, read_rows


def interval(values: list[float]) -> str:
    """Mean and half the width of its interval."""
    found = np.array(values)
    if len(found) < 2:
        return f"{found.mean():.3f}"
    margin = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found))
    return f"{found.mean():.3f} ± {margin:.3f}"


def main(runs: list[str]) -> None:
    """Print one line for each attack and metric."""
    values: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for run in runs:
        for row in read_rows(RunFolder(Path(run)).scores):
            if not row["missing"]:
                ceiling = float(row["ceiling"]) if row["ceiling"] else np.nan
                values[row["attack"], row["metric"]].append((float(row["value"]), float(row["floor"]), ceiling))
    print(f"{'attack':26} {'metric':28} {'n':>3}  {'mean':17} {'floor':>7} {'ceiling':>8}  value minus floor")
    for (attack, metric), rows in values.items():
        found, floor, ceiling = (list(column) for column in zip(*rows, strict=True))
        gain = interval([value - guess for value, guess in zip(found, floor, strict=True)])
        means = f"{interval(found):17} {np.mean(floor):7.3f} {np.mean(ceiling):8.3f}"
        print(f"{attack:26} {metric:28} {len(rows):3}  {means}  {gain}")


if __name__ == "__main__":
    main(sys.argv[1:])
