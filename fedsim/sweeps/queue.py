"""Order the jobs of a sweep: federations before the cells that attack them, within the memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.sweeps.cells import SweepCell


@dataclass(frozen=True)
class SweepJob:
    """Job of a sweep: a federation to run, or a cell to attack.

    Attributes:
        cell: the cell, or one of those that need the federation.
    """

    cell: SweepCell
    federates: bool

    @property
    def name(self) -> str:
        """Return the name of the job in messages."""
        return f"federation of {self.cell.point.name}" if self.federates else self.cell.point.name


class JobQueue:
    """Queue of jobs that can be started, for `fedsim.base.workers.run_in_processes`.

    Attacks come first, unless fewer are ready than there are workers: then a federation does, so
    that no worker has to wait for one in the end.

    Args:
        federations: the first cell of each federation that is to be run.
        memory: bytes for all jobs together.
    """

    def __init__(self, federations: Sequence[SweepCell], cells: Sequence[SweepCell], workers: int, memory: int) -> None:
        self._federations = deque[SweepCell]()
        self._ready = deque[SweepCell]()
        self._blocked: dict[str, list[SweepCell]] = defaultdict(list)
        self._workers, self._memory = workers, memory
        self._busy, self._largest = 0, 0
        self.add(federations, cells)

    def add(self, federations: Sequence[SweepCell], cells: Sequence[SweepCell]) -> None:
        """Add federations to be run, and cells to be attacked."""
        self._federations.extend(federations)
        pending_federations = {cell.federation for cell in federations}
        for cell in cells:
            if cell.federation in pending_federations:
                self._blocked[cell.federation].append(cell)
            else:
                self._ready.append(cell)

    def __bool__(self) -> bool:
        """Return whether a job can be started: one at least, and more while memory allows."""
        fits = self._busy == 0 or (self._busy + 1) * self._largest <= self._memory
        return fits and bool(self._ready or self._federations)

    def popleft(self) -> SweepJob:
        """Remove and return the next job."""
        self._busy += 1
        if self._federations and len(self._ready) < self._workers:
            return SweepJob(self._federations.popleft(), federates=True)
        return SweepJob(self._ready.popleft(), federates=False)

    def record_memory(self, memory: int) -> None:
        """Record that a job has used `memory` bytes."""
        self._largest = max(self._largest, memory)

    def record_end(self, job: SweepJob, *, well: bool) -> list[SweepCell]:
        """Record the end of a job, and release the cells that wait for its federation.

        Returns:
            Cells that cannot be attacked, because their federation failed.
        """
        self._busy -= 1
        released = self._blocked.pop(job.cell.federation, []) if job.federates else []
        if well:
            self._ready.extend(released)
            return []
        return released
