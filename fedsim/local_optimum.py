"""The model that a client would have trained alone: theta_c* = argmin L_c, which only the evaluator can compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.messages import State
from fedsim.task import Loss
from fedsim.training import forward, load_state, set_evaluation_modes, state_of


def local_optimum(
    model: nn.Module,
    start: State,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss = cross_entropy,
    *,
    iterations: int = 1000,
) -> dict[str, Tensor]:
    """Theta."""
    load_state(model, start)
    set_evaluation_modes(model, start)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(iterations):
        objective = loss(forward(model, inputs), labels)
        optimizer.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return state_of(model)
