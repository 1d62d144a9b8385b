"""Models of trees that clients send as XGBoost's JSON: splits, covers, leaf values and gains.

Flower's `FedXgbBagging` and `FedXgbCyclic` send such a model as the bytes of one array. Reading it
takes no XGBoost: the JSON has every number that training left in the trees.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import uint8

from fedsim.base.errors import TranscriptError, describe_error, first_line
from fedsim.recording.payloads import State

LOGISTIC, SQUARED_ERROR = "binary:logistic", "reg:squarederror"
OBJECTIVES = (LOGISTIC, SQUARED_ERROR)
"""Objectives whose gradients and Hessians are known for each record."""
_NO_CHILD = -1

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """One tree; a record goes left where its feature is below the threshold.

    Attributes:
        features: `node`, the feature that an inner node splits by.
        thresholds: `node`, of inner nodes.
        left: `node`, index of the left child; -1 for a leaf.
        right: `node`, index of the right child; -1 for a leaf.
        covers: `node`, the sum of the Hessians of a node's records.
        weights: `node`, the value of a leaf, which the learning rate has scaled; of an inner node
            what its value would be, not scaled.
        gains: `node`, by how much the split of an inner node lowers the objective.
    """

    features: Integers
    thresholds: Floats
    left: Integers
    right: Integers
    covers: Floats
    weights: Floats
    gains: Floats

    @property
    def inner_nodes(self) -> list[int]:
        """Return the nodes that split, from the root down; pruned nodes are left out."""
        return [node for node in self._reachable_nodes() if self.left[node] != _NO_CHILD]

    @property
    def leaves(self) -> list[int]:
        """Return the leaves."""
        return [node for node in self._reachable_nodes() if self.left[node] == _NO_CHILD]

    def _reachable_nodes(self) -> Iterator[int]:
        waiting = [0]
        while waiting:
            node = waiting.pop(0)
            yield node
            if self.left[node] != _NO_CHILD:
                waiting += [int(self.left[node]), int(self.right[node])]

    def find_leaves(self, rows: NDArray[Any]) -> Integers:
        """Return the leaf of each row, `row`.

        Args:
            rows: `row feature`, in the units that the tree was trained on.
        """
        single = rows.astype(np.float32)  # the type in which XGBoost compares
        nodes = np.zeros(len(rows), np.int64)
        for node in self.inner_nodes:  # parents come before their children
            here = np.flatnonzero(nodes == node)
            goes_left = single[here, self.features[node]] < np.float32(self.thresholds[node])
            nodes[here] = np.where(goes_left, self.left[node], self.right[node])
        return nodes

    @cached_property
    def identity(self) -> int:
        """Return a number that is the same for equal trees, which later models hold as well."""
        arrays = self.features, self.thresholds, self.left, self.right, self.weights
        return hash(tuple(array.tobytes() for array in arrays))


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeModel:
    """Trees whose leaf values add up to a prediction.

    Attributes:
        trees: in the order of training.
        objective: one of `OBJECTIVES`.
        base_score: the prediction without any tree; a probability where the objective is logistic.
        num_features: number of features of a record.
    """

    trees: Sequence[Tree]
    objective: str
    base_score: float
    num_features: int

    @property
    def base_margin(self) -> float:
        """Return the base score before the link function."""
        if self.objective != LOGISTIC:
            return self.base_score
        return math.log(self.base_score / (1 - self.base_score))

    def new_trees(self, before: TreeModel | None) -> Sequence[Tree]:
        """Return the trees that a client added to the model `before` that it was sent.

        Under bagging it returns new trees alone, in a cyclic federation the whole model.
        """
        count = len(before.trees) if before else 0
        if before is None or len(self.trees) < count:
            return self.trees
        heads = zip(before.trees, self.trees, strict=False)
        is_whole = all(np.array_equal(old.weights, new.weights) for old, new in heads)
        return self.trees[count:] if is_whole else self.trees


def parse_tree_state(state: State, where: str) -> TreeModel | None:
    """Read the model in the only array of a message; None where it is empty, before the first round.

    Raises:
        TranscriptError: the message holds no model of trees that can be read.
    """
    arrays = list(state.values())
    if len(arrays) != 1 or arrays[0].dtype != uint8 or arrays[0].ndim != 1:
        raise TranscriptError(
            f"{where}: is not a model of trees, which is one array of bytes; attack it as what it is, or choose a "
            "recording of FedXgbBagging or FedXgbCyclic"
        )
    content = arrays[0].numpy().tobytes()
    return parse_tree_model(content, where) if content else None


def holds_trees(state: State) -> bool:
    """Return whether a message looks like a model of trees in JSON."""
    arrays = list(state.values())
    if len(arrays) != 1 or arrays[0].dtype != uint8 or arrays[0].ndim != 1:
        return False
    return b'"gradient_booster"' in arrays[0].numpy().tobytes()


def parse_tree_model(content: bytes, where: str) -> TreeModel:
    """Read a model as `Booster.save_raw("json")` writes it.

    Args:
        content: the bytes of the JSON.
        where: its source, for errors.

    Raises:
        TranscriptError: it is no such model, or one with another objective or other splits.
    """
    try:
        learner = json.loads(content)["learner"]
        return _parse_learner(learner, where)
    except (ValueError, OverflowError, RecursionError) as error:
        raise TranscriptError(
            f"{where}: is no JSON of XGBoost ({first_line(error)}); have clients send `save_raw('json')`"
        ) from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise TranscriptError(
            f"{where}: is JSON, but no model of XGBoost's trees ({describe_error(error)}); have "
            "clients send `save_raw('json')`"
        ) from error


def _parse_learner(learner: Mapping[str, Any], where: str) -> TreeModel:
    booster, parameters = learner["gradient_booster"], learner["learner_model_param"]
    objective = learner["objective"]["name"]
    if booster["name"] != "gbtree":
        raise TranscriptError(f"{where}: its booster is '{booster['name']}', expected gbtree, whose trees are read")
    if objective not in OBJECTIVES:
        raise TranscriptError(
            f"{where}: its objective is '{objective}', expected {' or '.join(OBJECTIVES)}, whose sums are understood"
        )
    positive_weight = float(learner["objective"]["reg_loss_param"].get("scale_pos_weight", 1))
    if positive_weight != 1:
        raise TranscriptError(
            f"{where}: scale_pos_weight is {positive_weight:g}, expected 1; covers that count some records more than "
            "once are not read"
        )
    parallel = int(booster["model"].get("gbtree_model_param", {}).get("num_parallel_tree", 1))
    if parallel != 1:
        raise TranscriptError(
            f"{where}: num_parallel_tree is {parallel}, expected 1; forests of trees that are made side by side are "
            "not read"
        )
    # Before trees are read: a leaf of several targets is a vector, in arrays of other lengths.
    stated_score = str(parameters["base_score"]).strip("[]")
    if "," in stated_score or int(parameters.get("num_target", 1)) > 1:
        raise TranscriptError(
            f"{where}: its trees predict several targets, and one is expected; have clients train a model of each"
        )
    num_features = int(parameters["num_feature"])
    trees = [_parse_tree(tree, num_features, where) for tree in booster["model"]["trees"]]
    base_score = float(stated_score)
    if objective == LOGISTIC and not 0 < base_score < 1:
        raise TranscriptError(
            f"{where}: base_score is {base_score:g}, so that all labels of the client that began with it are "
            f"{base_score:g}; its trees say nothing more"
        )
    return TreeModel(trees=trees, objective=objective, base_score=base_score, num_features=num_features)


def _parse_tree(tree: Mapping[str, Any], num_features: int, where: str) -> Tree:
    if any(tree.get("split_type", ())):
        raise TranscriptError(
            f"{where}: a tree splits by sets of categories, which are not read; have clients encode categories as "
            "numbers or as one column each"
        )
    parsed = Tree(
        features=np.array(tree["split_indices"], np.int64),
        thresholds=np.array(tree["split_conditions"], np.float64),
        left=np.array(tree["left_children"], np.int64),
        right=np.array(tree["right_children"], np.int64),
        covers=np.array(tree["sum_hessian"], np.float64),
        weights=np.array(tree["base_weights"], np.float64),
        gains=np.array(tree["loss_changes"], np.float64),
    )
    _check_tree(parsed, num_features)
    # The value of a leaf is what a prediction adds, whatever its base weight says.
    leaves = parsed.leaves
    parsed.weights[leaves] = parsed.thresholds[leaves]
    return parsed


def _check_tree(tree: Tree, num_features: int) -> None:
    """Raise ValueError unless the arrays describe one tree, with finite numbers."""
    columns = vars(tree).values()
    sizes = {array.shape for array in columns}
    count = len(tree.left)
    if sizes != {(count,)} or not count:
        raise ValueError("its columns differ in length")
    if not all(np.isfinite(array).all() for array in columns):
        raise ValueError("it holds NaN or infinite numbers")
    children = np.concatenate([tree.left, tree.right])
    is_pair = (tree.left == _NO_CHILD) == (tree.right == _NO_CHILD)
    inner = children[children != _NO_CHILD]
    is_node = (inner >= 1) & (inner < count)
    if not is_pair.all() or not is_node.all() or len(set(inner.tolist())) != len(inner):
        raise ValueError("its nodes make no tree")
    if (tree.features < 0).any() or (tree.features >= num_features).any():
        raise ValueError("it splits by a feature that does not exist")
