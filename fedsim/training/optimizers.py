"""SGD, Adam and AdamW by torch's own functions of one step.

The classes in `torch.optim` import torch's compiler, which takes seconds and much memory in each process that trains or
attacks. The functions that these classes call do not, and give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedsim.training.settings import LocalTraining

Groups = Iterable[Any]
"""Tensors to optimise; or tables, each with tensors as `params`, and their step size as `lr` if it differs."""


class Optimizer(ABC):
    """Moves tensors along the slopes in their `grad`; one that has none stays.

    Attributes:
        param_groups: tables with `params` and `lr`, which may be changed between steps.
        memory: by tensor, in the order of the groups, what is kept from step to step; empty before its first step.
    """

    def __init__(self, params: Groups, lr: float, *, fused: bool | None = None) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.param_groups: list[dict[str, Any]] = [
            {"lr": lr, **group, "params": list(group["params"])} for group in groups
        ]
        self.memory: list[dict[str, Tensor]] = [{} for group in self.param_groups for _ in group["params"]]
        self._fused = fused

    def zero_grad(self) -> None:
        """Forget the slopes."""
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.grad = None

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Take one step; `closure` is called before, and sets the slopes."""
        if closure is not None:
            closure()
        place = 0
        with torch.no_grad():
            for group in self.param_groups:
                tensors = group["params"]
                kept, place = self.memory[place : place + len(tensors)], place + len(tensors)
                moving = [(t, memory) for t, memory in zip(tensors, kept, strict=True) if t.grad is not None]
                self._move([t for t, _ in moving], [t.grad for t, _ in moving], [m for _, m in moving], group["lr"])

    @abstractmethod
    def _move(self, tensors: list[Tensor], slopes: list[Tensor], kept: list[dict[str, Tensor]], lr: float) -> None:
        """Move `tensors`, which have these slopes and memories, in place."""


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`."""

    def __init__(
        self,
        params: Groups,
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, fused=fused)
        self._momentum, self._weight_decay = momentum, weight_decay

    def _move(self, tensors: list[Tensor], slopes: list[Tensor], kept: list[dict[str, Tensor]], lr: float) -> None:
        buffers = [memory.get("momentum") for memory in kept]
        sgd(
            tensors,
            slopes,
            buffers,
            fused=self._fused,
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for memory, buffer in zip(kept, buffers, strict=True):
            if buffer is not None:
                memory["momentum"] = buffer


class Adam(Optimizer):
    """Adam, as `torch.optim.Adam`; with `decoupled`, AdamW."""

    def __init__(
        self,
        params: Groups,
        lr: float,
        *,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, fused=fused)
        self._weight_decay, self._decoupled = weight_decay, decoupled

    def _move(self, tensors: list[Tensor], slopes: list[Tensor], kept: list[dict[str, Tensor]], lr: float) -> None:
        for tensor, memory in zip(tensors, kept, strict=True):
            if not memory:
                memory["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device if self._fused else "cpu")
                memory["mean"], memory["square"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        adam(
            tensors,
            slopes,
            [memory["mean"] for memory in kept],
            [memory["square"] for memory in kept],
            [],
            [memory["step"] for memory in kept],
            fused=self._fused,
            decoupled_weight_decay=self._decoupled,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=self._weight_decay,
            eps=1e-8,
            maximize=False,
        )


def sgd_direction(
    slope: Tensor, weight: Tensor, start: Tensor, settings: LocalTraining, momentum: dict[str, Tensor], name: str
) -> Tensor:
    """Where one step of SGD moves a parameter, before its step size; it can be differentiated, as `SGD` cannot.

    Args:
        slope: the gradient, in the shape of `weight`.
        weight: the parameter now.
        start: what it was when local training began, from which FedProx's proximal term pulls.
        settings: with weight decay, proximal term and momentum.
        momentum: by `name` what is kept from step to step, none before the first one; it is changed.
    """
    if settings.proximal_mu:
        slope = slope + settings.proximal_mu * (weight - start)
    if settings.weight_decay:
        slope = slope + settings.weight_decay * weight
    if settings.momentum:
        slope = momentum[name] = slope + settings.momentum * momentum[name] if name in momentum else slope
    return slope
