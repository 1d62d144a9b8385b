"""Each pitfall is found in a file that has it, not in one that has not, and not in its counter-experiment."""

from __future__ import annotations

import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.base.errors import ConfigError
from fedsim.pitfalls.find import RULES

EXPERIMENT: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 24},
    "model": {"name": "mlp"},
    "training": {"local_epochs": 1},
    "federation": {"clients": 4, "rounds": 2},
    "attack": [{"name": "inverting-gradients", "iterations": 1}],
}
DEFENDED = {"defense": [{"name": "update-noise", "noise_multiplier": 0.1}]}
EARLY_ROUNDS = {"federation": {"rounds": 3}, "defense": [{"name": "censor", "rounds": 2}]}
ROUND_2 = {"federation": {"rounds": 3}, "adversary": {"rounds": [2]}, "recording": {"rounds": [2]}}
FIRST_ROUND = [{"name": "censor", "rounds": 1}]
IDLE = {"defense": [{"name": "update-noise", "clip": 2.0}, {"name": "top-k", "fraction": 0.1}]}
FEDSGD = {"strategy": {"name": "fedsgd"}, "training": {"local_epochs": None, "local_steps": 1}}
CANDIDATES = {"adversary": {"knowledge": {"candidates": "held-out"}}}
RLU = {"attack": [{"name": "rlu"}], "adversary": {"victims": "all", "knowledge": {"auxiliary": True}}}
AUXILIARY = {"adversary": {"knowledge": {"auxiliary": True}}}
ALL_HELD = {"partition": {"samples_per_client": None}}
TEST_CLIENTS = {"partition": {"test_fraction": 0.2, "test_by": "client"}}
LABELS = {"adversary": {"knowledge": {"labels": True}}}
WITH_LABELS = {"attack": [{"name": "fedsim.skeletons.attack:Skeleton", "label": "needs labels"}]}
TEXTS = {
    "data": {"name": "reuters-r8"},
    "model": {"name": "transformer-decoder", "dim": 128},
    "attack": [{"name": "dager"}],
}
TWO_SEEDS = {"sweep": {"seeds": [1, 2]}}
REFUSED = [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 0.0}]
FULL_CASE = {"label": "b", "defense": [{"name": "top-k", "fraction": 1.0}]}


def sweep_over(**axes: list[Any]) -> dict[str, Any]:
    return {"sweep": {"axes": {axis.replace("__", "."): values for axis, values in axes.items()}}}


def merge(tables: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """Return tables with changes as a user copies them: None removes a key, another name and a list replace."""
    merged = deepcopy(tables)
    for change in changes:
        for key, value in change.items():
            old = merged.get(key)
            is_same_plugin = isinstance(old, dict) and isinstance(value, dict)
            is_same_plugin = is_same_plugin and value.get("name", old.get("name")) == old.get("name")
            if is_same_plugin:
                merged[key] = merge(old, value)
            elif value is None:
                merged.pop(key, None)
            else:
                merged[key] = deepcopy(value)
    return merged


def find_names(tables: dict[str, Any]) -> list[str]:
    return [pitfall.name for pitfall in fedsim.lint(tables) if pitfall.was_tried]


PRESENT: list[tuple[str, tuple[dict[str, Any], ...]]] = [
    ("no-attack", ({"attack": []},)),
    ("no-attack", ({"attack": []}, {key: None for key in EXPERIMENT if key != "attack"})),
    ("no-attack", ({"attack": []}, {"data": {"name": "reuters-r8"}, "model": TEXTS["model"]})),
    ("refused-cells", (sweep_over(defense=[[], IDLE["defense"], REFUSED]),)),
    ("refused-cells", (sweep_over(case=[{"label": "a"}, {"label": "b", "defense": REFUSED}]),)),
    ("no-strength", (sweep_over(defense=[[], [IDLE["defense"][0]], [{"name": "top-k", "fraction": 1.0}]]),)),
    ("no-strength", (sweep_over(case=[{"label": "a", "defense": [IDLE["defense"][0]]}, FULL_CASE]),)),
    ("no-strength", (IDLE,)),
    ("no-strength", ({"attack": []}, IDLE)),
    ("no-strength", (sweep_over(defense=[[], IDLE["defense"]]),)),
    ("no-strength", (IDLE, TWO_SEEDS)),
    ("no-control", (DEFENDED,)),
    ("undefended-rounds", (EARLY_ROUNDS,)),
    ("undefended-rounds", (EARLY_ROUNDS, {"recording": {"rounds": [1]}, "adversary": {"rounds": "all"}})),
    ("undefended-rounds", (sweep_over(defense=[[], EARLY_ROUNDS["defense"]]), {"federation": {"rounds": 3}})),
    ("undefended-rounds", (sweep_over(defense=[FIRST_ROUND, EARLY_ROUNDS["defense"]]), ROUND_2)),
    ("naive-attacks", (DEFENDED,)),
    ("naive-attacks", (DEFENDED, CANDIDATES, {"attack": [{"name": "membership-loss"}]})),
    ("naive-attacks", (sweep_over(defense=[[], DEFENDED["defense"]]),)),
    ("naive-attacks", (sweep_over(defense=[[], DEFENDED["defense"]]), WITH_LABELS, LABELS)),
    ("no-public-prior", (DEFENDED,)),
    ("no-public-prior", (sweep_over(defense=[[], DEFENDED["defense"]]),)),
    ("no-public-prior", (sweep_over(attack=[{"name": "dlg"}, {"name": "sme"}]), DEFENDED)),
    ("private-knowledge", (CANDIDATES, {"attack": [{"name": "membership-loss"}]})),
    ("private-knowledge", (CANDIDATES, {"attack": [{"name": "membership-loss"}, {"name": "dlg"}]})),
    ("private-knowledge", (LABELS, WITH_LABELS)),
    ("private-knowledge", (CANDIDATES, sweep_over(attack=[{"name": "membership-loss"}, {"name": "fedmia"}]))),
    ("granted-labels", (LABELS,)),
    ("granted-labels", (LABELS, TWO_SEEDS)),
    ("test-as-auxiliary", (RLU, ALL_HELD)),
    ("test-as-auxiliary", (RLU, ALL_HELD, TWO_SEEDS)),
    ("few-victims", (RLU,)),
    ("few-victims", ({"adversary": {"victims": [0, 1]}},)),
    ("few-victims", (WITH_LABELS,)),
    ("few-victims", ({"attack": TEXTS["attack"], "data": TEXTS["data"], "model": TEXTS["model"]},)),
    ("few-victims", (RLU, {"federation": {"clients": 9}, "adversary": {"victims": [0, 1]}})),
    ("few-victims", (RLU, {"federation": {"clients": 9}, "recording": {"clients": [0, 3]}})),
    ("few-victims", (RLU, {"adversary": {"victims": [0, 1]}}, TWO_SEEDS)),
    ("easy-data", ()),
    ("easy-data", ({"data": {"name": "handwriting"}, "partition": {"name": "natural"}},)),
    ("easy-data", (sweep_over(data=[{"name": "digits"}, {"name": "handwriting"}]),)),
    ("iid-only", ()),
    ("iid-only", (TWO_SEEDS,)),
    ("iid-only", (sweep_over(partition=[{"name": "iid"}, {"name": "dirichlet", "alpha": 1e6}]),)),
    ("one-epoch", ()),
    ("one-epoch", (FEDSGD,)),
    ("one-epoch", ({"training": {"local_epochs": None, "local_steps": 1}},)),
    ("one-epoch", (sweep_over(training__local_epochs=[1]),)),
    ("fresh-weights", ()),
    ("fresh-weights", ({"adversary": {"rounds": [1]}},)),
    ("fresh-weights", ({"adversary": {"rounds": "all"}, "federation": {"rounds": 1}},)),
    ("fresh-weights", ({"adversary": {"rounds": "all"}, "recording": {"rounds": [1]}},)),
    ("fresh-weights", ({"adversary": {"rounds": "all"}, "recording": {"every": 5}},)),
    ("fresh-weights", (sweep_over(case=[{"label": "short", "federation": {"rounds": 3}}]),)),
    ("one-seed", ()),
    ("one-seed", ({"sweep": {"seeds": [4]}},)),
]
"""A pitfall, and changes of the experiment that leave or bring it."""

ABSENT: list[tuple[str, tuple[dict[str, Any], ...]]] = [
    ("no-attack", ()),
    ("no-attack", ({"adversary": {"when": "never"}},)),
    ("refused-cells", (TWO_SEEDS,)),
    ("refused-cells", (sweep_over(defense=[[], IDLE["defense"]]),)),
    ("no-strength", (DEFENDED,)),
    ("no-strength", ({"defense": [{"name": "gate", "measure": "gradient-norm", "above": 1e9}]},)),
    ("no-strength", (sweep_over(defense=[[{"name": "update-noise"}], DEFENDED["defense"]]),)),
    ("no-control", ()),
    ("no-control", (DEFENDED, TWO_SEEDS)),
    ("undefended-rounds", (DEFENDED,)),
    ("undefended-rounds", (EARLY_ROUNDS, {"adversary": {"rounds": [1, 3]}})),
    ("undefended-rounds", (EARLY_ROUNDS, {"federation": {"rounds": 2}})),
    ("undefended-rounds", (sweep_over(defense=[[], FIRST_ROUND]), ROUND_2)),
    ("naive-attacks", ()),
    ("naive-attacks", (DEFENDED, TEXTS)),
    ("naive-attacks", (DEFENDED, {"adversary": {"knowledge": {"defenses": True}}})),
    ("naive-attacks", (DEFENDED, sweep_over(adversary__knowledge__defenses=[False, True]))),
    ("no-public-prior", ()),
    ("no-public-prior", (DEFENDED, TEXTS)),
    ("no-public-prior", (DEFENDED, {"data": {"name": "leaf-synthetic"}})),
    ("no-public-prior", (DEFENDED, CANDIDATES, {"attack": [{"name": "membership-loss"}]})),
    ("no-public-prior", (DEFENDED, {"attack": [{"name": "dlg"}, {"name": "map"}]}, AUXILIARY)),
    ("no-public-prior", (DEFENDED, {"attack": [{"name": "dlg"}, {"name": "learned-inversion"}]}, AUXILIARY)),
    ("no-public-prior", (DEFENDED, sweep_over(attack=[{"name": "dlg"}, {"name": "map"}]), AUXILIARY)),
    ("private-knowledge", (CANDIDATES,)),
    ("private-knowledge", (LABELS,)),
    ("private-knowledge", (WITH_LABELS, sweep_over(adversary__knowledge__labels=[False, True]))),
    ("granted-labels", ()),
    ("granted-labels", (LABELS, WITH_LABELS)),
    ("granted-labels", (sweep_over(adversary__knowledge__labels=[False, True]),)),
    ("test-as-auxiliary", (RLU, ALL_HELD, TEST_CLIENTS)),
    ("test-as-auxiliary", (RLU,)),
    ("test-as-auxiliary", ({"adversary": RLU["adversary"]},)),
    ("few-victims", ({"adversary": {"victims": "all"}, "federation": {"clients": 5}},)),
    ("few-victims", (RLU, {"federation": {"clients": 5}})),
    ("few-victims", (RLU, {"adversary": {"victims": [0, 1]}}, {"sweep": {"seeds": [1, 2, 3]}})),
    ("few-victims", (CANDIDATES, {"attack": [{"name": "membership-loss"}]})),
    ("easy-data", ({"data": {"name": "leaf-synthetic"}},)),
    ("easy-data", ({"data": {"name": "image-folder", "path": "nowhere"}},)),
    ("easy-data", (sweep_over(data=[{"name": "digits"}, {"name": "leaf-synthetic"}]),)),
    ("iid-only", ({"partition": {"name": "dirichlet"}},)),
    ("iid-only", (sweep_over(partition=[{"name": "iid"}, {"name": "dirichlet"}]),)),
    ("one-epoch", ({"training": {"local_epochs": 2}},)),
    ("one-epoch", (sweep_over(training__local_epochs=[1, 5]),)),
    ("fresh-weights", ({"adversary": {"rounds": "all"}},)),
    ("fresh-weights", ({"model": {"start": "trained.safetensors"}},)),
    ("fresh-weights", ({"recording": {"rounds": [2]}},)),
    ("one-seed", (TWO_SEEDS,)),
]
"""A pitfall, and changes of the experiment without it."""


@pytest.mark.parametrize(("name", "changes"), PRESENT)
def test_a_pitfall_is_found_and_its_counter_experiment_is_valid_and_without_it(
    name: str, changes: tuple[dict[str, Any], ...]
) -> None:
    tables = merge(EXPERIMENT, *changes)
    [pitfall] = [pitfall for pitfall in fedsim.lint(tables) if pitfall.name == name]
    counter = tomllib.loads(pitfall.counter_experiment)
    changed = merge(tables, counter)
    assert changed != tables
    assert name not in find_names(changed)


@pytest.mark.parametrize(("name", "changes"), ABSENT)
def test_a_file_without_a_pitfall_is_not_said_to_have_it(name: str, changes: tuple[dict[str, Any], ...]) -> None:
    assert name not in find_names(merge(EXPERIMENT, *changes))


def test_each_rule_has_a_file_with_its_pitfall_and_one_without() -> None:
    names = {rule.name for rule in RULES}
    assert {name for name, _ in PRESENT} == names
    assert {name for name, _ in ABSENT} == names


ATTACK_FILE: dict[str, Any] = {
    "adversary": {"victims": [0], "knowledge": {"labels": True, "defenses": True}},
    "attack": [{"name": "inverting-gradients"}, {"name": "llg"}],
}


def test_an_attack_file_has_the_pitfalls_of_an_adversary_alone() -> None:
    expected = ["no-control", "granted-labels", "few-victims", "fresh-weights"]
    assert find_names(ATTACK_FILE) == expected
    for pitfall in fedsim.lint(ATTACK_FILE):
        assert pitfall.name not in find_names(merge(ATTACK_FILE, tomllib.loads(pitfall.counter_experiment)))


def test_of_an_experiment_without_attacks_nothing_else_is_said() -> None:
    assert find_names(merge(EXPERIMENT, {"attack": None}, DEFENDED)) == ["no-attack"]


def test_an_attack_file_without_attacks_attacks_nothing() -> None:
    assert find_names({"adversary": {"victims": [0]}}) == ["no-attack"]


def test_what_cannot_be_looked_for_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    tables = merge(EXPERIMENT, {"data": {"name": "image-folder", "path": "nowhere"}})
    [pitfall] = [pitfall for pitfall in fedsim.lint(tables) if not pitfall.was_tried]
    assert pitfall.title == "not checked: small grey images only, such as MNIST or digits"
    assert re.fullmatch(r"image-folder cannot be checked: .*nowhere.*\.", pitfall.detail)
    assert pitfall.counter_experiment == ""


def test_one_data_set_that_is_not_easy_answers_for_those_that_cannot_be_read() -> None:
    data = [{"name": "image-folder", "path": "nowhere"}, {"name": "leaf-synthetic"}]
    assert all(pitfall.was_tried for pitfall in fedsim.lint(merge(EXPERIMENT, sweep_over(data=data))))


def test_all_idle_defenses_are_named_and_given_strength_at_once() -> None:
    defense = [{"name": "update-noise", "clip": 1e9}, {"name": "top-k", "fraction": 1.0}]
    pitfall = fedsim.lint(merge(EXPERIMENT, {"defense": defense}))[0]
    assert pitfall.detail == (
        "update-noise (noise_multiplier = 0, clip = 1e+09) and top-k (fraction = 1) send small messages on unchanged."
    )
    noise, top = tomllib.loads(pitfall.counter_experiment)["defense"]
    assert noise["clip"] == 1.0
    assert noise["noise_multiplier"] > 0
    assert top["fraction"] < 1


def test_refused_cells_are_named_with_the_reason_and_the_exclusions_that_there_are_stay() -> None:
    tables = merge(EXPERIMENT, sweep_over(defense=[[], IDLE["defense"], REFUSED]))
    tables["sweep"]["exclude"] = [{"defense": "update-noise + top-k"}]
    [pitfall] = [item for item in fedsim.lint(tables) if item.name == "refused-cells"]
    assert "dp-sgd" in pitfall.detail
    assert "noise_multiplier: expected a value above 0, got 0.0" in pitfall.detail
    first, second = tomllib.loads(pitfall.counter_experiment)["sweep"]["exclude"]
    assert first == tables["sweep"]["exclude"][0]
    assert "dp-sgd" in second["defense"]


def test_a_file_a_config_and_its_tables_have_the_same_pitfalls(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"  # a folder with experiment.toml passes for a run
    path.write_text('[training]\nlocal_epochs = 2\n[[attack]]\nname = "dlg"\n')
    tables = tomllib.loads(path.read_text())
    expected = ["few-victims", "easy-data", "iid-only", "fresh-weights", "one-seed"]
    assert [pitfall.name for pitfall in fedsim.lint(path)] == expected
    assert fedsim.lint(tables) == fedsim.lint(path)
    assert fedsim.lint(fedsim.Config(**tables)) == fedsim.lint(path)
    assert "one-epoch" in [pitfall.name for pitfall in fedsim.lint(path, set={"training.local_epochs": 1})]


def test_a_sweep_keeps_the_cases_that_it_has() -> None:
    case = {"label": "short", "federation": {"rounds": 3}}
    [pitfall] = [item for item in fedsim.lint(merge(EXPERIMENT, sweep_over(case=[case]))) if item.name == "iid-only"]
    first, second = tomllib.loads(pitfall.counter_experiment)["sweep"]["axes"]["case"]
    assert first == case
    assert second["label"] == "not iid-only", "it names what the row is, not the pitfall that it avoids"
    assert second["federation"] == case["federation"]


def test_the_case_that_avoids_what_is_called_no_prior_is_called_prior() -> None:
    found = fedsim.lint(merge(EXPERIMENT, sweep_over(defense=[[], DEFENDED["defense"]])))
    [pitfall] = [item for item in found if item.name == "no-public-prior"]
    cases = tomllib.loads(pitfall.counter_experiment)["sweep"]["axes"]["case"]
    assert [case["label"] for case in cases] == ["as it is", "public-prior"]


def test_a_wrong_setting_is_an_error() -> None:
    with pytest.raises(ConfigError, match="iterations"):
        fedsim.lint(merge(EXPERIMENT, {"attack": [{"name": "dlg", "iterations": 0}]}))
    with pytest.raises(ConfigError, match="alpha"):
        fedsim.lint(merge(EXPERIMENT, {"partition": {"name": "dirichlet", "alpha": -1.0}}, TWO_SEEDS))
