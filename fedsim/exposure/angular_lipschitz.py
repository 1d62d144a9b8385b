"""Angular Lipschitz constant of a client's message: its turn per turn of the inputs, under noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.papers import Paper, cite
from fedsim.exposure.measure import Meaning
from fedsim.exposure.noises import NoiseEffects, NoiseMeasure, maximum_and_q99


@dataclass(frozen=True, kw_only=True)
class AngularLipschitz(NoiseMeasure):
    """L^cos: (1 - cos(g(x + n), g(x))) / (1 - cos(x + n, x)) over noises n on the whole batch.

    g is the client's message. `max` is the largest value over n ~ N(0, sigma^2) and `q99` the 99 %
    quantile, both without unit. Scaling the loss does not change them; scaling or shifting the
    inputs does. The paper finds better reconstructions where L^cos is small, so a smaller value
    says that more is exposed. Undefined for inputs that are all zero, which have no direction; for
    a single number, which cannot turn; and where no noise turns g by more than rounding, because
    then g carries nothing of the inputs. In networks with ReLU the maximum is heavy-tailed, as a
    noise may cross a kink: it grows with `noises`, and `q99` is the steadier value.

    References:
        [Anonymous2023], Sec. 4.1, the equation of L^cos.
        Differs: 1 - cos(a, b) is half the squared chord |a / |a| - b / |b||, for at this size of
        noise one minus a cosine is rounding error in float32. `q99` is ours. The paper does not say
        in which units its images are. Noise that has deviation s in pixels of [0, 1] has s / d in
        model units, where d is the deviation by which the data set is normalised, if it is the same
        for all channels.
    """

    paper: ClassVar[Paper] = cite("Anonymous2023")

    quantities: ClassVar[Mapping[str, Meaning]] = {"max": "less", "q99": "less"}

    def _compare_messages(self, moves: NoiseEffects) -> Tensor:
        return torch.where(moves.input_turn > 0, moves.message_turn / moves.input_turn, torch.nan)

    def _summarise_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        return maximum_and_q99(changes)
