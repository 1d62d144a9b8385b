"""Settings are judged by what they do: defenses by their hooks, partitions by sorted examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fedsim.federation.federation_tables import PartitionTable
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.pitfalls.defense_probe import find_missing_strength
from fedsim.pitfalls.setting_rules import mixes_equally, suits_any_data
from fedsim.plugins import registry
from fedsim.recording.wire_format import State
from tests.clients.test_strength_zero import ZERO

NEEDED: dict[str, dict[str, Any]] = {
    "dp-sgd": {"noise_multiplier": 1e-3},
    "gate": {"measure": "gradient-norm", "above": 1.0},
    "layer-freeze": {"layers": ["model.0"]},
    "update-noise": {"noise_multiplier": 1e-3},
}
"""Settings without which a defense is refused or does nothing."""
WEAK: list[tuple[str, dict[str, Any]]] = [
    ("augmentation", {"padding": 0, "flip": 0.1}),
    ("gradient-prune", {"pruned": 0.01}),
    ("mixup", {"alpha": 0.1}),
    ("random-mask", {"masked": 0.01}),
    ("soteria", {"pruned": 0.02}),
    ("top-k", {"fraction": 0.99}),
    ("update-noise", {"clip": 1e6, "noise_multiplier": 1e-9}),
]


@pytest.mark.parametrize(("name", "settings"), [item for item in ZERO if item[0] != "gate"])
def test_a_defense_of_strength_zero_is_found_with_a_setting_that_gives_it_strength(
    name: str, settings: dict[str, Any]
) -> None:
    missing = find_missing_strength(registry.build("defenses", name, settings, "defense"))
    assert missing is not None
    assert find_missing_strength(registry.build("defenses", name, settings | missing, "defense")) is None


@pytest.mark.parametrize(("clip", "expected"), [(1e9, ["noise_multiplier", "clip"]), (2.0, ["noise_multiplier"])])
def test_only_a_limit_that_no_message_reaches_is_lowered(clip: float, expected: list[str]) -> None:
    missing = find_missing_strength(registry.build("defenses", "update-noise", {"clip": clip}, "defense"))
    assert missing is not None
    assert list(missing) == expected


@pytest.mark.parametrize("name", registry.registered_names("defenses"))
def test_a_defense_as_it_comes_has_strength(name: str) -> None:
    assert find_missing_strength(registry.build("defenses", name, NEEDED.get(name, {}), "defense")) is None


@pytest.mark.parametrize(("name", "settings"), WEAK)
def test_a_weak_defense_is_none_of_strength_zero(name: str, settings: dict[str, Any]) -> None:
    assert find_missing_strength(registry.build("defenses", name, settings, "defense")) is None


@dataclass(frozen=True, kw_only=True)
class FailingProbe(Defense):
    strength: float = 0.0

    def on_update(self, update: State, context: LocalContext) -> State:
        return {"fc.weight": update["fc.weight"]}


def test_a_defense_that_fails_on_other_networks_than_its_own_is_not_judged() -> None:
    assert find_missing_strength(FailingProbe()) is None


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"name": "iid"}, True),
        ({"name": "iid", "distinct_labels": True}, True),
        ({"name": "dirichlet", "alpha": 1e6}, True),
        ({"name": "dirichlet", "alpha": 1.0}, False),
        ({"name": "pathological", "classes": 2}, False),
        ({"name": "quantity-skew"}, False),
        ({"name": "natural"}, False),
        ({"name": "adult-by-age"}, False),
        ({"name": "index-file", "path": "nowhere.json"}, False),
    ],
)
def test_a_partition_mixes_equally_where_clients_get_the_same_classes(table: dict[str, Any], expected: bool) -> None:
    assert mixes_equally(PartitionTable(**table)) is expected


def test_a_partition_by_groups_does_not_suit_all_data() -> None:
    assert not suits_any_data(PartitionTable(name="natural"))
    assert suits_any_data(PartitionTable(name="dirichlet"))
