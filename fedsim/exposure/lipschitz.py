"""Empirical Lipschitz constant of a client's message: its change per unit of input noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.base.papers import Paper, cite
from fedsim.exposure.measure import Meaning
from fedsim.exposure.noises import NoiseEffects, NoiseMeasure, maximum_and_q99


@dataclass(frozen=True, kw_only=True)
class Lipschitz(NoiseMeasure):
    """L: |g(x + n) - g(x)| / |n| over noises n ~ N(0, sigma^2) on the whole batch.

    `max` is its largest value and `q99` the 99 % quantile. g is the client's message. Values are in
    units of g over model units; a server that scales the
    loss scales them. Undefined where no noise changes g by more than rounding, because then g
    carries nothing of the inputs. The paper expects an attacker's loss to drop more where L is
    small, so a smaller value says that more is exposed. In networks with ReLU the maximum is
    heavy-tailed, as a noise may cross a kink: it grows with `noises`, and `q99` is the steadier
    value. It is a lower bound of the Lipschitz constant: noise in many dimensions hardly ever
    points where g changes most. The `max` of `lavp` is the square of the largest such ratio for
    small noise.

    References:
        [Anonymous2023], Sec. 4.1, before the equation of L^cos.
        Differs: `q99` is ours. The paper does not say in which units its images are. Noise that has
        deviation s in pixels of [0, 1] has s / d in model units, where d is the deviation by which
        the data set is normalised, if it is the same for all channels; L for pixels is then L / d.
    """

    paper: ClassVar[Paper] = cite("Anonymous2023")

    quantities: ClassVar[Mapping[str, Meaning]] = {"max": "less", "q99": "less"}

    def _compare_messages(self, moves: NoiseEffects) -> Tensor:
        return moves.message_change / moves.noise_norm

    def _summarise_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        return maximum_and_q99(changes)
