"""L-BFGS for several independent problems of one size at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ValuesAndGradients = Callable[[Tensor], tuple[Tensor, Tensor]]
"""`points -> (values, gradients)`: `problem`, and `problem ...` like the points."""


@torch.no_grad()
def minimise(evaluate: ValuesAndGradients, start: Tensor, *, steps: int, step_size: float) -> tuple[Tensor, Tensor]:
    """Take `steps` steps of L-BFGS from `start`, for each problem by itself.

    Each problem takes the steps of `torch.optim.LBFGS` with `max_iter = steps` and no line search,
    but one call of `evaluate` serves all of them. A problem whose gradient is not finite becomes
    NaN; the others are not affected.

    Args:
        evaluate: values and gradients of all problems; called `steps` times.
        start: `problem ...`.
        step_size: of every step but the first, whose size is at most `step_size / |gradient|_1`.

    Returns:
        The points after the last step, and the values at `start`.
    """
    shape = start.shape
    point = start.flatten(1).clone()
    start_values, gradient = evaluate(point.reshape(shape))
    gradient = gradient.flatten(1)
    memory: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = torch.ones_like(gradient[:, :1])
    direction = -gradient
    length = (1 / gradient.abs().sum(1, keepdim=True)).clamp_max(1) * step_size
    for step in range(steps):
        if step:
            # Remember the last step and the change of the gradient along it.
            previous, gradient = gradient, evaluate(point.reshape(shape))[1].flatten(1)
            displacement, change = direction * length, gradient - previous
            curvature = (displacement * change).sum(1, keepdim=True)
            curved = curvature > 1e-10  # otherwise the step says nothing about the Hessian
            inverse_curvature = torch.where(curved, 1 / curvature, 0)
            memory.append((displacement, change, inverse_curvature))
            new_scale = curvature / change.square().sum(1, keepdim=True)
            scale = torch.where(curved, new_scale, scale)
            direction = _two_loop_direction(gradient, memory, scale)
            length = torch.full_like(length, step_size)
        point = point + direction * length
    return point.reshape(shape), start_values


def _two_loop_direction(gradient: Tensor, memory: list[tuple[Tensor, Tensor, Tensor]], scale: Tensor) -> Tensor:
    """Return minus the inverse Hessian times the gradient ([Nocedal2006], Algorithm 7.4).

    Args:
        memory: displacement s, change of the gradient y and 1 / (s y) of each step.
        scale: of the initial inverse Hessian.
    """
    rest, coefficients = -gradient, []
    for displacement, change, inverse in reversed(memory):
        coefficients.append(inverse * (displacement * rest).sum(1, keepdim=True))
        rest = rest - coefficients[-1] * change
    direction = scale * rest
    for (displacement, change, inverse), coefficient in zip(memory, reversed(coefficients), strict=True):
        projection = inverse * (change * direction).sum(1, keepdim=True)
        direction = direction + displacement * (coefficient - projection)
    return direction
