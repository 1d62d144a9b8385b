"""Objective of several gradients of one mini-batch, each computed at weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedsim.inversion.lbfgs import ValuesAndGradients
from fedsim.inversion.priors import BatchNormStatistics, total_variation
from fedsim.inversion.problem import InversionProblem
from fedsim.training.gradients import flatten_examples

LayerWeighting = Literal["increasing", "decreasing", "equal", "relative"]


def temporal_objective(
    problems: Sequence[InversionProblem],
    *,
    distance: Literal["l2", "cosine"],
    layers: LayerWeighting,
    bn_weight: float,
    tv_weight: float,
    vectorise: bool,
) -> ValuesAndGradients:
    """Return the function `points -> (f_t, gradients)`, one point for each of T recorded gradients.

    f_t is `gradient` and the gradients are `gradient ...` (TGIAs-RO, Eq. 4).

    Args:
        problems: one for each recorded gradient, with the labels of the mini-batch.
        distance: `l2`, squared Euclidean over the recorded gradient's squared norm, or one minus
            the `cosine`.
        layers: weighting of the parameter tensors, see `layer_weights`.
        bn_weight: of the distance of BatchNorm statistics from those that the client returned.
        tv_weight: of total variation.
        vectorise: compute the gradients at all weights in one call; otherwise in a loop.
    """
    targets = []
    for tensors in zip(*(problem.mean_gradient for problem in problems), strict=True):
        targets.append(flatten_examples(torch.stack(tensors)))
    distances = _distance_function(targets, distance, layers)
    gradients = _vectorised_gradients(problems) if vectorise else _looped_gradients(problems)

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            points = points.detach().requires_grad_(True)
            defended = _apply_defenses(problems, gradients(points))
            values = distances([flatten_examples(tensor) for tensor in defended])
            if bn_weight:
                prior = BatchNormStatistics(exact=problems[0].uses_batch_statistics)
                terms = []
                for problem, images in zip(problems, points, strict=True):
                    terms.append(prior(problem, images, images))
                values = values + bn_weight * torch.stack(terms)
            if tv_weight:
                variations = torch.stack([total_variation(data, problems[0].smooth_dimensions) for data in points])
                values = values + tv_weight * variations
            (point_gradients,) = torch.autograd.grad(values.sum(), points, materialize_grads=True)
        return values.detach(), point_gradients

    return evaluate


def _distance_function(
    targets: Sequence[Tensor], distance: Literal["l2", "cosine"], layers: LayerWeighting
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function from dummy gradients to their distances from the targets, `gradient`.

    Args:
        targets: `gradient number` for each parameter tensor, as are the dummy gradients.
    """
    weights = layer_weights(targets, layers)

    def inner_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        triples = zip(weights, left, right, strict=True)
        return torch.stack([weight * (a * b).sum(1) for weight, a, b in triples]).sum(0)

    squared_norms = inner_products(targets, targets)
    tiny = torch.finfo(squared_norms.dtype).tiny

    def distances(dummy: Sequence[Tensor]) -> Tensor:
        if distance == "cosine":
            norms = (inner_products(dummy, dummy) * squared_norms).clamp_min(tiny).sqrt()
            return 1 - inner_products(dummy, targets) / norms
        differences = [a - b for a, b in zip(dummy, targets, strict=True)]
        return inner_products(differences, differences) / squared_norms

    return distances


def layer_weights(targets: Sequence[Tensor], layers: LayerWeighting) -> Sequence[float | Tensor]:
    """Return the weight of each parameter tensor in the distance.

    Args:
        targets: the recorded gradients, `gradient number` for each parameter tensor in the model's
            order.
        layers: `increasing` linearly from the first parameter tensor to the last, `decreasing`,
            `equal`, or `relative` to the inverse of the recorded gradient's squared norm.

    Returns:
        Numbers of mean 1, or with `relative` tensors `gradient`.
    """
    count = len(targets)
    if layers == "relative":
        weights = []
        for target in targets:
            squared_norms = target.square().sum(1)
            weights.append(1 / squared_norms.clamp_min(torch.finfo(target.dtype).tiny))
        return weights
    if layers == "equal":
        return (1.0,) * count
    rising = tuple(2 * (index + 1) / (count + 1) for index in range(count))
    return rising if layers == "increasing" else rising[::-1]


def _apply_defenses(problems: Sequence[InversionProblem], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Apply the adversary models of known defenses to `gradients`, tensors `gradient ...`."""
    if not any(problem.defenses for problem in problems):
        return gradients
    defended = []
    for index, problem in enumerate(problems):
        defended.append(problem.apply_defenses([tensor[index] for tensor in gradients]))
    return [torch.stack(tensors) for tensors in zip(*defended, strict=True)]


def _vectorised_gradients(problems: Sequence[InversionProblem]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a function that computes the gradients at all w_t in one call.

    They are tensors `gradient ...`, in the order of the model's parameters.
    """
    first = problems[0]
    states = zip(*(problem.before for problem in problems), strict=True)
    weights = tuple(torch.stack(tensors) for tensors in states)
    buffers = {}
    for name in first.buffers:
        buffers[name] = torch.stack([problem.buffers[name] for problem in problems])

    def compute_loss(weights: Sequence[Tensor], buffers: Mapping[str, Tensor], dummy: Tensor) -> Tensor:
        state = {**dict(zip(first.parameter_names, weights, strict=True)), **buffers}
        outputs = functional_call(first.model, state, (first.scaling.to_model(dummy),))
        return first.loss(outputs, first.labels)

    gradient = vmap(grad(compute_loss))
    return lambda points: gradient(weights, buffers, points)


def _looped_gradients(problems: Sequence[InversionProblem]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a function that computes the same gradients one after the other."""

    def gradients(points: Tensor) -> Sequence[Tensor]:
        rows = []
        for problem, dummy in zip(problems, points, strict=True):
            rows.append(problem.gradient(problem.before, dummy, problem.labels))
        return [torch.stack(tensors) for tensors in zip(*rows, strict=True)]

    return gradients
