"""Priors: terms of the objective that favour dummy data that look like data, each with a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.base.module_hooks import hook_inputs
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.public_fits import fit_patches, image_patches


class Prior(Protocol):
    """Term of the objective that depends on the dummy data."""

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return a scalar, smaller the more plausible the dummy data are.

        Args:
            dummy: `example ...`, standardised.
            consensus: the mean of the dummy data of all restarts before this iteration.
        """
        ...


def total_variation(data: Tensor, dimensions: Sequence[int] = (2, 3)) -> Tensor:
    """Compute the mean absolute difference of neighbouring values, averaged over the dimensions.

    It is anisotropic and does not wrap around, as in SME's released code (IG's code sums the
    directions).

    Args:
        data: `example ...`.
        dimensions: those along which neighbours are alike, by default height and width of
            `example channel height width`; without any, the result is 0.

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])).item()
    0.5
    """
    total = data.new_zeros(())
    for dimension in reversed(dimensions):
        last = data.shape[dimension] - 1
        steps = (data.narrow(dimension, 1, last) - data.narrow(dimension, 0, last)).abs()
        # One value in a direction has no neighbours there; the mean of nothing is NaN.
        total = total + (steps.mean() if steps.numel() else steps.sum())
    return total / max(1, len(dimensions))


@dataclass(frozen=True)
class TotalVariation:
    """Total variation along the smooth axes of the modality, see `total_variation`."""

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the total variation."""
        return total_variation(dummy, problem.smooth_dimensions)


@dataclass(frozen=True)
class MeanSquare:
    """Mean squared value of the dummy data (GradInversion, R_l2)."""

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the mean square."""
        return dummy.square().mean()


@dataclass(frozen=True)
class GroupConsistency:
    """Mean squared distance to the mean of all restarts (GradInversion, R_group).

    Differs: images are not registered to that mean.
    """

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the mean squared distance to the consensus."""
        return (dummy - consensus).square().mean()


@dataclass(frozen=True)
class BatchNormStatistics:
    """Distance of the dummy data's BatchNorm statistics from those that the client returned.

    Sum over layers of ||mean - running mean||_2 + ||variance - running variance||_2, with features
    at w_0 (GradInversion, R_BN). With `exact`, the statistics of the client's mini-batches replace
    the running ones.

    Attributes:
        exact: the client trained in training mode, for one epoch at most. With layer momentum m,
            torch updates running = (1 - m) running + m batch at each step, where the variance of
            the batch is over n - 1 of a channel's n values; a layer without momentum keeps the mean
            of all batches. So the running statistics before and after give the batch's own for one
            step, and a weighted mean of them for several. Those of the dummy data, split into
            mini-batches in their order, are weighted likewise. B must be granted, and the problem's
            model has to normalise by the batch, see `copy_with_batch_statistics`.
    """

    exact: bool = False

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the sum over the model's BatchNorm layers."""
        layers = {}
        for name, module in problem.model.named_modules():
            if isinstance(module, _BatchNorm):
                layers[name] = module
        inputs_by_layer = self._layer_inputs(problem, dummy, layers)
        terms = []
        for name, inputs in inputs_by_layer.items():
            axes = [0, *range(2, inputs[0].ndim)]
            kept_share, shares = 0.0, [1.0]
            if self.exact:
                kept_share, shares = _running_shares(layers[name], len(inputs))
            mean = self._target(problem, f"{name}.running_mean", kept_share)
            variance = self._target(problem, f"{name}.running_var", kept_share)
            last_inputs = inputs[-len(shares) :]
            dummy_mean = _weighted_sum(shares, [batch.mean(axes) for batch in last_inputs])
            dummy_variance = _weighted_sum(shares, [batch.var(axes, unbiased=self.exact) for batch in last_inputs])
            term = (dummy_mean - mean).norm() + (dummy_variance - variance).norm()
            terms.append(term / sum(shares))
        return torch.stack(terms).sum()

    def _layer_inputs(
        self, problem: InversionProblem, dummy: Tensor, layers: dict[str, _BatchNorm]
    ) -> dict[str, list[Tensor]]:
        """Return by layer what goes into it, in the order of the calls."""
        inputs: dict[str, list[Tensor]] = {}
        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.enter_context(hook_inputs(layer, _input_recorder(inputs, name)))
            for batch in self._split_batches(problem, dummy):
                problem.outputs(problem.before, batch)
        return inputs

    def _split_batches(self, problem: InversionProblem, dummy: Tensor) -> Sequence[Tensor]:
        if not self.exact:
            return [dummy]
        assert problem.batch_size is not None
        return torch.split(dummy, problem.batch_size)[: problem.steps]

    def _target(self, problem: InversionProblem, name: str, kept_share: float) -> Tensor:
        """Return what the client's batches added to a running statistic.

        Args:
            kept_share: share of the statistic of the broadcast state that is left.
        """
        name = name.removeprefix(".")
        return problem.returned_buffers[name] - kept_share * problem.buffers[name]


@dataclass(frozen=True)
class SquaredTotalVariation:
    """Squared differences of neighbouring values, summed over an example (DLFA's code).

    Neighbours are those along the smooth axes of the modality; values at opposite edges are
    neighbours, too.
    """

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the mean over examples; 0 where the modality has no smooth axes."""
        if not problem.smooth_dimensions:
            return dummy.new_zeros(())
        differences = [dummy - dummy.roll(1, axis) for axis in problem.smooth_dimensions]
        squares = [difference.square().flatten(1).sum(1) for difference in differences]
        return torch.stack(squares).sum(0).mean()


@dataclass(frozen=True)
class SoftBounds:
    """Squared distance of pixels from [0, 1], summed over pixels (DLFA's code)."""

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the mean over images."""
        scaling = problem.scaling
        pixels = (scaling.to_model(dummy) - scaling.low) / (scaling.high - scaling.low)
        return (pixels - pixels.clamp(0, 1)).square().flatten(1).sum(1).mean()


@dataclass(frozen=True)
class EpochConsistency:
    """Mean squared difference of two epochs' mean images (DLFA's code, order-invariant prior)."""

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the mean over pairs of epochs and over pixels."""
        epochs = torch.split(dummy, problem.num_examples)
        means = torch.stack([epoch.mean(0).flatten() for epoch in epochs])
        return (means[:, None] - means[None]).square().mean()


def _running_shares(layer: _BatchNorm, batches: int) -> tuple[float, list[float]]:
    """Return the shares of which running statistics are made after some batches.

    A layer that a model uses twice counts two batches a step.

    Returns:
        The share of the statistics before, and the share of each batch's own.
    """
    if layer.momentum is None:
        return 0.0, [1 / batches] * batches
    decay = 1 - layer.momentum
    shares = [layer.momentum * decay**later for later in reversed(range(batches))]
    return decay**batches, shares


def _weighted_sum(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    products = [weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]
    return torch.stack(products).sum(0)


def _input_recorder(
    inputs_by_layer: dict[str, list[Tensor]], name: str
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs_by_layer.setdefault(name, []).append(inputs[0])

    return record


@dataclass(frozen=True, kw_only=True)
class PatchMixture:
    """Negative logarithm of a mixture of Gaussians of patches (EPLL), fitted to public images.

    All patches half their side apart count; their mean is scaled to that of disjoint patches of all
    images, so that it is about a log-probability. EPLL is [Zoran2011]. Differs: it is a term of the
    objective like others, without half-quadratic splitting.

    Attributes:
        size: side of the patches.
        components: Gaussians of the mixture.
    """

    size: int = 6
    components: int = 10

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the sum over images."""
        fit = fit_patches(problem, self.size, self.components, tuple(dummy.shape[1:]))
        patches = image_patches(dummy, fit.size, max(1, fit.size // 2)).flatten(0, 1)
        whitened = torch.einsum("pv,kvw->pkw", patches, fit.precisions)
        whitened = whitened - torch.einsum("kv,kvw->kw", fit.means, fit.precisions)
        log_determinants = fit.precisions.diagonal(dim1=1, dim2=2).log().sum(1)
        logarithms = fit.log_weights + log_determinants - whitened.square().sum(2) / 2
        disjoint = dummy[0, 0].numel() / fit.size**2 * len(dummy)
        return -torch.logsumexp(logarithms, 1).mean() * disjoint
