"""How far the dummy update is from the recorded one: what an inversion minimises.

A distance computes its target from the scene once, and then compares gradients with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adversaries.scene import Scene

Tensors = Sequence[Tensor]
_MOVED = 1e-5
"""Share of the longest tensor's length up to which one may have moved by rounding alone."""


class Distance(Protocol):
    """Compares a gradient with a target, tensor by tensor in the order of the model's parameters."""

    def target(self, scene: Scene) -> list[Tensor]:
        """What the gradient is compared with."""
        ...

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """A scalar, smaller the closer they are."""
        ...


def length(tensors: Tensors) -> Tensor:
    """Euclidean norm of all tensors together."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


@dataclass(frozen=True)
class Cosine:
    """One minus the cosine between the gradient and w_0 - w_T, over all parameters at once: L_sim of SME, Eq. 1.

    In [0, 2]; needs neither the learning rate nor the number of steps.

    Attributes:
        layers: factor of each tensor, of the gradient's and of the update's, in the model's order; None is 1 for all.
    """

    layers: tuple[float, ...] | None = None

    def target(self, scene: Scene) -> list[Tensor]:
        """w_0 - w_T at length one."""
        direction = self._weighted(scene.direction)
        norm = length(direction)
        return [delta / norm for delta in direction]

    def _weighted(self, tensors: Tensors) -> Tensors:
        return tensors if self.layers is None else [w * t for w, t in zip(self.layers, tensors, strict=True)]

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """See `Distance`."""
        gradient = self._weighted(gradient)
        inner = torch.stack([(g * t).sum() for g, t in zip(gradient, target, strict=True)]).sum()
        norm = length(gradient)
        return 1 - inner / norm.clamp_min(torch.finfo(norm.dtype).tiny)


@dataclass(frozen=True)
class SquaredL2:
    """Squared Euclidean distance to the mean gradient (w_0 - w_T) / (eta T).

    Attributes:
        layers: weight of each tensor, in the model's order; None weighs all the same.
    """

    layers: tuple[float, ...] | None = None

    def target(self, scene: Scene) -> list[Tensor]:
        """The mean gradient."""
        return scene.mean_gradient

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """See `Distance`."""
        weights = self.layers or (1.0,) * len(target)
        pairs = zip(weights, gradient, target, strict=True)
        return torch.stack([weight * (g - t).square().sum() for weight, g, t in pairs]).sum()


@dataclass(frozen=True)
class SquaredAndAbsolute:
    """Squared Euclidean distance to the mean gradient plus the sum of absolute differences: TAG (Deng et al. 2021).

    Attributes:
        factor: of the absolute differences of the first tensor; it falls linearly with the tensors, as those nearest to
            the inputs say most of them.
    """

    factor: float

    def target(self, scene: Scene) -> list[Tensor]:
        """The mean gradient."""
        return scene.mean_gradient

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """See `Distance`."""
        count = len(target)
        terms = []
        for place, (g, t) in enumerate(zip(gradient, target, strict=True)):
            terms.append((g - t).square().sum() + self.factor * (1 - place / count) * (g - t).abs().sum())
        return torch.stack(terms).sum()


@dataclass(frozen=True)
class MeanCosine:
    """One minus the cosine between gradient and update, tensor by tensor: their mean (LAMP, Balunović et al. 2022).

    Tensors that did not move are left out, and those that rounding alone moved, as the biases of an attention's keys.
    """

    def target(self, scene: Scene) -> list[Tensor]:
        """w_0 - w_T, each tensor at length one, or 0 where it is left out."""
        norms = torch.stack([delta.norm() for delta in scene.direction])
        factors = torch.where(norms > _MOVED * norms.max(), 1 / norms, 0.0)
        return [factor * delta for factor, delta in zip(factors, scene.direction, strict=True)]

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """See `Distance`."""
        tiny = torch.finfo(target[0].dtype).tiny
        cosines = [(g * t).sum() / g.norm().clamp_min(tiny) for g, t in zip(gradient, target, strict=True)]
        moved = torch.stack([t.norm() for t in target])
        return (moved - torch.stack(cosines)).sum() / moved.sum()


@dataclass(frozen=True)
class GaussianKernel:
    """One minus a Gaussian kernel for each parameter tensor, as wide as its recorded gradient varies: their mean.

    1 - exp(-||g - g'||^2 / sigma^2) after SAPAG (Wang et al. 2020). Here sigma^2 is the variance of the
    tensor's recorded gradient times its number of entries: with the variance alone the kernel of a large
    tensor would be flat wherever the dummy data start. A tensor of one entry has no variance and counts
    as far off until it is matched exactly.

    Attributes:
        layers: weight of each tensor in the mean, in the model's order; None weighs all the same.
    """

    layers: tuple[float, ...] | None = None

    def target(self, scene: Scene) -> list[Tensor]:
        """The mean gradient."""
        return scene.mean_gradient

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """See `Distance`."""
        terms = []
        for g, t in zip(gradient, target, strict=True):
            width = t.var(unbiased=False) * t.numel() + torch.finfo(t.dtype).tiny
            terms.append(1 - torch.exp(-(g - t).square().sum() / width))
        found = torch.stack(terms)
        weights = found.new_tensor(self.layers or (1.0,) * len(terms))
        return (weights * found).sum() / weights.sum()
