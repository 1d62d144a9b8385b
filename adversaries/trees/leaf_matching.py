"""Choose records whose Hessians and gradients add up to what trees say, by linear programs.

A model that was sent predicts the same for a candidate as it did for a record with its values, so
that each candidate adds known numbers to one leaf of each tree. The program chooses how often each
is there; its dual values say which further candidates would bring the sums closer to the trees'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adversaries.trees.candidates import Candidates
from fedsim.base.errors import AttackError, one_line
from fedsim.recording.tree_models import LOGISTIC, Floats, Integers, Tree, TreeModel
from fedsim.recording.tree_sums import LeafCounts

_ROOM = 2.0
"""A candidate is chosen so often at most that this many times N could be chosen, or once."""
_LEAST_AMOUNT = 1e-9
"""Added to amounts, so that a leaf whose candidates were not chosen gets its records, too."""
_COUNT_WEIGHT = 10.0
"""How much more a wrong sum weighs in a first tree, whose sums are exact counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeSums:
    """A tree of the client, with what its leaves' records add up to.

    Attributes:
        earlier: the model that it was trained on.
        covers: `leaf`, sums of Hessians.
        gradients: `leaf`, sums of gradients.
        are_counts: whether all records had the same prediction.
    """

    tree: Tree
    earlier: TreeModel
    covers: Floats
    gradients: Floats
    are_counts: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class LeafProblem:
    """The sums over all leaves of a client's trees, which its records have to add up to.

    Attributes:
        num_records: N.
        counts: of the leaves of the first tree, where they are exact; empty elsewhere.
    """

    sums: Sequence[TreeSums]
    num_records: int
    counts: Sequence[LeafCounts] = ()

    def contributions(self, candidates: Candidates) -> tuple[Any, Floats]:
        """Return what each candidate adds to each sum, and the sums of the trees.

        Both are relative to the mean of a record.

        Returns:
            A sparse matrix `sum candidate`, and `sum`.
        """
        from scipy.sparse import csr_array

        rows, columns, values, totals = list[Any](), list[Any](), list[Any](), list[Any]()
        first_row, everyone = 0, np.arange(len(candidates))
        margins: dict[int, Floats] = {}
        for sums in self.sums:
            predictions, hessians = self._predict(sums.earlier, candidates, margins)
            leaves = sums.tree.leaves
            position = np.zeros(len(sums.tree.left), np.int64)
            position[leaves] = np.arange(len(leaves))
            leaf = position[sums.tree.find_leaves(candidates.rows)]
            cover_scale, gradient_scale = self._scales(sums)
            rows += [first_row + leaf, first_row + len(leaves) + leaf]
            columns += [everyone, everyone]
            values += [hessians / cover_scale, (predictions - candidates.labels) / gradient_scale]
            totals += [sums.covers / cover_scale, sums.gradients / gradient_scale]
            first_row += 2 * len(leaves)
        entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
        return csr_array(entries, shape=(first_row, len(candidates))), np.concatenate(totals)

    def _predict(self, model: TreeModel, candidates: Candidates, margins: dict[int, Floats]) -> tuple[Floats, Floats]:
        """Return predictions and Hessians; trees that several models share are evaluated once."""
        total = np.full(len(candidates), model.base_margin)
        for tree in model.trees:
            key = tree.identity
            if key not in margins:
                margins[key] = tree.weights[tree.find_leaves(candidates.rows)]
            total += margins[key]
        if model.objective != LOGISTIC:
            return total, np.ones(len(total))
        predictions = 1 / (1 + np.exp(-total))
        return predictions, predictions * (1 - predictions)

    def _scales(self, sums: TreeSums) -> tuple[float, float]:
        """Return the mean Hessian of a record, and about the size of its gradient."""
        cover = float(sums.covers.sum()) / self.num_records
        if sums.earlier.objective == LOGISTIC:
            return cover, 2 * cover
        return cover, max(float(np.abs(sums.gradients).sum()) / self.num_records, 1e-12)

    def weights(self) -> Floats:
        """Return how much a difference in each sum weighs, `sum`."""
        weights: list[Floats] = []
        for sums in self.sums:
            weight = _COUNT_WEIGHT if sums.are_counts else 1.0
            weights.append(np.full(2 * len(sums.covers), weight))
        return np.concatenate(weights)


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Solution of the linear program.

    Attributes:
        amounts: `candidate`, how often each is chosen; not whole yet.
        misfit: differences of all sums, in records.
        prices: `sum`, how much the misfit grows with each sum.
        record_price: how much it grows with N.
    """

    amounts: Floats
    misfit: float
    prices: Floats
    record_price: float

    def reduced_costs(self, contributions: Any) -> Floats:
        """Return how much each further candidate would change the misfit; below 0 it is of use."""
        costs: Floats = -(contributions.T @ self.prices) - self.record_price
        return costs


def choose_amounts(problem: LeafProblem, candidates: Candidates) -> Choice:
    """Choose how often each candidate is there, so that sums differ least from the trees'."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, eye_array, hstack, vstack

    contributions, totals = problem.contributions(candidates)
    num_sums, count = contributions.shape
    lacking, surplus = eye_array(num_sums), -eye_array(num_sums)
    # Different records explain more of the truth than copies of a few.
    most = max(1.0, _ROOM * problem.num_records / count)
    bounds = [(0.0, most)] * count + [(0.0, None)] * (2 * num_sums)
    is_candidate = np.concatenate([np.ones(count), np.zeros(2 * num_sums)])
    matrix = vstack([hstack([contributions, lacking, surplus]), csr_array(is_candidate[None])])
    weights = problem.weights()
    solution = linprog(
        np.concatenate([np.zeros(count), weights, weights]),
        A_eq=matrix.tocsc(),
        b_eq=np.concatenate([totals, [problem.num_records]]),
        bounds=bounds,
        method="highs",
    )
    if solution.x is None:
        raise AttackError(f"no records fit the trees at all: {one_line(solution.message)}; try other rounds")
    prices = solution.eqlin.marginals
    slacks = float(solution.x[count:].sum())
    return Choice(amounts=solution.x[:count], misfit=slacks, prices=prices[:-1], record_price=float(prices[-1]))


def round_choice(problem: LeafProblem, candidates: Candidates, amounts: Floats) -> Integers:
    """Round how often each candidate is there, so that counts of the first tree stay exact."""
    if not problem.counts:
        return round_amounts(amounts, problem.num_records)
    leaves = problem.sums[0].tree.find_leaves(candidates.rows)
    times = np.zeros(len(candidates), np.int64)
    for count in problem.counts:
        in_leaf = leaves == count.leaf
        positives = count.positives or 0
        for label, number in enumerate((count.records - positives, positives)):
            is_label = candidates.labels == label if count.positives is not None else label == 0
            members = np.flatnonzero(in_leaf & is_label)
            if number and len(members):
                weights = amounts[members] + _LEAST_AMOUNT
                times[members] = round_amounts(weights * number / weights.sum(), number)
    return times


def round_amounts(amounts: Floats, total: int) -> Integers:
    """Round to whole numbers that add up to `total`; the largest remainders are rounded up.

    >>> round_amounts(np.array([0.5, 1.75, 0.75]), 3)
    array([0, 2, 1])
    """
    whole = np.floor(amounts + 1e-9).astype(np.int64)
    missing = max(0, total - int(whole.sum()))
    whole[np.argsort(whole - amounts, kind="stable")[:missing]] += 1
    return whole
