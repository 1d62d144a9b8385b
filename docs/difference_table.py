"""Print the table of docs/explanation/verdicts.md on seeds: how often intervals of differences hold the mean.

Run it as `python docs/difference_table.py`; it takes half a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are not installed

from tests.support.paired_seeds import measure_coverage

SEEDS, SPREADS = (1, 2, 3, 5), (0.0, 0.5, 1.0, 2.0)
DRAWS = 2000


def main() -> None:
    """Print a row for each number of seeds, a column for each spread of their means."""
    print(f"| seeds | {' | '.join(f'spread {spread:g}' for spread in SPREADS)} |")
    print("|---|" + "---|" * len(SPREADS))
    for seeds in SEEDS:
        cells = []
        for spread in SPREADS:
            coverage = measure_coverage(seeds, spread, DRAWS)
            cells.append(f"{coverage.of_these:.0%}, {coverage.of_all:.0%}, {coverage.less:.1%}")
        print(f"| {seeds} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
