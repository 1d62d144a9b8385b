"""Every sweep file fits the paper's table and the experiments that exist; every table says what makes it again."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.api.reproduce import recipes
from fedsim.api.reproduce.figures import parse_figure
from fedsim.api.reproduce.papers import PACKAGE_FOLDER, read_papers
from fedsim.api.reproduce.recipes import (
    FigureSource,
    ScaleName,
    SweepRecipe,
    TableRecipe,
    find_recipe,
    read_reasons,
    read_sweep_figures,
)
from fedsim.base.errors import ConfigError
from fedsim.federation.experiment_file import config_of, set_value
from fedsim.federation.table_validation import validate_tables
from fedsim.plugins.registry import load, registered_names
from fedsim.sweeps.grid import SweepGrid, build_grid
from fedsim.sweeps.table import SweepTableFile

ROOT = Path(__file__).parents[4]
TABLES = [(paper, table) for paper, about in read_papers().items() for table in about.table]
MADE = {f"{paper}-{table}": made for paper, table in TABLES if (made := find_recipe(paper, table))}
SWEEPS = {name: made for name, made in MADE.items() if not made.recipe.geometry}
GEOMETRIES = {name: made for name, made in MADE.items() if made.recipe.geometry}
SCALES: list[ScaleName] = ["quick", "full"]


def rows_in(made: SweepRecipe, grid: SweepGrid) -> set[str]:
    """The rows of the paper's table of which a cell of the grid is one."""
    every = [point.row for point in grid.points]
    return {
        row
        for row, labels in made.recipe.rows.items()
        if any(all(point[axis] == str(label) for axis, label in labels.items()) for point in every)
    }


def test_every_sweep_file_is_that_of_a_table() -> None:
    assert {path.stem for path in PACKAGE_FOLDER.glob("sweeps/*.toml")} == set(MADE)


@pytest.mark.parametrize(("paper", "table"), TABLES)
def test_a_table_is_made_again_by_a_sweep_or_by_studies_that_are_there(paper: str, table: str) -> None:
    script = read_papers()[paper].table[table].script
    assert (script is None) is (find_recipe(paper, table) is not None)
    if script is not None:
        for study in script.command.removeprefix("python -m studies ").split():
            assert (ROOT / "studies" / study / "study.toml").is_file()


@pytest.mark.parametrize("name", SWEEPS)
def test_every_row_and_every_attack_that_is_read_is_in_the_full_sweep(name: str) -> None:
    made = SWEEPS[name]
    grid = build_grid(made.sweep("full", PACKAGE_FOLDER))
    assert rows_in(made, grid) == set(made.recipe.rows)
    assert made.recipe.by_attack is not any(one.attack for one in made.recipe.quantities.values())
    read_of = {of for one in made.recipe.quantities.values() for of in (one.attack, one.minus, one.over) if of}
    assert read_of <= {point.labels["attack"] for point in grid.points}


@pytest.mark.parametrize("name", SWEEPS)
def test_the_quick_sweep_is_a_part_of_the_full_one(name: str) -> None:
    made = SWEEPS[name]
    quick, full = (build_grid(made.sweep(scale, PACKAGE_FOLDER)) for scale in SCALES)
    assert rows_in(made, quick)
    assert {tuple(point.row.items()) for point in quick.points} <= {tuple(point.row.items()) for point in full.points}
    assert made.recipe.quick.minutes <= min(15, made.recipe.full.minutes)


def test_all_quick_runs_together_take_less_than_two_hours() -> None:
    assert sum(made.recipe.quick.minutes for made in MADE.values()) < 120


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SWEEPS)
def test_every_cell_of_a_sweep_is_an_experiment(name: str, scale: ScaleName) -> None:
    made = SWEEPS[name]
    grid = build_grid(made.sweep(scale, PACKAGE_FOLDER))
    for point in grid.points:
        tables = grid.tables(point) | {"attack": []}  # plug-ins are not loaded here
        assert config_of(tables, made.where, PACKAGE_FOLDER).federation.seed == point.seed


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_row_of_a_geometry_is_an_experiment_that_is_not_attacked(name: str, scale: ScaleName) -> None:
    made = GEOMETRIES[name]
    for row, values in made.recipe.rows.items():
        tables = made.tables_at(scale)
        for key, value in values.items():
            set_value(tables, key, value, made.where)
        config = config_of(tables, made.where, PACKAGE_FOLDER)
        assert (config.attack, config.adversary.when) == ([], "never"), row


@pytest.mark.parametrize("name", [name for name, made in MADE.items() if made.recipe.train])
def test_states_that_a_recipe_starts_from_are_those_that_it_trains(name: str) -> None:
    made = MADE[name]
    config = config_of(deepcopy(made.recipe.train or {}), made.where, PACKAGE_FOLDER)
    trained = {f"round-{number}.safetensors" for number in config.states.rounds}
    rows = {values.get("model.start") for values in made.recipe.rows.values()} - {None}
    assert rows == trained


SCORES = SweepTableFile(
    axes=("data",),
    rows=[
        {
            "data": data, "attack": attack, "seed": "1", "victim": victim, "round": "1", "repeat": "0",
            "knows_defenses": "0", "metric": "psnr", "value": value, "floor": "8", "accuracy": "0.5", "seconds": "3",
        }
        for data, attack, victim, value in [
            ("A", "SME", "0", "20"), ("A", "SME", "1", "24"), ("A", "IG", "0", "19"), ("A", "IG", "1", "21"),
            ("A", "DLG", "0", ""), ("B", "SME", "0", "30"),
        ]
    ],
)  # fmt: skip
READINGS: dict[str, dict[str, Any]] = {
    "mean": {"attack": "SME", "metric": "psnr"},
    "gain": {"attack": "SME", "minus": "IG", "metric": "psnr"},
    "floor": {"attack": "SME", "metric": "floor", "of": "psnr"},
    "share": {"attack": "SME", "metric": "accuracy", "times": 100},
    "ratio": {"attack": "SME", "over": "IG", "metric": "seconds"},
    "refused": {"attack": "DLG", "metric": "psnr"},
    "adaptive": {"attack": "SME", "metric": "psnr", "adaptive": True},
}


def recipe(spread: str) -> TableRecipe:
    scale = {"minutes": 1, "note": "All."}
    rows = {"first": {"data": "A"}, "second": {"data": "B"}, "third": {"data": "C"}}
    tables = {"rows": rows, "quantities": READINGS, "spread": spread, "quick": scale, "full": scale}
    return validate_tables(TableRecipe, tables, "here")


@pytest.mark.parametrize(
    ("spread", "of_mean", "of_gain"), [("standard deviation", "2.8", "1.4"), ("standard error", "2.0", "1.0")]
)
def test_figures_are_means_over_victims_and_a_gain_is_paired(spread: str, of_mean: str, of_gain: str) -> None:
    """20 and 24 over 19 and 21: apart by 1 and 3."""
    found = read_sweep_figures(recipe(spread), SCORES, dict.fromkeys(READINGS, 1))
    assert found["first"] == {
        "mean": f"22.0 ± {of_mean}",
        "gain": f"+2.0 ± {of_gain}",
        "floor": "8.0 ± 0.0",
        "share": "50.0 ± 0.0",
        "ratio": "1.0",
        "refused": "refused",
    }


def test_victims_without_a_value_are_left_out_and_counted() -> None:
    """And so are those of whom one of two attacks has none."""
    rows = [
        row | {"value": "" if (row["attack"], row["victim"]) == ("SME", "1") else row["value"]} for row in SCORES.rows
    ]
    found = read_sweep_figures(recipe("standard error"), SweepTableFile(SCORES.axes, rows), dict.fromkeys(READINGS, 1))[
        "first"
    ]
    assert (found["mean"], found["gain"]) == ("20.0 (1 of 2)", "+1.0 (1 of 2)")
    assert parse_figure(found["mean"], "").value == 20


def test_victims_on_whom_an_attack_failed_are_counted_and_where_it_failed_on_all_it_is_refused() -> None:
    def failed(attack: str, victim: str) -> SweepTableFile:
        return SweepTableFile(
            SCORES.axes,
            [
                row | {"metric": "", "value": "", "floor": "", "seconds": ""}
                if (row["attack"], row["data"]) == (attack, "A") and victim in (row["victim"], "all")
                else row
                for row in SCORES.rows
            ],
        )

    one, every = (
        read_sweep_figures(recipe("standard error"), failed("SME", victim), dict.fromkeys(READINGS, 1))["first"]
        for victim in ("1", "all")
    )
    assert (one["mean"], one["gain"], one["floor"], one["ratio"]) == (
        "20.0 (1 of 2)",
        "+1.0 (1 of 2)",
        "8.0 (1 of 2)",
        "1.0",
    )
    assert (every["mean"], every["gain"], every["floor"], every["share"]) == (
        "refused",
        "refused",
        "refused",
        "50.0 ± 0.0",
    )


def test_seeds_of_the_same_clients_are_no_further_clients() -> None:
    """Two clients at 20 and 24 in each of three seeds: the interval is that of two clients, Student's."""
    rows = [row | {"seed": seed} for seed in "123" for row in SCORES.rows if row["data"] == "A"]
    once, thrice = (
        read_sweep_figures(recipe("95 % interval"), SweepTableFile(SCORES.axes, some), dict.fromkeys(READINGS, 1))[
            "first"
        ]["mean"]
        for some in (SCORES.rows, rows)
    )
    assert once == thrice == "22.0 ± 25.4"


def test_a_perfect_victim_has_no_spread() -> None:
    rows = [row | {"value": "inf" if row["victim"] == "1" else row["value"]} for row in SCORES.rows]
    found = read_sweep_figures(recipe("95 % interval"), SweepTableFile(SCORES.axes, rows), dict.fromkeys(READINGS, 1))[
        "first"
    ]
    assert found["mean"] == "inf"
    assert parse_figure(found["mean"], "").text == "inf"


def test_each_attack_has_a_row_where_attacks_are_compared_or_the_reason_why_it_does_not_apply() -> None:
    """DLG fails on all of A, and SME's floor of 8 is subtracted for each victim."""
    quantities = {"mean": {"metric": "psnr"}, "beyond": {"metric": "psnr", "beyond_floor": True}}
    asked = recipe("standard error").model_copy(update={"by_attack": True, "rows": {"first": {"data": "A"}}})
    asked = asked.model_copy(update={"quantities": {name: FigureSource(**one) for name, one in quantities.items()}})
    cells = SweepTableFile(("data",), [{"attack": attack} for attack in ("SME", "IG", "DLG", "SPEAR")])
    with_rows = asked.with_attack_rows(cells)
    assert list(with_rows.rows) == ["first: SME", "first: IG", "first: DLG", "first: SPEAR"]
    found = read_sweep_figures(with_rows, SCORES, {"mean": 1, "beyond": 1})
    assert found == {
        "first: SME": {"mean": "22.0 ± 2.0", "beyond": "+14.0 ± 2.0"},
        "first: IG": {"mean": "20.0 ± 1.0", "beyond": "+12.0 ± 1.0"},
    }
    failed = [f"DLG, round 1, client {client}: round 1, client {client}: it is late" for client in (0, 1)]
    board: Any = SimpleNamespace(
        plan=SimpleNamespace(
            inapplicable=[(SimpleNamespace(row={"data": "A", "attack": "SPEAR"}), "it reads tables")],
            cells=[SimpleNamespace(key="k", point=SimpleNamespace(row={"data": "A", "attack": "DLG"}))],
            finished_cells={"k": SimpleNamespace(failures=failed)},
        )
    )
    assert read_reasons(with_rows, board, found) == {"first: DLG": "it is late", "first: SPEAR": "it reads tables"}
    assert read_reasons(asked.model_copy(update={"by_attack": False}), board, {}) == {}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", [name for name in SWEEPS if name.startswith("field-inversion")])
def test_every_attack_that_reconstructs_images_is_compared(name: str, scale: ScaleName) -> None:
    compared = {point.labels["attack"] for point in build_grid(SWEEPS[name].sweep(scale, PACKAGE_FOLDER)).points}
    packages = ("adversaries.inversion", "adversaries.exact")
    known = {name for name in registered_names("attacks") if load("attacks", name).__module__.startswith(packages)}
    assert compared == known


def test_what_was_not_run_is_left_out() -> None:
    found = read_sweep_figures(recipe("standard error"), SCORES, dict.fromkeys(READINGS, 1))
    assert found["second"] == {"mean": "30.0", "floor": "8.0", "share": "50.0"}
    assert "third" not in found


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('rows = { "E = 5, B = 6" = {} }', "sme-table4.toml: no row is called 'E = 5, B = 6', did you mean"),
        ("rows = {}\ngeometry = { beast = 'max cosine' }", "sme-table4.toml: no quantity is called 'beast'"),
        ("rows = {}\ngeometry = { best = 'max cosin' }", "sme-table4.toml: reproduce: geometry.best"),
        ("rows = [", "sme-table4.toml: "),
    ],
)  # fmt: skip
def test_a_mistake_in_a_sweep_file_is_told_with_its_name(
    table: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps").mkdir()
    scale = '{ minutes = 1, note = "All." }'
    (tmp_path / "sweeps" / "sme-table4.toml").write_text(f"[reproduce]\n{table}\nquick = {scale}\nfull = {scale}\n")
    monkeypatch.setattr(recipes, "PACKAGE_FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        find_recipe.__wrapped__("sme", "table4")
