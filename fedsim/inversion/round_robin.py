"""Round robin of victims: each victim's attack advances by one iteration, then the next one's."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

from fedsim.interfaces.attack import FAILURES, Outcome, VictimTask
from fedsim.interfaces.findings import Finding


def run_round_robin(
    turns: Mapping[VictimTask, Generator[None, None, Finding]],
) -> Iterator[tuple[VictimTask, Outcome]]:
    """Advance the attacks in turn; yield the outcome of each one as soon as it ends.

    An attack that raises ends alone; the others go on.

    Args:
        turns: by victim, an attack that yields once an iteration.
    """
    running = dict(turns)
    while running:
        for task in list(running):
            try:
                with task.log_context():
                    next(running[task])
            except StopIteration as end:
                del running[task]
                yield task, end.value
            except FAILURES as error:
                del running[task]
                yield task, error
