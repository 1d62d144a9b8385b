"""How far a sweep is: the state of every cell, and the tables that say so."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.errors import FedsimError
from fedsim.sweeps.cells import Cell
from fedsim.sweeps.plan import Plan
from fedsim.sweeps.queue import Job
from fedsim.sweeps.store import Marker, Store
from fedsim.sweeps.table import State, write_cells, write_table


@dataclass
class Board:
    """The cells of a sweep as they are now.

    Attributes:
        folder: of the sweep's tables.
        store: of the cells.
        plan: what was to be done.
        failed: by key, why a cell has no marker.
    """

    folder: Path
    store: Store
    plan: Plan
    failed: dict[str, str] = field(default_factory=dict)

    def ended(self, job: Job, error: BaseException | None, waiting: list[Cell]) -> Marker | None:
        """Note the end of a job.

        Args:
            error: why it failed.
            waiting: the cells that its failure leaves without a federation.

        Returns:
            What is known of it now; None where it failed.
        """
        place = self.store.federation(job.cell.federation) if job.federates else self.store.cell(job.cell.key)
        marker = None if error is not None else place.read()
        if marker is not None:
            (self.plan.federations if job.federates else self.plan.done)[place.folder.path.name] = marker
            return marker
        reason = _said(error)
        if job.federates:
            self.failed |= {cell.key: f"its federation failed: {reason}" for cell in waiting}
        else:
            self.failed[job.cell.key] = reason
        return None

    def write(self) -> None:
        """Write both tables.

        Raises:
            RunError: the folder cannot be written.
        """
        write_table(self.folder, self.plan.grid.axes, self._scores())
        write_cells(self.folder, self.plan.grid.axes, self._cells())

    @property
    def failures(self) -> list[str]:
        """A sentence for each reason why cells failed, with the first of them."""
        names = self.reasons
        more = {reason: f" and {len(which) - 1} more" if len(which) > 1 else "" for reason, which in names.items()}
        return [f"{which[0]}{more[reason]}: {reason}" for reason, which in names.items()]

    @property
    def reasons(self) -> dict[str, list[str]]:
        """By the reason for which cells failed, their names."""
        names: dict[str, list[str]] = defaultdict(list)
        for cell in self.plan.cells:
            if reason := self._state(cell)[1]:
                names[reason].append(cell.point.name)
        return dict(names)

    def _state(self, cell: Cell) -> tuple[State, str]:
        """The state of a cell, and why it failed."""
        if cell.key in self.failed:
            return "failed", self.failed[cell.key]
        if (marker := self.plan.done.get(cell.key)) is None:
            return "not done", ""
        return ("failed" if marker.failures else "done"), "; ".join(marker.failures)

    def _scores(self) -> Iterator[dict[str, Any]]:
        for cell in self.plan.cells:
            if marker := self.plan.done.get(cell.key):
                for row in marker.rows:
                    yield {**self._place(cell), "baseline": int(cell.baseline), **row, "run": self._run(cell)}

    def _cells(self) -> Iterator[dict[str, Any]]:
        cells = {cell.point.name: cell for cell in self.plan.cells}
        why = {point.name: reason for point, reason in self.plan.left_out}
        for point in self.plan.grid.points:
            if (cell := cells.get(point.name)) is None:
                yield point.row | {"state": "does not apply", "reason": why[point.name]}
                continue
            state, reason = self._state(cell)
            row = self._place(cell) | {"state": state, "reason": reason}
            marker = self.plan.done.get(cell.key)
            yield row | ({"seconds": marker.seconds, "run": self._run(cell)} if marker else {})

    def _place(self, cell: Cell) -> dict[str, Any]:
        return {"cell": cell.key, "federation": cell.federation, **cell.point.row}

    def _run(self, cell: Cell) -> str:
        return os.path.relpath(self.store.cell(cell.key).folder.path, self.folder)


def _said(error: BaseException | None) -> str:
    """Why a job failed; what is said of workers is true of those of the sweep."""
    if error is None:
        return "it left no marker; another process removed it"
    text = str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"
    return text.replace("adversary.workers", "sweep.workers")
