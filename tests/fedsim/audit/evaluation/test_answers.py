"""Answers about people are scored beside what everybody knows of a person."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedsim.audit.evaluation.answers import score_people
from fedsim.audit.evaluation.truth import PEOPLE
from fedsim.base.errors import AttackError
from fedsim.interfaces.answer_findings import AnsweredValues


def claim_people(people: Mapping[str, torch.Tensor]) -> AnsweredValues:
    def column(low: float, high: float) -> torch.Tensor:
        return torch.tensor([[low], [high]], dtype=torch.float64)

    values: Mapping[str, torch.Tensor] = {"count": column(4, 5), "income": column(100, 140)}
    return AnsweredValues(
        rounds=dict.fromkeys(values, torch.tensor([1, 2])),
        values=values,
        standings=dict.fromkeys(values, torch.tensor([2, 2])),
        spreads=dict.fromkeys(values, torch.zeros(2, 1)),
        people=people,
    )


def test_that_a_person_adds_one_to_a_number_of_people_is_no_finding() -> None:
    finding = claim_people({"2/count": torch.ones(1), "2/income": torch.tensor([40.0])})
    true = {f"{PEOPLE}/2/count": torch.ones(1), f"{PEOPLE}/2/income": torch.tensor([40.0])}
    score = score_people(finding, true, {})
    assert (score.value, score.floor) == (1.0, 0.5)


@pytest.mark.parametrize("key", ["1/count", "3/count", "2/age", "count"])
def test_a_person_who_joined_before_the_first_answer_or_in_no_round_is_refused(key: str) -> None:
    """Beside the first answer, the guess would be made from the last one."""
    with pytest.raises(AttackError, match=f"claims a person of '{key}', expected a round after the first answer"):
        claim_people({key: torch.ones(1)})
