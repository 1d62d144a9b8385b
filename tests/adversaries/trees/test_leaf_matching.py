"""Linear programs over candidates: what is chosen, and which further candidates are of use."""

from __future__ import annotations

import numpy as np
import pytest

from adversaries.trees.candidates import Candidates
from adversaries.trees.leaf_matching import LeafProblem, TreeSums, choose_amounts, round_choice
from fedsim.recording.tree_models import parse_tree_model
from fedsim.recording.tree_sums import LeafCounts
from tests.support.trees import grow_tree, model_bytes

ROWS = np.array([[1.0], [1.0], [8.0]])
LABELS = np.array([0.0, 1.0, 1.0])


def problem() -> LeafProblem:
    """Return what a tree says of three records: one of each label on the left, one of label 1 on the right."""
    model = parse_tree_model(model_bytes([grow_tree(ROWS, LABELS, (0, 5.0, None, None))], 1), "here")
    earlier = parse_tree_model(model_bytes([], 1), "here")
    sums = TreeSums(
        tree=model.trees[0],
        earlier=earlier,
        covers=np.array([0.5, 0.25]),
        gradients=np.array([0.0, -0.5]),
        are_counts=True,
    )
    return LeafProblem(sums=[sums], num_records=3)


def candidates(*pairs: tuple[float, float]) -> Candidates:
    return Candidates(rows=np.array([[row] for row, _ in pairs]), labels=np.array([label for _, label in pairs]))


def test_the_records_of_the_tree_are_chosen() -> None:
    choice = choose_amounts(problem(), candidates((1.0, 0.0), (1.0, 1.0), (8.0, 0.0), (8.0, 1.0)))
    assert choice.amounts.tolist() == pytest.approx([1, 1, 0, 1])
    assert choice.misfit == pytest.approx(0, abs=1e-9)


def test_a_candidate_that_is_missing_is_of_use_and_one_that_is_too_much_is_not() -> None:
    choice = choose_amounts(problem(), candidates((1.0, 0.0), (1.0, 1.0), (1.0, 0.0), (1.0, 1.0)))
    assert choice.misfit > 1
    further, _ = problem().contributions(candidates((8.0, 1.0), (1.0, 0.0)))
    costs = choice.reduced_costs(further)
    assert costs[0] < -1e-6
    assert costs[0] < costs[1]


def test_amounts_are_rounded_within_counts() -> None:
    known = problem()
    counts = [
        LeafCounts(leaf=1, records=2, positives=1),
        LeafCounts(leaf=2, records=1, positives=1),
    ]
    exact = LeafProblem(sums=known.sums, num_records=3, counts=counts)
    pairs = candidates((1.0, 0.0), (2.0, 0.0), (1.0, 1.0), (8.0, 1.0), (8.0, 0.0))
    assert round_choice(exact, pairs, np.array([0.4, 0.6, 0.1, 0.0, 1.9])).tolist() == [0, 1, 1, 1, 0]
