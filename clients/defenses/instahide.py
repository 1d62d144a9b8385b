"""Clients train on mixtures of images whose signs are flipped at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clients.defenses.mixing import Mixing
from fedsim.attacks import Paper
from fedsim.defense import Setting
from fedsim.errors import ConfigError

LARGEST = 0.65
"""No record has a larger weight in a mixture, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class InstaHide(Mixing):
    """Mix each image of a batch with k - 1 others by random weights, then flip the sign of each of its values or not.

    Labels are mixed by the same weights and become probabilities of classes. In a batch of fewer than k images, all of
    them are mixed; one that is alone has only its signs flipped. Signs are flipped around 0 in model units, which has
    to be among the values, as with `standardise = true`, the default of `[data]`: of values that are never negative, as
    those in [0, 1], absolute values would undo the flips. No formal guarantee.

    Args:
        k: images in a mixture, at least 2.

    Raises:
        ConfigError: `k` is out of range, larger than a batch or what a client holds, the data are no images with
            classes, or their values are of one sign.

    References:
        Huang, Song, Li, Arora: InstaHide: Instance-hiding Schemes for Private Distributed Learning, ICML 2020
        (inside-dataset). Differs: mixes images of a mini-batch instead of the whole data set, anew in
        each step; weights are absolute values of normal draws over their sum, drawn again where one is above 0.65.
    """

    k: int = 4

    flips_signs: ClassVar[bool] = True
    against: ClassVar[str] = (
        "a server that reconstructs records: it finds mixtures without signs; one that knows the defense undoes the "
        "signs by absolute values, and may take the mixtures apart"
    )
    cost: ClassVar[str] = "much accuracy; no bytes, hardly any time"
    paper: ClassVar[Paper] = Paper(
        title="InstaHide: Instance-hiding Schemes for Private Distributed Learning",
        authors="Huang, Song, Li, Arora",
        venue="ICML",
        year=2020,
        url="https://arxiv.org/abs/2010.02772",
    )

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ConfigError(f"k: a mixture is of at least 2 images, got {self.k}")

    @property
    def records(self) -> int:
        """See Mixing."""
        return self.k

    def check(self, setting: Setting) -> None:
        """See Defense."""
        if setting.task.kind != "image" or not setting.task.num_classes:
            raise ConfigError("it hides images with classes, and the data set has none; leave it out, or use mixup")
        low, high = setting.value_range or ((-1.0,), (1.0,))
        if max(low) >= 0 or min(high) <= 0:
            raise ConfigError(
                "data.standardise: signs are flipped around 0, but all values of a channel are on one side of it, so "
                "that the flips hide nothing there; set it to true"
            )
        super().check(setting)

    def on_batch(self, inputs: Tensor, labels: Tensor, *, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """See Defense."""
        count = len(inputs)
        if count > 1:
            inputs, labels = self.mixed(inputs, labels, bounded_weights(count, min(self.k, count), rng), rng)
        return inputs * (2 * torch.randint(2, inputs.shape, generator=rng) - 1).to(inputs), labels


def bounded_weights(count: int, records: int, rng: torch.Generator) -> Tensor:
    """`count record` random weights above 0 that sum to 1, none above `LARGEST`, for at least 2 records."""
    weights = torch.ones(count, records)
    while len(rows := (weights.amax(1) > LARGEST).nonzero().flatten()):
        drawn = torch.randn((len(rows), records), generator=rng).abs()
        weights[rows] = drawn / drawn.sum(1, keepdim=True)
    return weights
