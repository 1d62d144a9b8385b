"""Print the table of docs/explanation/verdicts.md: how often messages that say nothing are said to leak.

Run it as `python docs/verdict_table.py`; it takes some minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are not installed

from tests.support.silent_messages import KINDS, count_false_leaks

VICTIMS = (1, 2, 5, 10, 20)
RUNS = 1000


def main() -> None:
    """Print a row for each kind of score, a column for each number of victims."""
    print(f"| kind of score | {' | '.join(f'n = {victims}' for victims in VICTIMS)} |")
    print("|---|" + "---|" * len(VICTIMS))
    for kind in KINDS:
        shares = [count_false_leaks(kind, victims, RUNS) / RUNS for victims in VICTIMS]
        print(f"| {kind} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
