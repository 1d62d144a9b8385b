"""The order of work: a federation before the cells that attack it, and no more at once than memory allows."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.sweeps.cells import Cell


@dataclass(frozen=True)
class Job:
    """A federation to run, or a cell to attack; of a federation, `cell` is one of those that need it."""

    cell: Cell
    federates: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"federation of {self.cell.point.name}" if self.federates else self.cell.point.name


class Queue:
    """Jobs that can be begun, for `fedsim.auditing.workers.in_processes`.

    An attack goes first, unless fewer are ready than there are workers: then a federation, so that nobody waits for one
    in the end.

    Args:
        federations: of each federation that is to be run, the first cell.
        cells: to be attacked.
        workers: most jobs at once.
        memory: bytes for all of them together.
    """

    def __init__(self, federations: Sequence[Cell], cells: Sequence[Cell], workers: int, memory: int) -> None:
        self._federations = deque(federations)
        waited_for = {cell.federation for cell in federations}
        self._ready = deque(cell for cell in cells if cell.federation not in waited_for)
        self._blocked: dict[str, list[Cell]] = defaultdict(list)
        for cell in cells:
            if cell.federation in waited_for:
                self._blocked[cell.federation].append(cell)
        self._workers, self._memory = workers, memory
        self._busy, self._largest = 0, 0

    def __bool__(self) -> bool:
        """Whether a job can be begun now: one at least, and more as long as they fit into memory."""
        fits = self._busy == 0 or (self._busy + 1) * self._largest <= self._memory
        return fits and bool(self._ready or self._federations)

    def popleft(self) -> Job:
        """The next job."""
        self._busy += 1
        if self._federations and len(self._ready) < self._workers:
            return Job(self._federations.popleft(), federates=True)
        return Job(self._ready.popleft(), federates=False)

    def needs(self, memory: int) -> None:
        """Note that a job has held so many bytes."""
        self._largest = max(self._largest, memory)

    def ended(self, job: Job, *, well: bool) -> list[Cell]:
        """Note the end of a job; which cells wait in vain, because it was their federation and it failed."""
        self._busy -= 1
        released = self._blocked.pop(job.cell.federation, []) if job.federates else []
        if well:
            self._ready.extend(released)
            return []
        return released
