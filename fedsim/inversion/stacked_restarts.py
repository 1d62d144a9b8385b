"""Several restarts whose values are rows of the same tensors, moved by one optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim.inversion.recipe import Recipe
from fedsim.inversion.restart import Restart, is_curve, set_gradients
from fedsim.training.optimizers import Optimizer


class StackedRestarts:
    """Values of several restarts, stacked; from now on the restarts' own values are views of them.

    The optimizers of inversion change each number by its own gradient, so one step in few kernels
    moves all restarts.

    Attributes:
        restarts: whose values these are.
        values: by name, `restart ...`.
    """

    def __init__(self, recipe: Recipe, restarts: Sequence[Restart]) -> None:
        self.restarts = list(restarts)
        self.values = stack_values(restarts)
        self._recipe = recipe
        self._optimizer = restarts[0].make_optimizer(self.values)
        self._step_sizes = [group["lr"] for group in self._optimizer.param_groups]
        self._point_restarts_to_rows()

    def keep_restarts(self, remaining: Sequence[Restart]) -> None:
        """Drop all restarts but these, with their rows of values, gradients and optimizer state."""
        if len(remaining) == len(self.restarts):
            return
        device = next(iter(self.values.values())).device
        rows = torch.tensor([self.restarts.index(restart) for restart in remaining]).to(device)
        self.restarts, previous = list(remaining), self.values
        self.values = {name: tensor.index_select(0, rows) for name, tensor in previous.items()}
        for name, tensor in self.values.items():
            gradient = previous[name].grad
            tensor.grad = None if gradient is None else gradient.index_select(0, rows)
        for group, tensor in zip(self._optimizer.param_groups, self.values.values(), strict=True):
            group["params"] = [tensor]
        if isinstance(self._optimizer, Optimizer):
            for state in self._optimizer.memory:
                for name, tensor in state.items():
                    if tensor.ndim:
                        state[name] = tensor.index_select(0, rows)
        self._point_restarts_to_rows()

    def step(self, iteration: int, gradients: Mapping[str, Tensor]) -> None:
        """Take one optimizer step with all restarts."""
        set_gradients(self._recipe, self.values, gradients)
        for group, size in zip(self._optimizer.param_groups, self._step_sizes, strict=True):
            group["lr"] = size * self.restarts[0].step_size_factor(iteration)
        self._optimizer.step()

    def variable_means(self) -> dict[str, Tensor]:
        """Return `restart` means of the variables that the report shows as curves, by name."""
        means = {}
        for name, value in self.values.items():
            if is_curve(name):
                means[name] = value.reshape(len(value), -1).mean(1)
        return means

    def _point_restarts_to_rows(self) -> None:
        for row, restart in enumerate(self.restarts):
            restart.store_values_in({name: tensor[row] for name, tensor in self.values.items()})


def stack_values(restarts: Sequence[Restart]) -> dict[str, Tensor]:
    """Return the values of all restarts by name, `restart ...`."""
    values = [restart.values() for restart in restarts]
    return {name: torch.stack([row[name] for row in values]) for name in values[0]}
