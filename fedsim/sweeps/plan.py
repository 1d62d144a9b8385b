"""Plan a sweep: the cells that apply, those that are finished, and the time for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedsim.audit.audit import Audit
from fedsim.base.errors import (
    ConfigError,
    DataError,
    FedsimError,
    InstallationError,
    PluginError,
    TrustError,
    error_reason,
)
from fedsim.base.grouping import group_by
from fedsim.base.progress import track
from fedsim.base.randomness import use_one_thread
from fedsim.federation.experiment import Experiment
from fedsim.sweeps.cells import InvalidPoint, SweepCell, build_cells
from fedsim.sweeps.controls import ControlledCells, find_controls
from fedsim.sweeps.file import SweepFile
from fedsim.sweeps.grid import ATTACK, GridPoint, SweepGrid, build_grid
from fedsim.sweeps.store import CellStore, Marker


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Cells of a sweep, and the results that exist.

    Attributes:
        inapplicable: points that do not apply, each with the reason.
        finished_cells: markers of finished cells by key; a cell that crashed is tried again.
        finished_federations: markers of finished federations by key, likewise.
        controls: controls of the cells, of which those that the grid lacks are among `cells`, at the end.
    """

    grid: SweepGrid
    cells: Sequence[SweepCell]
    inapplicable: Sequence[tuple[GridPoint, str]]
    finished_cells: dict[str, Marker]
    finished_federations: dict[str, Marker]
    controls: ControlledCells

    @property
    def points(self) -> list[GridPoint]:
        """Return all points: those of the grid, and those of added controls."""
        added = [cell.point for cell in self.cells if cell.point.is_added]
        return [*self.grid.points, *added, *(point for point, _ in self.inapplicable if point.is_added)]

    @property
    def control_federations(self) -> set[str]:
        """Return the keys of the federations of cells that are the control of a cell with a defense."""
        control_keys = {control for key, control in self.controls.key_of.items() if key != control}
        return {cell.federation for cell in self.cells if cell.key in control_keys}

    @property
    def remaining_cells(self) -> list[SweepCell]:
        """Return the cells that are not finished, or crashed."""
        return [
            cell for cell in self.cells if cell.key not in self.finished_cells or self.finished_cells[cell.key].crashed
        ]

    @property
    def remaining_federations(self) -> list[SweepCell]:
        """Return the first cell of each federation that is needed and not finished, or crashed."""
        first_cells = {cell.federation: cell for cell in reversed(self.remaining_cells)}
        needed: list[SweepCell] = []
        for key, cell in reversed(first_cells.items()):
            if key not in self.finished_federations or self.finished_federations[key].crashed:
                needed.append(cell)
        return needed

    @property
    def summary(self) -> str:
        """Return the numbers of cells and federations, and of finished ones, in a line."""
        cells, federations = len(self.cells), len({cell.federation for cell in self.cells})
        text = f"{cells} {'cell' if cells == 1 else 'cells'}"
        text += f" on {federations} {'federation' if federations == 1 else 'federations'}"
        text += f", {cells - len(self.remaining_cells)} done"
        if added := sum(cell.point.is_added for cell in self.cells):
            kind = "is a control" if added == 1 else "are controls"
            text += f"; {added} of the cells {kind} without a defense, added by fedsim"
        if left_out := len(self.inapplicable):
            text += f"; {left_out} more {'do' if left_out > 1 else 'does'} not apply"
        return text

    @property
    def estimated_seconds(self) -> float | None:
        """Estimate the seconds of one process that the remaining work takes, from finished cells.

        Returns:
            None where no cell is finished.
        """
        seconds_by_attack: dict[str, list[float]] = defaultdict(list)
        for cell in self.cells:
            if marker := self.finished_cells.get(cell.key):
                seconds_by_attack[cell.point.labels[ATTACK]].append(marker.seconds)
        if not seconds_by_attack:
            return None
        mean = fmean(second for seconds in seconds_by_attack.values() for second in seconds)
        federation = fmean([marker.seconds for marker in self.finished_federations.values()] or [0.0])
        attacks = sum(fmean(seconds_by_attack.get(cell.point.labels[ATTACK], [mean])) for cell in self.remaining_cells)
        return attacks + federation * len(self.remaining_federations)


def plan_sweep(file: SweepFile, store: CellStore, *, trust: bool) -> SweepPlan:
    """Plan the sweep of a file: find the cells that apply and those that are finished."""
    if file.sweep.address and not (file.is_own or trust):
        raise TrustError(
            f"{file.where}: sweep.address: '{file.sweep.address}' is a machine that a run folder "
            "names, which would be sent code and data of yours, and is not joined unasked; pass "
            "--trust if you trust the author of the folder"
        )
    grid = build_grid(file)
    points = build_cells(grid, trust=trust)
    cells = [point for point in points if isinstance(point, SweepCell)]
    controls = find_controls(grid, cells, trust=trust)
    points += controls.added
    cells += controls.added
    # Read the results that exist.
    done: dict[str, Marker] = {}
    for cell in cells:
        if (marker := store.cell(cell.key).read_intact()) is not None:
            done[cell.key] = marker
    federations: dict[str, Marker] = {}
    for key in dict.fromkeys(cell.federation for cell in cells):
        if (marker := store.federation(key).read_intact()) is not None:
            federations[key] = marker
    # Check the cells without results.
    with use_one_thread():  # threads that wait for one another take ten times as long on busy cores
        reasons = _find_inapplicable([cell for cell in cells if cell.key not in done], store)
    applicable = [cell for cell in cells if cell.key not in reasons]
    controls.drop(reasons)
    left_out: list[tuple[GridPoint, str]] = []
    for point in points:
        if isinstance(point, InvalidPoint):
            left_out.append((point.point, point.reason))
        elif point.key in reasons:
            left_out.append((point.point, reasons[point.key]))
    if not applicable:
        first = next(iter(reasons.values()), "") or left_out[0][1]
        raise ConfigError(f"{file.where}: no cell of the grid applies; the first one does not, because {first}")
    return SweepPlan(
        grid=grid,
        cells=applicable,
        inapplicable=left_out,
        finished_cells=done,
        finished_federations=federations,
        controls=controls,
    )


def _find_inapplicable(cells: Iterable[SweepCell], store: CellStore) -> dict[str, str]:
    """Return by key the reasons why cells do not apply, as far as checks can tell before work."""
    by_federation = group_by(cells, lambda cell: cell.federation)
    reasons: dict[str, str] = {}
    for group in track(by_federation.values(), "checking", len(by_federation)):
        experiment = Experiment(group[0].config)
        experiment_error = _error_of(experiment.check)
        for cell in group:
            folder = store.cell(cell.key).folder
            audit = Audit(folder=folder, spec=cell.config, experiment=experiment, base_folder=folder.path, trust=True)
            if reason := experiment_error or _error_of(audit.check) or audit.refusal_reasons.get(cell.title, ""):
                reasons[cell.key] = reason
    return reasons


def _error_of(check: Callable[[], object]) -> str:
    """Run `check` and return the text of its error; '' where there is none."""
    try:
        check()
    except (DataError, InstallationError, PluginError):
        raise
    except FedsimError as error:
        return str(error)
    except SystemExit as error:
        raise PluginError(f"a plug-in ended the program ({error_reason(error)})") from error
    return ""
