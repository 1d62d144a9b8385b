"""The learning problem of a model: the shape of its inputs, what it predicts, and its loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from fedsim.base.errors import ConfigError
from fedsim.base.loss_term import LossWithTerm, prediction_loss

Goal = Literal["classes", "labels", "numbers", "masks"]
"""What a model predicts of an example: its class, several labels that each hold or not, one number or more, or a mask,
which is the class of each pixel (segmentation).

The targets of several labels are float32, `example label`, each 0 or 1; those of numbers are float32, `example` of one
and `example number` of several; masks are int64, `example height width`, and their logits `example class height width`.
"""


class Loss(Protocol):
    """Loss function that clients minimise."""

    def __call__(self, outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
        """Return the `mean` or `sum` of the examples' losses, or with `none` each of them."""
        ...


@dataclass(frozen=True)
class Task:
    """A learning problem, as far as a network has to know it.

    Attributes:
        input_shape: shape of one example: `channel height width` for an image, `feature` for a row
            of a table, `position` for a text, `channel time` for a series.
        num_classes: number of classes, of which an example has one; 0 where it has none.
        vocabulary: number of different tokens of texts, whose inputs are integers; 0 otherwise.
        padding: the token that pads short texts at the end; None where there is none.
        modality: name of the kind of examples; inferred where it is left out.
        num_labels: number of labels, of which an example may have any (multi-label); 0 where it has none.
        num_targets: how many numbers a regression predicts.
        mask_classes: number of classes of pixels, of which a mask names one for each (segmentation); 0 where there are
            no masks.

    >>> Task((3, 32, 32), 10).modality
    'image'
    >>> Task((64,), 0, num_labels=4).goal
    'labels'
    >>> Task((1, 16, 16), 0, mask_classes=3).target_shape
    (16, 16)
    """

    input_shape: tuple[int, ...]
    num_classes: int
    vocabulary: int = 0
    padding: int | None = None
    modality: str = ""
    num_labels: int = 0
    num_targets: int = 1
    mask_classes: int = 0

    def __post_init__(self) -> None:
        counts = self.num_classes, self.num_labels, self.num_targets - 1, self.mask_classes
        if sum(count > 0 for count in counts) > 1 or min(counts) < 0:
            raise ConfigError(
                "task: expected one of num_classes, num_labels, num_targets and mask_classes, none below its default, "
                f"got {self.num_classes}, {self.num_labels}, {self.num_targets} and {self.mask_classes}; leave the "
                "others out"
            )
        if not self.modality:
            inferred = infer_modality(self.input_shape, has_tokens=self.vocabulary > 0)
            object.__setattr__(self, "modality", inferred)
        if self.mask_classes and self.modality != "image":
            raise ConfigError(
                f"task: masks are of images, and the examples are of the modality '{self.modality}'; leave "
                "mask_classes out"
            )

    @property
    def goal(self) -> Goal:
        """Return what is predicted of an example."""
        if self.mask_classes:
            return "masks"
        return "classes" if self.num_classes else "labels" if self.num_labels else "numbers"

    @property
    def outputs(self) -> int:
        """Return the number of outputs for each example: one logit a class or label, or one prediction a number.

        Of masks it is the number for each pixel.
        """
        return self.num_classes or self.num_labels or self.mask_classes or self.num_targets

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of a model's outputs for one example; of masks `class height width`."""
        return (self.outputs, *self.target_shape) if self.goal == "masks" else (self.outputs,)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Return the shape of an example's target; `()` of a class or of one number."""
        if self.goal == "masks":
            return self.input_shape[1:]
        has_vector = self.num_labels or self.num_targets > 1
        return (self.outputs,) if has_vector else ()

    @property
    def loss(self) -> Loss:
        """Return the cross-entropy of classes or of pixels, the binary one of labels, or the mean squared error."""
        return _LOSSES[self.goal]

    def describe_goal(self) -> str:
        """Return what is predicted, as the end of a sentence.

        >>> Task((64,), 0, num_targets=3).describe_goal()
        'a regression of 3 numbers'
        """
        if self.goal == "classes":
            return f"{self.num_classes} classes"
        if self.goal == "masks":
            return f"masks of {self.mask_classes} classes of pixels"
        if self.goal == "labels":
            return f"{self.num_labels} labels, any of which an example may have"
        return "a regression" if self.num_targets == 1 else f"a regression of {self.num_targets} numbers"


def infer_modality(input_shape: Sequence[int], *, has_tokens: bool = False) -> str:
    """Return the modality of examples that nobody named one for; empty where none fits.

    This is the one place where the number of axes says what examples are.

    >>> infer_modality((6, 128))
    'series'
    """
    if has_tokens:
        return "text"
    return {1: "table", 2: "series", 3: "image"}.get(len(input_shape), "")


def squared_error(outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """Return the squared error of predictions `example number`, of several numbers their mean.

    Args:
        outputs: `example number`.
        targets: `example`, or of several numbers `example number`.
        reduction: as of `Loss`.
    """
    if targets.ndim < 2:
        return mse_loss(outputs.squeeze(-1), targets, reduction=reduction)
    return _reduce(mse_loss(outputs, targets, reduction="none").mean(1), reduction)


def label_loss(outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """Return the binary cross-entropy of logits `example label`, its mean over the labels.

    Args:
        outputs: `example label`, logits.
        targets: `example label`, 0 or 1, or a probability.
        reduction: as of `Loss`.

    >>> label_loss(torch.zeros(2, 3), torch.tensor([[0.0, 1, 1], [0, 0, 0]])).item()
    0.6931471824645996
    """
    return _reduce(binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1), reduction)


def mask_loss(outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits `example class height width`, its mean over the pixels.

    Args:
        outputs: `example class height width`, logits.
        targets: `example height width`, class indices, or `example class height width` probabilities.
        reduction: as of `Loss`.

    >>> round(mask_loss(torch.zeros(2, 3, 4, 4), torch.ones(2, 4, 4, dtype=torch.int64)).item(), 6)
    1.098612
    """
    return _reduce(cross_entropy(outputs, targets, reduction="none").mean((1, 2)), reduction)


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    """Reduce the losses `example` as the losses of torch do."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


_LOSSES: Mapping[Goal, Loss] = {
    "classes": cross_entropy,
    "labels": label_loss,
    "numbers": squared_error,
    "masks": mask_loss,
}


def goal_of(loss: object) -> Goal:
    """Return what a model predicts that is trained by `loss`; classes where the loss does not tell.

    A loss that is not known here, such as a module of torch or a function of the user, is tried on a few outputs.

    >>> goal_of(torch.nn.BCEWithLogitsLoss()), goal_of(lambda outputs, targets: (outputs - targets).abs().mean())
    ('labels', 'numbers')
    """
    loss = prediction_loss(loss)
    loss = loss.func if isinstance(loss, partial) else loss
    for goal, known in _KNOWN_LOSSES.items():
        if any(loss is function for function in known):
            return goal
    try:
        return _try_loss(loss)
    except TypeError:  # what cannot be hashed
        return _try_loss.__wrapped__(loss)


_KNOWN_LOSSES: Mapping[Goal, tuple[object, ...]] = {
    "classes": (None, cross_entropy),
    "labels": (label_loss, binary_cross_entropy_with_logits),
    "numbers": (squared_error, mse_loss),
    "masks": (mask_loss,),
}


@lru_cache(maxsize=64)
def _try_loss(loss: Any) -> Goal:
    """Return the kind of targets that a loss takes, of two examples with three outputs each.

    One that takes a class an example is of classes, though it may take masks, too, as the cross-entropy does.
    """
    if takes_targets(loss, torch.zeros(2, 3), torch.tensor([0, 2])):
        return "classes"
    if takes_targets(loss, torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)):
        return "masks"
    if not takes_targets(loss, torch.zeros(2, 3), torch.tensor([[0.0, 1, 0], [1, 0, 1]])):
        return "classes"
    # Logits cost less, the surer of a label they are; a number has to be met.
    losses = [loss(torch.full((2, 3), logit), torch.ones(2, 3)) for logit in (1.0, 4.0, 50.0)]
    return "labels" if losses[0] >= losses[1] >= losses[2] else "numbers"


def are_classes(targets: Tensor) -> bool:
    """Return whether targets are one class an example, and not numbers, rows of labels or masks.

    >>> are_classes(torch.tensor([0, 2])), are_classes(torch.tensor([0.5])), are_classes(torch.zeros(1, 4, 4).long())
    (True, False, False)
    """
    return targets.ndim == 1 and not targets.is_floating_point()


def are_masks(targets: Tensor) -> bool:
    """Return whether targets are the class of each pixel, `example height width`."""
    return targets.ndim == 3 and not targets.is_floating_point()


def describe_ignored_pixels(masks: Tensor) -> str:
    """Return what is wrong with masks that seem to mark pixels by 255 that count for nothing; empty if nothing.

    >>> describe_ignored_pixels(torch.tensor([[[0, 1, 255]]])).partition(",")[0]
    'it has pixels of class 255 and none of class 254'
    >>> describe_ignored_pixels(torch.tensor([[[0, 1, 2]]]))
    ''
    """
    if not (masks == 255).any() or (masks == 254).any():
        return ""
    others = masks[masks != 255]
    following = int(others.max()) + 1 if others.numel() else 0
    return (
        "it has pixels of class 255 and none of class 254, and so 255 may mark pixels that count for nothing, which "
        f"losses and scores do not leave out; number the classes from 0 without a gap, with {following} in place of 255"
    )


def takes_targets(loss: Any, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether a loss, which may be anybody's function, takes these targets."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of targets of another shape
            return bool(torch.as_tensor(loss(outputs, targets)).isfinite().all())
    except Exception:
        return False


def count_correct(outputs: Tensor, targets: Tensor, goal: Goal) -> Tensor | None:
    """Return how many predictions are right, of labels in examples; None of numbers, which are never right or wrong.

    Args:
        outputs: `example class`, `example label` or `example class height width`, logits.
        targets: `example` classes, `example label`, or masks `example height width`.
        goal: what is predicted; of masks, an example counts as the share of its pixels that are right.

    >>> count_correct(torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 1.0]]), "labels").item()
    0.5
    """
    if goal == "labels":
        return ((outputs > 0) == (targets > 0.5)).double().mean(1).sum()
    if goal == "masks":
        return (outputs.argmax(1) == targets).double().mean((1, 2)).sum()
    return None if targets.is_floating_point() else (outputs.argmax(1) == targets).sum()


def sort_targets(targets: Tensor) -> Tensor:
    """Return targets in ascending order: of vectors the rows as they are, by the first number, then by the next.

    >>> sort_targets(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0]])).tolist()
    [[0.0, 1.0], [0.0, 2.0], [1.0, 0.0]]
    """
    if targets.ndim < 2:
        return targets.sort().values
    order, rows = torch.arange(len(targets), device=targets.device), targets.flatten(1)
    for column in reversed(range(rows.shape[1])):
        order = order[rows[order, column].argsort(stable=True)]
    return targets[order]


def smooth_labels(loss: Loss, smoothing: float) -> Loss:
    """Return `loss` with label smoothing; with `smoothing` 0, the same object.

    Args:
        loss: the cross-entropy, if `smoothing` is above 0.
        smoothing: share of each label that is spread evenly over all classes.

    Raises:
        ConfigError: `loss` is not the cross-entropy of classes.

    References:
        [Szegedy2016], Sect. 7.
    """
    if not smoothing:
        return loss
    if isinstance(loss, LossWithTerm):
        return LossWithTerm(smooth_labels(loss.of_predictions, smoothing))
    if loss is not cross_entropy:
        raise ConfigError(
            "training.label_smoothing: spreads labels over classes, and what is learned here is not classes by the "
            "cross-entropy; leave it out"
        )
    return _smoothed_cross_entropy(smoothing)


@cache  # compiled code is looked up by the loss object
def _smoothed_cross_entropy(smoothing: float) -> Loss:
    return partial(cross_entropy, label_smoothing=smoothing)
