"""The size of the derivative of what a client sends by its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.errors import ConfigError
from fedsim.measure import Meaning, Measure
from fedsim.paper import Paper
from fedsim.randomness import generator
from fedsim.training.linear import Linear
from fedsim.training.sent import Sent


@dataclass(frozen=True, kw_only=True)
class JacobianNorm(Measure):
    """Frobenius norm of J, the derivative of what the client sends by all inputs that vary.

    `norm` is in units of what is sent over model units. It is estimated without bias, its square that is, from J v for
    random signs v (Hutchinson); the relative deviation of the square is about sqrt(2 / (probes r)), where r is how many
    eigenvalues of J' J matter. Of inputs with no more numbers than `probes` it is exact at that cost. Mo et al. take a
    larger norm for more exposure, for then the gradient tells an input from those beside it; LAVP takes it for less,
    for then attacks do not converge.

    Args:
        probes: how many random directions, at least 1.
        exact: take one product for each number of the inputs instead, which of many inputs takes long.

    Raises:
        ConfigError: `probes` is out of range.

    References:
        Mo et al.: Quantifying and Localizing Usable Information Leakage from Neural Network Gradients, 2021.
        Hutchinson: A Stochastic Estimator of the Trace of the Influence Matrix, 1990.
        Differs: Mo et al. look at single layers, this at all that a client sends.
    """

    paper: ClassVar[Paper] = Paper(
        title="Quantifying and Localizing Usable Information Leakage from Neural Network Gradients",
        authors="Mo, Borovykh, Malekzadeh, Demetriou, Gündüz, Haddadi",
        venue="ESORICS",
        year=2021,
    )

    probes: int = 100
    exact: bool = False

    quantities: ClassVar[Mapping[str, Meaning]] = {"norm": "more"}

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise ConfigError(f"probes: expected at least 1, got {self.probes}")

    def _of(self, sent: Sent) -> Mapping[str, Tensor]:
        linear = sent.linear
        if self.exact or linear.size <= self.probes:
            return {"norm": _squares(linear, linear.units()).sum().sqrt()}
        return {"norm": _squares(linear, self._signs(sent)).mean().sqrt()}

    def _signs(self, sent: Sent) -> Iterator[Tensor]:
        """The random directions, `direction number`, the same ones in whatever parts."""
        random = generator("measure", "probes")
        for some in sent.linear.blocks(torch.arange(self.probes)):
            yield torch.randint(2, (len(some), sent.linear.size), generator=random).to(sent.inputs) * 2 - 1


def _squares(linear: Linear, directions: Iterable[Tensor]) -> Tensor:
    """|J v|^2 of each of `direction number`, which come in parts, in float64."""
    return torch.cat([linear.push(some).double().square().sum(1) for some in directions])
