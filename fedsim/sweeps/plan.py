"""What a sweep has to do: which cells apply, which are done already, and how long the others may take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedsim.auditing.audit import Audit
from fedsim.errors import ConfigError, DataError, FedsimError, InstallationError, PluginError, TrustError, what_it_said
from fedsim.experiments.build import Experiment
from fedsim.experiments.run_folder import RunFolder
from fedsim.progress import tracked
from fedsim.randomness import one_thread
from fedsim.sweeps.cells import Cell, Unread, cells_of
from fedsim.sweeps.file import SweepFile
from fedsim.sweeps.grid import ATTACK, Grid, Point, grid_of
from fedsim.sweeps.store import Marker, Store


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cells of a sweep.

    Attributes:
        grid: what the file asks for.
        cells: those that apply, in the order of the grid.
        left_out: the other points, and why.
        done: by key, what is known of cells that are finished; one that crashed is tried again.
        federations: the same for federations.
    """

    grid: Grid
    cells: Sequence[Cell]
    left_out: Sequence[tuple[Point, str]]
    done: dict[str, Marker]
    federations: dict[str, Marker]

    @property
    def to_do(self) -> list[Cell]:
        """Cells that are not finished, or crashed."""
        return [cell for cell in self.cells if cell.key not in self.done or self.done[cell.key].crashed]

    @property
    def to_federate(self) -> list[Cell]:
        """Of each federation that is not finished, or crashed, and is needed, the first cell."""
        first = {cell.federation: cell for cell in reversed(self.to_do)}
        known = self.federations
        return [cell for key, cell in reversed(first.items()) if key not in known or known[key].crashed]

    @property
    def sentence(self) -> str:
        """How much there is and how much of it is done, in a line."""
        cells, federations = len(self.cells), len({cell.federation for cell in self.cells})
        text = f"{cells} cell{'s' * (cells != 1)} on {federations} federation{'s' * (federations != 1)}"
        text += f", {cells - len(self.to_do)} done already"
        left_out = len(self.left_out)
        return text + (f"; {left_out} more {'do' if left_out > 1 else 'does'} not apply" if left_out else "")

    @property
    def seconds(self) -> float | None:
        """What is left to do, in seconds of one process, by what finished cells took; None where none is finished."""
        by_attack: dict[str, list[float]] = defaultdict(list)
        for cell in self.cells:
            if marker := self.done.get(cell.key):
                by_attack[cell.point.labels[ATTACK]].append(marker.seconds)
        if not by_attack:
            return None
        anyone = fmean(second for seconds in by_attack.values() for second in seconds)
        federation = fmean([marker.seconds for marker in self.federations.values()] or [0.0])
        attacks = sum(fmean(by_attack.get(cell.point.labels[ATTACK], [anyone])) for cell in self.to_do)
        return attacks + federation * len(self.to_federate)


def planned(file: SweepFile, store: Store, *, trust: bool) -> Plan:
    """What the sweep file asks for, and what of it is done.

    Raises:
        ConfigError: the file describes cells that cannot be, or none that applies.
        TrustError: it is in a run folder, and names a cluster to join.
        DataError, InstallationError, PluginError: something that a cell needs is missing or does not load.
    """
    if file.sweep.address and not (file.own or trust):
        raise TrustError(
            f"{file.where}: sweep.address: '{file.sweep.address}' is a machine that a run folder names, which would be "
            "sent code and data of yours, and is not joined unasked; pass --trust if you trust the author of the folder"
        )
    grid = grid_of(file)
    found = cells_of(grid, trust=trust)
    cells = [item for item in found if isinstance(item, Cell)]
    done = {cell.key: marker for cell in cells if (marker := store.cell(cell.key).finished()) is not None}
    wanted = dict.fromkeys(cell.federation for cell in cells)
    federations = {key: marker for key in wanted if (marker := store.federation(key).finished()) is not None}
    with one_thread():  # threads that wait for one another take ten times as long on busy cores
        why = _why_not([cell for cell in cells if cell.key not in done], store)
    applying = [cell for cell in cells if cell.key not in why]
    if not applying:
        first = next(iter(why.values()), "") or next(item.reason for item in found if isinstance(item, Unread))
        raise ConfigError(f"{file.where}: no cell of the grid applies; the first one does not, because {first}")
    left_out = [
        (item.point, item.reason if isinstance(item, Unread) else why[item.key])
        for item in found
        if isinstance(item, Unread) or item.key in why
    ]
    return Plan(grid=grid, cells=applying, left_out=left_out, done=done, federations=federations)


def _why_not(cells: Iterable[Cell], store: Store) -> dict[str, str]:
    """Why cells do not apply, by key, as far as that can be told before work starts."""
    by_federation: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_federation[cell.federation].append(cell)
    found: dict[str, str] = {}
    for group in tracked(by_federation.values(), "checking", len(by_federation)):
        experiment = Experiment(group[0].config)
        reason = _refused(experiment.check)
        for cell in group:
            audit = _audit(cell, experiment, store.cell(cell.key).folder)
            if why := reason or _refused(audit.check) or audit.refused.get(cell.title, ""):
                found[cell.key] = why
    return found


def _audit(cell: Cell, experiment: Experiment, folder: RunFolder) -> Audit:
    return Audit(folder=folder, spec=cell.config, experiment=experiment, beside=Path(folder.path), trust=True)


def _refused(check: object) -> str:
    """Why `check` refuses; nothing where it does not.

    Raises:
        DataError, InstallationError, PluginError: something is missing or does not load, which no other cell mends.
    """
    assert callable(check)
    try:
        check()
    except (DataError, InstallationError, PluginError):
        raise
    except FedsimError as error:
        return str(error)
    except SystemExit as error:
        raise PluginError(f"a plug-in ended the program ({what_it_said(error)})") from error
    return ""
