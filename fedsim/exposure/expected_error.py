"""How far an attacker stays from the truth who sees no further than the linearised gradient: fedsim's own measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.errors import ConfigError
from fedsim.exposure.hessian import Distance, Hessian
from fedsim.exposure.lanczos import lanczos
from fedsim.measure import Meaning, Measure
from fedsim.training.sent import Sent

_BLIND = 1e-6
"""Curvature along a line, beside the largest one, that is no more than rounding."""


@dataclass(frozen=True, kw_only=True)
class ExpectedError(Measure):
    """What one damped Gauss-Newton step from the middle of the data leaves of the distance to the truth.

    An attacker who starts at c = 0 in model units, the mean of standardised data, and minimises the linearised
    matching loss (x - x*)' H (x - x*) + d |x - c|^2 with the damping d = `damping` x lambda_max ends at an error of
    d (H + d I)^-1 (x* - c). `error` is its mean square over all numbers that vary, in squared model units, a prediction
    of the MSE. `share` is its squared length beside that of x* - c, in [0, 1]: 1 where the gradient tells nothing of
    what makes this example differ from the mean, 0 where it tells all. A larger value means less exposure.

    Where LAVP reads two ends of the spectrum, this weighs every eigenvalue by how much of the example lies along its
    eigenvector. `steps` of Lanczos iteration from x* - c give that by Gauss quadrature, without any eigenvector. Both
    are undefined where the example is c itself. It is refused where what is sent does not change at all along the line
    from c to x*, as with BatchNorm that normalises a whole batch by its own statistics and so undoes any scaling: the
    step is then blind, whatever an attacker from elsewhere sees. Single examples of such a batch can be measured.

    Args:
        distance: by which the attacker matches gradients.
        damping: d beside lambda_max, above 0: how much smaller an eigenvalue may be and still be of use.
        steps: of Lanczos iteration, each one product J' J v.
    """

    distance: Distance = "cosine"
    damping: float = 1e-3
    steps: int = 30
    quantities: ClassVar[Mapping[str, Meaning]] = {"error": "less", "share": "less"}

    def __post_init__(self) -> None:
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping: expected a share above 0, below 1, got {self.damping}")
        if self.steps < 1:
            raise ConfigError(f"steps: expected at least 1, got {self.steps}")

    def _of(self, sent: Sent) -> Mapping[str, float | Tensor]:
        sent.check_continuous()
        apart = sent.unknown.double().flatten()
        if not apart.any():
            return dict.fromkeys(self.quantities, float("nan"))
        hessian = Hessian(sent, self.distance)
        eigenvalues, weights = lanczos(hessian, apart, self.steps)
        if hessian.largest and weights @ eigenvalues <= _BLIND * hessian.largest:
            raise ConfigError(
                "measure: what is sent does not change along the line from the mean of the data to these examples, as "
                "where a layer normalises by the batch, so that a step from there tells nothing; set "
                "training.batch_norm = 'eval', measure single examples, or use another measure"
            )
        damping = self.damping * hessian.largest
        left = damping / (eigenvalues + damping) if damping else eigenvalues.new_ones(len(eigenvalues))
        share = (weights * left.square()).sum()
        return {"error": share * apart.square().mean(), "share": share}
