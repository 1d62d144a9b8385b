"""The learning problem of a model: the shape of its inputs, its classes and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from fedsim.base.errors import ConfigError


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
        num_classes: number of classes; 0 for a regression.
        vocabulary: number of different tokens of texts, whose inputs are integers; 0 otherwise.
        padding: the token that pads short texts at the end; None where there is none.
        modality: name of the kind of examples; inferred where it is left out.

    >>> Task((3, 32, 32), 10).modality
    'image'
    """

    input_shape: tuple[int, ...]
    num_classes: int
    vocabulary: int = 0
    padding: int | None = None
    modality: str = ""

    def __post_init__(self) -> None:
        if not self.modality:
            inferred = infer_modality(self.input_shape, has_tokens=self.vocabulary > 0)
            object.__setattr__(self, "modality", inferred)

    @property
    def outputs(self) -> int:
        """Return the number of outputs for each example: one logit a class, or one prediction."""
        return self.num_classes or 1

    @property
    def loss(self) -> Loss:
        """Return the cross-entropy, or the mean squared error for a regression."""
        return cross_entropy if self.num_classes else squared_error


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
    """Return the squared error of `example 1` predictions from `example` targets."""
    return mse_loss(outputs.squeeze(-1), targets, reduction=reduction)


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
    if loss is not cross_entropy:
        raise ConfigError(
            "training.label_smoothing: spreads labels over classes, and what is learned here is not classes by the "
            "cross-entropy; leave it out"
        )
    return _smoothed_cross_entropy(smoothing)


@cache  # compiled code is looked up by the loss object
def _smoothed_cross_entropy(smoothing: float) -> Loss:
    return partial(cross_entropy, label_smoothing=smoothing)
