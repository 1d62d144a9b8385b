"""Scores of properties: by hand, as parts of the area that scikit-learn finds, and what cannot be told apart."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedsim.audit.evaluation.properties import PropertyEvaluator, score_clients, score_messages
from fedsim.base.errors import AttackError, DataError
from fedsim.base.randomness import generator
from fedsim.interfaces.findings import PropertyPresence

CLAIM: dict[str, Any] = {
    "clients": torch.tensor([3, 3, 5]),
    "rounds": torch.tensor([1, 2, 1]),
    "scores": torch.tensor([0.2, 0.5, 0.75]),
    "shares": torch.tensor([0.0, 0.5]),
}


def test_scores_are_those_of_counting_by_hand() -> None:
    scores = torch.tensor([0.9, 0.5, 0.4, 0.5, 0.1])
    held = torch.tensor([True, False, True, False, False])
    victims = torch.tensor([0.5, 1.0, 0.0, 0.0, 0.0])
    area, accuracy = score_messages(scores, held, torch.tensor([True, True, False, False, False]), victims)
    # The victim's first message is above all three without; its second is below one of two with, above the other.
    assert area.value == pytest.approx((1 + 0.5) / 2)
    assert accuracy.value == pytest.approx((1 + 0.5) / 2)  # even chances count half
    assert (area.floor, area.ceiling) == (0.5, 1.0)
    assert accuracy.floor == pytest.approx(1 - 1.5 / 5)  # "no" to all five of them
    assert accuracy.floor_guess == "one answer for all victims"


@pytest.mark.parametrize("kinds", [[1.0, 1.0], [0.0]])
def test_of_victims_of_one_kind_the_same_answer_for_all_is_always_right(kinds: list[float]) -> None:
    scores, held = torch.tensor([0.9, 0.9, 0.1, 0.2]), torch.tensor([True, True, False, False])
    mine = held if kinds[0] else ~held  # whom the attack is right about, as about all others
    for score in score_messages, score_clients:
        area, accuracy = score(scores, held, mine, torch.tensor(kinds))
        assert (area.value, area.floor) == (1, 0.5)
        assert (accuracy.value, accuracy.floor) == (1, 1)


def test_level_scores_count_half_in_the_area() -> None:
    scores, held = torch.tensor([0.5, 0.5, 0.2]), torch.tensor([True, False, False])
    area, _ = score_messages(scores, held, torch.tensor([True, False, False]), torch.ones(1))
    assert area.value == pytest.approx(0.75)


def test_the_mean_over_clients_is_the_area_over_all_messages() -> None:
    rng = generator("properties")
    scores, held = torch.rand(40, generator=rng), torch.rand(40, generator=rng) < 0.4  # mixed within clients
    clients = torch.arange(40) % 5
    parts = [score_messages(scores, held, clients == client, torch.ones(1))[0].value for client in range(5)]
    assert sum(parts) / 5 == pytest.approx(roc_auc_score(held, scores))


def test_of_one_kind_alone_there_is_no_area_and_the_floor_is_perfect() -> None:
    for held, told in ((torch.ones(3), "the larger share"), (torch.zeros(3), "the smaller share")):
        area, accuracy = score_clients(torch.tensor([0.9, 0.2, 0.4]), held.bool(), torch.arange(3) == 0, held[:1])
        assert math.isnan(area.value)
        assert f"each of the 3 clients has the property in {told}" in area.missing
        assert (area.metric, accuracy.metric) == ("property_client_auc", "property_client_accuracy")
        assert accuracy.floor == 1


def test_a_truth_about_other_messages_is_refused() -> None:
    with pytest.raises(DataError, match="the attack scores 3 messages, the truth is about 2"):
        score_messages(torch.rand(3), torch.tensor([True, False]), torch.tensor([True, False, False]), torch.ones(1))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scores": torch.tensor([0.2, 0.5, 1.5])}, r"scores outside \[0, 1\], or NaN"),
        ({"scores": torch.tensor([0.2, 0.5, math.nan])}, r"scores outside \[0, 1\], or NaN"),
        ({"scores": torch.tensor([0, 1, 1])}, "floating point numbers in one row"),
        ({"shares": torch.tensor([0.5, 0.5])}, "expected a smaller and a larger one"),
        ({"shares": torch.tensor([0.0, 0.5, 1.0])}, "expected a smaller and a larger one"),
        ({"clients": torch.tensor([3, 5])}, r"expected integers of shape \(3,\)"),
        ({"rounds": torch.tensor([2, 2, 1])}, "scores a message twice"),
    ],
)
def test_claims_without_the_form_of_scores_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(AttackError, match=told):
        PropertyPresence(**CLAIM | change)


def test_a_claim_survives_being_saved() -> None:
    again = PropertyPresence.from_tensors(PropertyPresence(**CLAIM).claim_tensors, {})
    assert {name: tensor.tolist() for name, tensor in again.tensors.items()} == {
        name: tensor.tolist() for name, tensor in CLAIM.items()
    }


def test_a_message_that_nobody_sent_is_named_and_not_scored() -> None:
    class Recorded:
        def header(self, number: int) -> Any:
            return SimpleNamespace(find_reply=lambda client: None if (client, number) == (3, 2) else object())

    context: Any = SimpleNamespace(transcript=Recorded(), case=SimpleNamespace(require_experiment=object))
    with pytest.raises(DataError, match="client 3: sent nothing in round 2, which the attack scores"):
        PropertyEvaluator().judge(PropertyPresence(**CLAIM), {"victim": 3}, context)
