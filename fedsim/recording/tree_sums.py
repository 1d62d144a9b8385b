"""Sums over the records in each leaf, which a server reads from a model of trees in clear.

A leaf's cover is the sum of its records' Hessians, and its value follows from the sum of their
gradients. In the first tree of a client all records have the same prediction, the base score, so
that the two sums are two counts: of the records, and of those with label 1. Learning rate and L2
penalty are not in the message, but weights and gains of inner nodes contain them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.base.errors import AttackError
from fedsim.recording.tree_models import LOGISTIC, Floats, Tree, TreeModel

_START = (1 / 0.3, 1.0)
"""Inverse of the learning rate and L2 penalty from which their fit starts, XGBoost's defaults.

A single split may have two solutions, so that the fit takes the one that is nearer to these."""
_MAX_MISFIT = 1e-3
"""Greatest median misfit of the fitted settings, relative to the terms of each equation."""
_MAX_FRACTION = 0.05
"""Greatest distance of a count from a whole number, before it is no count of records."""


@dataclass(frozen=True, kw_only=True)
class BoostingSettings:
    """Settings of a client's training that its trees reveal.

    Attributes:
        learning_rate: factor on the values of leaves (`eta`).
        l2_penalty: what is added to a cover before gradients are divided by it (`lambda`).
    """

    learning_rate: float
    l2_penalty: float

    def gradient_sums(self, tree: Tree) -> Floats:
        """Return the sum of the gradients of each node's records, `node`."""
        is_leaf = tree.left < 0
        unscaled = np.where(is_leaf, tree.weights / self.learning_rate, tree.weights)
        return -unscaled * (tree.covers + self.l2_penalty)


@dataclass(frozen=True, kw_only=True)
class LeafCounts:
    """Number of records in a leaf, as the first tree of a client says.

    Attributes:
        leaf: its node.
        records: number of the client's records in it.
        positives: number of those with label 1; None where the label is a number.
    """

    leaf: int
    records: int
    positives: int | None


def fit_settings(trees: Iterable[Tree], where: str) -> BoostingSettings:
    """Fit learning rate and L2 penalty to weights and gains of inner nodes.

    The gradients of two children add up to those of their parent, and the gain of a split is the
    difference of their squares over covers.

    Raises:
        AttackError: no tree has a split, covers are withheld, or the numbers do not fit together.
    """
    from scipy.optimize import least_squares

    rows = [row for tree in trees for row in _split_rows(tree)]
    if not rows:
        raise AttackError(f"{where}: no tree has a split, so there is nothing to read; attack later rounds too")
    numbers = np.array(rows)
    if not (numbers[:, 1] > 0).all():
        raise AttackError(
            f"{where}: covers are withheld, so that no tree says how many records are where; its thresholds are still "
            "values of records (fedsim inspect)"
        )

    def misfit(parameters: Floats) -> Floats:
        return _misfit(numbers, parameters[0], parameters[1])

    limits = (1e-6, 0.0), (np.inf, np.inf)
    # Sums of later trees may be small differences of large ones, which rounding spoils.
    fit = least_squares(misfit, _START, bounds=limits, x_scale="jac", loss="soft_l1", f_scale=_MAX_MISFIT)
    additivity, gains = np.split(np.abs(misfit(fit.x)), 2)
    if max(np.median(additivity), np.median(gains)) > _MAX_MISFIT:
        raise AttackError(
            f"{where}: leaf values, covers and gains do not follow from one learning rate and L2 penalty; noise was "
            "added, or clients train with an L1 penalty or max_delta_step, which are not read"
        )
    return BoostingSettings(learning_rate=float(1 / fit.x[0]), l2_penalty=float(fit.x[1]))


def _split_rows(tree: Tree) -> Iterable[tuple[float, ...]]:
    """Yield for each split weight, cover and gain, then weight, cover and kind of both children."""
    for node in tree.inner_nodes:
        row = [tree.weights[node], tree.covers[node], tree.gains[node]]
        for child in (tree.left[node], tree.right[node]):
            row += [tree.weights[child], tree.covers[child], float(tree.left[child] < 0)]
        yield tuple(map(float, row))


def _misfit(rows: Floats, inverse_rate: float, penalty: float) -> Floats:
    """Return how far both equations of each split are from equality, relative to their terms."""
    weight, cover, gain = rows[:, 0], rows[:, 1], rows[:, 2]
    gradient = -weight * (cover + penalty)
    gradients, squares = np.zeros(len(rows)), np.zeros(len(rows))
    gradient_scale = np.abs(gradient)
    for start in (3, 6):
        child_weight, child_cover, is_leaf = rows[:, start], rows[:, start + 1], rows[:, start + 2]
        unscaled = np.where(is_leaf > 0, child_weight * inverse_rate, child_weight)
        child_gradient = -unscaled * (child_cover + penalty)
        gradients += child_gradient
        gradient_scale = gradient_scale + np.abs(child_gradient)
        squares += unscaled * unscaled * (child_cover + penalty)
    split_gain = squares - weight * weight * (cover + penalty)
    additivity = (gradients - gradient) / (gradient_scale + 1e-9)
    gains = (split_gain - gain) / (np.abs(gain) + squares + 1e-9)
    return np.concatenate([additivity, gains])


def count_leaves(tree: Tree, model: TreeModel, settings: BoostingSettings, where: str) -> list[LeafCounts]:
    """Count the records in each leaf of a client's first tree, exactly.

    Args:
        tree: trained from `model.base_score` alone.
        model: what the client sent.

    Raises:
        AttackError: covers are not multiples of one record's Hessian.
    """
    gradients = settings.gradient_sums(tree)
    share = model.base_score
    hessian = share * (1 - share) if model.objective == LOGISTIC else 1.0
    counts: list[LeafCounts] = []
    for leaf in tree.leaves:
        records = _whole_number(tree.covers[leaf] / hessian, where)
        positives = None
        if model.objective == LOGISTIC:
            positives = _whole_number(share * records - gradients[leaf], where)
            if not 0 <= positives <= records:
                raise AttackError(
                    f"{where}: a leaf of {records} records would have {positives} of label 1; its values are not "
                    "those of the objective that it names"
                )
        counts.append(LeafCounts(leaf=leaf, records=records, positives=positives))
    return counts


def _whole_number(count: float, where: str) -> int:
    number = round(count)
    if abs(count - number) > max(_MAX_FRACTION, 1e-4 * abs(count)):
        raise AttackError(
            f"{where}: a leaf would hold {count:.4g} records of a kind; covers are not counts where records have "
            "weights, or where sums are noised"
        )
    return number


def find_thresholds(trees: Sequence[Tree]) -> dict[int, list[float]]:
    """Return the thresholds of each feature that is split, ascending.

    Histograms (`tree_method` hist or approx) put them at values that a record of the client has;
    the exact method puts them halfway between two.
    """
    thresholds: dict[int, set[float]] = {}
    for tree in trees:
        for node in tree.inner_nodes:
            thresholds.setdefault(int(tree.features[node]), set()).add(float(tree.thresholds[node]))
    return {feature: sorted(values) for feature, values in sorted(thresholds.items())}
