"""Train a model on one client's data until it rests, as if nobody averaged it with others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn

from fedsim.base.errors import RunError
from fedsim.base.randomness import generator
from fedsim.recording.wire_format import non_finite_names
from fedsim.training.modes import forward, normalise_by_batch
from fedsim.training.optimizers import SGD

ITERATIONS, _MAX_BATCH_SIZE = 300, 2048
"""Default number of gradient descent steps, and the most examples in one of them."""
_STEP_SIZES, _MOMENTUM = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003), 0.9
_ALLOWED_RISE = 0.1
"""Gradient descent counts as stable while loss <= lowest + max(0.1, 0.9^step) * first loss.

The second term is the energy that momentum still holds from its start: in a parabolic valley it
loses a tenth of it in each step."""


def train_to_convergence(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    iterations: int = ITERATIONS,
) -> tuple[nn.Module, list[float]]:
    """Train a copy of `model` by gradient descent until it rests; return it and each step's loss.

    The optimizer is the clients' own, SGD, with few large steps: full batches (random batches of at
    most 2048 where there are more examples), momentum 0.9, and a step size that falls to 0
    on half a cosine. 300 steps from 0.1 go as far as 15 000 of plain gradient descent with a step
    size of 0.01. An adaptive optimizer reaches a small loss sooner, but it moves all weights alike,
    also those that the data do not determine, and so ends far from where SGD would.

    The first step size is the largest of 0.1, 0.03, 0.01 ... that is stable: the mean loss over a
    pass never rises above the lowest so far by more than a tenth of the first loss, or by what
    momentum may swing back in the first steps. Larger steps leave the valley that small steps
    follow and come to rest far away, or leave no unit alive. So where the loss does not fall to
    half, all smaller step sizes are tried as well (up to six times the work), and the result with
    the lowest loss is returned.

    BatchNorm layers normalise by the batch; dropout layers do not drop.

    Args:
        inputs: `example ...` in model units.
        labels: `example`, or whatever `loss` takes.
        loss: mean loss of `(outputs, labels)`.
        iterations: number of steps.
    """
    best: tuple[nn.Module, list[float]] | None = None
    num_batches, lowest = math.ceil(len(inputs) / _MAX_BATCH_SIZE), math.inf
    for step_size in _STEP_SIZES:
        trial = copy.deepcopy(model)
        curve = _descend(trial, inputs, labels, loss, iterations, step_size, num_batches)
        # Drop diverged trials.
        if len(curve) < iterations or non_finite_names(dict(trial.named_parameters())):
            continue
        final_loss = fmean(curve[-num_batches:])
        if final_loss < lowest:
            best, lowest = (trial, curve), final_loss
        if final_loss < fmean(curve[:num_batches]) / 2:
            break
    if best is None:
        raise RunError(
            "training alone: gradient descent is unstable even with a step size of "
            f"{_STEP_SIZES[-1]}; standardise the inputs"
        )
    return best


def _descend(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    iterations: int,
    step_size: float,
    num_batches: int,
) -> list[float]:
    """Train `model` in place; return each step's loss, cut off where the loss rises too far."""
    normalise_by_batch(model)
    optimizer = SGD(model.parameters(), step_size, momentum=_MOMENTUM, fused=True)
    order = generator("training alone")
    # Batches of about one size: the last of a pass must not be so small that it cannot be
    # normalised.
    batches = zip(inputs.tensor_split(num_batches), labels.tensor_split(num_batches), strict=True)
    with torch.no_grad():
        first = 0.0
        for batch_inputs, targets in batches:
            first += len(batch_inputs) * loss(forward(model, batch_inputs), targets).item()
    first = lowest = first / len(inputs)
    remaining_batches: list[Tensor] = []
    curve: list[float] = []
    for step in range(iterations):
        # Shuffle at the start of each pass.
        if not remaining_batches:
            shuffled = torch.randperm(len(inputs), generator=order).to(inputs.device)
            remaining_batches = list(shuffled.tensor_split(num_batches))
        batch = remaining_batches.pop()
        # Compute the gradient at the step size of the cosine schedule.
        falling_step_size = step_size * (1 + math.cos(math.pi * step / iterations)) / 2
        optimizer.param_groups[0]["lr"] = falling_step_size
        optimizer.zero_grad()
        objective = loss(forward(model, inputs[batch]), labels[batch])
        objective.backward()
        curve.append(objective.item())
        # Stop at the end of a pass whose mean loss rose too far.
        if not remaining_batches:
            pass_loss = fmean(curve[-num_batches:])
            if not pass_loss <= lowest + max(_ALLOWED_RISE, _MOMENTUM**step) * first:
                return curve[:-1]
            lowest = min(lowest, pass_loss)
        optimizer.step()
    return curve
