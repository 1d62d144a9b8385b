"""The sum of the gradients of single examples, each shortened by a factor, without making any of them.

In a linear layer the gradient of one example is the outer product of what the layer was given and the slope of its
output. So its norm is the product of theirs, and the sum over examples of gradients times factors is one product of two
matrices. In a convolution, whose weights are few, the gradients of examples are made. So a step costs little more than
one without, where gradients of all weights for each example are mostly time in memory.

References:
    Goodfellow: Efficient Per-Example Gradient Computations, 2015 (norms of linear layers).
    Bu et al.: Differentially Private Optimization on Large Model at Small Cost, ICML 2023 (sums out of what one
    backward pass left). Differs: convolutions have their gradients made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fedsim.task import Loss

_AT_ONCE = 1 << 26
"""Most numbers in the gradients of all examples for one convolution."""
Factors = Callable[[Tensor], Tensor]
"""From L2 norms, `tensor example`, to factors of the same shape."""


def fits(model: nn.Module) -> bool:
    """Whether `model` is a sequence of linear layers, convolutions, and layers of PyTorch without weights.

    Only then is it known that its weights are used in no other way than by their layers. All of them are trained.
    """
    layers = list(_layers(model)) if type(model) is nn.Sequential else []
    return (
        any(_weighs(layer) for layer in layers)
        and len({id(layer) for layer in layers}) == len(layers)
        and len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False)))
        and all(parameter.requires_grad for parameter in model.parameters())
        and all(_weighs(layer) or _is_plain(layer) for layer in layers)
    )


def shortened_sum(
    model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss, factors: Factors
) -> tuple[dict[str, Tensor], Tensor] | None:
    """By parameter the sum of the examples' gradients times their factors, and the losses, `example`.

    Args:
        model: one that `fits`.
        inputs: `example ...` in model units.
        labels: `example`.
        factors: from the norms of each example's gradient for each parameter, in their order.

    Returns:
        None where a layer was given something of another shape than it is known for, or its output was changed.
    """
    found: list[_Slopes] = []
    outputs = inputs
    for layer in _layers(model):
        given, outputs = outputs, layer(outputs)
        if _weighs(layer):
            found.append(_Slopes(layer, given.detach(), outputs, given._version, outputs._version))
    if not all(slopes.known for slopes in found):
        return None
    losses = loss(outputs, labels, reduction="none")
    grads = torch.autograd.grad(losses.sum(), [slopes.output for slopes in found])
    terms = [term for slopes, grad in zip(found, grads, strict=True) for term in slopes.terms(grad)]
    shares = factors(torch.stack([term.norms for term in terms]))
    names = [name for name, _ in model.named_parameters()]
    sums = {name: term.sum(share) for name, term, share in zip(names, terms, shares, strict=True)}
    return sums, losses.detach()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a sequence and of those in it, in their order."""
    for layer in model.children():
        if type(layer) is nn.Sequential:
            yield from _layers(layer)
        else:
            yield layer


def _weighs(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def _is_plain(layer: nn.Module) -> bool:
    """Whether it is one of PyTorch's own that has neither weights nor layers in it."""
    own = type(layer).__module__.startswith("torch.nn.modules.")
    return own and not any(True for _ in layer.children()) and not layer.state_dict()


@dataclass(frozen=True)
class _Term:
    """Of one parameter, the norms of all examples' gradients, and how they are summed by factors, `example`."""

    norms: Tensor
    sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Slopes:
    """A layer, what it was given, what it made of that, and how often both had been changed by then."""

    layer: nn.Linear | nn.Conv2d
    given: Tensor
    output: Tensor
    given_version: int
    output_version: int

    @property
    def known(self) -> bool:
        """Whether nothing was changed in place since, and the gradients are those that `terms` makes."""
        unchanged = (self.given._version, self.output._version) == (self.given_version, self.output_version)
        if not isinstance(self.layer, nn.Conv2d):
            return unchanged and self.given.ndim == 2
        return unchanged and self.given.ndim == 4 and len(self.given) * self.layer.weight.numel() <= _AT_ONCE

    def terms(self, grad: Tensor) -> list[_Term]:
        """Of weight and bias, from the slope of the layer's output, `example ...`."""
        if isinstance(self.layer, nn.Conv2d):
            return _of_convolution(self.layer, self.given, grad)
        return _of_linear(self.layer, self.given, grad)


def _of_linear(layer: nn.Linear, given: Tensor, grad: Tensor) -> list[_Term]:
    norms = grad.norm(dim=1)
    weight = _Term(given.norm(dim=1) * norms, lambda share: (share[:, None] * grad).mT @ given)
    return [weight] if layer.bias is None else [weight, _Term(norms, lambda share: share @ grad)]


def _of_convolution(layer: nn.Conv2d, given: Tensor, grad: Tensor) -> list[_Term]:
    patches = unfold(given, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    grad = grad.flatten(2)
    weights, biases = torch.bmm(grad, patches.mT).flatten(1), grad.sum(2)
    weight = _Term(weights.norm(dim=1), lambda share: (share @ weights).view(layer.weight.shape))
    return [weight] if layer.bias is None else [weight, _Term(biases.norm(dim=1), lambda share: share @ biases)]
