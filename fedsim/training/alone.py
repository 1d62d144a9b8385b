"""Training alone: what a client would do with its data if nobody averaged its model with others'."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn

from fedsim.errors import RunError
from fedsim.randomness import generator
from fedsim.training.modes import forward, normalise_by_batch
from fedsim.training.optimizers import SGD
from fedsim.wire.messages import non_finite

ITERATIONS, BATCH = 300, 2048
"""Steps of gradient descent, and most examples in one of them."""
_STEP_SIZES, _MOMENTUM = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003), 0.9
_JUMP = 0.1
"""Gradient descent is stable if its loss stays below lowest + max(0.1, 0.9^step) * first: the second term is what is
left of the energy with which momentum began, of which it loses a tenth in each step, as in a parabolic valley."""


def train_alone(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    iterations: int = ITERATIONS,
    batch_size: int = BATCH,
) -> tuple[nn.Module, list[float]]:
    """A copy of `model` that gradient descent has brought to rest on these data, and the loss in each step.

    The method is the clients' own, SGD, in long strides: all examples at once (random batches of at most `batch_size`
    where there are more), momentum 0.9, the step size falling to 0 on half a cosine. It begins with the largest of 0.1,
    0.03, 0.01 ... that is stable: it never lifts the loss, its mean over a pass, by a tenth of the first one above the
    lowest so far, or by what momentum may swing back in the first steps. Longer strides leap out of the valley that
    short ones follow and come to rest far away, or leave no unit alive: where they do not halve the loss, all shorter
    ones are tried, too (up to six times the work), and those that end lowest are taken. 300 steps from 0.1 go as far as
    15 000 of plain gradient descent with a step size of 0.01. An adaptive optimizer is quicker to a small loss, but
    moves all weights alike, those too of which the data say nothing, and so ends far from where SGD would.

    BatchNorm layers normalise by the batch; dropout layers do not drop.

    Args:
        inputs: `example ...` in model units.
        labels: `example`, or whatever `loss` takes.
        loss: mean loss of `(outputs, labels)`.
        iterations: steps.
        batch_size: most examples in a step.

    Raises:
        RunError: it is unstable even with the smallest step size.
    """
    found: tuple[nn.Module, list[float]] | None = None
    pieces, lowest = math.ceil(len(inputs) / batch_size), math.inf
    for step_size in _STEP_SIZES:
        own = copy.deepcopy(model)
        curve = _descend(own, inputs, labels, loss, iterations, step_size, pieces)
        if len(curve) < iterations or non_finite(dict(own.named_parameters())):
            continue
        end = fmean(curve[-pieces:])
        if end < lowest:
            found, lowest = (own, curve), end
        if end < fmean(curve[:pieces]) / 2:
            break
    if found is None:
        raise RunError(
            f"training alone: gradient descent is unstable even with a step size of {_STEP_SIZES[-1]}; standardise the "
            "inputs"
        )
    return found


def _descend(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    iterations: int,
    step_size: float,
    pieces: int,
) -> list[float]:
    """The loss in each step, up to where its mean over a pass of so many batches jumps."""
    normalise_by_batch(model)
    optimizer = SGD(model.parameters(), step_size, momentum=_MOMENTUM, fused=True)
    order = generator("training alone")
    # Batches of about one size: the last of a pass must not be so small that it cannot be normalised.
    with torch.no_grad():
        parts = zip(inputs.tensor_split(pieces), labels.tensor_split(pieces), strict=True)
        first = sum(len(some) * loss(forward(model, some), own).item() for some, own in parts)
    first = lowest = first / len(inputs)
    waiting: list[Tensor] = []
    curve: list[float] = []
    for step in range(iterations):
        if not waiting:
            waiting = list(torch.randperm(len(inputs), generator=order).to(inputs.device).tensor_split(pieces))
        batch = waiting.pop()
        optimizer.param_groups[0]["lr"] = step_size * (1 + math.cos(math.pi * step / iterations)) / 2
        optimizer.zero_grad()
        objective = loss(forward(model, inputs[batch]), labels[batch])
        objective.backward()  # type: ignore[no-untyped-call]
        curve.append(objective.item())
        if not waiting:
            level = fmean(curve[-pieces:])
            if not level <= lowest + max(_JUMP, _MOMENTUM**step) * first:
                return curve[:-1]
            lowest = min(lowest, level)
        optimizer.step()
    return curve
