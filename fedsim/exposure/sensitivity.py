"""Sensitivity of a client's message: how far input noise changes it on average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.base.constraints import PositiveInt
from fedsim.base.papers import Paper, cite
from fedsim.exposure.measure import Meaning
from fedsim.exposure.noises import NoiseEffects, NoiseMeasure


@dataclass(frozen=True, kw_only=True)
class Sensitivity(NoiseMeasure):
    """Average of |g(x + n) - g(x)| over noises n ~ N(0, sigma^2) on all inputs that vary.

    `mean` is in units of g, the client's message, and grows in proportion to `sigma`. For small
    noise it is at most about sigma times the Frobenius norm of the Jacobian. Mo et al. take a
    larger value for more exposure, because the gradient then tells an input from its neighbours;
    LAVP takes it for less, because attacks then do not converge.

    References:
        [Mo2021], as given by [Hong2023] (LAVP), related work.
        Differs: they look at single layers, this at the whole message; neither text gives the size
        of the noise.
    """

    paper: ClassVar[Paper] = cite("Mo2021")

    noises: PositiveInt = 100

    quantities: ClassVar[Mapping[str, Meaning]] = {"mean": "more"}

    def _compare_messages(self, moves: NoiseEffects) -> Tensor:
        return moves.message_change

    def _summarise_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        return {"mean": changes.mean()}
