"""The share of a table's values that are right, and what guesses get of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.table_scores import draw_rows, likeliest_row
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import table_metrics
from fedsim.base.randomness import generator
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.modality import PublicExamples

COLUMNS = (1, 3)
TRUE = torch.tensor([[0.5, 1.0, 0.0, 0.0], [0.1, 0.0, 1.0, 0.0]])
DEVIATIONS = torch.tensor([0.1, 9.0, 9.0, 9.0])


def test_a_number_is_right_within_the_tolerance_and_a_category_where_it_is_the_largest() -> None:
    claimed = torch.tensor([[0.132, 0.3, 0.4, 0.3], [0.531, 0.2, 0.1, 0.3]])
    found = table_metrics.compare_rows(claimed, TRUE, COLUMNS, DEVIATIONS)
    assert found.tolist() == [[[False, False], [True, False]], [[False, True], [False, False]]]


def test_rows_are_assigned_so_that_most_values_are_right() -> None:
    claimed = torch.tensor([[0.1, 0.0, 1.0, 0.0], [0.5, 0.0, 1.0, 0.0]])
    assert table_metrics.find_correct_columns(claimed, TRUE, COLUMNS, DEVIATIONS).tolist() == [
        [True, False],
        [True, True],
    ]


def test_a_row_without_a_claim_has_nothing_right() -> None:
    found = table_metrics.find_correct_columns(TRUE[1:], TRUE[[1, 1]], COLUMNS, DEVIATIONS)
    assert sorted(found.tolist()) == [[False] * 2, [True] * 2]


def test_of_more_claims_than_rows_those_that_fit_count() -> None:
    claimed = torch.cat([1 - TRUE, TRUE])
    assert table_metrics.find_correct_columns(claimed, TRUE, COLUMNS, DEVIATIONS).all()


def test_the_likeliest_values_are_the_mode_and_the_densest_number() -> None:
    numbers = torch.tensor([0.0, 0.5, 0.51, 0.52, 0.9])
    rows = torch.cat([numbers[:, None], torch.eye(3)[torch.tensor([2, 1, 1, 0, 1])]], 1)
    guess = likeliest_row(rows, COLUMNS, torch.tensor([0.05, 1.0, 1.0, 1.0]))
    assert guess.tolist() == pytest.approx([0.51, 0, 1, 0])


def test_drawn_rows_have_the_values_of_public_columns_and_break_their_ties() -> None:
    kinds = torch.arange(100) % 2
    rows = torch.cat([kinds[:, None].float(), torch.eye(3)[kinds]], 1)
    made = draw_rows(rows, COLUMNS, 200, generator("drawn"))
    assert set(made[:, 0].tolist()) == {0.0, 1.0}
    assert (made[:, 1:].sum(1) == 1).all()
    assert 0.3 < (made[:, 0] == made[:, 1:].argmax(1)).double().mean() < 0.7


def test_the_score_stands_beside_the_best_guess_of_any() -> None:
    rows = TRUE[[0, 0, 0]] + torch.tensor([[0.0], [0.001], [0.002]])
    public = PublicExamples(data=rows.clamp(0, 1), labels=torch.zeros(3).long())  # data sets lie in their range
    finding = Reconstruction(data=TRUE.flip(0), labels=torch.tensor([0, 1]))
    plain = Truth(data=TRUE, labels=torch.tensor([1, 0]))
    truth = replace(plain, columns=COLUMNS, deviations=public.data.std(0))
    scores = {s.metric: s for s in score_examples(finding, truth, public=public, rng=generator(0))}
    found = scores["columns_right"]
    assert (found.value, found.ceiling, found.per_image) == (1.0, 1.0, (1.0, 1.0))
    assert 0.5 <= found.floor < 1
    assert "columns_right" not in {s.metric for s in score_examples(finding, plain, public=public, rng=generator(0))}
    assert "columns_right" not in {s.metric for s in score_examples(finding, truth, public=None, rng=generator(0))}


def test_wrong_labels_lower_no_floor() -> None:
    """Most public rows are those of the victim, some have another number, and few of a third kind are claimed."""
    others = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 15 + [[0.9, 0.0, 0.0, 1.0]] * 3)
    data = torch.cat([TRUE.repeat_interleave(40, 0), others])
    public = PublicExamples(data=data, labels=torch.tensor([0] * 40 + [1] * 40 + [0] * 15 + [2] * 3))
    truth = Truth(data=TRUE, labels=torch.tensor([0, 1]), columns=COLUMNS, deviations=public.data.std(0))
    claimed = Reconstruction(data=torch.zeros(2, 4), labels=torch.tensor([2, 2]))
    scores = {s.metric: s for s in score_examples(claimed, truth, public=public, rng=generator(0))}
    assert scores["columns_right"].floor == 1.0
    assert scores["columns_right"].floor_guess == "medians of public data"
