"""TabLeak: rows of tables by relaxed categories and an ensemble (Vero, Balunović, Dimitrov, Vechev 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.engine.aggregation import median
from adversaries.engine.descent import Trial
from adversaries.engine.matching import GradientInversion, best_of
from adversaries.engine.places import AlongTraining
from adversaries.engine.priors import EpochConsistency
from adversaries.engine.recipe import Recipe, constant
from adversaries.engine.relaxed import RelaxedUnits
from adversaries.engine.restart import Restart
from adversaries.engine.settings import check_not_negative, check_positive
from adversaries.inversion.data_leakage import epochs_of, mean_of_epochs
from adversaries.scene import Scene, known_steps
from fedsim.attacks import Knowledge, Paper
from fedsim.errors import AttackError
from fedsim.findings import Reconstruction
from fedsim.table_metrics import assigned, right
from fedsim.wire.messages import Update

_LEAST_SPREAD = 1e-6
"""Of a number over the ensemble, in standard deviations: the logarithm of less says nothing more."""


@dataclass(frozen=True, kw_only=True)
class TabLeak(GradientInversion):
    """Match the update by relaxed rows, from many random starts, and take the median of what these find.

    Of a column, the dummy categories are a softmax and a number is a sigmoid between its bounds, so that each dummy row
    is nearly one of the table all the time. The rows of each start are assigned to those of the start that matches best
    so that as many values as possible agree, rows of one class among themselves; the median over starts is the claim,
    of a category the largest. How much the starts agree is told as an entropy, by which values that are right can be
    told from others without the truth.

    After one local step, or where a gradient was sent, the gradient at w_0 is matched. After several that are known (E
    or T, B and the learning rate) local training is simulated, each epoch with rows of its own; where they are not
    known, the update is taken for one gradient.

    Args:
        iterations: steps of Adam, whose gradients are replaced by their signs.  [paper and released code: 1500]
        restarts: starts of the ensemble. Time grows with it.                    [30; for FedAvg 15]
        step_size: Adam's, in standard deviations of the inputs; constant.       [.06]
        order_weight: of the difference between the epochs' mean rows.           [0 to .5, see below]
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes linear layers in it.

    References:
        Vero et al.: TabLeak: Tabular Data Leakage in Federated Learning, ICML 2023, and its released code. Differs:
        starts are Gaussian instead of uniform in [-1, 1]; the start to which others are assigned has the smallest
        objective as it is, the code rounds rows first; the code assigns across classes; of an even number of starts the
        median is the mean of the two in the middle; the released code picks order_weight for each setting by the true
        error, and knows how labels are ordered into mini-batches, here neither is known.
    """

    iterations: int = 1500
    restarts: int = 30
    step_size: float = 0.06
    order_weight: float = 0.01

    paper: ClassVar[Paper] = Paper(
        title="TabLeak: Tabular Data Leakage in Federated Learning",
        authors="Vero, Balunović, Dimitrov, Vechev",
        venue="ICML",
        year=2023,
        url="https://arxiv.org/abs/2210.01785",
    )
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | {"columns"}
    main_metric: ClassVar[str] = "columns_right"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size")
        check_not_negative(self, "order_weight")

    def _scene(self, update: Update, knowledge: Knowledge) -> Scene:
        columns, shape = knowledge.columns or (), knowledge.input_shape or ()
        if shape != (sum(columns),):
            raise AttackError(
                f"{self.called}: columns: {len(columns)} columns have {sum(columns)} features, and an example has the "
                f"shape {shape}; expected a row of as many features, mend columns or input_shape"
            )
        scene = super()._scene(update, knowledge)
        return replace(scene, units=RelaxedUnits.relaxing(scene.units, columns))

    def _recipe(self, scene: Scene) -> Recipe:
        how = Recipe(step_size=self.step_size, signed=True, schedule=constant, bounded=False)
        if not _simulated(scene):
            return replace(how, one_step=True)
        priors = [(self.order_weight, _RelaxedConsistency())]
        return replace(how, place=AlongTraining(), priors=priors, epochs=epochs_of(scene))

    def _merged(self, data: Tensor, scene: Scene) -> Tensor:
        return mean_of_epochs(data, scene) if _simulated(scene) else data

    def _concluded(self, ends: Sequence[tuple[Restart, Trial]]) -> Reconstruction:
        best, trial = best_of(ends)
        units = best.scene.units
        assert isinstance(units, RelaxedUnits)
        columns, deviations = units.columns, (units.scale / (units.high - units.low)).cpu()
        first = best.finding(trial, self._merged)

        def aligned(other: Reconstruction) -> Tensor:
            """`example feature`, in the order of the best."""
            agreement = right(other.data, first.data, columns, deviations).sum(2)
            same_class = first.labels[:, None] == other.labels
            return other.data[assigned(agreement + len(columns) * same_class)]

        rows = torch.stack([aligned(restart.finding(end, self._merged)) for restart, end in ends])
        pooled = median(rows)
        return Reconstruction(
            data=_certain(pooled, columns),
            labels=first.labels,
            trace=first.trace,
            entropy=_entropies(pooled, rows / deviations, columns) if len(rows) > 1 else None,
        )


@dataclass(frozen=True)
class _RelaxedConsistency:
    """`EpochConsistency` of rows as the model is fed with them."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        return EpochConsistency()(scene, scene.units.to_model(dummy), consensus)


def _simulated(scene: Scene) -> bool:
    """Whether the client took several steps, and enough is known of them to follow it."""
    steps = known_steps(scene, scene.num_examples)
    return steps not in (None, 1) and scene.learning_rate is not None and scene.batch_size is not None


def _certain(rows: Tensor, columns: Sequence[int]) -> Tensor:
    """`example feature`, numbers as they are and of each column's categories the largest alone."""
    parts = torch.split(rows, list(columns), 1)
    return torch.cat(
        [torch.eye(part.shape[1])[part.argmax(1)] if part.shape[1] > 1 else part for part in parts],
        1,
    )


def _entropies(pooled: Tensor, rows: Tensor, columns: Sequence[int]) -> Tensor:
    """`example column`: of a category that of its shares, in [0, 1]; of a number that of a Gaussian, in nats.

    Args:
        pooled: `example feature`, the median over the ensemble.
        rows: `start example feature`, in standard deviations.
    """
    spread = rows.std(0).clamp_min(_LEAST_SPREAD)
    gaussian = 0.5 * (2 * math.pi * math.e * spread.square()).log()
    found = []
    for shares, number in zip(*(torch.split(part, list(columns), 1) for part in (pooled, gaussian)), strict=True):
        whole = shares.sum(1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
        certain = torch.special.entr(shares / whole).sum(1) / math.log(max(2, shares.shape[1]))
        found.append(certain if shares.shape[1] > 1 else number[:, 0])
    return torch.stack(found, 1)
