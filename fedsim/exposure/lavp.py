"""The two ends of the spectrum of the Hessian of a gradient matching loss at the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan, sqrt
from typing import ClassVar

from fedsim.base.constraints import PositiveInt
from fedsim.base.papers import Paper, cite
from fedsim.exposure.hessian import Hessian
from fedsim.exposure.lanczos import smallest_by_power_iteration
from fedsim.exposure.measure import Meaning, Measure
from fedsim.training.message_function import ClientMessage


@dataclass(frozen=True, kw_only=True)
class Lavp(Measure):
    """LAVP: the largest eigenvalue and an estimate of the smallest, for L2 and cosine distance.

    `max` and `min` are of H = J' J, `ang_max` and `ang_min` of (J' J - J' g g' J / |g|^2) / |g|^2,
    where g is the client's message and J its Jacobian by the inputs that vary; `fusion` = sqrt(max
    ang_min) serves where the distance is not known. The first two are in squared units of g over
    squared model units; those with `ang_` do not change with the scale of the loss. A larger
    curvature means that descent on the matching distance converges less well, so the paper takes a
    smaller value for more exposure.

    `max` and `ang_max` are eigenvalues, by Lanczos iteration. `min` and `ang_min` are not: power
    iteration with `steps` steps on lambda_max I - H approaches the smallest eigenvalue from above
    so slowly that its result depends on `steps`, about as 1 / steps where the true minimum is
    nearly 0, as it is wherever inputs have more numbers than the gradient can distinguish. It is an
    average over small eigenvalues. It also depends on the start vector, on LeNet a little and on an
    MLP of 100 units by up to ten times and more. Compare only values with the same
    number of steps, and for inputs of the same shape; `spectrum` gives low quantiles.

    Where the message depends on the inputs by no more than rounding, eigenvalues are 0, the
    smallest value there is, though nothing is exposed; they are undefined then, as the paper's
    theorems ask for a Lipschitz constant above some epsilon. Where the inputs change only the norm
    of the message, those with `ang_` and `fusion` are undefined.

    Args:
        steps: steps of power iteration for `min` and `ang_min`, at least 1; the paper gives none.

    Raises:
        ConfigError: `steps` is out of range, or the inputs are token ids.
        RunError: a layer cannot be differentiated twice, or Lanczos iteration did not converge.

    References:
        [Hong2023], Theorems 3 and 4, Eqs. 4 and 5, and Table 3 for the fusion.
        Differs: J v is exact, by automatic differentiation, where the paper takes finite
        differences, which in networks with ReLU cross kinks. The printed Algorithm 1 does not
        compute what the text says, so it is not followed: it draws v anew in each pass, so it never
        iterates and gives the largest v' H v of random v, a small part of the largest eigenvalue;
        line 33 subtracts g at the truth where g1 is meant, and divides by two steps; line 45
        detaches the gradient before it is differentiated; the gradient of line 40 is not
        normalised, and the factor 1 / |g|^2 of Eq. 5 is missing. The start vector is the same each
        time. The Hessian is that of half the squared L2 distance, as in the paper's proof; its text
        has the squared distance, of which it is twice as large.
    """

    paper: ClassVar[Paper] = cite("Hong2023")

    steps: PositiveInt = 100

    quantities: ClassVar[Mapping[str, Meaning]] = dict.fromkeys(("max", "min", "ang_max", "ang_min", "fusion"), "less")

    def _compute(self, sent: ClientMessage) -> Mapping[str, float]:
        largest, smallest = self._extreme_eigenvalues(Hessian(sent, "l2"))
        ang_largest, ang_smallest = self._extreme_eigenvalues(Hessian(sent, "cosine"))
        return {
            "max": largest,
            "min": smallest,
            "ang_max": ang_largest,
            "ang_min": ang_smallest,
            "fusion": sqrt(largest * ang_smallest),
        }

    def _extreme_eigenvalues(self, hessian: Hessian) -> tuple[float, float]:
        if not hessian.largest_eigenvalue:
            return nan, nan
        return hessian.largest_eigenvalue, smallest_by_power_iteration(hessian, self.steps)
