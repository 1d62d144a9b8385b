"""TabLeak: tabular data leakage by relaxed categories and an ensemble [Vero2023]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inversion.data_leakage import average_epochs, num_epochs
from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.base.table_metrics import assign_rows, compare_rows
from fedsim.interfaces.attack import Knowledge, Paper
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.aggregation import median
from fedsim.inversion.descent import Trial
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.matching import GradientInversion, best_restart
from fedsim.inversion.priors import EpochConsistency
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe, constant_schedule
from fedsim.inversion.restart import Restart
from fedsim.inversion.update_models import UnrolledTraining
from fedsim.recording.wire_format import Update
from fedsim.training.settings import known_steps

_MIN_ENSEMBLE_STD = 1e-6
"""Least deviation of a number over the ensemble, in standard deviations, before its logarithm."""


@dataclass(frozen=True, kw_only=True)
class TabLeak(GradientInversion):
    """Match the update by relaxed rows from many random starts and claim the median of the results.

    1. Relax the table: a category is the softmax of dummy logits, a number a sigmoid between its
       bounds, so that each dummy row is always close to a valid one (`_problem`).
    2. Match the update from each of many random starts (`_recipe`).
    3. Assign the rows of each start to those of the best start, within classes, so that as many
       values as possible agree; claim the median over starts, of categories the largest
       (`_conclude`).
    4. Report the starts' disagreement as an entropy, which indicates correct values without the
       truth (`_column_entropies`).

    After one local step, or where a gradient was sent, the gradient at w_0 is matched. After
    several steps that are known (E or T, B and the learning rate) local training is simulated, with
    separate rows for each epoch; where they are not known, the update is matched as one gradient.

    Args:
        iterations: steps of Adam, fed with signs of gradients. [paper and released code: 1500]
        restarts: size of the ensemble.                         [30; for FedAvg 15]
        step_size: Adam's, in standard deviations of the inputs; constant.             [.06]
        order_weight: weight of the difference of the epochs' mean rows.  [0 to .5, see below]

    References:
        [Vero2023], and its released code. Differs: starts are Gaussian instead of uniform in
        [-1, 1]; the best start is the one with the smallest objective of relaxed rows, the code
        rounds rows first; the code assigns across classes; the median of an even number of starts
        is the mean of the middle two; the released code picks order_weight for each setting by the
        true error, and knows how labels are ordered into mini-batches, here neither is known.
    """

    iterations: PositiveInt = 1500
    restarts: PositiveInt = 30
    step_size: PositiveFloat = 0.06
    order_weight: NonNegativeFloat = 0.01

    paper: ClassVar[Paper] = cite("Vero2023")
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | {"columns"}
    main_metric: ClassVar[str] = "columns_right"

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        columns, shape = knowledge.columns or (), knowledge.input_shape or ()
        if shape != (sum(columns),):
            raise AttackError(
                f"{self.title}: columns: {len(columns)} columns have {sum(columns)} features, and an example has the "
                f"shape {shape}; expected a row of as many features, fix columns or input_shape"
            )
        problem = super()._problem(update, knowledge)
        return replace(problem, scaling=RelaxedScaling.from_scaling(problem.scaling, columns))

    def _recipe(self, problem: InversionProblem) -> Recipe:
        recipe = Recipe(step_size=self.step_size, signed=True, schedule=constant_schedule, bounded=False)
        if not _can_unroll(problem):
            return replace(recipe, one_step=True)
        priors = [(self.order_weight, _RelaxedConsistency())]
        return replace(recipe, update_model=UnrolledTraining(), priors=priors, epochs=num_epochs(problem))

    def _merge_epochs(self, data: Tensor, problem: InversionProblem) -> Tensor:
        return average_epochs(data, problem) if _can_unroll(problem) else data

    def _conclude(self, ends: Sequence[tuple[Restart, Trial]]) -> Reconstruction:
        best, trial = best_restart(ends)
        scaling = best.problem.scaling
        assert isinstance(scaling, RelaxedScaling)
        columns, deviations = scaling.columns, (scaling.scale / (scaling.high - scaling.low)).cpu()
        reference = best.finding(trial, self._merge_epochs)

        def rows_in_best_order(reconstruction: Reconstruction) -> Tensor:
            """Return the rows in the order of the best start, `example feature`."""
            agreement = compare_rows(reconstruction.data, reference.data, columns, deviations).sum(2)
            same_class = reference.labels[:, None] == reconstruction.labels
            return reconstruction.data[assign_rows(agreement + len(columns) * same_class)]

        rows = torch.stack([rows_in_best_order(restart.finding(end, self._merge_epochs)) for restart, end in ends])
        pooled = median(rows)
        return Reconstruction(
            data=_round_categories(pooled, columns),
            labels=reference.labels,
            trace=reference.trace,
            entropy=_column_entropies(pooled, rows / deviations, columns) if len(rows) > 1 else None,
        )


@dataclass(frozen=True)
class _RelaxedConsistency:
    """`EpochConsistency` of the rows that the model takes, not of their logits."""

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        return EpochConsistency()(problem, problem.scaling.to_model(dummy), consensus)


def _can_unroll(problem: InversionProblem) -> bool:
    """Return whether the client took several local steps that are known well enough to simulate."""
    steps = known_steps(problem, problem.num_examples)
    return steps not in (None, 1) and problem.learning_rate is not None and problem.batch_size is not None


def _round_categories(rows: Tensor, columns: Sequence[int]) -> Tensor:
    """Replace the shares of each column's categories by one-hot vectors; keep numbers."""
    rounded = []
    for column in torch.split(rows, list(columns), 1):
        num_categories = column.shape[1]
        rounded.append(torch.eye(num_categories)[column.argmax(1)] if num_categories > 1 else column)
    return torch.cat(rounded, 1)


def _column_entropies(pooled: Tensor, rows: Tensor, columns: Sequence[int]) -> Tensor:
    """Compute the ensemble's entropy for each value, `example column`.

    A category has the entropy of its shares, in [0, 1]; a number that of a Gaussian with the
    ensemble's deviation, in nats.

    Args:
        pooled: `example feature`, the median over the ensemble.
        rows: `start example feature`, in standard deviations.
    """
    deviation = rows.std(0).clamp_min(_MIN_ENSEMBLE_STD)
    gaussian = 0.5 * (2 * math.pi * math.e * deviation.square()).log()
    widths = list(columns)
    entropies = []
    for shares, number in zip(torch.split(pooled, widths, 1), torch.split(gaussian, widths, 1), strict=True):
        if shares.shape[1] == 1:
            entropies.append(number[:, 0])
            continue
        total = shares.sum(1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
        entropy = torch.special.entr(shares / total).sum(1)
        entropies.append(entropy / math.log(max(2, shares.shape[1])))
    return torch.stack(entropies, 1)


@dataclass(frozen=True)
class RelaxedScaling(InputScaling):
    """Map that turns any dummy data into rows of a table (TabLeak, softmax and sigmoid).

    In [0, 1], the range of the inputs, the features of a categorical column are the softmax of the
    values that `InputScaling` would give, and a number is the sigmoid of its dummy value.

    Attributes:
        columns: number of features of each column, in their order: 1 is a number, more are
            categories.
    """

    columns: tuple[int, ...] = ()

    @classmethod
    def from_scaling(cls, scaling: InputScaling, columns: Sequence[int]) -> RelaxedScaling:
        """Relax `scaling`, with a value for each feature."""
        tensors = (scaling.centre, scaling.scale, scaling.low, scaling.high)
        centre, scale, low, high = (tensor.expand(sum(columns)) for tensor in tensors)
        return cls(centre, scale, low, high, tuple(columns))

    def to_model(self, dummy: Tensor) -> Tensor:
        """Return the model's inputs for dummy data.

        Args:
            dummy: `example feature`.
        """
        width = self.high - self.low
        logits = (super().to_model(dummy) - self.low) / width
        cell_features, padding, feature_cells, is_number = self._layout
        cells = logits.index_select(1, cell_features).reshape(-1, *padding.shape)
        probabilities = cells.masked_fill(padding, -torch.inf).softmax(2)
        probabilities = probabilities.flatten(1).index_select(1, feature_cells)
        return self.low + width * torch.where(is_number, dummy.sigmoid(), probabilities)

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Lay out the columns as rows of cells, each padded to the widest.

        Returns:
            `cell`, the feature of each of columns x widest cells; `column widest`, which cells are
            padding; `feature`, its cell; `feature`, whether it is a number.
        """
        widest = max(self.columns)
        cell_features: list[int] = []
        padding: list[bool] = []
        is_number: list[bool] = []
        start = 0
        for size in self.columns:
            for offset in range(widest):
                cell_features.append(start + min(offset, size - 1))
                padding.append(offset >= size)
            is_number += [size == 1] * size
            start += size
        feature_cells = [cell for cell, padded in enumerate(padding) if not padded]
        device = self.low.device
        return (
            torch.tensor(cell_features, device=device),
            torch.tensor(padding, device=device).reshape(len(self.columns), widest),
            torch.tensor(feature_cells, device=device),
            torch.tensor(is_number, device=device),
        )
