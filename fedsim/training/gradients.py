"""Gradients of a batch: of the mean loss, or of each example's own loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedsim.base.errors import RunError, first_line
from fedsim.base.task import Loss
from fedsim.interfaces.algorithm import FeatureLoss
from fedsim.training.features import forward_with_features
from fedsim.training.ghost_clipping import clipped_sum
from fedsim.training.hooks import TrainingHooks
from fedsim.training.local_step import ModelStep
from fedsim.training.modes import forward

_MAX_GRADIENT_NUMBERS = 1 << 26
"""Most numbers in the gradients that are computed at once; the layers' memory grows with it."""
_VMAP_ERROR_WORDS = ("vmap", "batching rule", "functorch", "jvp")
"""Words in PyTorch's errors where a network cannot be computed for many examples at once."""


def put_gradient(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss,
    hooks: TrainingHooks,
    penalties: Callable[[], Sequence[Tensor]] = tuple,
    feature_loss: FeatureLoss | None = None,
) -> Tensor | None:
    """Compute the gradient of a batch, with defenses, and store it in the parameters of `model`.

    An empty batch, as Poisson sampling may draw it, has a gradient of zero, to which defenses may
    add noise.

    Args:
        model: its parameters have no gradient yet.
        inputs: `example ...` in model units.
        labels: `example`.
        penalties: returns further terms of the objective, functions of the parameters alone.
        feature_loss: computes a further term from the batch and its representation.

    Returns:
        The batch's mean loss without these terms; None for an empty batch.
    """
    step = ModelStep(model=model, loss=loss, sees_examples=hooks.sees_examples)
    with hooks.local_step(step):
        if len(inputs):
            inputs, labels = step.batch = hooks.replace_batch(inputs, labels)
        mean = _put_batch_gradient(model, inputs, labels, loss, hooks, penalties, feature_loss)
        hooks.replace_gradient(model)
    return mean


def _put_batch_gradient(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss,
    hooks: TrainingHooks,
    penalties: Callable[[], Sequence[Tensor]],
    feature_loss: FeatureLoss | None,
) -> Tensor | None:
    """Store the gradient before `on_gradient`; return the batch's mean loss, if it has examples."""
    if feature_loss is not None and (hooks.sees_examples or hooks.sampling is not None):
        raise RunError(
            "algorithm: it adds a term to the losses of examples, and a defense bounds their gradients, or samples "
            "them, without it; leave one of them out"
        )
    if hooks.sees_examples:
        mean = _put_example_gradients(model, inputs, labels, loss, hooks)
        _backward(penalties())
        return mean
    if not len(inputs):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        _backward(penalties())
        return None
    terms = list(penalties())
    if feature_loss is None:
        outputs = hooks.compute_outputs(model, inputs)
    else:
        outputs, features = forward_with_features(model, inputs, hooks.compute_outputs)
        terms.append(feature_loss(inputs, features))
    if labels.is_floating_point() and labels.ndim == outputs.ndim == 2 and labels.shape[1] != outputs.shape[1]:
        raise RunError(
            f"a defense makes labels of {labels.shape[1]} classes for a model of {outputs.shape[1]} outputs; let its "
            "of_client keep participation.num_classes"
        )
    objective = loss(outputs, labels)
    mean = objective.detach()
    if hooks.sampling is not None:
        objective = objective * (len(inputs) / hooks.expected_batch_size(len(inputs)))
    _backward((objective, *terms))
    return mean


def example_gradients(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the gradient of each example's own loss.

    Many examples are computed at once by `torch.func`, which accepts any network and takes no
    longer than hooks on each layer, as in Opacus; so only the accountants of Opacus are used. Where
    only the clipped sum is needed, `fedsim.training.ghost_clipping.clipped_sum` is faster than
    both. Networks with recurrent layers, which `torch.func` splits into their time steps, are given
    one example after the other. No example's gradient depends on another one, except for what
    dropout layers draw.

    Returns:
        The gradients, `example ...` by name of each trained parameter, and the losses, `example`.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    size = sum(p.numel() for p in trained.values())
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    if recurrent:
        compute, chunk_size = _single_gradient, 1
    else:
        compute, chunk_size = _vectorised_gradients, max(1, _MAX_GRADIENT_NUMBERS // size)
    if 0 < len(inputs) <= chunk_size and not recurrent:
        return compute(model, trained, inputs, labels, loss)
    gradients = {name: p.new_empty(len(inputs), *p.shape) for name, p in trained.items()}
    losses = next(iter(trained.values())).new_empty(len(inputs))
    for start in range(0, len(inputs), chunk_size):
        rows = slice(start, start + chunk_size)
        chunk_gradients, losses[rows] = compute(model, trained, inputs[rows], labels[rows], loss)
        for name, gradient in chunk_gradients.items():
            gradients[name][rows] = gradient
    return gradients, losses


def _single_gradient(
    model: nn.Module, trained: dict[str, nn.Parameter], inputs: Tensor, labels: Tensor, loss: Loss
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the gradient and the loss of a batch of one example."""
    objective = loss(forward(model, inputs), labels)
    gradients = torch.autograd.grad(objective, list(trained.values()), materialize_grads=True)
    return dict(zip(trained, gradients, strict=True)), objective.detach()


def _vectorised_gradients(
    model: nn.Module, trained: dict[str, nn.Parameter], inputs: Tensor, labels: Tensor, loss: Loss
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute all gradients and losses at once, as if each example were a batch of its own."""

    def example_loss(weights: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, weights, (example[None],)), label[None])

    weights = {name: parameter.detach() for name, parameter in trained.items()}
    compute = vmap(grad_and_value(example_loss), in_dims=(None, 0, 0), randomness="different")
    try:
        gradients, losses = compute(weights, inputs, labels)
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _VMAP_ERROR_WORDS):
            raise
        raise RunError(
            "the model: torch.func cannot compute the gradient of each of its examples "
            f"({first_line(error)}); write its forward pass without in-place changes and without "
            "Python numbers made of tensors, or choose another"
        ) from error
    return gradients, losses


def _put_example_gradients(
    model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss, hooks: TrainingHooks
) -> Tensor | None:
    """Store what a defense makes of the examples' gradients; return their mean loss, if any."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach() for name, p in parameters.items()}
    # The clipped sum alone is faster, where it is all that the defense needs.
    clipped = None
    if hooks.clipping_factors and len(inputs):
        clipped = clipped_sum(model, inputs, labels, loss, hooks.clipping_factors)
    if clipped is None:
        gradients, losses = example_gradients(model, inputs, labels, loss)
        defended = hooks.combine_examples(gradients, weights)
    else:
        total, losses = clipped
        defended = hooks.combine_sum(total, len(inputs), weights)
    for name, gradient in defended.items():
        parameters[name].grad = gradient
    return losses.mean() if len(inputs) else None


def _backward(terms: Sequence[Tensor]) -> None:
    """Add the gradient of the sum of `terms`, if there are any, to that of the parameters."""
    if terms:
        sum(terms[1:], start=terms[0]).backward()


def flatten_examples(values: Tensor) -> Tensor:
    """Return `example ...` as `example value`; a scalar parameter gives one value an example."""
    return values.flatten(1) if values.ndim > 1 else values[:, None]
