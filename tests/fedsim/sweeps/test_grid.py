"""The grid has every combination that was asked for, under names that tell them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsim.base.errors import ConfigError
from fedsim.sweeps.file import parse_sweep
from fedsim.sweeps.grid import SweepGrid, build_grid
from fedsim.sweeps.labels import label_values

SME, IG = {"name": "sme"}, {"name": "inverting-gradients"}
NOISE = {"name": "update-noise", "clip": 0.5}


def grid(axes: dict[str, list[Any]], base: dict[str, Any] | None = None, **sweep: Any) -> SweepGrid:
    tables = {"sweep": {"axes": axes, **sweep}, **({"attack": [dict(SME)]} if base is None else base)}
    return build_grid(parse_sweep(tables, "study.toml", Path("/nowhere")))


def names(found: SweepGrid) -> list[str]:
    return [point.name for point in found.points]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 5], ["1", "5"]),
        ([0.1, True, "all", [0, 1]], ["0.1", "true", "all", "[0, 1]"]),
        ([SME, IG], ["sme", "inverting-gradients"]),
        ([SME, {**SME, "iterations": 300}], ["sme", "sme iterations=300"]),
        ([{**SME, "iterations": n, "tv_weight": 1} for n in (3, 5)], ["sme iterations=3", "sme iterations=5"]),
        ([[], [NOISE]], ["none", "update-noise"]),
        ([[NOISE, {"name": "top-k"}], [NOISE]], ["update-noise + top-k", "update-noise"]),
        ([[{**NOISE, "clip": c}] for c in (1, 2)], ["update-noise clip=1", "update-noise clip=2"]),
        ([[], {"groups": 2}], ["none", "groups=2"]),
        ([[{**NOISE, "label": "weak"}], [NOISE]], ["weak", "update-noise"]),
    ],
)  # fmt: skip
def test_values_are_called_by_what_tells_them_apart(values: list[Any], expected: list[str]) -> None:
    assert label_values(values) == expected


def test_the_grid_is_a_product_in_the_order_of_the_file_with_seeds_last() -> None:
    found = grid({"training.local_epochs": [1, 5], "attack": [SME, IG]}, base={}, seeds=[1, 2])
    assert names(found)[:3] == [
        "training.local_epochs=1, attack=sme, seed=1",
        "training.local_epochs=1, attack=sme, seed=2",
        "training.local_epochs=1, attack=inverting-gradients, seed=1",
    ]
    assert len(found.points) == 8
    assert found.axes == ("training.local_epochs",)


def test_tables_that_go_together_under_one_label_are_named_once() -> None:
    data = [{"label": label, "name": "digits"} for label in ("few", "many")]
    clients = [{"label": "few", "clients": 2}, {"label": "9 clients", "clients": 9}]
    numbers: dict[str, list[Any]] = {"training.local_epochs": [8, 4], "training.batch_size": [8, 16]}
    found = grid(
        {"data": data, "federation": clients, **numbers}, zip=[["data", "federation"], list(numbers)], seeds=[1]
    )
    assert names(found)[::3] == [
        "data=few, training.local_epochs=8, training.batch_size=8, attack=sme, seed=1",
        "data=many, federation=9 clients, training.local_epochs=4, training.batch_size=16, attack=sme, seed=1",
    ]
    assert found.points[0].row["federation"] == "few", "the tables have all axes"


def test_attacks_of_the_base_are_an_axis_of_their_own_and_its_seed_is_kept() -> None:
    found = grid({"training.local_epochs": [1]}, base={"attack": [SME, IG], "federation": {"seed": 9}})
    assert names(found) == [
        "training.local_epochs=1, attack=sme, seed=9",
        "training.local_epochs=1, attack=inverting-gradients, seed=9",
    ]


def test_axes_that_go_together_keep_step() -> None:
    axes = {"training.local_epochs": [1, 5], "defense": [[], [NOISE]], "training.learning_rate": [0.1, 0.02]}
    found = grid(axes, zip=[["training.learning_rate", "training.local_epochs"]])
    pairs = {(p.labels["training.local_epochs"], p.labels["training.learning_rate"]) for p in found.points}
    assert pairs == {("1", "0.1"), ("5", "0.02")}
    assert len(found.points) == 4


def test_cells_are_excluded_by_label_or_value() -> None:
    axes = {"training.local_epochs": [1, 5], "defense": [[], [NOISE]]}
    found = grid(
        axes,
        exclude=[{"training.local_epochs": 1, "defense": "none"}, {"training.local_epochs": "5", "seed": 2}],
        seeds=[1, 2],
    )
    assert names(found) == [
        "training.local_epochs=1, defense=update-noise, attack=sme, seed=1",
        "training.local_epochs=1, defense=update-noise, attack=sme, seed=2",
        "training.local_epochs=5, defense=none, attack=sme, seed=1",
        "training.local_epochs=5, defense=update-noise, attack=sme, seed=1",
    ]  # fmt: skip


def test_the_tables_of_a_point_have_its_values_tables_before_the_keys_in_them() -> None:
    axes = {
        "model.hidden": [[8]],
        "model": [{"name": "mlp", "label": "small"}],
        "secure_aggregation": [[], {"groups": 2}],
    }
    found = grid(axes, base={"attack": [SME], "secure_aggregation": {"groups": 5}}, seeds=[4])
    first, second = (found.tables(point) for point in found.points)
    assert first["model"] == {"name": "mlp", "hidden": [8]}
    assert first["federation"] == {"seed": 4}
    assert "secure_aggregation" not in first
    assert second["secure_aggregation"] == {"groups": 2}
    assert found.file.base["secure_aggregation"] == {"groups": 5}  # that of the file has not changed


def test_a_single_table_stands_for_a_list_of_one() -> None:
    found = grid({"defense": [[], {**NOISE, "label": "noise"}]})
    assert [found.tables(point)["defense"] for point in found.points] == [[], [NOISE]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"axes": {"training.local_epochs": [1]}, "base": {}}, "no attack is named"),
        ({"axes": {"attack": [[SME, IG]]}}, "'attack': expected a table for each value"),
        ({"axes": {"attack": ["sme"]}}, "'attack': expected a table for each value"),
        ({"axes": {"attack": [{**SME, "label": "sme adaptive"}]}}, "'sme adaptive' is what 'sme' is called"),
        ({"axes": {}, "base": {"attack": [{**IG, "label": "x adaptive"}]}}, "'x adaptive' is what 'x' is called"),
        ({"axes": {"training.local_epochs": [1, 1]}}, "two values are called '1'"),
        ({"axes": {"defense": [[], []]}}, "two values are called 'none'"),
        ({"axes": {"model": [{}]}, "exclude": [{}]}, "sweep.exclude.0: the table is empty"),
        ({"axes": {"model": [{}]}, "exclude": [{"modle": "none"}]}, "'modle' is not an axis, did you mean 'model'?"),
        ({"axes": {"defense": [[], [NOISE]]}, "exclude": [{"defense": "update-nose"}]}, "did you mean 'update-noise'?"),
        ({"axes": {"training.local_epochs": [1]}, "exclude": [{"training.local_epochs": True}]}, "no value"),
        ({"axes": {"training.local_epochs": [1]}, "exclude": [{"attack": "sme"}]}, "every cell is excluded"),
        (
            {
                "axes": {"training.local_epochs": [1, 5], "training.batch_size": [1, 5]},
                "zip": [["training.local_epochs", "training.batch_size"]],
                "exclude": [{"training.local_epochs": 1, "training.batch_size": 5}],
            },
            "no cell is",
        ),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"^study\.toml: ") as error:
        grid(**arguments)
    assert words in str(error.value)


BASE = {"attack": [dict(SME)], "data": {"name": "mnist"}, "training": {"local_epochs": 1, "learning_rate": 0.1}}


def test_a_case_changes_tables_key_by_key_after_all_other_axes() -> None:
    long = {
        "label": "long",
        "training": {"local_epochs": 5, "learning_rate": []},
        "data": {"name": "digits", "size": 8},
    }
    found = grid({"case": [{"label": "short"}, long], "training.local_epochs": [2]}, base=BASE)
    assert names(found) == [f"case={case}, training.local_epochs=2, attack=sme, seed=0" for case in ("short", "long")]
    short, changed = map(found.tables, found.points)
    assert short["training"] == {"local_epochs": 2, "learning_rate": 0.1}
    assert changed["training"] == {"local_epochs": 5}
    assert changed["data"] == {"name": "digits", "size": 8}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"training": {"local_epochs": 5}}, "expected tables with a label"),
        ({"label": "a", "trainin": {}}, "a: 'trainin' names no key of an experiment file, did you mean"),
        ({"label": "a", "federation": {"seed": 3}}, "a: write the values as seeds"),
    ],
)
def test_a_case_that_is_no_part_of_an_experiment_is_refused(case: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid({"case": [case]}, base=BASE)


def test_only_some_cells_stay_and_a_star_stands_for_any_text() -> None:
    axes = {"case": [{"label": label} for label in ("E = 1", "E = 5", "none")], "attack": [SME, IG]}
    found = grid(axes, only=[{"case": "E = *", "attack": "sme"}, {"case": "none"}], exclude=[{"attack": "inv*"}])
    assert [point.labels["case"] for point in found.points] == ["E = 1", "E = 5", "none"]
    with pytest.raises(ConfigError, match=r"sweep\.only\.0: case = 'F\*': no value"):
        grid(axes, only=[{"case": "F*"}])
    with pytest.raises(ConfigError, match=r"sweep\.only: no cell is any of these"):
        grid(axes, only=[{"case": "none", "attack": "sme"}], exclude=[{"case": "none"}])
