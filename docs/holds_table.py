"""Print the table of docs/explanation/verdicts.md on defenses that leave a leak and are said to hold.

Run it as `python docs/holds_table.py`; it takes two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are not installed

from tests.support.known_defenses import KINDS, count_false_holds

VICTIMS_AND_SEEDS = ((5, 1), (20, 1), (6, 3), (20, 3))
DRAWS = 400


def main() -> None:
    """Print a row for each kind of leak, a column for each number of victims and seeds."""
    print(
        f"| what leaks with the defense | {' | '.join(f'{victims}, {seeds}' for victims, seeds in VICTIMS_AND_SEEDS)} |"
    )
    print("|---|" + "---|" * len(VICTIMS_AND_SEEDS))
    for kind in KINDS:
        shares = [count_false_holds(kind, victims, seeds, DRAWS) / DRAWS for victims, seeds in VICTIMS_AND_SEEDS]
        print(f"| {kind} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
