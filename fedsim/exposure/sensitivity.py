"""How far noise on the inputs moves what a client sends, on average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.exposure.noises import Moves, OfNoises
from fedsim.measure import Meaning
from fedsim.paper import Paper


@dataclass(frozen=True, kw_only=True)
class Sensitivity(OfNoises):
    """Average of |g(x + n) - g(x)| over noises n ~ N(0, sigma^2) on all inputs that vary.

    `mean` is in units of g, what the client sends, and grows in proportion to `sigma`. For small noise it is about
    sigma times the Frobenius norm of the Jacobian, at most. Mo et al. take a larger value for more exposure, for then
    the gradient tells an input from those beside it; LAVP takes it for less, for then attacks do not converge.

    References:
        Mo et al.: Quantifying and Localizing Usable Information Leakage from Neural Network Gradients, 2021, as given
        by Hong et al. 2023 (LAVP), related work.
        Differs: they look at single layers, this at all that a client sends; neither text gives the size of noises.
    """

    paper: ClassVar[Paper] = Paper(
        title="Quantifying and Localizing Usable Information Leakage from Neural Network Gradients",
        authors="Mo, Borovykh, Malekzadeh, Demetriou, Gündüz, Haddadi",
        venue="ESORICS",
        year=2021,
    )

    noises: int = 100

    quantities: ClassVar[Mapping[str, Meaning]] = {"mean": "more"}

    def _change(self, moves: Moves) -> Tensor:
        return moves.change

    def _of_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        return {"mean": changes.mean()}
