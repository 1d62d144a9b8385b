"""Attacks are filed under the threat models of the field by what they were granted."""

from __future__ import annotations

from typing import Any

from fedsim.interfaces.knowledge import FACTS
from fedsim.report.knowledge_levels import find_level, list_levels

OUTSIDE = {
    *("labels", "records", "partial_records", "candidates", "known_candidates", "known_rows", "private_parts"),
    "defenses",
}
"""Facts of the victim's data, and the defenses: the paper has no level for them."""


def test_every_fact_has_a_level_or_is_named_beside_it() -> None:
    for name in FACTS:
        assert bool(find_level([name]).beyond) == (name in OUTSIDE), name


def test_the_level_is_that_of_the_most_that_is_known() -> None:
    assert find_level([]).level == "A"
    assert find_level(["model", "loss", "num_classes"]).level == "A"
    assert find_level(["model", "value_range", "labels"]).level == "B"
    assert find_level(["model", "value_range", "batch_size"]).level == "C"
    assert find_level(["auxiliary", "batch_size"]).level == "D"


def test_who_sees_sums_or_models_alone_has_no_level() -> None:
    def finding(attack: str, **about: Any) -> dict[str, Any]:
        return {"attack": attack, "granted": ["model"], **about}

    levels = list_levels(
        [
            finding("a", members=[1, 2]),
            finding("b", attacker="outsider"),
            finding("b", attacker=["server", 3]),
            finding("b", attacker="feature-party"),
            finding("c", attacker=["eavesdropper", 3], granted=["batch_size"]),
            finding("d"),
            finding("d"),
        ]
    )
    assert [(level.level, titles) for level, titles in levels.items()] == [("A", ["d"]), ("C", ["c"])]


def test_an_attack_on_the_model_of_another_knows_what_that_knew() -> None:
    levels = list_levels(
        [
            {"attack": "lmra", "granted": ["model", "learning_rate"]},
            {"attack": "attribute", "granted": ["model", "partial_records"], "settings": {"source": "lmra"}},
            {"attack": "on-optimum", "granted": ["model"], "settings": {"source": "optimal"}},
            {"attack": "on-broadcast", "granted": ["model"], "settings": {"source": "global"}},
        ]
    )
    by_attack = {title: (level.level, level.beyond) for level, titles in levels.items() for title in titles}
    assert by_attack == {"lmra": ("C", ()), "attribute": ("C", ("partial records",)), "on-broadcast": ("A", ())}
