"""What engine serial adds to a bare PyTorch loop: rounds of both in turn, within one process.

    python benchmarks/serial_turns.py lenet [--repeats 8] [--clients 100] [--out FILE.json]

The clients are those of `engines.py`, which runs each framework in a process of its own. Here a round of the bare loop
follows each round of fedsim, so that what else the machine does slows both alike. CPU time (`ms` an update) is that of
the thread. A turn is a round of fedsim, beside the mean of the two rounds of the loop around it.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch
from frameworks import fedsim_engine
from frameworks.bare import BareLoop
from frameworks.clock import CLOCK
from frameworks.jobs import JOBS, Task
from measuring import compare_turns, make_parser, publish_rows

BARE, SERIAL = "bare loop", "fedsim serial"


def measure_turns(task: Task) -> list[dict[str, float]]:
    """Return seconds an update of both in each turn; the first two rounds are not counted."""
    loop, ends = BareLoop(task), list[tuple[float, float]]()

    def follow_round() -> None:
        started = time.thread_time()
        loop.run_round()
        ends.append((started, time.thread_time()))

    CLOCK.round_over = follow_round  # type: ignore[method-assign]
    fedsim_engine.run(task)
    turns = []
    for (bare_start, bare_end), (next_start, next_end) in pairwise(ends[1:]):
        bare = (bare_end - bare_start + next_end - next_start) / 2
        turns.append({BARE: bare / task.clients, SERIAL: (next_start - bare_end) / task.clients})
    return turns


def main() -> None:
    """Measure one job."""
    parser = make_parser(__doc__, repeats=8)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--clients", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = Task(options.job, options.clients, options.repeats + 2, loop=True)
    rows = compare_turns(measure_turns(task), BARE, {"job": options.job, "clients": options.clients})
    publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
