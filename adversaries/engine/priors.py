"""What makes dummy data look like data: terms added to the distance, each with a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adversaries.scene import Scene


class Prior(Protocol):
    """A term of the objective that depends on the dummy data."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """A scalar, smaller the more plausible.

        Args:
            dummy: `example ...` in standardised units.
            consensus: the mean of the dummy data of all restarts, as they were before this iteration.
        """
        ...


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, averaged over both directions.

    `images` is `example channel height width`; anisotropic and without wrap-around, in the units of
    the dummy data, as in SME's released code (IG's own code sums the directions).
    """
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    return (across + down) / 2


@dataclass(frozen=True)
class TotalVariation:
    """See `total_variation`."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`; nothing for inputs that are no images."""
        return total_variation(dummy) if dummy.ndim == 4 else dummy.new_zeros(())


@dataclass(frozen=True)
class Norm:
    """Mean squared value of the dummy data (GradInversion, R_l2)."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`."""
        return dummy.square().mean()


@dataclass(frozen=True)
class GroupConsistency:
    """Mean squared distance to the mean of all restarts (GradInversion's R_group, without registration)."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`."""
        return (dummy - consensus).square().mean()


@dataclass(frozen=True)
class BatchNormStatistics:
    """Distance of the dummy data's statistics in each BatchNorm layer from those that the client returned.

    Sum over layers of ||mean - running mean||_2 + ||variance - running variance||_2 (GradInversion's
    R_BN), at w_0. After one step in training mode the batch's own statistics follow exactly from the
    running ones before and after, and stand in their place. With layer momentum m, torch keeps
    running = (1 - m) running + m own, where its own variance is that over n - 1 of a channel's n values;
    a layer without momentum keeps the own ones.

    Attributes:
        exact: the client took one step in training mode, so that the batch's statistics follow. The
            model of the scene has to normalise by the batch then, see `normalising_by_batch`.
    """

    exact: bool = False

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`."""
        layers = {name: m for name, m in scene.model.named_modules() if isinstance(m, _BatchNorm)}
        seen: dict[str, Tensor] = {}
        hooks = [layer.register_forward_pre_hook(_noting(seen, name)) for name, layer in layers.items()]
        try:
            scene.outputs(scene.before, dummy)
        finally:
            for hook in hooks:
                hook.remove()
        terms = []
        for name, inputs in seen.items():
            axes = [0, *range(2, inputs.ndim)]
            mean, variance = self._targets(scene, name, layers[name], inputs.numel() // inputs.shape[1])
            terms.append((inputs.mean(axes) - mean).norm() + (inputs.var(axes, unbiased=False) - variance).norm())
        return torch.stack(terms).sum()

    def _targets(self, scene: Scene, name: str, layer: _BatchNorm, count: int) -> tuple[Tensor, Tensor]:
        """Mean and variance that the dummy data should have before this layer, of `count` values a channel."""
        prefix = f"{name}." if name else ""
        returned = [scene.returned_buffers[f"{prefix}running_{of}"] for of in ("mean", "var")]
        if not self.exact:
            return returned[0], returned[1]
        share = 1.0 if layer.momentum is None else layer.momentum
        sent = [scene.buffers[f"{prefix}running_{of}"] for of in ("mean", "var")]
        mean, variance = ((new - (1 - share) * old) / share for new, old in zip(returned, sent, strict=True))
        return mean, variance * (count - 1) / count


@dataclass(frozen=True)
class SquaredTotalVariation:
    """Squared differences of neighbours, around the edges too, summed over pixels: a mean over images (DLFA's code)."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`; nothing for inputs that are no images."""
        if dummy.ndim != 4:
            return dummy.new_zeros(())
        steps = (dummy - dummy.roll(1, axis) for axis in (2, 3))
        return torch.stack([step.square().flatten(1).sum(1) for step in steps]).sum(0).mean()


@dataclass(frozen=True)
class SoftBounds:
    """Squared distance of pixels, in [0, 1], to their range, summed over pixels: a mean over images (DLFA's code)."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`."""
        units = scene.units
        pixels = (units.to_model(dummy) - units.low) / (units.high - units.low)
        return (pixels - pixels.clamp(0, 1)).square().flatten(1).sum(1).mean()


@dataclass(frozen=True)
class EpochConsistency:
    """Mean squared difference between any two epochs' mean images: the order-invariant prior of DLFA's code."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`."""
        epochs = torch.split(dummy, scene.num_examples)
        means = torch.stack([epoch.mean(0).flatten() for epoch in epochs])
        return (means[:, None] - means[None]).square().mean()


def _noting(seen: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = inputs[0]

    return note
