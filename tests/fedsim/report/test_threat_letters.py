"""Attacks are filed under the threat models of the field by what they were granted."""

from __future__ import annotations

from typing import Any

from fedsim.interfaces.knowledge import FACTS
from fedsim.report.threat_letters import find_letter, list_letters

OUTSIDE = {
    *("labels", "records", "partial_records", "candidates", "known_candidates", "known_rows", "private_parts"),
    "defenses",
}
"""Facts of the victim's data, and the defenses: the paper has no letter for them."""


def test_every_fact_has_a_letter_or_is_named_beside_it() -> None:
    for name in FACTS:
        assert bool(find_letter([name]).beyond) == (name in OUTSIDE), name


def test_the_letter_is_that_of_the_most_that_is_known() -> None:
    assert find_letter([]).letter == "A"
    assert find_letter(["model", "loss", "num_classes"]).letter == "A"
    assert find_letter(["model", "value_range", "labels"]).letter == "B"
    assert find_letter(["model", "value_range", "batch_size"]).letter == "C"
    assert find_letter(["auxiliary", "batch_size"]).letter == "D"


def test_who_sees_sums_or_models_alone_has_no_letter() -> None:
    def finding(attack: str, **about: Any) -> dict[str, Any]:
        return {"attack": attack, "granted": ["model"], **about}

    letters = list_letters(
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
    assert [(letter.letter, titles) for letter, titles in letters.items()] == [("A", ["d"]), ("C", ["c"])]


def test_an_attack_on_the_model_of_another_knows_what_that_knew() -> None:
    letters = list_letters(
        [
            {"attack": "lmra", "granted": ["model", "learning_rate"]},
            {"attack": "attribute", "granted": ["model", "partial_records"], "settings": {"source": "lmra"}},
            {"attack": "on-optimum", "granted": ["model"], "settings": {"source": "optimal"}},
            {"attack": "on-broadcast", "granted": ["model"], "settings": {"source": "global"}},
        ]
    )
    by_attack = {title: (letter.letter, letter.beyond) for letter, titles in letters.items() for title in titles}
    assert by_attack == {"lmra": ("C", ()), "attribute": ("C", ("partial records",)), "on-broadcast": ("A", ())}
