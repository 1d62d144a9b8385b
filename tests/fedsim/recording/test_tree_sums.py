"""Sums in trees: settings, counts of records and of labels are read exactly, and what is no sum is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsim.base.errors import AttackError
from fedsim.recording.tree_models import SQUARED_ERROR, TreeModel, parse_tree_model
from fedsim.recording.tree_sums import count_leaves, find_thresholds, fit_settings
from tests.support.trees import Split, grow_tree, model_bytes

RNG = np.random.default_rng(3)
ROWS = RNG.integers(0, 10, size=(30, 2)).astype(np.float32)
LABELS = ((ROWS[:, 0] > 4) ^ (RNG.random(30) < 0.2)).astype(int)
SPLIT: Split = (0, 5.0, (1, 3.0, None, None), (1, 7.0, None, None))
STUMP: Split = (0, 5.0, None, None)


def model(labels: Any = LABELS, split: Split = SPLIT, base_score: float = 0.5, **settings: Any) -> TreeModel:
    objective = {name: value for name, value in settings.items() if name == "objective"}
    margin = base_score if objective else np.log(base_score / (1 - base_score))
    tree = grow_tree(ROWS, labels, split, margin, **settings)
    return parse_tree_model(model_bytes([tree], 2, base_score=base_score, **objective), "here")


@pytest.mark.parametrize(
    ("eta", "penalty", "split"), [(0.3, 1.0, SPLIT), (0.1, 0.0, SPLIT), (1.0, 10.0, SPLIT), (0.3, 1.0, STUMP)]
)
def test_learning_rate_and_penalty_follow_from_inner_nodes(eta: float, penalty: float, split: Split) -> None:
    settings = fit_settings(model(split=split, eta=eta, penalty=penalty).trees, "here")
    assert settings.learning_rate == pytest.approx(eta, rel=1e-3)
    assert settings.l2_penalty == pytest.approx(penalty, abs=1e-3)


@pytest.mark.parametrize("base_score", [0.5, 0.2])
def test_records_and_labels_of_each_leaf_are_counted(base_score: float) -> None:
    sent = model(base_score=base_score)
    counts = count_leaves(sent.trees[0], sent, fit_settings(sent.trees, "here"), "here")
    leaves = sent.trees[0].find_leaves(ROWS)
    expected = [(leaf, int((leaves == leaf).sum()), int(LABELS[leaves == leaf].sum())) for leaf in sent.trees[0].leaves]
    assert [(count.leaf, count.records, count.positives) for count in counts] == expected


def test_the_records_of_each_leaf_are_counted_where_labels_are_numbers() -> None:
    targets = ROWS[:, 0] * 1.5 + ROWS[:, 1]
    sent = model(targets, base_score=4.0, objective=SQUARED_ERROR)
    counts = count_leaves(sent.trees[0], sent, fit_settings(sent.trees, "here"), "here")
    leaves = sent.trees[0].find_leaves(ROWS)
    assert [count.positives for count in counts] == [None] * 4
    assert [count.records for count in counts] == [int((leaves == leaf).sum()) for leaf in sent.trees[0].leaves]


def test_thresholds_are_listed_by_feature() -> None:
    assert find_thresholds(model().trees) == {0: [5.0], 1: [3.0, 7.0]}


def test_withheld_covers_are_said_to_be_withheld() -> None:
    sent = model()
    sent.trees[0].covers[:] = 0
    with pytest.raises(AttackError, match="covers are withheld"):
        fit_settings(sent.trees, "here")


def test_noise_on_values_is_noticed() -> None:
    sent = model()
    sent.trees[0].weights[sent.trees[0].leaves] += RNG.normal(scale=0.1, size=4)
    with pytest.raises(AttackError, match="noise was added, or clients train with an L1 penalty"):
        fit_settings(sent.trees, "here")


def test_a_tree_without_a_split_says_nothing() -> None:
    with pytest.raises(AttackError, match="no tree has a split"):
        fit_settings(model(split=None).trees, "here")


def test_weights_of_records_are_no_counts() -> None:
    sent = model()
    settings = fit_settings(sent.trees, "here")
    sent.trees[0].covers[:] *= 1.13
    with pytest.raises(AttackError, match="covers are not counts where records have weights"):
        count_leaves(sent.trees[0], sent, settings, "here")


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_counts_of_xgboost_are_those_of_its_records(eta: float) -> None:
    xgboost = pytest.importorskip("xgboost")
    matrix = xgboost.DMatrix(ROWS, label=LABELS)
    parameters = {"objective": "binary:logistic", "max_depth": 3, "eta": eta, "nthread": 1}
    booster = xgboost.train(parameters, matrix, num_boost_round=1)
    sent = parse_tree_model(bytes(booster.save_raw("json")), "here")
    settings = fit_settings(sent.trees, "here")
    assert settings.learning_rate == pytest.approx(eta, rel=1e-3)
    counts = count_leaves(sent.trees[0], sent, settings, "here")
    leaves = sent.trees[0].find_leaves(ROWS)
    for count in counts:
        assert (count.records, count.positives) == ((leaves == count.leaf).sum(), LABELS[leaves == count.leaf].sum())
    # Thresholds are values of records.
    for feature, values in find_thresholds(sent.trees).items():
        assert set(values) <= set(ROWS[:, feature].tolist())
