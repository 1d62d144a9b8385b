"""Expected error of an attacker who inverts the linearised gradient: fedsim's own measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import PositiveInt, PositiveShareBelowOne
from fedsim.base.errors import ConfigError
from fedsim.exposure.hessian import Distance, Hessian
from fedsim.exposure.lanczos import lanczos_quadrature
from fedsim.exposure.measure import Meaning, Measure
from fedsim.training.message_function import ClientMessage

_ROUNDING_CURVATURE = 1e-6
"""Curvature along a line, relative to the largest one, that is rounding only."""


@dataclass(frozen=True, kw_only=True)
class ExpectedError(Measure):
    """Error that one damped Gauss-Newton step from the mean of the data leaves.

    An attacker who starts at c = 0 in model units, the mean of standardised data, and minimises the
    linearised matching distance (x - x*)' H (x - x*) + d |x - c|^2 with the damping
    d = `damping` x lambda_max ends at an error of d (H + d I)^-1 (x* - c). `error` is its mean
    square over all numbers that vary, in squared model units, a prediction of the MSE. `share` is
    its squared norm divided by that of x* - c, in [0, 1]: 1 where the gradient reveals nothing of
    what makes this example differ from the mean, 0 where it reveals everything. A larger value
    means less exposure.

    Where LAVP reads two ends of the spectrum, this weighs every eigenvalue by how much of the
    example lies along its eigenvector. `steps` of Lanczos iteration from x* - c give that by Gauss
    quadrature, without any eigenvector. Both are undefined where the example is c itself. The
    measure refuses messages that do not change at all along the line from c to x*, as with
    BatchNorm that normalises a whole batch by its own statistics and so undoes any scaling: the
    step then finds no gradient, whatever an attacker with another start may find. Single examples
    of such a batch can be measured.

    Args:
        distance: the distance by which the attacker matches gradients.
        damping: d divided by lambda_max, above 0: how much smaller an eigenvalue may be and still
            count.
        steps: steps of Lanczos iteration, each one product J' J v.
    """

    distance: Distance = "cosine"
    damping: PositiveShareBelowOne = 1e-3
    steps: PositiveInt = 30
    quantities: ClassVar[Mapping[str, Meaning]] = {"error": "less", "share": "less"}

    def _compute(self, sent: ClientMessage) -> Mapping[str, float | Tensor]:
        sent.check_continuous()
        # The mean is 0 in model units, so the inputs are the start's offset from the truth.
        offset = sent.unknown_inputs.double().flatten()
        if not offset.any():
            return dict.fromkeys(self.quantities, float("nan"))
        hessian = Hessian(sent, self.distance)
        eigenvalues, weights = lanczos_quadrature(hessian, offset, self.steps)
        if hessian.largest_eigenvalue and weights @ eigenvalues <= _ROUNDING_CURVATURE * hessian.largest_eigenvalue:
            raise ConfigError(
                "measure: the message does not change along the line from the mean of the data to these examples, "
                "as where a layer normalises by the batch, so a step from there is uninformative; set "
                "training.batch_norm = 'eval', measure single examples, or use another measure"
            )
        # Each eigenvalue leaves d / (lambda + d) of the offset along its eigenvector.
        damping = self.damping * hessian.largest_eigenvalue
        remainders = damping / (eigenvalues + damping) if damping else torch.ones_like(eigenvalues)
        share = (weights * remainders.square()).sum()
        return {"error": share * offset.square().mean(), "share": share}
