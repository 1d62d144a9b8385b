"""Print the tables of docs/explanation/verdicts.md on seeds and metrics: how often differences are judged falsely.

Run it as `python docs/difference_table.py`; it takes two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are not installed

from tests.support.paired_seeds import measure_coverage, measure_false_falls

SEEDS, SPREADS = (1, 2, 3, 5), (0.0, 0.5, 1.0, 2.0)
SEEDS_AND_SPREADS, SHARED = ((1, 0.0), (2, 0.0), (2, 0.5), (3, 0.5)), (0.0, 0.5, 0.9)
DRAWS = 2000


def main() -> None:
    """Print a row for each number of seeds, a column for each spread of their means or for what metrics share."""
    print(f"| seeds | {' | '.join(f'spread {spread:g}' for spread in SPREADS)} |")
    print("|---|" + "---|" * len(SPREADS))
    for seeds in SEEDS:
        cells = []
        for spread in SPREADS:
            coverage = measure_coverage(seeds, spread, DRAWS)
            cells.append(f"{100 * coverage.of_these:.0f} %, {100 * coverage.of_all:.0f} %, {100 * coverage.less:.1f} %")
        print(f"| {seeds} | {' | '.join(cells)} |", flush=True)
    print()
    print(f"| seeds | spread | {' | '.join(f'shared {shared:g}' for shared in SHARED)} |")
    print("|---|---|" + "---|" * len(SHARED))
    for seeds, spread in SEEDS_AND_SPREADS:
        cells = []
        for shared in SHARED:
            alone, corrected = measure_false_falls(seeds, spread, shared, DRAWS // 4)
            cells.append(f"{100 * alone:.1f} %, {100 * corrected:.1f} %")
        print(f"| {seeds} | {spread:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
