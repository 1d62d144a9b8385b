"""Every cell with a defense has the same cell without one beside it: the grid's own, or one that the sweep adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsim.base.errors import ConfigError
from fedsim.sweeps import controls
from fedsim.sweeps.cells import SweepCell, build_cells
from fedsim.sweeps.controls import ControlledCells, find_controls
from fedsim.sweeps.file import parse_sweep
from fedsim.sweeps.grid import GridPoint, SweepGrid, build_grid

TOP_K: list[dict[str, Any]] = [{"name": "top-k", "fraction": 0.1}]
BASE: dict[str, Any] = {
    "partition": {"name": "iid", "samples_per_client": 8},
    "model": {"name": "mlp", "hidden": [8]},
    "federation": {"clients": 4, "rounds": 2},
    "attack": [{"name": "sme"}],
}


def controlled(
    axes: dict[str, list[Any]], sweep: dict[str, Any] | None = None, **tables: Any
) -> tuple[Sequence[SweepCell], ControlledCells]:
    file = parse_sweep({"sweep": {"axes": axes, **(sweep or {})}, **BASE, **tables}, "study.toml", Path("/nowhere"))
    grid = build_grid(file)
    cells = [cell for cell in build_cells(grid, trust=False) if isinstance(cell, SweepCell)]
    return cells, find_controls(grid, cells, trust=False)


def names(cells: Sequence[SweepCell]) -> list[str]:
    return [cell.point.name for cell in cells]


def test_a_control_that_the_grid_lacks_is_added_for_each_setting_and_seed() -> None:
    axes = {"defense": [TOP_K], "training.local_epochs": [1, 2]}
    cells, found = controlled(axes, {"seeds": [1, 2]})
    assert names(found.added) == [
        f"defense=none, training.local_epochs={epochs}, attack=sme, seed={seed}" for epochs in (1, 2) for seed in (1, 2)
    ]
    assert [found.key_of[cell.key] for cell in cells] == [cell.key for cell in found.added]
    assert {(len(cell.config.defense), cell.point.is_added) for cell in found.added} == {(0, True)}
    assert [cell.config.training for cell in cells] == [cell.config.training for cell in found.added]


def test_a_control_that_the_grid_has_is_shared_by_all_defenses() -> None:
    cells, found = controlled({"defense": [[], TOP_K, [{"name": "update-noise"}]]})
    assert found.added == []
    assert [found.key_of[cell.key] for cell in cells] == [cells[0].key] * 3


def test_an_added_control_is_the_cell_that_a_grid_with_no_defense_has() -> None:
    _, found = controlled({"defense": [TOP_K]})
    (plain, *_), _ = controlled({"defense": [[], TOP_K]})
    assert [cell.key for cell in found.added] == [plain.key]


def test_a_control_that_was_excluded_is_added_again() -> None:
    _, found = controlled({"defense": [[], TOP_K]}, {"exclude": [{"defense": "none"}]})
    assert names(found.added) == ["defense=none, attack=sme, seed=0"]


def test_whether_the_adversary_would_know_a_defense_matters_to_no_control() -> None:
    case = [
        {"label": "plain", "adversary": {"knowledge": {"defenses": False}}},
        {"label": "top-k", "defense": TOP_K, "adversary": {"knowledge": {"defenses": True}}},
    ]
    cells, found = controlled({"case": case})
    assert found.added == []
    assert found.key_of[cells[1].key] == cells[0].key


def test_a_defense_of_the_base_is_told_from_its_control_by_an_axis() -> None:
    cells, found = controlled({"training.local_epochs": [1]}, defense=TOP_K)
    assert names(cells) == ["training.local_epochs=1, defense=top-k, attack=sme, seed=0"]
    assert names(found.added) == ["training.local_epochs=1, defense=none, attack=sme, seed=0"]


def test_an_axis_of_a_strength_has_no_strength_in_the_control() -> None:
    cells, found = controlled({"defense.top-k.fraction": [0.1, 0.2]}, defense=TOP_K)
    assert names(found.added) == ["defense.top-k.fraction=none, defense=none, attack=sme, seed=0"]
    assert {found.key_of[cell.key] for cell in cells} == {found.added[0].key}


def test_cases_that_differ_in_more_than_the_defense_have_controls_of_their_own() -> None:
    long = {"training": {"local_epochs": 5}}
    case = [
        {"label": "weak", "defense": TOP_K},
        {"label": "strong", "defense": [{"name": "top-k", "fraction": 0.01}]},
        {"label": "long", "defense": TOP_K, **long},
        {"label": "long and strong", "defense": [{"name": "top-k", "fraction": 0.01}], **long},
    ]
    cells, found = controlled({"case": case})
    assert [cell.point.labels["case"] for cell in found.added] == ["no defense", "long, no defense"]
    plain, long_plain = (cell.key for cell in found.added)
    assert [found.key_of[cell.key] for cell in cells] == [plain, plain, long_plain, long_plain]


def test_a_baseline_needs_no_control() -> None:
    attack = [{"name": "shared-model", "source": "last-returned"}]
    _, found = controlled({"defense": [TOP_K]}, attack=attack)
    assert (found.added, found.key_of, found.reasons) == ([], {}, {})


def test_why_a_control_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(grid: SweepGrid, point: GridPoint, *, trust: bool) -> SweepCell:
        raise ConfigError(f"{grid.file.where}: strategy: needs a defense; name one")

    monkeypatch.setattr(controls, "build_cell", refuse)
    cells, found = controlled({"defense": [TOP_K]})
    assert found.reasons == {
        cells[0].key: "without the defense its settings are invalid: strategy: needs a defense; name one"
    }
    assert (found.added, found.key_of) == ([], {})


def test_a_control_that_does_not_apply_is_none() -> None:
    cells, found = controlled({"defense": [TOP_K]})
    found.drop({found.added[0].key: "it reads tokens"})
    assert found.reasons == {cells[0].key: "without the defense this cell does not apply: it reads tokens"}
    assert cells[0].key not in found.key_of
    assert found.added == []
