"""The whole spectrum of the Hessian of a gradient matching loss at the truth, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.errors import ConfigError
from fedsim.exposure.hessian import EXACT, Distance, Hessian
from fedsim.exposure.lanczos import lanczos
from fedsim.measure import Meaning, Measure
from fedsim.paper import Paper
from fedsim.randomness import generator
from fedsim.training.sent import Sent

_QUANTILES = {"q90": 0.9, "median": 0.5, "q10": 0.1}


@dataclass(frozen=True, kw_only=True)
class Spectrum(Measure):
    """Largest eigenvalue, quantiles, effective rank and log-determinant of the Hessian, in float64.

    - `max`, `q90`, `median`, `q10`: eigenvalues, in squared units of what is sent over squared model units; of the
      cosine distance in 1 / squared model units. A quantile counts directions of the input: along a tenth of them the
      matching loss is flatter than `q10`. LAVP takes flatter for more exposed.
    - `effective_rank`: exp of the entropy of the eigenvalues divided by their sum, between 1 and the number of inputs;
      more directions in which what is sent tells inputs apart, so more is exposed.
    - `log_determinant`: the mean of ln(lambda + floor max) over all eigenvalues, a log of their geometric mean in which
      those far below `floor` times the largest count alike. The higher, the fewer inputs fit what is sent up to small
      noise, so more is exposed.

    All are undefined where what is sent depends on the inputs, or for `cosine` its direction, by no more than the
    rounding of what is sent, for then all eigenvalues are 0 and yet nothing is exposed.

    Inputs with at most `exact` numbers have their whole Hessian made, by one product for each number. Of larger ones
    the density of eigenvalues is estimated by Lanczos quadrature with `probes` times `steps` products. It tells large
    eigenvalues, and sums over the spectrum up to the noise of probes; `floor` should be above 1 / steps^2. A
    quantile is good to a place in the order rather than to digits, and is undefined (NaN) where it falls on the lowest
    point of the estimate, as low quantiles of many pixels do: `steps` are too few to tell it from 0.

    Args:
        distance: `l2` or `cosine`, by which an attacker matches gradients.
        exact: up to how many numbers that vary the spectrum is exact; at most 4096.
        probes: random directions of the estimate, at least 1.
        steps: Lanczos steps from each, at least 1.
        floor: share of the largest eigenvalue, above 0, at most 1.

    Raises:
        ConfigError: a setting is out of range, or the inputs are token ids.
        RunError: a layer cannot be differentiated twice.

    References:
        Hong et al. 2023 (LAVP), Eqs. 4 and 5, for the Hessian; Ghorbani et al.: An Investigation into Neural Net
        Optimization via Hessian Eigenvalue Density, ICML 2019, and Ubaru, Chen and Saad 2017 for the quadrature; Roy
        and Vetterli 2007 for the effective rank.
        Differs: LAVP uses two ends of the spectrum only, and by single precision.
    """

    paper: ClassVar[Paper] = Paper(
        title="Foreseeing Reconstruction Quality of Gradient Inversion: An Optimization Perspective",
        authors="Hong, Cho, Cho, Ahn, Kim",
        venue="arXiv",
        year=2023,
        url="https://arxiv.org/abs/2312.12488",
    )

    distance: Distance = "l2"
    exact: int = 1024
    probes: int = 8
    steps: int = 40
    floor: float = 1e-3

    quantities: ClassVar[Mapping[str, Meaning]] = {
        "max": "less",
        "q90": "less",
        "median": "less",
        "q10": "less",
        "effective_rank": "more",
        "log_determinant": "more",
    }

    def __post_init__(self) -> None:
        if not 0 <= self.exact <= EXACT:
            raise ConfigError(f"exact: expected 0 to {EXACT} numbers, got {self.exact}")
        for name in ("probes", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.floor <= 1:
            raise ConfigError(f"floor: expected a share above 0, at most 1, got {self.floor}")

    def _of(self, sent: Sent) -> Mapping[str, Tensor]:
        sent.check_continuous()
        if Hessian(sent, self.distance).is_flat:
            return dict.fromkeys(self.quantities, torch.tensor(torch.nan))
        hessian = Hessian(sent.double(), self.distance)
        if hessian.size > self.exact:
            return self._told_by(*self._estimated(hessian), hessian.size)
        values = torch.linalg.eigvalsh(hessian.matrix()).clamp_min(0)
        return self._told_by(values, torch.full_like(values, 1 / len(values)), -1.0, hessian.size)

    def _estimated(self, hessian: Hessian) -> tuple[Tensor, Tensor, float]:
        """Values that stand for the eigenvalues, ascending, their shares, and up to where they only bound them."""
        random = generator("measure", "probes")
        signs = torch.randint(2, (self.probes, hessian.size), generator=random).to(hessian.sent.inputs) * 2 - 1
        left = hessian.sent.budget - hessian.sent.bytes_of_derivative
        at_once = max(1, left // (8 * hessian.size * 4 * self.steps))
        found = [lanczos(hessian, some, self.steps) for some in torch.split(signs, at_once)]
        lowest = max(float(torch.where(weights > 0, points, torch.inf).amin(1).max()) for points, weights in found)
        values, weights = (torch.cat([part.flatten() for part in parts]) for parts in zip(*found, strict=True))
        order = values.argsort()
        return values[order], weights[order] / self.probes, lowest

    def _told_by(self, values: Tensor, shares: Tensor, lowest: float, size: int) -> Mapping[str, Tensor]:
        top = values[-1]
        portions = values / (values @ shares)  # of an eigenvalue in the sum of all, times how many there are
        return {
            "max": top,
            **{name: _quantile(values, shares, place, lowest) for name, place in _QUANTILES.items()},
            "effective_rank": size * (-torch.special.xlogy(portions, portions) @ shares).exp(),
            "log_determinant": (values + self.floor * top).log() @ shares,
        }


def _quantile(values: Tensor, shares: Tensor, quantile: float, lowest: float) -> Tensor:
    """The first value at which the shares of it and all smaller ones reach `quantile`; NaN up to `lowest`.

    Of the lowest point of a quadrature is known only that so many eigenvalues lie below the next one.
    """
    place = torch.searchsorted(shares.cumsum(0), quantile * (1 - 1e-9)).clamp(max=len(values) - 1)
    return values[place] if values[place] > lowest else torch.tensor(torch.nan)
