"""How far dummy data are from several gradients of one mini-batch, each taken at weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from adversaries.engine.lbfgs import Slopes
from adversaries.engine.priors import BatchNormStatistics, total_variation
from adversaries.scene import Scene
from fedsim.training.gradients import rows_of_examples

Layers = Literal["increasing", "decreasing", "equal", "relative"]


def temporal_objective(
    scenes: Sequence[Scene],
    *,
    distance: Literal["l2", "cosine"],
    layers: Layers,
    bn_weight: float = 0.0,
    tv_weight: float = 0.0,
    vectorise: bool = True,
) -> Slopes:
    """The function `points -> (f_t, slopes)`, both `gradient ...`: one point for each gradient (TGIAs-RO, Eq. 4).

    Args:
        scenes: one for each gradient, with the labels of the mini-batch.
        distance: `l2`, squared Euclidean over the recorded gradient's squared norm, or one minus the `cosine`.
        layers: how the parameter tensors weigh in it, see `layer_weights`.
        bn_weight: of the distance of BatchNorm statistics to those that the client returned.
        tv_weight: of total variation.
        vectorise: compute the gradients at all weights in one call; otherwise in a loop.
    """
    targets = [
        rows_of_examples(torch.stack(tensors)) for tensors in zip(*(s.mean_gradient for s in scenes), strict=True)
    ]
    apart = _distances(targets, distance, layers)
    gradients = _all_at_once(scenes) if vectorise else _one_by_one(scenes)

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            points = points.detach().requires_grad_(True)
            values = apart([rows_of_examples(tensor) for tensor in _defended(scenes, gradients(points))])
            if bn_weight:
                prior = BatchNormStatistics(exact=scenes[0].by_batch)
                each = [prior(scene, images, images) for scene, images in zip(scenes, points, strict=True)]
                values = values + bn_weight * torch.stack(each)
            if tv_weight:
                values = values + tv_weight * torch.stack([total_variation(images) for images in points])
            (slopes,) = torch.autograd.grad(values.sum(), points, materialize_grads=True)
        return values.detach(), slopes

    return evaluate


def _distances(
    targets: Sequence[Tensor], distance: Literal["l2", "cosine"], layers: Layers
) -> Callable[[Sequence[Tensor]], Tensor]:
    """A function from dummy gradients to their distances from the targets; both are tensors `gradient number`."""
    weights = layer_weights(targets, layers)

    def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        pairs = zip(weights, left, right, strict=True)
        return torch.stack([weight * (a * b).sum(1) for weight, a, b in pairs]).sum(0)

    size = inner(targets, targets)
    tiny = torch.finfo(size.dtype).tiny

    def distances(dummy: Sequence[Tensor]) -> Tensor:
        if distance == "cosine":
            return 1 - inner(dummy, targets) / (inner(dummy, dummy) * size).clamp_min(tiny).sqrt()
        apart = [a - b for a, b in zip(dummy, targets, strict=True)]
        return inner(apart, apart) / size

    return distances


def layer_weights(targets: Sequence[Tensor], layers: Layers) -> Sequence[float | Tensor]:
    """Of each parameter tensor's share of the distance: one number with mean one, or `gradient` each.

    Args:
        targets: the recorded gradients, `gradient number` for each parameter tensor in the model's order.
        layers: `increasing` linearly from the first parameter tensor to the last, `decreasing`, `equal`, or
            `relative` to the inverse of the recorded gradient's squared norm.
    """
    count = len(targets)
    if layers == "relative":
        return [1 / target.square().sum(1).clamp_min(torch.finfo(target.dtype).tiny) for target in targets]
    if layers == "equal":
        return (1.0,) * count
    rising = tuple(2 * (place + 1) / (count + 1) for place in range(count))
    return rising if layers == "increasing" else rising[::-1]


def _defended(scenes: Sequence[Scene], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """`gradients`, tensors `gradient ...` in the model's order, as the known defenses would have made them."""
    if not scenes[0].defenses:
        return gradients
    each = [scene.defended([tensor[place] for tensor in gradients]) for place, scene in enumerate(scenes)]
    return [torch.stack(tensors) for tensors in zip(*each, strict=True)]


def _all_at_once(scenes: Sequence[Scene]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Gradients at all w_t by one vectorised call, tensors `gradient ...` in the model's order."""
    first = scenes[0]
    weights = tuple(torch.stack(tensors) for tensors in zip(*(scene.before for scene in scenes), strict=True))
    buffers = {name: torch.stack([scene.buffers[name] for scene in scenes]) for name in first.buffers}

    def loss_of(weights: Sequence[Tensor], buffers: Mapping[str, Tensor], dummy: Tensor) -> Tensor:
        state = {**dict(zip(first.names, weights, strict=True)), **buffers}
        return first.loss(functional_call(first.model, state, (first.units.to_model(dummy),)), first.labels)

    gradient = vmap(grad(loss_of))
    return lambda points: gradient(weights, buffers, points)


def _one_by_one(scenes: Sequence[Scene]) -> Callable[[Tensor], Sequence[Tensor]]:
    """The same in a loop."""

    def gradients(points: Tensor) -> Sequence[Tensor]:
        each = [s.gradient(s.before, dummy, s.labels) for s, dummy in zip(scenes, points, strict=True)]
        return [torch.stack(tensors) for tensors in zip(*each, strict=True)]

    return gradients
