"""Progress of a sweep: the state of every cell, and the tables that show it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.base.errors import error_reason, number_of
from fedsim.sweeps.cells import SweepCell
from fedsim.sweeps.plan import SweepPlan
from fedsim.sweeps.queue import SweepJob
from fedsim.sweeps.store import CellStore, Marker
from fedsim.sweeps.table import State, write_cells, write_table


@dataclass
class SweepBoard:
    """Current states of the cells of a sweep.

    Attributes:
        plan: cells and federations of the sweep; those that end are added to the finished ones.
        failed: by key, the reason why a cell has no marker.
        skipped: why all cells that are not done are skipped; empty where they are not.
    """

    folder: Path
    store: CellStore
    plan: SweepPlan
    failed: dict[str, str] = field(default_factory=dict)
    skipped: str = ""

    def record_end(self, job: SweepJob, error: BaseException | None, waiting: list[SweepCell]) -> Marker | None:
        """Record the end of a job.

        Args:
            waiting: cells that its failure leaves without a federation.

        Returns:
            The marker of its result; None where it failed.
        """
        if job.federates:
            entry, finished = self.store.federation(job.cell.federation), self.plan.finished_federations
        else:
            entry, finished = self.store.cell(job.cell.key), self.plan.finished_cells
        marker = None if error is not None else entry.read_marker()
        if marker is not None:
            finished[entry.folder.path.name] = marker
            return marker
        reason = _describe_failure(error)
        if job.federates:
            self.failed |= {cell.key: f"its federation failed: {reason}" for cell in waiting}
        else:
            self.failed[job.cell.key] = reason
        return None

    def write(self) -> None:
        """Write both tables."""
        write_table(self.folder, self.plan.grid.axes, self.score_rows())
        write_cells(self.folder, self.plan.grid.axes, self._cell_rows())

    @property
    def failure_summaries(self) -> list[str]:
        """Return a sentence for each reason why cells failed, with the first cell's name."""
        sentences: list[str] = []
        failures_of = {"; ".join(marker.failures): marker.failures for marker in self.plan.finished_cells.values()}
        for reason, names in self.cells_by_reason.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            first, *others = failures_of.get(reason) or [reason]
            # An attack that fails on every victim has a reason for each, which differ by a number.
            rest = f"; {number_of(len(others), 'failure')} more in the report of this cell" if others else ""
            sentences.append(f"{names[0]}{more}: {first}{rest}")
        return sentences

    @property
    def crash_summaries(self) -> list[str]:
        """Return a sentence for each cell that a program's error or the death of a process ended."""
        sentences: list[str] = []
        for cell in self.plan.cells:
            marker = self.plan.finished_cells.get(cell.key)
            if cell.key in self.failed or (marker is not None and marker.crashed):
                sentences.append(f"{cell.point.name}: {self._state(cell)[1]}")
        return sentences

    @property
    def cells_by_reason(self) -> dict[str, list[str]]:
        """Return the names of failed cells by the reason of their failure."""
        names: dict[str, list[str]] = defaultdict(list)
        for cell in self.plan.cells:
            state, reason = self._state(cell)
            if state == "failed":
                names[reason].append(cell.point.name)
        return dict(names)

    def _state(self, cell: SweepCell) -> tuple[State, str]:
        """Return the state of a cell, and the reason why it failed or is skipped."""
        if cell.key in self.failed:
            return "failed", self.failed[cell.key]
        if (marker := self.plan.finished_cells.get(cell.key)) is None:
            return ("skipped", self.skipped) if self.skipped else ("not done", "")
        return ("failed" if marker.failures else "done"), "; ".join(marker.failures)

    def score_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `sweep.csv`, of all cells that are done."""
        for cell in self.plan.cells:
            if marker := self.plan.finished_cells.get(cell.key):
                for row in marker.rows:
                    run = self._run_path(cell)
                    yield {
                        **self._cell_columns(cell),
                        "baseline": int(cell.is_baseline),
                        **row,
                        "run": run,
                    }

    def _cell_rows(self) -> Iterator[dict[str, Any]]:
        cells = {cell.point.name: cell for cell in self.plan.cells}
        reasons = {point.name: reason for point, reason in self.plan.inapplicable}
        for point in self.plan.points:
            added = {"added": int(point.is_added)}
            if (cell := cells.get(point.name)) is None:
                yield point.row | added | {"state": "does not apply", "reason": reasons[point.name]}
                continue
            state, reason = self._state(cell)
            no_control = self.plan.controls.reasons.get(cell.key, "")
            texts = {
                "no_control": no_control,
                "defense_limits": cell.defense_limits,
                "open_rounds": " ".join(map(str, cell.open_rounds)),
            }
            row = self._cell_columns(cell) | added | texts | {"state": state, "reason": reason}
            if marker := self.plan.finished_cells.get(cell.key):
                row |= {"seconds": marker.seconds, "run": self._run_path(cell)}
            yield row

    def _cell_columns(self, cell: SweepCell) -> dict[str, Any]:
        control = self.plan.controls.key_of.get(cell.key, "")
        return {"cell": cell.key, "federation": cell.federation, "control": control, **cell.point.row}

    def _run_path(self, cell: SweepCell) -> str:
        return os.path.relpath(self.store.cell(cell.key).folder.path, self.folder)


def _describe_failure(error: BaseException | None) -> str:
    """Describe why a job failed; advice about workers is rewritten for those of the sweep."""
    if error is None:
        return "it left no marker; another process removed it"
    text = error_reason(error)
    return text.replace("adversary.workers", "sweep.workers")
