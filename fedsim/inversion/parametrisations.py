"""Parametrisations: what is optimised in place of dummy data, of which fewer are plausible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsim.base.task import are_classes
from fedsim.inversion.denoisers import Denoiser
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.public_fits import fit_components, fit_denoiser


class Parametrisation(Protocol):
    """Makes dummy data of coefficients, which are optimised in their place."""

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draw the coefficients of dummy data of this `shape`, `example ...`."""
        ...

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return the dummy data, standardised, differentiable in the coefficients."""
        ...

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return a term of the objective, smaller the more plausible the coefficients are."""
        ...


@dataclass(frozen=True, kw_only=True)
class PublicComponents:
    """Mean of public examples of the class plus principal components of public examples.

    The components are those within the example's class where the labels are known, else those of
    all examples around their mean. Coefficients have the variance 1 among public examples, so half their squared
    norm is the negative logarithm of a Gaussian prior. `InversionProblem.auxiliary` has the public
    examples.

    Attributes:
        components: number of them; fewer where there are fewer examples or values.
        weight: of the penalty in the objective; 1 where the distance is a log-likelihood.
        spread: standard deviation of the coefficients at the start; 0 starts at the class means.
        draw: number of a random draw from the prior, around which the penalty pulls the
            coefficients; 0 for the prior's mean, around which it should pull them.
    """

    components: int = 60
    weight: float = 1.0
    spread: float = 0.0
    draw: int = 0

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draw the coefficients, `example component`, from the prior at a spread of its own."""
        fit = fit_components(problem, self.components, shape[1:])
        coefficients = torch.randn((shape[0], len(fit.total)), generator=rng)
        return (self.spread * coefficients).to(problem.before[0])

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return mean and components, in the units of the dummy data."""
        fit = fit_components(problem, self.components)
        labels, scaling = problem.labels, problem.scaling
        if fit.class_means is None or fit.within is None or not len(labels) or not are_classes(labels):
            flat = fit.mean + coefficients @ fit.total
        else:
            rows = labels.clamp_max(len(fit.class_means) - 1)
            flat = fit.class_means[rows] + (coefficients[:, None] @ fit.within[rows]).squeeze(1)
        return (flat.reshape(len(flat), *fit.shape) - scaling.centre) / scaling.scale

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return half the squared distance from the prior's mean, or from a draw, times the weight."""
        centre = torch.zeros_like(coefficients)
        if self.draw:
            generator = torch.Generator().manual_seed(self.draw)
            centre = torch.randn(coefficients.shape, generator=generator).to(coefficients)
        return self.weight / 2 * (coefficients - centre).square().sum()


@dataclass(frozen=True, kw_only=True)
class DenoisedImages:
    """Images that a denoiser of public images makes of noisy ones, which are optimised in their place.

    So dummy data are images that the denoiser takes for likely, whatever the noisy ones are. The penalty on these is
    regularisation by denoising [Romano2017]: it has the gradient of the negative logarithm of the density of public
    images with noise (Tweedie's formula). The denoiser is told the class of an example where it is known.
    `InversionProblem.auxiliary` has the public images.

    Attributes:
        weight: of the penalty in the objective; 1 where the distance is a log-likelihood.
        spread: standard deviation of the noisy images at the start, in that of the noise.
    """

    weight: float = 1.0
    spread: float = 0.0

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draw the noisy images, around the mean of all public ones, in standard deviations of the noise."""
        fit_denoiser(problem, shape[1:])
        return self.spread * torch.randn(shape, generator=rng).to(problem.before[0])

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return the denoised images, in the units of the dummy data."""
        _, denoised = self._denoise(problem, coefficients)
        return problem.scaling.from_unit_range(denoised)

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return half the squared distance from the denoised images, over the variance of the noise."""
        denoiser, denoised = self._denoise(problem, coefficients.detach())
        centre = (denoised - denoiser.mean) / denoiser.level
        return self.weight / 2 * (coefficients - centre).square().sum()

    def _denoise(self, problem: InversionProblem, coefficients: Tensor) -> tuple[Denoiser, Tensor]:
        """Return the denoiser, and what it makes of noisy images, in units of the range of the inputs."""
        denoiser, labels = fit_denoiser(problem, tuple(coefficients.shape[1:])), problem.labels
        if len(labels) != len(coefficients) or not are_classes(labels):
            labels = torch.full((len(coefficients),), denoiser.num_classes, device=coefficients.device)
        noisy = denoiser.mean + denoiser.level * coefficients.float()
        return denoiser, denoiser(noisy, labels.clamp_max(denoiser.num_classes)).to(coefficients)
