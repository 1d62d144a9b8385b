"""Grouping of examples by client is scored by pairs, and clients drawn at random score as chance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation.example_groups import PairsRight, _have_several_holders, score_groups
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.scores import score_row
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.interfaces.findings import ExampleGroups

HOLDERS = torch.tensor([0] * 6 + [1] * 6 + [2] * 6)
DATA = torch.rand((18, 5), generator=generator("data"))


def scores_of(groups: Tensor, holders: Tensor = HOLDERS) -> dict[str, Score]:
    return {score.metric: score for score in score_groups(groups, holders, DATA)}


def test_pairs_that_are_right_and_found_are_counted() -> None:
    groups = torch.arange(18) + 10
    groups[[0, 1, 2]] = 0  # three pairs, all of client 0
    groups[[6, 7, 12]] = 1  # three pairs, of which one is of client 1
    scores = scores_of(groups)
    assert scores["pairs_right"].value == pytest.approx(4 / 6)
    assert scores["pairs_found"].value == pytest.approx(4 / 45)
    assert scores["pairs_found"].floor == pytest.approx(6 / 153)
    assert scores["pairs_right"].floor >= 45 / 153
    assert scores["pairs_right"].count == 4  # links: two of each group of three


def test_the_right_groups_have_a_rand_index_of_one() -> None:
    scores = scores_of(HOLDERS.flip(0))
    assert [scores[name].value for name in ("pairs_right", "pairs_found", "rand_index")] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("groups", [torch.arange(18), torch.zeros(18, dtype=torch.long)])
def test_all_alone_and_all_together_have_a_rand_index_of_chance(groups: Tensor) -> None:
    scores = scores_of(groups)
    assert scores["rand_index"].value == pytest.approx(0.0)
    assert not scores["pairs_right"].value > scores["pairs_right"].floor


def test_no_claimed_pair_is_a_reason_and_no_score() -> None:
    assert scores_of(torch.arange(18))["pairs_right"].missing == (
        "the attack claims of no two examples that they are of one client"
    )


def test_claims_near_no_example_are_of_no_client() -> None:
    holders = HOLDERS.clone()
    holders[:2] = torch.tensor([-1, -2])
    groups = torch.arange(18) + 10
    groups[[0, 1]] = 0
    assert scores_of(groups, holders)["pairs_right"].value == 0.0


def test_shuffled_clients_score_as_chance_and_within_its_spread() -> None:
    groups = torch.arange(18) // 3
    rng = generator("shuffle")
    draws = [scores_of(groups, HOLDERS[torch.randperm(18, generator=rng)]) for _ in range(60)]
    shares = torch.tensor([draw["pairs_right"].value for draw in draws])
    indices = torch.tensor([draw["rand_index"].value for draw in draws])
    bound, _ = PairsRight().chance_spread(draws[0]["pairs_right"].count or 0)
    assert float(shares.mean()) == pytest.approx(45 / 153, abs=3 * bound / math.sqrt(60))
    assert float(shares.std()) <= bound
    assert abs(float(indices.mean())) < 0.05


def test_examples_grouped_by_looks_are_no_better_than_the_floor() -> None:
    data = DATA + 5 * HOLDERS[:, None]  # the clients' examples look unlike
    precision, _, agreement = score_groups(HOLDERS, HOLDERS, data)
    assert (precision.value, precision.floor) == (1.0, 1.0)
    assert (agreement.floor, agreement.floor_guess) == (1.0, "k-means")


def test_a_score_of_other_items_than_examples_has_their_number_in_its_row() -> None:
    scores = scores_of(HOLDERS)
    assert score_row(scores["pairs_right"], 99)["examples"] == 15
    assert score_row(scores["pairs_found"], 99)["examples"] == 99
    assert "count" not in score_row(scores["pairs_right"], 99)


def test_a_finding_survives_being_saved_and_refuses_groups_of_another_length() -> None:
    data, labels = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 1])
    finding = ExampleGroups(data=data, labels=labels, clients=torch.tensor([0, 2, 0]), claims="client")
    again = ExampleGroups.from_tensors(finding.tensors, {})
    assert again.clients.equal(finding.clients)
    assert (again.claims, again.data.equal(data)) == ("client", True)
    with pytest.raises(AttackError, match="clients"):
        ExampleGroups(data=data, labels=labels, clients=torch.tensor([0, 1]))


def test_an_example_that_two_clients_hold_is_in_no_pair() -> None:
    data = torch.eye(4)
    truth = Truth(data=torch.cat([data, data[:1]]), labels=torch.zeros(5).long(), holders=torch.tensor([0, 0, 1, 1, 1]))
    finding = ExampleGroups(
        data=data,
        labels=torch.zeros(4).long(),
        certified=torch.ones(4).bool(),
        claims="client",
        clients=torch.arange(4),
    )
    assert _have_several_holders(finding, truth).tolist() == [True, False, False, False]
