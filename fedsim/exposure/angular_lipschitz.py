"""How far noise on the inputs turns what a client sends, for each unit by which it turns the inputs, at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.exposure.noises import Moves, OfNoises, highest
from fedsim.measure import Meaning
from fedsim.paper import Paper


@dataclass(frozen=True, kw_only=True)
class AngularLipschitz(OfNoises):
    """L^cos: (1 - cos(g(x + n), g(x))) / (1 - cos(x + n, x)) over noises n on the whole batch, as one vector.

    g is what the client sends; given are the largest value over n ~ N(0, sigma^2) and the 99 % quantile, without unit.
    Scaling the loss does not change them, scaling or shifting the inputs does. The paper finds better reconstructions
    where L^cos is small, so a smaller value says that more is exposed. Undefined of inputs that are all zero, which
    have no direction; of a single number, which cannot turn; and where no noise turns g by more than rounding, for then
    nothing of the inputs is in it. In networks with ReLU the maximum is heavy-tailed, as a noise may cross a kink: it
    grows with `noises`, and `q99` is the steadier value.

    References:
        Angular Lipschitz paper, Sec. 4.1, the equation of L^cos.
        Differs: 1 - cos(a, b) is half the squared chord |a / |a| - b / |b||, for at this size of noise one minus a
        cosine is rounding error in float32. `q99` is ours. The paper does not say in which units its images are. Noise
        that has deviation s in pixels of [0, 1] has s / d in model units, where d is the deviation by which the data
        set is normalised, if it is the same for all channels.
    """

    paper: ClassVar[Paper] = Paper(
        title="Foreseeing Privacy Threats from Gradient Inversion Through the Lens of Angular Lipschitz Smoothness",
        authors="Anonymous",
        venue="preprint under review",
        year=2023,
    )

    quantities: ClassVar[Mapping[str, Meaning]] = {"max": "less", "q99": "less"}

    def _change(self, moves: Moves) -> Tensor:
        return torch.where(moves.turn > 0, moves.turn_sent / moves.turn, torch.nan)

    def _of_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        return highest(changes)
