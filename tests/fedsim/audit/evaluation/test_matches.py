"""Matches by chance: the law of the numbers, classes of their own, and what claims cannot change."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import hypergeom

from fedsim.audit.evaluation.matches import Pool
from fedsim.audit.evaluation.truth import Truth
from fedsim.interfaces.modality import PublicExamples


def draw_truth(labels: list[int], seed: int = 0) -> Truth:
    data = torch.rand(len(labels), 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return Truth(data=data, labels=torch.tensor(labels))


def make_pool(victim: list[int], others: list[int]) -> Pool:
    truth, public = draw_truth(victim), draw_truth(others, seed=1)
    pool = Pool.from_truth(truth, PublicExamples(data=public.data, labels=public.labels))
    assert pool is not None
    return pool


def match(pool: Pool, *indices: int) -> torch.Tensor:
    is_matched = torch.zeros(len(pool.data), dtype=torch.bool)
    is_matched[list(indices)] = True
    return is_matched


def test_of_one_example_among_twenty_chance_matches_one_in_twenty() -> None:
    pool = make_pool([3], [3] * 19)
    for matched in (4, 19):
        assert pool.expected_share(match(pool, matched)) == pytest.approx(1 / 20)


def test_as_many_matches_of_a_class_hit_the_victim_as_its_share_of_the_pool() -> None:
    pool = make_pool([0] * 4, [0] * 12)
    expected = hypergeom.mean(16, 4, 5) / 4
    assert pool.expected_share(match(pool, 0, 1, 12, 13, 14)) == pytest.approx(expected)


def test_classes_count_for_themselves_and_foreign_classes_not_at_all() -> None:
    pool = make_pool([0, 1], [0] * 9 + [1] * 4 + [2] * 50)
    assert len(pool.data) == 15
    assert pool.expected_share(match(pool, 13, 14)) == pytest.approx((1 / 10 + 1 / 5) / 2)


def test_where_no_other_holds_the_class_each_match_is_by_chance() -> None:
    pool = make_pool([0, 1], [0] * 9)
    assert pool.expected_share(match(pool, 10)) == pytest.approx(1 / 2)
    others = PublicExamples(data=torch.rand(3, 1, 4, 4), labels=torch.zeros(3).long())
    assert Pool.from_truth(draw_truth([5]), others) is None
    assert Pool.from_truth(draw_truth([5]), None) is None


def test_a_large_pool_is_thinned_within_each_class() -> None:
    pool = make_pool([0, 1], [0, 1] * 1000)
    assert pool.classes[~pool.of_victim].bincount().tolist() == [500, 500]


def test_targets_of_a_regression_are_of_one_kind() -> None:
    truth = Truth(data=torch.rand(2, 5), labels=torch.tensor([0.5, 1.5]))
    pool = Pool.from_truth(truth, PublicExamples(data=torch.rand(18, 5), labels=torch.rand(18)))
    assert pool is not None
    assert pool.expected_share(match(pool, 18, 19)) == pytest.approx(2 / 20)
