"""LAVP's attack on LeNet with three weights of its prior, on many images at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from fedsim.base import metrics
from fedsim.base.randomness import generator, use_one_thread
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.priors import total_variation
from fedsim.inversion.recipe import step_decay_schedule
from fedsim.training.optimizers import Adam
from studies.lavp.study import SEED, TV_WEIGHTS, example, experiment_of, trained_network
from studies.lavp_measures.study import measured_images
from studies.messages import image_knowledge, perceive_distances
from studies.running import Row

OF = ("cifar10", "lenet")
ITERATIONS, STEP_SIZE = 600, 0.1
SCORES = ("mse", "ssim", "lpips", "objective")
Gradients = list[tuple[Tensor, ...]]
"""By layer the gradients of its weights and biases, example by example, or for linear layers the inputs and slopes
whose outer products they are, which need not be formed."""


def measure(start: int, distance: str, half: int, weight: float) -> list[Row]:
    """Return a row for each image of one half of them; `weight` is a share of that of the study `lavp`."""
    images = measured_images(*OF)
    images = images[len(images) // 2 * (half - 1) : len(images) // 2 * half]
    scores = attack_images(images, start, distance, weight * TV_WEIGHTS[distance])
    return [{"image": image, **row} for image, row in zip(images, scores, strict=True)]


@use_one_thread()
def attack_images(images: list[int], start: int, distance: str, weight: float) -> list[dict[str, float]]:
    """Return for each image the scores of a start, the first of which is that of the study `lavp`, too."""
    network, experiment = trained_network(*OF), experiment_of(*OF)
    assert isinstance(network, nn.Sequential)
    true, inputs, labels = (torch.cat(parts) for parts in zip(*(example(*OF, i) for i in images), strict=True))
    rngs = [generator(SEED, "lavp attack", image) for image in images]
    for _ in range(start):
        dummy = torch.cat([torch.randn(inputs[:1].shape, generator=rng) for rng in rngs])
    scaling = InputScaling.from_knowledge(image_knowledge(experiment, labels), inputs)
    objective = descend(network, (inputs, labels), dummy, distance, weight, scaling)
    claimed = scaling.to_unit_range(dummy)
    scores = [metrics.mse(claimed, true), metrics.ssim(claimed, true), perceive_distances(claimed, true), objective]
    return [dict(zip(SCORES, values, strict=True)) for values in torch.stack(scores, 1).tolist()]


def descend(
    network: nn.Sequential,
    batch: tuple[Tensor, Tensor],
    dummy: Tensor,
    distance: str,
    weight: float,
    scaling: InputScaling,
    iterations: int = ITERATIONS,
) -> Tensor:
    """Move dummy data as the study's attack does, each example by itself; return the objectives before the last step.

    One pass serves all examples, which is several times as fast as one after the other.
    """
    inputs, labels = batch
    target = [tuple(part.detach() for part in parts) for parts in example_gradients(network, inputs, labels)]
    scaling.clamp_(dummy)
    optimizer = Adam([dummy], STEP_SIZE)
    objective = torch.empty(len(dummy))
    for iteration in range(iterations):
        moving = dummy.detach().requires_grad_()
        found = example_gradients(network, scaling.to_model(moving), labels)
        objective = compare_gradients(found, target, distance) + weight * vmap(image_variation)(moving)
        (slope,) = torch.autograd.grad(objective.sum(), moving)
        dummy.grad = slope.sign()
        optimizer.param_groups[0]["lr"] = STEP_SIZE * step_decay_schedule(iteration, iterations)
        optimizer.step()
        scaling.clamp_(dummy)
    return objective.detach()


def image_variation(image: Tensor) -> Tensor:
    """Return the total variation of one image, `channel height width`."""
    return total_variation(image, (1, 2))


def example_gradients(network: nn.Sequential, inputs: Tensor, labels: Tensor) -> Gradients:
    """Return the gradient of each example's loss, differentiable in the inputs."""
    layers, outputs, values = list[tuple[nn.Module, Tensor]](), list[Tensor](), inputs
    for layer in network:
        given, values = values, layer(values)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layers.append((layer, given))
            outputs.append(values)
    loss = functional.cross_entropy(values, labels, reduction="sum")
    slopes = torch.autograd.grad(loss, outputs, create_graph=True)
    gradients: Gradients = []
    for (layer, given), slope in zip(layers, slopes, strict=True):
        if isinstance(layer, nn.Conv2d):
            patches = functional.unfold(given, layer.kernel_size)
            gradients.append((slope.flatten(2) @ patches.transpose(1, 2), slope.sum((2, 3))))
        else:
            gradients.append((given, slope))
    return gradients


def compare_gradients(found: Gradients, target: Gradients, distance: str) -> Tensor:
    """Return the squared L2 distance, or one minus the cosine, of each example's gradient and its target's."""
    inner, square = inner_products(found, target), inner_products(found, found)
    of_target = inner_products(target, target)
    return square - 2 * inner + of_target if distance == "l2" else 1 - inner / (square * of_target).sqrt()


def inner_products(first: Gradients, second: Gradients) -> Tensor:
    """Return the inner products of the gradients of each example over all layers."""
    total = torch.zeros(())
    for parts, others in zip(first, second, strict=True):
        products = [(part * other).flatten(1).sum(1) for part, other in zip(parts, others, strict=True)]
        # Gradients of biases are the slopes, so each outer product comes with 1.
        total = total + (products[0] + products[1] if parts[0].ndim > 2 else (products[0] + 1) * products[1])
    return total
