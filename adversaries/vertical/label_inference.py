"""Labels from gradients of embeddings, as a feature party gets them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, CLIENT, Attack, Paper, Progress, RoundsNeeded, Subject, Target, warn
from fedsim.interfaces.row_findings import RowLabels
from fedsim.recording.split_steps import SplitStep, read_split_steps

_ZERO_SUM = 1e-3
"""Greatest sum of a row's gradient, relative to its size, that rounding leaves of 0."""
_THRESHOLD_STEPS = 50
"""Most steps of the search for two means."""


@dataclass(frozen=True, kw_only=True)
class GradientLabelInference(Attack):
    """Base of attacks of a feature party: score the labels of each step's rows by their gradients."""

    needs: ClassVar[frozenset[str]] = frozenset({"num_classes"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    needs_num_examples: ClassVar[bool] = False
    subject: ClassVar[Subject] = "embedding gradients"
    main_metric: ClassVar[str] = "row_label_auc"

    def _run(self, target: Target, progress: Progress) -> RowLabels:
        num_classes = target.knowledge.num_classes
        assert num_classes is not None
        rows, steps, scores = list[Tensor](), list[Tensor](), list[Tensor]()
        known_steps = _read_gradients(target)
        self._check_gradients(torch.cat([gradients for _, gradients in known_steps]), num_classes)
        for index, (step, gradients) in enumerate(known_steps, 1):
            step_scores = self._score_rows(gradients, num_classes)
            rows.append(step.rows)
            steps.append(torch.full_like(step.rows, step.number))
            # Scores of different steps are added up, so each step gets the same weight.
            scores.append(step_scores / step_scores.abs().mean().clamp_min(1e-30))
            # Nothing is minimised; the length of gradients says how far the head has come.
            progress(index, len(known_steps), {"objective": float(gradients.norm(dim=1).mean())})
        return RowLabels(
            rows=torch.cat(rows),
            steps=torch.cat(steps),
            scores=torch.cat(scores),
            counted=known_steps[0][0].counted,
        )

    def _check_gradients(self, gradients: Tensor, num_classes: int) -> None:
        """Raise AttackError, or warn, where these gradients `row unit` are none that the attack is for."""
        if num_classes != 2:
            raise AttackError(f"{self.title} parts rows in two, and there are {num_classes} classes; choose label-sign")

    @abstractmethod
    def _score_rows(self, gradients: Tensor, num_classes: int) -> Tensor:
        """Return `row class` scores of the gradients `row unit` of one step."""


@dataclass(frozen=True, kw_only=True)
class GradientNormLabels(GradientLabelInference):
    """Claim the rarer label of rows whose gradient is long: the head is less sure of it.

    The lengths of a step are parted by two means, which takes no known label.

    Args:
        rarer_label: the label that fewer rows have, as is known of the field.

    References:
        [Li2022], Sect. 4.1. Differs: the paper scores lengths by their AUC alone; here they are
        parted, too, so that labels are claimed.
    """

    rarer_label: Annotated[int, Ge(0), Le(1)] = 1
    paper: ClassVar[Paper] = cite("Li2022")

    def _score_rows(self, gradients: Tensor, num_classes: int) -> Tensor:
        """Return by how much each length is above the middle between two means."""
        return _both_labels(_excess_over_middle(gradients.norm(dim=1)), self.rarer_label)


@dataclass(frozen=True, kw_only=True)
class GradientDirectionLabels(GradientLabelInference):
    """Claim the rarer label of rows whose gradients point the other way than most.

    Gradients of rows with different labels have opposite signs before the head's weights turn them,
    so that their cosine is near -1. The sign along the step's main direction parts them, and the
    smaller part is claimed to have the rarer label.

    Args:
        rarer_label: the label that fewer rows have, as is known of the field. With the wrong one, all
            labels are exchanged.

    References:
        [Li2022], Sect. 4.2. Differs: the paper takes cosines with the gradient of one row that
        is known to have label 1; here with the main direction, and no label is known.
    """

    rarer_label: Annotated[int, Ge(0), Le(1)] = 1
    paper: ClassVar[Paper] = cite("Li2022")

    def _score_rows(self, gradients: Tensor, num_classes: int) -> Tensor:
        """Return the cosine of each gradient with the main direction of all."""
        directions = torch.nn.functional.normalize(gradients, dim=1)
        main = torch.linalg.svd(directions, full_matrices=False).Vh[0]
        cosines = directions @ main
        is_majority_positive = (cosines > 0).double().mean() > 0.5
        return _both_labels(-cosines if is_majority_positive else cosines, self.rarer_label)


@dataclass(frozen=True, kw_only=True)
class GradientSignLabels(GradientLabelInference):
    """Read labels off the signs of gradients, where the head only adds up embeddings.

    The gradient of the cross-entropy by the logits is p - y: below 0 for the label alone. Embeddings
    have as many units as there are classes then, or one where there are two.

    References:
        [Fu2022], Sect. 4.1, the direct attack. Differs: a label is claimed from all steps of its row.
    """

    paper: ClassVar[Paper] = cite("Fu2022")
    main_metric: ClassVar[str] = "row_label_accuracy"

    def _check_gradients(self, gradients: Tensor, num_classes: int) -> None:
        """Refuse embeddings that are no logits; warn of gradients that are not by logits."""
        width = gradients.shape[1]
        if width == 1 and num_classes == 2:
            return
        if width != num_classes:
            raise AttackError(
                f"embeddings have {width} units, and there are {num_classes} classes, so the head does not add them up "
                "to logits; choose label-direction or label-norm"
            )
        sums = gradients.sum(1).abs() / gradients.abs().sum(1).clamp_min(1e-30)
        if float(sums.median()) > _ZERO_SUM:
            warn(
                "gradients of a row do not add up to 0, as those by logits do; the head is not a sum of embeddings, or "
                "noise was added"
            )

    def _score_rows(self, gradients: Tensor, num_classes: int) -> Tensor:
        """Return the negative gradient by each logit."""
        return -gradients if gradients.shape[1] == num_classes else _both_labels(-gradients[:, 0], 1)


def _read_gradients(target: Target) -> Sequence[tuple[SplitStep, Tensor]]:
    """Return the steps of the party whose gradients are there."""
    updates = [target.read_update(number) for number in target.participation_rounds()]
    steps = [(step, step.gradients) for step in read_split_steps(updates) if step.gradients is not None]
    if not steps:
        raise AttackError(
            f"client {target.victim}: no message holds the gradients of embeddings of the round before; attack rounds "
            "that follow each other (adversary.rounds)"
        )
    return steps


def _both_labels(scores: Tensor, label: int) -> Tensor:
    """Return `row class` scores of two classes from those of one `label`."""
    return torch.stack([-scores, scores] if label == 1 else [scores, -scores], 1)


def _excess_over_middle(values: Tensor) -> Tensor:
    """Return by how much values exceed the middle between the means of two groups of them."""
    middle = (values.min() + values.max()) / 2
    for _ in range(_THRESHOLD_STEPS):
        is_high = values > middle
        if is_high.all() or not is_high.any():
            break
        following = (values[is_high].mean() + values[~is_high].mean()) / 2
        if following == middle:
            break
        middle = following
    return values - middle
