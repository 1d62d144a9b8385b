"""LMRA's Tables 1 and 9 from attacked runs: python benchmarks/lmra_tables.py RUN ... (runs of one data set, any seeds).

Every line is a mean over all clients of all runs with its 95 % interval (see `fedsim.audit.evaluation.statistics`),
and the
paired difference to the floor, client by client.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from fedsim.audit.evaluation.statistics import format_mean
from fedsim.federation.run_folder import RunFolder, read_rows


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
        means = f"{format_mean(found):17} {floor:7.3f} {ceiling:8.3f}"
        print(f"{attack:26} {metric:28} {len(cell):3}  {means}  {format_mean(gain)}")


if __name__ == "__main__":
    main(sys.argv[1:])
