"""L-BFGS for several independent problems of one size at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]
"""`points -> (values, slopes)`: `problem`, and `problem ...` like the points."""


@torch.no_grad()
def minimise(evaluate: Slopes, start: Tensor, *, steps: int, step_size: float) -> tuple[Tensor, Tensor]:
    """Where `steps` steps of L-BFGS lead from `start`, each problem alone.

    The same steps as `torch.optim.LBFGS` with `max_iter = steps` and no line search takes for each problem, but
    one call of `evaluate` serves all of them. A problem whose slope is not finite becomes NaN, the others do not.

    Args:
        evaluate: values and slopes of all problems; called `steps` times.
        start: `problem ...`.
        step_size: of every step but the first, which is shortened to `step_size / |slope|_1` where that is less.

    Returns:
        The points after the last step, and the values at `start`.
    """
    shape = start.shape
    point = start.flatten(1).clone()
    first, slope = evaluate(point.reshape(shape))
    slope = slope.flatten(1)
    memory: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = torch.ones_like(slope[:, :1])
    direction, length = -slope, (1 / slope.abs().sum(1, keepdim=True)).clamp_max(1) * step_size
    for step in range(steps):
        if step:
            before, slope = slope, evaluate(point.reshape(shape))[1].flatten(1)
            moved, change = direction * length, slope - before
            curvature = (moved * change).sum(1, keepdim=True)
            bent = curvature > 1e-10  # where the slope did not turn, nothing was learnt
            memory.append((moved, change, torch.where(bent, 1 / curvature, 0)))
            scale = torch.where(bent, curvature / change.square().sum(1, keepdim=True), scale)
            direction, length = _two_loops(slope, memory, scale), torch.full_like(length, step_size)
        point = point + direction * length
    return point.reshape(shape), first


def _two_loops(slope: Tensor, memory: list[tuple[Tensor, Tensor, Tensor]], scale: Tensor) -> Tensor:
    """Minus the slope times the inverse Hessian that the memory stands for (Nocedal, Wright 2006, Algorithm 7.4)."""
    rest, shares = -slope, []
    for moved, change, inverse in reversed(memory):
        shares.append(inverse * (moved * rest).sum(1, keepdim=True))
        rest = rest - shares[-1] * change
    direction = scale * rest
    for (moved, change, inverse), share in zip(memory, reversed(shares), strict=True):
        direction = direction + moved * (share - inverse * (change * direction).sum(1, keepdim=True))
    return direction
