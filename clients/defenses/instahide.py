"""InstaHide: clients train on mixtures of images whose signs are flipped at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from clients.defenses.mixing import Mixing
from fedsim.base.errors import ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Setting
from fedsim.interfaces.local_context import LocalContext

MAX_WEIGHT = 0.65
"""Largest weight of a record in a mixture, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class InstaHide(Mixing):
    """Mix each image of a batch with k - 1 others by random weights, then flip signs at random.

    Labels are mixed by the same weights and become class probabilities. In a batch of fewer than k
    images, all of them are mixed; in a batch of one, only signs are flipped. Signs are flipped
    around 0 in model units, so values have to be of both signs, as with `standardise = true`, the
    default of `[data]`: if values are never negative, as in [0, 1], absolute values undo the flips.
    No formal guarantee.

    Args:
        k: number of images in a mixture, at least 2.

    Raises:
        ConfigError: `k` is out of range or larger than a batch or a client's N, the data are no
            images with classes, or their values are of one sign.

    References:
        [Huang2020] (inside-dataset). Differs: mixes images of a mini-batch instead of the whole
        data set, anew in each step; weights are absolute values of normal draws over their sum,
        drawn again where one is above 0.65.
    """

    k: Annotated[int, Ge(2)] = 4

    flips_signs: ClassVar[bool] = True
    against: ClassVar[str] = (
        "a server that reconstructs records: it finds mixtures without signs; one that knows the defense undoes the "
        "signs by absolute values, and may take the mixtures apart"
    )
    cost: ClassVar[str] = "much accuracy; no bytes, hardly any time"
    paper: ClassVar[Paper] = cite("Huang2020")

    @property
    def records(self) -> int:
        """Return the number of images in one mixture."""
        return self.k

    def check(self, setting: Setting) -> None:
        """Check that the data are images with classes whose values have both signs."""
        if setting.task.modality != "image" or not setting.task.num_classes:
            raise ConfigError("it hides images with classes, and the data set has none; leave it out, or use mixup")
        low, high = setting.value_range or ((-1.0,), (1.0,))
        if max(low) >= 0 or min(high) <= 0:
            raise ConfigError(
                "data.standardise: signs are flipped around 0, but all values of a channel are on one side of it, so "
                "that the flips hide nothing there; set it to true"
            )
        super().check(setting)

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        """Return the batch with each image mixed and its signs flipped at random."""
        count = len(inputs)
        if count > 1:
            weights = draw_bounded_weights(count, min(self.k, count), context.rng)
            inputs, labels = self.mix(inputs, labels, weights, context.rng)
        return inputs * (2 * torch.randint(2, inputs.shape, generator=context.rng) - 1).to(inputs), labels


def draw_bounded_weights(count: int, records: int, rng: torch.Generator) -> Tensor:
    """Draw weights, `count record`, above 0 and at most `MAX_WEIGHT`, whose rows sum to 1.

    There have to be at least 2 records.
    """
    weights = torch.ones(count, records)
    while len(rejected := (weights.amax(1) > MAX_WEIGHT).nonzero().flatten()):
        draws = torch.randn((len(rejected), records), generator=rng).abs()
        weights[rejected] = draws / draws.sum(1, keepdim=True)
    return weights
