"""The Frobenius norm of the Jacobian of a client's message by its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import PositiveInt
from fedsim.base.papers import Paper, cite
from fedsim.base.randomness import generator
from fedsim.exposure.measure import Meaning, Measure
from fedsim.training.message_function import ClientMessage
from fedsim.training.message_jacobian import MessageJacobian


@dataclass(frozen=True, kw_only=True)
class JacobianNorm(Measure):
    """Frobenius norm of J, the Jacobian of the client's message by all inputs that vary.

    `norm` is in units of the message over model units. Its square is estimated without bias from J
    v for random signs v (Hutchinson); the relative deviation of the square is about
    sqrt(2 / (probes r)), where r is how many eigenvalues of J' J matter. It is exact at the same
    cost where the inputs have no more numbers than `probes`. Mo et al. take a larger norm for more
    exposure, because the gradient then tells an input from its neighbours; LAVP takes it for less,
    because attacks then do not converge.

    Args:
        probes: how many random directions, at least 1.
        exact: compute one product for each input number instead, which is slow for large inputs.

    Raises:
        ConfigError: `probes` is out of range.

    References:
        [Mo2021]; [Hutchinson1990] for the probes. Differs: Mo et al. look at single layers, this at
        the whole message.
    """

    paper: ClassVar[Paper] = cite("Mo2021")

    probes: PositiveInt = 100
    exact: bool = False

    quantities: ClassVar[Mapping[str, Meaning]] = {"norm": "more"}

    def _compute(self, sent: ClientMessage) -> Mapping[str, Tensor]:
        jacobian = sent.jacobian
        if self.exact or jacobian.size <= self.probes:
            return {"norm": _squared_norms(jacobian, jacobian.unit_vectors()).sum().sqrt()}
        return {"norm": _squared_norms(jacobian, self._random_signs(sent)).mean().sqrt()}

    def _random_signs(self, message: ClientMessage) -> Iterator[Tensor]:
        """Yield the random directions in blocks, `direction number`, of any size."""
        random, size = generator("measure", "probes"), message.jacobian.size
        for block in message.jacobian.split_directions(torch.arange(self.probes)):
            bits = torch.randint(2, (len(block), size), generator=random)
            yield bits.to(message.inputs) * 2 - 1


def _squared_norms(jacobian: MessageJacobian, blocks: Iterable[Tensor]) -> Tensor:
    """Return |J v|^2 in float64 for each direction v of all blocks, `direction number`."""
    return torch.cat([jacobian.push_forward(block).double().square().sum(1) for block in blocks])
