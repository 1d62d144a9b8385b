"""What a model is for: the shape of its inputs, and what it predicts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from fedsim.errors import ConfigError


class Loss(Protocol):
    """What clients minimise."""

    def __call__(self, outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
        """The loss of `example output` predictions: their `mean` or `sum`, or with `none` one an example."""
        ...


@dataclass(frozen=True)
class Task:
    """A learning problem, as far as a network has to know it.

    Attributes:
        input_shape: shape of one example: `channel height width` of an image, `feature` of a row of
            a table, `place` of a text.
        num_classes: number of classes; 0 for a regression.
        vocabulary: number of different tokens of a text, whose inputs are integers; 0 otherwise.
        padding: the token that fills short texts up behind; None where there is none.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    vocabulary: int = 0
    padding: int | None = None

    @property
    def kind(self) -> Literal["image", "table", "text"]:
        """What an example is."""
        return "text" if self.vocabulary else "image" if len(self.input_shape) == 3 else "table"

    @property
    def outputs(self) -> int:
        """How many numbers a network gives for each example: a logit a class, or one prediction."""
        return self.num_classes or 1

    @property
    def loss(self) -> Loss:
        """Cross-entropy, or for a regression the mean squared error."""
        return cross_entropy if self.num_classes else squared_error


def squared_error(outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """Squared error of `example 1` predictions from `example` targets."""
    return mse_loss(outputs.squeeze(-1), targets, reduction=reduction)


def smoothed(loss: Loss, smoothing: float) -> Loss:
    """`loss` of labels of which the share `smoothing` is spread evenly over all classes; with 0, `loss` itself.

    Raises:
        ConfigError: it is not the cross-entropy of classes.

    References:
        Szegedy et al.: Rethinking the Inception Architecture for Computer Vision, CVPR 2016, Section 7.
    """
    if not smoothing:
        return loss
    if loss is not cross_entropy:
        raise ConfigError(
            "training.label_smoothing: spreads labels over classes, and what is learned here is not classes by the "
            "cross-entropy; leave it out"
        )
    return _spread(smoothing)


@cache  # what is compiled for a loss is found again by the object
def _spread(smoothing: float) -> Loss:
    return partial(cross_entropy, label_smoothing=smoothing)
