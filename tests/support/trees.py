"""Trees made by hand as XGBoost writes them, from records that a test knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.recording.payloads import Payload
from fedsim.recording.tree_models import LOGISTIC, TreeModel
from fedsim.recording.wire_format import Update

Split = tuple[int, float, Any, Any] | None
"""Feature, threshold, and what the left and the right child split by; None for a leaf."""


def predict_margins(model: TreeModel, rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return what the trees predict for each row, before the link function, `row`."""
    margins = np.full(len(rows), model.base_margin)
    for tree in model.trees:
        margins += tree.weights[tree.find_leaves(rows)]
    return margins


def grow_tree(
    rows: NDArray[Any],
    labels: NDArray[Any],
    split: Split,
    margins: NDArray[Any] | float = 0.0,
    *,
    eta: float = 0.3,
    penalty: float = 1.0,
    objective: str = LOGISTIC,
) -> dict[str, Any]:
    """Return a tree with these splits, whose covers, weights and gains follow from the records."""
    predictions = np.broadcast_to(margins, len(rows)).astype(float)
    hessians = np.ones(len(rows))
    if objective == LOGISTIC:
        predictions = 1 / (1 + np.exp(-predictions))
        hessians = predictions * (1 - predictions)
    gradients = predictions - labels
    tree: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    def add_node(here: NDArray[np.bool_], split: Split) -> int:
        cover, gradient = float(hessians[here].sum()), float(gradients[here].sum())
        weight, node = -gradient / (cover + penalty), len(tree["sum_hessian"])
        value = weight if split else weight * eta
        feature, threshold = split[:2] if split else (0, value)
        entries = (-1, -1, feature, threshold, cover, value, 0.0, 0, 0)
        for name, entry in zip(_COLUMNS, entries, strict=True):
            tree[name].append(entry)
        if split:
            is_left = rows[:, feature] < threshold
            tree["left_children"][node] = add_node(here & is_left, split[2])
            tree["right_children"][node] = add_node(here & ~is_left, split[3])
            scores = [_gain(here & side, gradients, hessians, penalty) for side in (is_left, ~is_left)]
            tree["loss_changes"][node] = sum(scores) - _gain(here, gradients, hessians, penalty)
        return node

    add_node(np.ones(len(rows), bool), split)
    return tree


_COLUMNS = (
    *("left_children", "right_children", "split_indices", "split_conditions", "sum_hessian", "base_weights"),
    *("loss_changes", "split_type", "default_left"),
)


def _gain(here: NDArray[np.bool_], gradients: NDArray[Any], hessians: NDArray[Any], penalty: float) -> float:
    return float(gradients[here].sum() ** 2 / (hessians[here].sum() + penalty))


def model_bytes(
    trees: Sequence[dict[str, Any]], num_features: int, *, base_score: float = 0.5, objective: str = LOGISTIC
) -> bytes:
    """Return a model with these trees as XGBoost's JSON."""
    learner = {
        "gradient_booster": {"name": "gbtree", "model": {"trees": list(trees)}},
        "learner_model_param": {"base_score": f"[{base_score}]", "num_feature": str(num_features)},
        "objective": {"name": objective, "reg_loss_param": {"scale_pos_weight": "1"}},
    }
    return json.dumps({"learner": learner, "version": [3, 2, 0]}).encode()


def tree_update(sent: bytes, answer: bytes, *, number: int = 1, client: int = 0, num_examples: int = 0) -> Update:
    """Return a client's answer to a model of trees, as the curious Grid records it."""
    payload = Payload.from_dense({"0": _to_tensor(answer)}, "weights")
    before = {"0": _to_tensor(sent)}
    return Update(round=number, client=client, before=before, payload=payload, num_examples=num_examples)


def _to_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
