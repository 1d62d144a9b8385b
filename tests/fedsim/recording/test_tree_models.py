"""Models of trees in messages: every number of the JSON is read, and anything else is refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.base.errors import TranscriptError
from fedsim.recording.tree_models import holds_trees, parse_tree_model, parse_tree_state
from tests.support.trees import grow_tree, model_bytes, predict_margins, tree_update

ROWS = np.array([[1.0, 5.0], [2.0, 6.0], [3.0, 5.0], [4.0, 7.0]], np.float32)
LABELS = np.array([0, 1, 1, 1])
SPLIT = (0, 2.0, None, (1, 6.0, None, None))


def model_content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(model_bytes([grow_tree(ROWS, LABELS, SPLIT)], 2))
    return content


def test_a_record_at_a_threshold_goes_right() -> None:
    tree = parse_tree_model(model_bytes([grow_tree(ROWS, LABELS, SPLIT)], 2), "here").trees[0]
    assert tree.leaves == [1, 3, 4]
    assert tree.find_leaves(ROWS).tolist() == [1, 4, 3, 4]


def test_margins_are_the_base_score_and_leaf_values() -> None:
    content = model_bytes([grow_tree(ROWS, LABELS, SPLIT), grow_tree(ROWS, LABELS, (0, 4.0, None, None))], 2)
    # With p = 1/2, H is a quarter of the records, and G half of those of label 0 less those of label 1.
    first = 0.3 * np.array([-0.5, 1.0, 0.5, 1.0]) / (np.array([0.25, 0.5, 0.25, 0.5]) + 1)
    second = 0.3 * np.array([0.5, 0.5, 0.5, 0.5]) / (np.array([0.75, 0.75, 0.75, 0.25]) + 1)
    np.testing.assert_allclose(predict_margins(parse_tree_model(content, "here"), ROWS), first + second)


def test_a_leaf_adds_its_value_whatever_its_base_weight_is() -> None:
    content = model_content()
    tree = content["learner"]["gradient_booster"]["model"]["trees"][0]
    tree["base_weights"] = [0.0] * len(tree["base_weights"])
    margins = predict_margins(parse_tree_model(json.dumps(content).encode(), "here"), ROWS)
    np.testing.assert_allclose(margins, 0.3 * np.array([-0.5, 1.0, 0.5, 1.0]) / np.array([1.25, 1.5, 1.25, 1.5]))


@pytest.mark.parametrize("settings", [{"max_depth": 4}, {"max_depth": 3, "gamma": 2.0}])  # the latter prunes
def test_predictions_are_those_of_xgboost(settings: dict[str, Any]) -> None:
    xgboost = pytest.importorskip("xgboost")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 3)).astype(np.float32)
    matrix = xgboost.DMatrix(rows, label=(rows[:, 0] + rows[:, 1] ** 2 > 0.5).astype(int))
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1, **settings}, matrix, num_boost_round=3)
    model = parse_tree_model(bytes(booster.save_raw("json")), "here")
    np.testing.assert_allclose(predict_margins(model, rows), booster.predict(matrix, output_margin=True), atol=1e-5)


def test_new_trees_are_all_of_a_slice_and_the_last_of_a_whole_model() -> None:
    trees = [grow_tree(ROWS, LABELS, SPLIT), grow_tree(ROWS, LABELS, (0, 3.0, None, None))]
    before = parse_tree_model(model_bytes(trees[:1], 2), "here")
    whole, part = (parse_tree_model(model_bytes(some_trees, 2), "here") for some_trees in (trees, trees[1:]))
    assert [tree.thresholds[0] for tree in whole.new_trees(before)] == [3.0]
    assert [tree.thresholds[0] for tree in part.new_trees(before)] == [3.0]
    assert len(whole.new_trees(None)) == 2
    assert not before.new_trees(before), "a model that comes back as it was holds no tree of the client"
    assert len(before.new_trees(part)) == 1, "a bagging client may send as many trees as it was sent"


def _set_name(content: dict[str, Any]) -> None:
    content["learner"]["gradient_booster"]["name"] = "gblinear"


def _set_objective(content: dict[str, Any]) -> None:
    content["learner"]["objective"]["name"] = "multi:softprob"


def _weigh_positives(content: dict[str, Any]) -> None:
    content["learner"]["objective"]["reg_loss_param"]["scale_pos_weight"] = "2.5"


def _split_by_categories(content: dict[str, Any]) -> None:
    content["learner"]["gradient_booster"]["model"]["trees"][0]["split_type"][0] = 1


def _break_off(content: dict[str, Any]) -> None:
    del content["learner"]["gradient_booster"]


def _lead_in_circles(content: dict[str, Any]) -> None:
    content["learner"]["gradient_booster"]["model"]["trees"][0]["left_children"][2] = 2


def _split_by_a_missing_feature(content: dict[str, Any]) -> None:
    content["learner"]["gradient_booster"]["model"]["trees"][0]["split_indices"][0] = 7


def _grow_a_forest(content: dict[str, Any]) -> None:
    content["learner"]["gradient_booster"]["model"]["gbtree_model_param"] = {"num_parallel_tree": "5"}


def _predict_two_targets(content: dict[str, Any]) -> None:
    content["learner"]["learner_model_param"]["base_score"] = "[5E-1,5E-1]"


def _put_two_targets_into_each_leaf(content: dict[str, Any]) -> None:
    content["learner"]["learner_model_param"]["num_target"] = "2"
    content["learner"]["gradient_booster"]["model"]["trees"][0]["base_weights"] *= 2


def _begin_with_one_class(content: dict[str, Any]) -> None:
    content["learner"]["learner_model_param"]["base_score"] = "[1E0]"


def _leave_all_integers(content: dict[str, Any]) -> None:
    content["learner"]["gradient_booster"]["model"]["trees"][0]["left_children"][0] = 10**30


def _spoil_a_cover(content: dict[str, Any]) -> None:
    content["learner"]["gradient_booster"]["model"]["trees"][0]["sum_hessian"][1] = float("nan")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set_name, "booster is 'gblinear', expected gbtree"),
        (_set_objective, "objective is 'multi:softprob', expected binary:logistic or reg:squarederror"),
        (_weigh_positives, r"scale_pos_weight is 2\.5, expected 1"),
        (_split_by_categories, "splits by sets of categories"),
        (_break_off, "no model of XGBoost's trees"),
        (_lead_in_circles, "nodes make no tree"),
        (_split_by_a_missing_feature, "splits by a feature that does not exist"),
        (_spoil_a_cover, "NaN or infinite"),
        (_grow_a_forest, "num_parallel_tree is 5, expected 1"),
        (_predict_two_targets, "predict several targets"),
        (_put_two_targets_into_each_leaf, "predict several targets"),
        (_begin_with_one_class, "base_score is 1, so that all labels of the client that began with it are 1"),
        (_leave_all_integers, "is no JSON of XGBoost"),
    ],
)
def test_another_model_is_refused_by_name(change: Callable[[dict[str, Any]], None], reason: str) -> None:
    content = model_content()
    change(content)
    with pytest.raises(TranscriptError, match=f"^round 1, client 2: .*{reason}"):
        parse_tree_model(json.dumps(content).encode(), "round 1, client 2")


@pytest.mark.parametrize("content", [b"{L\x00\x00", b"[1, 2]", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_bytes_that_are_no_model_are_refused(content: bytes) -> None:
    with pytest.raises(TranscriptError, match=r"save_raw\('json'\)"):
        parse_tree_model(content, "here")


def test_a_message_of_weights_is_no_model() -> None:
    weights = {"0": torch.zeros(3)}
    assert not holds_trees(weights)
    with pytest.raises(TranscriptError, match="is not a model of trees, which is one array of bytes"):
        parse_tree_state(weights, "here")


def test_the_empty_message_before_the_first_round_has_no_model() -> None:
    update = tree_update(b"", model_bytes([grow_tree(ROWS, LABELS, SPLIT)], 2))
    assert parse_tree_state(update.before, "here") is None
    assert not holds_trees(update.before)
    assert holds_trees(update.after)
