"""Summary statistics of the whole spectrum of the gradient-matching Hessian at the true inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedsim.base.constraints import PositiveInt, PositiveShare
from fedsim.base.papers import Paper, cite
from fedsim.base.randomness import generator
from fedsim.exposure.hessian import MAX_EXACT_INPUTS, Distance, Hessian
from fedsim.exposure.lanczos import lanczos_quadrature
from fedsim.exposure.measure import Meaning, Measure
from fedsim.training.message_function import ClientMessage

_QUANTILES = {"q90": 0.9, "median": 0.5, "q10": 0.1}


@dataclass(frozen=True, kw_only=True)
class Spectrum(Measure):
    """Largest eigenvalue, quantiles, effective rank and log-determinant of the Hessian, in float64.

    - `max`, `q90`, `median`, `q10`: eigenvalues, in squared units of the message over squared model
      units; for the cosine distance in 1 / squared model units. A quantile counts directions of the
      input: along a tenth of them the matching distance is flatter than `q10`. LAVP takes flatter
      for more exposed.
    - `effective_rank`: exp of the entropy of the eigenvalues divided by their sum, between 1 and
      the number of inputs. A higher rank means more directions in which the message distinguishes
      inputs, so more is exposed.
    - `log_determinant`: the mean of ln(lambda + floor max) over all eigenvalues, a log of their
      geometric mean in which all those far below `floor` times the largest count the same. The
      higher it is, the fewer inputs fit the message up to small noise, so more is exposed.

    All are undefined where the message, or for `cosine` its direction, depends on the inputs by no
    more than rounding, because all eigenvalues are 0 then and yet nothing is exposed.

    For inputs with at most `exact` numbers the whole Hessian is formed, by one product for each
    number. For larger ones the density of eigenvalues is estimated by Lanczos quadrature with
    `probes` times `steps` products. It resolves large eigenvalues, and sums over the spectrum up to
    the noise of probes; `floor` should be above 1 / steps^2. A quantile is accurate in its rank
    rather than in its digits, and is undefined (NaN) where it falls on the lowest point of the
    estimate, as low quantiles of many pixels do: `steps` are too few to tell it from 0.

    Args:
        distance: `l2` or `cosine`, the distance by which an attacker matches gradients.
        exact: largest number of varying inputs for which the spectrum is exact; at most 4096.
        probes: random start vectors of the estimate, at least 1.
        steps: Lanczos steps from each, at least 1.
        floor: share of the largest eigenvalue, above 0, at most 1.

    Raises:
        ConfigError: a setting is out of range, or the inputs are token ids.
        RunError: a layer cannot be differentiated twice.

    References:
        [Hong2023] (LAVP), Eqs. 4 and 5, for the Hessian; [Ghorbani2019] and [Ubaru2017] for the
        quadrature; [Roy2007] for the effective rank.
        Differs: LAVP uses the two ends of the spectrum only, in single precision.
    """

    paper: ClassVar[Paper] = cite("Hong2023")

    distance: Distance = "l2"
    exact: Annotated[int, Ge(0), Le(MAX_EXACT_INPUTS)] = 1024
    probes: PositiveInt = 8
    steps: PositiveInt = 40
    floor: PositiveShare = 1e-3

    quantities: ClassVar[Mapping[str, Meaning]] = {
        "max": "less",
        "q90": "less",
        "median": "less",
        "q10": "less",
        "effective_rank": "more",
        "log_determinant": "more",
    }

    def _compute(self, sent: ClientMessage) -> Mapping[str, Tensor]:
        sent.check_continuous()
        if Hessian(sent, self.distance).is_flat:
            return dict.fromkeys(self.quantities, torch.tensor(torch.nan))
        hessian = Hessian(sent.to_double(), self.distance)
        if hessian.size > self.exact:
            values, shares, lowest = self._estimate_spectrum(hessian)
            return self._summarise(values, shares, lowest, hessian.size)
        values = torch.linalg.eigvalsh(hessian.matrix()).clamp_min(0)
        return self._summarise(values, torch.full_like(values, 1 / len(values)), -1.0, hessian.size)

    def _estimate_spectrum(self, hessian: Hessian) -> tuple[Tensor, Tensor, float]:
        """Return quadrature points in place of eigenvalues, their shares, and the lowest point.

        Points ascend. Those up to the lowest point of the probes are only upper bounds of
        eigenvalues.
        """
        random = generator("measure", "probes")
        bits = torch.randint(2, (self.probes, hessian.size), generator=random)
        signs = bits.to(hessian.message.inputs) * 2 - 1

        # Run as many probes at once as the memory budget allows.
        free_bytes = hessian.message.budget - hessian.message.jacobian_bytes
        block_size = max(1, free_bytes // (8 * hessian.size * 4 * self.steps))
        blocks = [lanczos_quadrature(hessian, block, self.steps) for block in torch.split(signs, block_size)]

        lowest = -torch.inf
        for points, weights in blocks:
            lowest_of_probes = torch.where(weights > 0, points, torch.inf).amin(1)
            lowest = max(lowest, float(lowest_of_probes.max()))
        values = torch.cat([points.flatten() for points, _ in blocks])
        shares = torch.cat([weights.flatten() for _, weights in blocks])
        order = values.argsort()
        return values[order], shares[order] / self.probes, lowest

    def _summarise(self, values: Tensor, shares: Tensor, lowest: float, size: int) -> Mapping[str, Tensor]:
        largest = values[-1]
        # Each eigenvalue divided by the mean of all.
        relative = values / (values @ shares)
        quantiles = {name: _quantile(values, shares, level, lowest) for name, level in _QUANTILES.items()}
        return {
            "max": largest,
            **quantiles,
            "effective_rank": size * (-torch.special.xlogy(relative, relative) @ shares).exp(),
            "log_determinant": (values + self.floor * largest).log() @ shares,
        }


def _quantile(values: Tensor, shares: Tensor, quantile: float, lowest: float) -> Tensor:
    """Return the first value at which the cumulative share reaches `quantile`; NaN up to `lowest`.

    The lowest point of a quadrature only says how many eigenvalues lie below the next point.
    """
    index = torch.searchsorted(shares.cumsum(0), quantile * (1 - 1e-9)).clamp(max=len(values) - 1)
    return values[index] if values[index] > lowest else torch.tensor(torch.nan)
