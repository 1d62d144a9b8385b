"""Second derivatives of ReLUs: where a unit switches, the gradient of a network jumps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedsim.inversion.problem import InversionProblem


class SmoothReluJumps(TorchFunctionMode):
    """Let the derivative of a network's gradient see that ReLUs switch.

    The derivative of a ReLU is a step, and that of the step is 0 wherever it exists. So matching, which descends along
    the derivative of a gradient, does not see that other inputs switch other units. In this context the derivative of
    the step is a Gaussian density: the mean of the jumps over inputs close by. Outputs and gradients of the network
    stay as they are.

    It covers ReLUs, as functions, methods and modules, but not their relatives (leaky, clipped), nor the jumps of max
    pooling.

    Args:
        width: standard deviation of the density, as a share of the root mean square of what enters the ReLU.

    Attributes:
        calls: of ReLUs in this context.

    References:
        [Neftci2019], for smooth derivatives of steps in training. Differs: what is differentiated twice here is a ReLU.
    """

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width, self.calls = width, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute ReLUs by `_Relu`, everything else as it is."""
        kwargs = kwargs or {}
        if func not in _RELUS and func not in _RELUS_IN_PLACE:
            return func(*args, **kwargs)
        self.calls += 1
        inputs = args[0] if args else kwargs["input"]
        if func in _RELUS_IN_PLACE or kwargs.get("inplace") or (func is functional.relu and True in args[1:]):
            return inputs.copy_(_Relu.apply(inputs.clone(), self.width))
        return _Relu.apply(inputs, self.width)


def has_relus(problem: InversionProblem, shape: tuple[int, ...]) -> bool:
    """Return whether the model calls a ReLU for data of a shape."""
    context = SmoothReluJumps(1.0)
    with context, torch.no_grad():
        problem.outputs(problem.before, problem.before[0].new_zeros(shape))
    return context.calls > 0


_RELUS = frozenset({functional.relu, torch.relu, Tensor.relu})
_RELUS_IN_PLACE = frozenset({functional.relu_, torch.relu_, Tensor.relu_})


class _OfWidth(torch.autograd.Function):
    """A function that keeps its inputs and the width for its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.width = inputs[1]


class _Relu(_OfWidth):
    """A ReLU whose derivative is `_Step`."""

    @staticmethod
    def forward(inputs: Tensor, width: float) -> Tensor:
        return inputs.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (inputs,) = ctx.saved_tensors
        return gradients[0] * _Step.apply(inputs, ctx.width), None


class _Step(_OfWidth):
    """1 above 0 and 0 elsewhere, with a Gaussian density as its derivative."""

    @staticmethod
    def forward(inputs: Tensor, width: float) -> Tensor:
        return (inputs > 0).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (inputs,) = ctx.saved_tensors
        deviation = ctx.width * inputs.square().mean().sqrt()
        density = torch.exp(-(inputs / deviation).square() / 2) / (deviation * math.sqrt(2 * math.pi))
        # Where all inputs are 0 they have no size, and the density would be infinite.
        return gradients[0] * torch.where(deviation > 0, density, 0.0), None
