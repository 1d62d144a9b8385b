"""Whose a claim is: what survives contrast, brightness and noise, and what other kinds of examples are compared by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation.identification import score_identification
from fedsim.audit.evaluation.matches import CHANCE, Pool
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities import find_modality
from tests.support.tensors import draw_uniform


def identify(claimed: Tensor, true: Tensor, others: Tensor) -> Score:
    truth = Truth(data=true, labels=torch.zeros(len(true)).long())
    pool = Pool.from_truth(truth, PublicExamples(data=others, labels=torch.zeros(len(others)).long()))
    return score_identification(claimed, truth, pool)


@pytest.mark.parametrize(
    "distort",
    [
        lambda images: images,
        lambda images: 0.1 * images,
        lambda images: 0.5 + 0.2 * images,
        lambda images: images + 0.3 * draw_uniform(*images.shape, seed=5),
    ],
    ids=["exact", "dark", "of little contrast", "noisy"],
)
def test_distorted_images_are_told_from_those_of_others(distort: object) -> None:
    assert callable(distort)
    true, others = draw_uniform(4, 1, 8, 8), draw_uniform(40, 1, 8, 8, seed=1)
    score = identify(distort(true), true, others)
    assert (score.value, score.per_image) == (1.0, (1.0,) * 4)
    assert (score.floor, score.floor_guess) == (pytest.approx(4 * 4 / 44 / 4), CHANCE)


def test_what_is_nearer_to_the_images_of_others_identifies_nobody() -> None:
    true, others = draw_uniform(4, 1, 8, 8), draw_uniform(40, 1, 8, 8, seed=1)
    assert identify(others[:4], true, others).value == 0
    # Claims of one image can pick out one at most.
    score = identify(true[1].expand(9, -1, -1, -1), true, others)
    assert score.per_image == (0.0, 1.0, 0.0, 0.0)


def test_an_example_that_another_holds_as_well_is_not_the_victims() -> None:
    true = draw_uniform(2, 1, 8, 8)
    others = torch.cat([draw_uniform(20, 1, 8, 8, seed=1), true[:1]])
    assert identify(true, true, others).per_image == (0.0, 1.0)


def test_constant_claims_are_like_nobody() -> None:
    true, others = draw_uniform(2, 1, 8, 8), draw_uniform(20, 1, 8, 8, seed=1)
    assert identify(torch.full_like(true, 0.3), true, others).value == 0
    assert metrics.correlations(torch.full((1, 5), 0.3), torch.rand(3, 5)).tolist() == [[0, 0, 0]]


def test_columns_of_a_table_count_by_how_much_they_vary() -> None:
    rows = torch.tensor([[0.0, 0.500, 0.3], [0.0, 0.501, 0.3], [1.0, 0.500, 0.3], [1.0, 0.501, 0.3]])
    similarity = find_modality("table").similarity(rows, rows)
    assert similarity.argmax(1).tolist() == [0, 1, 2, 3]
    assert similarity.isfinite().all()


def test_texts_are_compared_by_positions_and_tokens() -> None:
    texts = torch.tensor([[1, 2, 3, 0], [3, 2, 1, 0], [4, 5, 6, 7]])
    claimed = torch.tensor([[1, 2, 9, 0], [7, 6, 5, 4]])
    assert find_modality("text").similarity(claimed, texts).argmax(1).tolist() == [0, 2]
    truth = Truth(data=texts[:1], labels=torch.zeros(1).long(), padding=0)
    pool = Pool.from_truth(truth, PublicExamples(data=texts[1:], labels=torch.zeros(2).long()))
    assert score_identification(claimed[:1], truth, pool).value == 1


def test_where_nobody_else_is_known_it_says_so() -> None:
    score = score_identification(
        draw_uniform(2, 1, 8, 8), Truth(data=draw_uniform(2, 1, 8, 8), labels=torch.ones(2).long()), None
    )
    assert "name truth files of other clients" in score.missing
