"""How far noise on the inputs moves what a client sends, for each unit of noise, at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.exposure.noises import Moves, OfNoises, highest
from fedsim.measure import Meaning
from fedsim.paper import Paper


@dataclass(frozen=True, kw_only=True)
class Lipschitz(OfNoises):
    """L: |g(x + n) - g(x)| / |n| over noises n ~ N(0, sigma^2) on the whole batch, its largest value and 99 % quantile.

    g is what the client sends. Values are in units of g over model units; a server that scales the loss scales them.
    Undefined where no noise changes g by more than rounding, for then nothing of the inputs is in it.
    The paper expects an attacker's loss to drop more where L is small, so a smaller value says that more is exposed. In
    networks with ReLU the maximum is heavy-tailed, as a noise may cross a kink: it grows with `noises`, and `q99` is
    the steadier value. It is a lower bound of the Lipschitz constant: noise in many dimensions hardly ever points where
    g changes most, for which see `lavp`, whose `max` is the square of the largest such ratio for small noise.

    References:
        Angular Lipschitz paper, Sec. 4.1, before Eq. of L^cos.
        Differs: `q99` is ours. The paper does not say in which units its images are. Noise that has deviation s in
        pixels of [0, 1] has s / d in model units, where d is the deviation by which the data set is normalised, if it
        is the same for all channels; L for pixels is then L / d.
    """

    paper: ClassVar[Paper] = Paper(
        title="Foreseeing Privacy Threats from Gradient Inversion Through the Lens of Angular Lipschitz Smoothness",
        authors="Anonymous",
        venue="preprint under review",
        year=2023,
    )

    quantities: ClassVar[Mapping[str, Meaning]] = {"max": "less", "q99": "less"}

    def _change(self, moves: Moves) -> Tensor:
        return moves.change / moves.noise

    def _of_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        return highest(changes)
