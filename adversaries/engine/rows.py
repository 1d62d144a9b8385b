"""The values of several restarts as rows of the same tensors, which one optimizer moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adversaries.engine.recipe import Recipe
from adversaries.engine.restart import Restart, set_slopes


class Rows:
    """From now on, the values of `restarts` lie in rows.

    The optimizers of inversion move each number by its own slope, so all restarts take a step in the kernels of one.

    Attributes:
        restarts: whose values they are.
        values: by name, `restart ...`.
    """

    def __init__(self, recipe: Recipe, restarts: Sequence[Restart]) -> None:
        self.restarts = list(restarts)
        self.values = stacked(restarts)
        self._recipe = recipe
        self._optimizer = restarts[0].optimizer(self.values)
        self._sizes = [group["lr"] for group in self._optimizer.param_groups]
        self._share()

    def only(self, left: Sequence[Restart]) -> None:
        """Go on with these alone."""
        if len(left) == len(self.restarts):
            return
        first = next(iter(self.values.values()))
        at = torch.tensor([self.restarts.index(restart) for restart in left]).to(first.device)
        self.restarts, whole = list(left), self.values
        self.values = {name: tensor.index_select(0, at) for name, tensor in whole.items()}
        for name, tensor in self.values.items():
            slope = whole[name].grad
            tensor.grad = None if slope is None else slope.index_select(0, at)
        for group, tensor in zip(self._optimizer.param_groups, self.values.values(), strict=True):
            group["params"] = [tensor]
        for memory in getattr(self._optimizer, "memory", ()):
            memory.update({name: tensor.index_select(0, at) for name, tensor in memory.items() if tensor.ndim})
        self._share()

    def move(self, iteration: int, slopes: Mapping[str, Tensor]) -> None:
        """One step of all."""
        set_slopes(self._recipe, self.values, slopes)
        for group, size in zip(self._optimizer.param_groups, self._sizes, strict=True):
            group["lr"] = size * self.restarts[0].factor(iteration)
        self._optimizer.step()

    def means(self) -> dict[str, Tensor]:
        """Of each restart, the mean of what the report shows beside the objective."""
        shown = {name: value for name, value in self.values.items() if name not in ("dummy", "label_logits")}
        return {name: value.reshape(len(value), -1).mean(1) for name, value in shown.items()}

    def _share(self) -> None:
        for row, restart in enumerate(self.restarts):
            restart.hold({name: tensor[row] for name, tensor in self.values.items()})


def stacked(restarts: Sequence[Restart]) -> dict[str, Tensor]:
    """The values of all, by name, `restart ...`."""
    each = [restart.values() for restart in restarts]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}
