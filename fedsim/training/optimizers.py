"""SGD, Adam and AdamW by torch's functional optimizers, and L-BFGS.

The classes in `torch.optim` import torch's compiler, which takes seconds and much memory in each
process that trains or attacks. The functions that these classes call do not, and give the same
bits.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

_Key = TypeVar("_Key", bound=Hashable)
ParameterGroups = Iterable[Any]
"""Tensors to optimise, or dicts with tensors as `params` and, if it differs, their step size as
`lr`."""


class LBFGS(torch.optim.LBFGS):
    """L-BFGS of torch; only what keeps torch's compiler away from its methods is taken off.

    Otherwise the compiler would be imported with the first one.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Optimizer(ABC):
    """Optimizer that moves tensors by the gradients in their `grad`; tensors without one stay.

    Attributes:
        param_groups: dicts with `params` and `lr`, which may be changed between steps.
        memory: optimizer state of each tensor, in the order of the groups; empty before its first
            step.
    """

    def __init__(self, params: ParameterGroups, lr: float, *, fused: bool | None = None) -> None:
        groups = list(params)
        if not groups or not isinstance(groups[0], Mapping):
            groups = [{"params": groups}]
        self.param_groups: list[dict[str, Any]] = [
            {"lr": lr, **group, "params": list(group["params"])} for group in groups
        ]
        self.memory: list[dict[str, Tensor]] = [{} for group in self.param_groups for _ in group["params"]]
        self._fused = fused

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.grad = None

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Take one step; `closure`, where given, is called first to compute the gradients."""
        if closure is not None:
            closure()
        start = 0
        with torch.no_grad():
            for group in self.param_groups:
                tensors = group["params"]
                memories = self.memory[start : start + len(tensors)]
                start += len(tensors)
                gradients = [tensor.grad for tensor in tensors]
                moving = [position for position, gradient in enumerate(gradients) if gradient is not None]
                if len(moving) < len(tensors):
                    tensors, gradients, memories = (
                        [values[position] for position in moving] for values in (tensors, gradients, memories)
                    )
                if moving:
                    self._move(tensors, gradients, memories, group["lr"])

    @abstractmethod
    def _move(
        self,
        tensors: list[Tensor],
        gradients: list[Tensor],
        memories: list[dict[str, Tensor]],
        lr: float,
    ) -> None:
        """Move `tensors` in place, by their gradients and memories."""


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`."""

    def __init__(
        self,
        params: ParameterGroups,
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, fused=fused)
        self._momentum, self._weight_decay = momentum, weight_decay

    def _move(
        self,
        tensors: list[Tensor],
        gradients: list[Tensor],
        memories: list[dict[str, Tensor]],
        lr: float,
    ) -> None:
        if not (self._momentum or self._weight_decay or self._fused):
            # The steps of `sgd` in one call, because a small network would wait for the loop over its tensors.
            torch._foreach_add_(tensors, gradients, alpha=-lr)
            return
        buffers = [memory.get("momentum") for memory in memories]
        sgd(
            tensors,
            gradients,
            buffers,
            fused=self._fused,
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for memory, buffer in zip(memories, buffers, strict=True):
            if buffer is not None:
                memory["momentum"] = buffer


class Adam(Optimizer):
    """Adam, as `torch.optim.Adam`; with `decoupled`, AdamW."""

    def __init__(
        self,
        params: ParameterGroups,
        lr: float,
        *,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, fused=fused)
        self._weight_decay, self._decoupled = weight_decay, decoupled

    def _move(
        self,
        tensors: list[Tensor],
        gradients: list[Tensor],
        memories: list[dict[str, Tensor]],
        lr: float,
    ) -> None:
        for tensor, memory in zip(tensors, memories, strict=True):
            if not memory:
                step_device = tensor.device if self._fused else "cpu"
                memory["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
                memory["mean"], memory["square"] = (
                    torch.zeros_like(tensor),
                    torch.zeros_like(tensor),
                )
        adam(
            tensors,
            gradients,
            [memory["mean"] for memory in memories],
            [memory["square"] for memory in memories],
            [],
            [memory["step"] for memory in memories],
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


class DirectionSettings(Protocol):
    """Settings that the direction of an SGD step depends on, such as `LocalTraining`."""

    @property
    def momentum(self) -> float:
        """Return the share of the last direction that is added."""

    @property
    def weight_decay(self) -> float:
        """Return the weight of the L2 penalty."""

    @property
    def proximal_mu(self) -> float:
        """Return the weight of FedProx's proximal term."""


def sgd_direction(
    gradient: Tensor,
    weight: Tensor,
    start: Tensor,
    settings: DirectionSettings,
    momentum: dict[_Key, Tensor],
    name: _Key,
) -> Tensor:
    """Compute the direction of one SGD step, to be subtracted after scaling by the step size.

    This is the rule of local SGD wherever it is simulated, differentiated or computed for many
    clients at once. `fedsim.training.loop`, the reference, takes the same steps by `SGD`, which is
    faster but cannot be differentiated.

    >>> from fedsim.training.settings import LocalTraining
    >>> settings = LocalTraining(local_steps=1, momentum=0.5, weight_decay=0.25)
    >>> momentum = {}
    >>> gradient, weight = torch.ones(1), torch.tensor([4.0])
    >>> [sgd_direction(gradient, weight, weight, settings, momentum, "w").item() for _ in range(2)]
    [2.0, 3.0]

    Args:
        gradient: of the loss, in the shape of `weight`.
        weight: current value of the parameter.
        start: its value at the start of local training, for FedProx's proximal term.
        settings: weight decay, proximal term and momentum.
        momentum: momentum buffers by name, empty before the first step; updated in place.
        name: of the parameter, among `momentum`.
    """
    direction = gradient
    if settings.proximal_mu:
        direction = direction + settings.proximal_mu * (weight - start)
    if settings.weight_decay:
        direction = direction + settings.weight_decay * weight
    if settings.momentum:
        if name in momentum:
            direction = direction + settings.momentum * momentum[name]
        momentum[name] = direction
    return direction
