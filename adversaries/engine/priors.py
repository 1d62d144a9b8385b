"""What makes dummy data look like data: terms added to the distance, each with a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    across = (images[..., 1:] - images[..., :-1]).abs()
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    # Images one pixel high or wide have no neighbours in that direction, and the mean of nothing is NaN.
    return sum((step.mean() if step.numel() else step.sum() for step in (across, down)), start=images.new_zeros(())) / 2


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

    Sum over layers of ||mean - running mean||_2 + ||variance - running variance||_2 (GradInversion's R_BN), at w_0.
    Of a client that trained in training mode the mini-batches' own statistics stand in their place, see `exact`.

    Attributes:
        exact: the client trained in training mode, for one epoch at most. With layer momentum m, torch keeps
            running = (1 - m) running + m own at each step, where its own variance is that over n - 1 of a channel's n
            values; a layer without momentum keeps the mean of the own ones. So the own ones of one step follow from
            the running ones before and after, and of several steps a weighted mean of them. Those of the dummy data
            are weighted likewise, by mini-batches in their order. B must be granted, and the model of the scene has
            to normalise by the batch, see `normalising_by_batch`.
    """

    exact: bool = False

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`."""
        layers = {name: m for name, m in scene.model.named_modules() if isinstance(m, _BatchNorm)}
        seen: dict[str, list[Tensor]] = {}
        hooks = [layer.register_forward_pre_hook(_noting(seen, name)) for name, layer in layers.items()]
        try:
            for batch in self._batches(scene, dummy):
                scene.outputs(scene.before, batch)
        finally:
            for hook in hooks:
                hook.remove()
        terms = []
        for name, inputs in seen.items():
            axes = [0, *range(2, inputs[0].ndim)]
            kept, shares = _remembered(layers[name], len(inputs)) if self.exact else (0.0, [1.0])
            mean, variance = (self._target(scene, f"{name}.running_{of}", kept) for of in ("mean", "var"))
            counted = inputs[-len(shares) :]
            own_mean = _summed(shares, [one.mean(axes) for one in counted])
            own_variance = _summed(shares, [one.var(axes, unbiased=self.exact) for one in counted])
            terms.append(((own_mean - mean).norm() + (own_variance - variance).norm()) / sum(shares))
        return torch.stack(terms).sum()

    def _batches(self, scene: Scene, dummy: Tensor) -> Sequence[Tensor]:
        """What passes through the layers at once."""
        if not self.exact:
            return [dummy]
        assert scene.batch_size is not None
        return torch.split(dummy, scene.batch_size)[: scene.steps]

    def _target(self, scene: Scene, name: str, kept: float) -> Tensor:
        """What the client's steps put into a running statistic, of which they kept the share `kept`."""
        name = name.removeprefix(".")
        return scene.returned_buffers[name] - kept * scene.buffers[name]


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


def _remembered(layer: _BatchNorm, times: int) -> tuple[float, list[float]]:
    """Which share of the running statistics from before, and of each time's own, are in those after so many times.

    A layer that a model uses twice takes note twice a step.
    """
    if layer.momentum is None:
        return 0.0, [1 / times] * times
    kept = 1 - layer.momentum
    return kept**times, [layer.momentum * kept**later for later in reversed(range(times))]


def _summed(shares: Sequence[float], each: Sequence[Tensor]) -> Tensor:
    return torch.stack([share * one for share, one in zip(shares, each, strict=True)]).sum(0)


def _noting(seen: dict[str, list[Tensor]], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, []).append(inputs[0])

    return note
