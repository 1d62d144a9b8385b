"""Distances between the update of the dummy data and the recorded one, which inversions minimise.

A distance computes its target from the inversion problem once, and then compares gradients with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsim.inversion.problem import InversionProblem

Tensors = Sequence[Tensor]
_ROUNDING_SHARE = 1e-5
"""Largest norm, relative to that of the longest tensor, that rounding alone may cause."""


class Distance(Protocol):
    """Distance of a gradient from a target; tensors are in the order of the model's parameters."""

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Compute what gradients are compared with."""
        ...

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return a scalar, smaller the closer they are."""
        ...


def global_norm(tensors: Tensors) -> Tensor:
    """Return the Euclidean norm of all tensors together, a scalar."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


@dataclass(frozen=True)
class Cosine:
    """One minus the cosine between the gradient and w_0 - w_T, over all parameters at once.

    This is L_sim of SME, Eq. 1. It lies in [0, 2] and needs neither the learning rate nor the
    number of steps.

    Attributes:
        layers: factor of each tensor, of the gradient and of the update, in the model's order; None
            is 1 for all.
    """

    layers: tuple[float, ...] | None = None

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return w_0 - w_T, weighted by `layers`, at norm 1."""
        direction = self._weight_layers(problem.direction)
        norm = global_norm(direction)
        return [delta / norm for delta in direction]

    def _weight_layers(self, tensors: Tensors) -> Tensors:
        if self.layers is None:
            return tensors
        return [weight * tensor for weight, tensor in zip(self.layers, tensors, strict=True)]

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return one minus the cosine."""
        gradient = self._weight_layers(gradient)
        inner = torch.stack([(g * t).sum() for g, t in zip(gradient, target, strict=True)]).sum()
        norm = global_norm(gradient)
        return 1 - inner / norm.clamp_min(torch.finfo(norm.dtype).tiny)


@dataclass(frozen=True)
class PartialCosine:
    """One minus the cosine over the entries of each tensor that are largest in the update.

    Attributes:
        share: of each tensor's entries that are compared, at least one of each.
    """

    share: float

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return w_0 - w_T at norm 1, and after it 1 for each entry that is compared, else 0."""
        masks = []
        for delta in problem.direction:
            count = max(1, round(self.share * delta.numel()))
            mask = torch.zeros_like(delta).flatten()
            mask[delta.abs().flatten().topk(count).indices] = 1.0
            masks.append(mask.reshape(delta.shape))
        return [*Cosine().target(problem), *masks]

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return one minus the cosine of what is compared."""
        direction, masks = target[: len(gradient)], target[len(gradient) :]
        compared = [mask * g for mask, g in zip(masks, gradient, strict=True)]
        kept = [mask * t for mask, t in zip(masks, direction, strict=True)]
        norm = global_norm(kept)
        return Cosine()(compared, [t / norm for t in kept])


@dataclass(frozen=True)
class SquaredL2:
    """Squared Euclidean distance to the mean gradient (w_0 - w_T) / (eta T).

    Attributes:
        layers: weight of each tensor, in the model's order; None weighs all the same.
    """

    layers: tuple[float, ...] | None = None

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return the mean gradient."""
        return problem.mean_gradient

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return the weighted sum of squared differences."""
        weights = self.layers or (1.0,) * len(target)
        triples = zip(weights, gradient, target, strict=True)
        return torch.stack([weight * (g - t).square().sum() for weight, g, t in triples]).sum()


@dataclass(frozen=True)
class SquaredAndAbsolute:
    """Squared Euclidean distance to the mean gradient plus absolute differences (TAG, 2021).

    TAG is [Deng2021].

    Attributes:
        factor: of the absolute differences of the first tensor. It falls linearly from tensor to
            tensor, because the ones nearest to the inputs say most about them.
    """

    factor: float

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return the mean gradient."""
        return problem.mean_gradient

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return the sum of squared and weighted absolute differences."""
        count = len(target)
        terms = []
        for index, (g, t) in enumerate(zip(gradient, target, strict=True)):
            absolute = self.factor * (1 - index / count) * (g - t).abs().sum()
            terms.append((g - t).square().sum() + absolute)
        return torch.stack(terms).sum()


@dataclass(frozen=True)
class MeanCosine:
    """Mean over tensors of one minus the cosine of gradient and update (LAMP, 2022).

    LAMP is [Balunovic2022]. Tensors that did not change are left out, and those that only rounding
    changed, as the key biases of attention.
    """

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return w_0 - w_T, each tensor at norm 1, or 0 if it is left out."""
        norms = torch.stack([delta.norm() for delta in problem.direction])
        factors = torch.where(norms > _ROUNDING_SHARE * norms.max(), 1 / norms, 0.0)
        return [factor * delta for factor, delta in zip(factors, problem.direction, strict=True)]

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return the mean over the tensors that are not left out."""
        tiny = torch.finfo(target[0].dtype).tiny
        cosines = []
        for g, t in zip(gradient, target, strict=True):
            cosines.append((g * t).sum() / g.norm().clamp_min(tiny))
        included = torch.stack([t.norm() for t in target])  # 1, or 0 for a tensor that is left out
        return (included - torch.stack(cosines)).sum() / included.sum()


@dataclass(frozen=True)
class GaussianKernel:
    """Mean over tensors of one minus a Gaussian kernel of gradient and recorded gradient (SAPAG).

    A tensor's term is 1 - exp(-||g - g'||^2 / sigma^2) [Wang2020b]. Here sigma^2 is the variance of
    the tensor's recorded gradient times its number of entries: with the variance alone the kernel
    of a large tensor would be flat wherever the dummy data start. A tensor of one entry has no
    variance and counts as far off until it is matched exactly.

    Attributes:
        layers: weight of each tensor in the mean, in the model's order; None weighs all the same.
    """

    layers: tuple[float, ...] | None = None

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return the mean gradient."""
        return problem.mean_gradient

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return the weighted mean of the kernels' complements."""
        terms = []
        for g, t in zip(gradient, target, strict=True):
            width = t.var(unbiased=False) * t.numel() + torch.finfo(t.dtype).tiny
            terms.append(1 - torch.exp(-(g - t).square().sum() / width))
        distances = torch.stack(terms)
        weights = distances.new_tensor(self.layers or (1.0,) * len(terms))
        return (weights * distances).sum() / weights.sum()
