"""The gradient of a batch: that of the mean loss, or one of each example's own loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedsim.errors import RunError, first_line
from fedsim.task import Loss
from fedsim.training.hooks import Hooks
from fedsim.training.modes import forward
from fedsim.training.shortened import shortened_sum

_AT_ONCE = 1 << 26
"""Most numbers in the gradients that are computed at once; what the layers need for it grows alike."""
_UNABLE = ("vmap", "batching rule", "functorch")
"""What PyTorch's errors speak of where a network cannot be computed for many examples at once."""


def put_gradient(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss,
    hooks: Hooks,
    penalties: Callable[[], Sequence[Tensor]] = tuple,
) -> Tensor | None:
    """Leave the gradient of a batch, defended, in `grad` of each parameter of `model`, which has none yet.

    An empty batch, as Poisson sampling may draw it, has a gradient of zero, which defenses may add noise to.

    Args:
        inputs: `example ...` in model units.
        labels: `example`.
        penalties: returns what is minimised besides, functions of the parameters alone.

    Returns:
        The batch's mean loss without penalties; None of an empty batch.

    Raises:
        RunError: a defense failed, BatchNorm was to normalise a batch of one example, or this network has no gradient
            of each example.
    """
    mean = None
    if len(inputs):
        inputs, labels = hooks.batch(inputs, labels)
    if hooks.sees_examples:
        mean = _put_from_examples(model, inputs, labels, loss, hooks)
        _backward(penalties())
    elif len(inputs):
        objective = loss(hooks.outputs(model, inputs), labels)
        mean = objective.detach()
        if hooks.sampling is not None:
            objective = objective * (len(inputs) / hooks.expected(len(inputs)))
        _backward((objective, *penalties()))
    else:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        _backward(penalties())
    hooks.gradient(model)
    return mean


def example_gradients(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of each example's own loss, `example ...` by parameter that is trained, and the losses, `example`.

    Many examples are computed at once, by `torch.func`, which takes any network, and no longer than one layer after the
    other with hooks, as Opacus does. Where only their clipped sum is needed, `shortened_sum` is faster than both. So
    of Opacus only the accountants are used. Recurrent layers, which `torch.func` takes apart into their steps, see one
    example after the other.
    No example's gradient depends on another one, except for what dropout layers draw.

    Raises:
        RunError: `torch.func` cannot compute this network.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    size = sum(p.numel() for p in trained.values())
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    compute, width = (_one, 1) if recurrent else (_several, max(1, _AT_ONCE // size))
    if 0 < len(inputs) <= width and not recurrent:
        return compute(model, trained, inputs, labels, loss)
    each = {name: p.new_empty(len(inputs), *p.shape) for name, p in trained.items()}
    losses = next(iter(trained.values())).new_empty(len(inputs))
    for start in range(0, len(inputs), width):
        rows = slice(start, start + width)
        found, losses[rows] = compute(model, trained, inputs[rows], labels[rows], loss)
        for name, gradient in found.items():
            each[name][rows] = gradient
    return each, losses


def _one(
    model: nn.Module, trained: dict[str, nn.Parameter], inputs: Tensor, labels: Tensor, loss: Loss
) -> tuple[dict[str, Tensor], Tensor]:
    """Of a batch of one example."""
    objective = loss(forward(model, inputs), labels)
    slopes = torch.autograd.grad(objective, list(trained.values()), materialize_grads=True)
    return dict(zip(trained, slopes, strict=True)), objective.detach()


def _several(
    model: nn.Module, trained: dict[str, nn.Parameter], inputs: Tensor, labels: Tensor, loss: Loss
) -> tuple[dict[str, Tensor], Tensor]:
    """Of a batch at once, as if each example were a batch of its own."""

    def own_loss(weights: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, weights, (example[None],)), label[None])

    weights = {name: parameter.detach() for name, parameter in trained.items()}
    compute = vmap(grad_and_value(own_loss), in_dims=(None, 0, 0), randomness="different")
    try:
        gradients, losses = compute(weights, inputs, labels)
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _UNABLE):
            raise
        raise RunError(
            f"the model: torch.func cannot compute the gradient of each of its examples ({first_line(error)}); write "
            "its forward pass without in-place changes and without Python numbers made of tensors, or choose another"
        ) from error
    return gradients, losses


def _put_from_examples(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss, hooks: Hooks) -> Tensor | None:
    """Leave in `grad` what a defense makes of the gradients of single examples; the mean loss, if there are any."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach() for name, p in parameters.items()}
    summed = shortened_sum(model, inputs, labels, loss, hooks.factors) if hooks.factors and len(inputs) else None
    if summed is None:
        each, losses = example_gradients(model, inputs, labels, loss)
        made = hooks.examples(each, weights)
    else:
        total, losses = summed
        made = hooks.summed(total, len(inputs), weights)
    for name, gradient in made.items():
        parameters[name].grad = gradient
    return losses.mean() if len(inputs) else None


def _backward(terms: Sequence[Tensor]) -> None:
    """Add the gradient of the sum of `terms`, if there are any."""
    if terms:
        sum(terms[1:], start=terms[0]).backward()  # type: ignore[no-untyped-call]


def rows_of_examples(values: Tensor) -> Tensor:
    """Return `example ...` as `example value`; of a parameter without axes, each example has one value."""
    return values.flatten(1) if values.ndim > 1 else values[:, None]
