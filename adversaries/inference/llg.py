"""LLG: label distribution inference from row sums of the last layer's gradient."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inference.label_distribution import check_output_layer, infer_label_distribution
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, Attack, Knowledge, Paper, Progress, RoundsNeeded, Target, warn
from fedsim.interfaces.findings import LabelDistribution
from fedsim.inversion.labels.last_layer import last_layer, untrained_layer_error
from fedsim.inversion.labels.logit_gradient import MeanLoss, logit_gradient
from fedsim.inversion.model_checks import random_inputs
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class LabelLeakage(Attack):
    """Claim the shares of classes by row sums of the last layer's gradient, without any data.

    Behind a ReLU, the sum of a class's gradient row is negative only if the class occurs, and each
    of its examples lowers the sum by about the same amount, the impact.

    1. Sum each row of the last layer's weight gradient; after several local steps, w_t - w_k takes
       the place of the gradient, since the scale does not matter.
    2. Estimate the impact from the negative sums (`count_labels_by_row_sums`).
    3. Claim each class with a negative sum once and subtract the impact from its sum.
    4. Until there are N labels, claim the class with the smallest sum and subtract the impact.

    References:
        [Wainakh2022], LLG, the variant that uses the shared gradient alone. Differs: one label an
        example, whatever the number of local steps; shares are averaged over rounds. Label smoothing
        is not subtracted: in the row sums it scales the impact of an example, which is estimated.
    """

    paper: ClassVar[Paper] = cite("Wainakh2022")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    rounds_needed: ClassVar[RoundsNeeded] = ALL

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network whose last layer counts no labels, and classes that row sums do not tell apart."""
        classes = check_output_layer(knowledge)
        if classes is not None and knowledge.loss is not None:
            _check_classes(classes, knowledge.loss, knowledge.device, "the network")

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse a network of which a part stays with the clients."""
        build_problem(update, knowledge)

    def _run(self, target: Target, progress: Progress) -> LabelDistribution:
        knowledge = target.knowledge

        def count_classes(update: Update) -> Tensor:
            problem = build_problem(update, knowledge)
            layer = last_layer(problem, random_inputs(knowledge, problem.before[0]))
            if not layer.weight_gradient.any():
                raise untrained_layer_error("the weight")
            _check_classes(len(layer.weight), problem.loss, knowledge.device, problem.where)
            if not layer.non_negative:
                warn(f"{self.title}: {problem.where}: the last layer's inputs may be below 0, which LLG excludes")
            return count_labels_by_row_sums(layer.weight_gradient.sum(1), update.num_examples)

        return infer_label_distribution(target, count_classes, progress, smoothing=None)


def _check_classes(classes: int, loss: MeanLoss, device: torch.device, where: str) -> None:
    """Raise AttackError where the row sums do not tell the classes apart."""
    if classes < 3:
        raise AttackError(
            f"{where}: of two classes the rows of the last layer's gradient are each other's negatives, so that LLG "
            "would always claim one class alone; take label-counts"
        )
    if not logit_gradient(loss, classes, device).treats_classes_alike:
        raise AttackError(
            f"{where}: clients minimise a loss with class weights, which LLG does not model; take label-counts"
        )


def count_labels_by_row_sums(sums: Tensor, num_examples: int) -> Tensor:
    """Count how often each class occurs among `num_examples`, `class`.

    If more sums are negative than there are examples, the smallest sums count. If none is negative,
    the impact is unknown and all classes count equally.

    Args:
        sums: `class`, sums of the rows of the last layer's gradient, on any scale.

    >>> count_labels_by_row_sums(torch.tensor([-3.0, -1.0, 2.0]), num_examples=4)
    tensor([3., 1., 0.])
    """
    num_classes = len(sums)
    negative = sums < 0
    if not negative.any():
        return torch.ones(num_classes)
    impact = float(sums[negative].sum()) / num_examples * (1 + 1 / num_classes)
    counts, remaining_sums = torch.zeros(num_classes), sums.clone()

    # Claim each class whose sum is negative once.
    present = sums.argsort()[: min(int(negative.sum()), num_examples)]
    counts[present] = 1
    remaining_sums[present] -= impact

    # Claim the class with the smallest sum until there are N labels.
    for _ in range(num_examples - len(present)):
        label = remaining_sums.argmin()
        counts[label] += 1
        remaining_sums[label] -= impact
    return counts
