"""Find the control of each defended cell: the same settings without a defense, added where the grid lacks it.

What a defense is worth shows only beside the same attack on the same clients without one. Cells are
compared by their hashes, so that a control is found whatever it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedsim.base.errors import ConfigError
from fedsim.sweeps.cells import InvalidPoint, SweepCell, build_cell
from fedsim.sweeps.file import CASE
from fedsim.sweeps.grid import DEFENSE, GridPoint, SweepGrid
from fedsim.sweeps.labels import NONE

NO_DEFENSE = "no defense"
"""Label of a case without its defense."""


@dataclass(kw_only=True)
class ControlledCells:
    """Cells of a grid and the controls of those that have a defense.

    Attributes:
        added: controls that the grid lacks, in the order of the cells that need them.
        key_of: key of each cell's control, by the key of the cell; a cell without a defense is its
            own.
        reasons: why a cell has no control, by the key of the cell.
    """

    added: list[SweepCell] = field(default_factory=list)
    key_of: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def drop(self, reasons: Mapping[str, str]) -> None:
        """Drop controls that do not apply, by their keys, each with the reason."""
        for key, control in list(self.key_of.items()):
            if key != control and control in reasons:
                self.reasons[key] = f"without the defense this cell does not apply: {reasons[control]}"
                del self.key_of[key]
        self.added = [cell for cell in self.added if cell.key not in reasons]


def find_controls(grid: SweepGrid, cells: Sequence[SweepCell], *, trust: bool) -> ControlledCells:
    """Find the control of each cell of `grid`, and build those that it lacks."""
    result = ControlledCells()
    undefended: dict[str, SweepCell] = {}
    for cell in cells:
        if not cell.config.defense:
            undefended.setdefault(_hash_without_knowledge(cell), cell)
            result.key_of[cell.key] = cell.key
    for cell in cells:
        if not cell.config.defense or cell.is_baseline:
            continue
        # Build the control, and look for a cell that equals it.
        control = _build_control(grid, cell.point, trust=trust)
        if isinstance(control, InvalidPoint):
            reason = control.reason.removeprefix(f"{grid.file.where}: ")
            result.reasons[cell.key] = f"without the defense its settings are invalid: {reason}"
            continue
        identity = _hash_without_knowledge(control)
        if identity not in undefended:
            undefended[identity] = control
            result.added.append(control)
            result.key_of[control.key] = control.key
        result.key_of[cell.key] = undefended[identity].key
    return result


def _build_control(grid: SweepGrid, point: GridPoint, *, trust: bool) -> SweepCell | InvalidPoint:
    control = without_defense(grid, point)
    try:
        return build_cell(grid, control, trust=trust)
    except ConfigError as error:
        return InvalidPoint(control, str(error))


def without_defense(grid: SweepGrid, point: GridPoint) -> GridPoint:
    """Return the point of the same settings without a defense."""
    labels = dict(point.labels)
    for axis in labels:
        if axis.partition(".")[0] == DEFENSE:
            labels[axis] = NONE
        elif axis == CASE and DEFENSE in point.values[CASE]:
            labels[axis] = _name_undefended_case(grid, point.values[CASE])
    return replace(point, labels=labels, is_added=True)


def _name_undefended_case(grid: SweepGrid, case: Mapping[str, Any]) -> str:
    """Name a case without its defense; cases that differ in nothing else share the name of the first."""
    settings, cases = _settings_besides_defense(case), grid.file.sweep.axes[CASE]
    if not settings:
        # Another case of this label would be shown as one with it.
        is_free = all(other["label"] != NO_DEFENSE or not _settings_besides_defense(other) for other in cases)
        return NO_DEFENSE if is_free else f"{NO_DEFENSE} (control)"
    first = next(other for other in cases if DEFENSE in other and _settings_besides_defense(other) == settings)
    return f"{first['label']}, {NO_DEFENSE}"


def _settings_besides_defense(case: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key not in ("label", DEFENSE)}


def _hash_without_knowledge(cell: SweepCell) -> str:
    """Return the key of an undefended cell whose adversary is not told that there is no defense.

    Nothing depends on that: an attack has no adaptive form where there is nothing to adapt to.
    """
    adversary = cell.config.adversary
    knowledge = adversary.knowledge.model_copy(update={"defenses": False})
    unaware = cell.config.model_copy(update={"adversary": adversary.model_copy(update={"knowledge": knowledge})})
    return replace(cell, config=unaware).key
