"""The last linear layer of a model and its gradient, from which labels are recovered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.loss_term import has_loss_term, loss_term_of
from fedsim.base.module_hooks import hook_outputs
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.defense import Defense, apply_adversary_views
from fedsim.inversion.model_checks import probe_inputs
from fedsim.inversion.problem import InversionProblem
from fedsim.recording.wire_format import State
from fedsim.training.first_layer import USE_TOLERANCE

_REMEDY = "grant them with adversary.knowledge.labels = true, and set align = false where there is such a setting"


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """Weights and one gradient of the last linear layer, which the label rules read.

    Attributes:
        weight: `class feature`, at w_t.
        bias: `class`, or None if the layer has none.
        weight_gradient: `class feature`, of the mean loss over the mini-batch.
        bias_gradient: `class`, or None if the layer has no bias.
        non_negative: the layer's inputs are not below 0, as after a ReLU.
    """

    weight: Tensor
    bias: Tensor | None
    weight_gradient: Tensor
    bias_gradient: Tensor | None
    non_negative: bool = True


def last_layer(problem: InversionProblem, dummy: Tensor) -> LastLayer:
    """Return the last linear layer of the gradient that a client sent.

    Assumes that the model's outputs go into the cross-entropy as they are.

    Args:
        dummy: `example ...`, standardised, any data that the model takes. The outputs for them show
            which layer is the last, and whether features may be below 0.
    """
    prefix, features = output_layer(problem.model, problem.scaling.to_model(dummy))
    indices = []
    for index, name in enumerate(problem.parameter_names):
        if name.rpartition(".")[0] == prefix:
            indices.append(index)
    weight_name = f"{prefix}.weight".removeprefix(".")
    if weight_name not in problem.parameter_names:
        raise untrained_layer_error(weight_name)
    direction = problem.direction
    before = [problem.before[index].double().cpu() for index in indices]
    gradient = [direction[index].double().cpu() for index in indices]
    has_bias = len(indices) > 1
    if has_bias and problem.defenses:
        names = [problem.parameter_names[index] for index in indices]
        layer = dict(zip(names, gradient, strict=True))
        gradient = list(fill_dropped_entries(layer, problem.defenses).values())
    return LastLayer(
        weight=before[0],
        bias=before[1] if has_bias else None,
        weight_gradient=gradient[0],
        bias_gradient=gradient[1] if has_bias else None,
        non_negative=bool((features >= 0).all()),
    )


def fill_dropped_entries(layer: State, defenses: Sequence[Defense]) -> State:
    """Fill in what known defenses dropped from the gradient of a linear layer, as far as possible.

    Row c of the weights' gradient is about the bias's c-th entry times the mean feature vector:
    exactly for one example, and nearly for classes that do not occur. That vector follows from the
    rows whose bias entry was sent, and the other bias entries follow from it. Of this estimate, the
    part that the defenses would have dropped, by their `adversary_view`, is filled in. If nothing
    of the bias was sent, nothing is filled in.

    Args:
        layer: `class feature` and `class`, the weights first; zeros may have been dropped.
    """
    (weight_name, weight), (bias_name, bias) = layer.items()
    tiny = torch.finfo(weight.dtype).tiny
    sent = (weight != 0).to(weight)
    # Estimate the mean features, the bias and the weights.
    features = (bias @ weight) / (bias.square() @ sent).clamp_min(tiny)
    fitted_bias = (weight @ features) / (sent @ features.square()).clamp_min(tiny)
    bias_estimate = torch.where(bias != 0, bias, fitted_bias)
    estimate: State = {
        weight_name: bias_estimate[:, None] * features,
        bias_name: bias_estimate,
    }
    # Fill in what the defenses drop of the estimate.
    defended = apply_adversary_views(defenses, estimate, layer) or estimate
    filled = {}
    for name, tensor in layer.items():
        filled[name] = torch.where(tensor != 0, tensor, estimate[name] - defended[name])
    return filled


@torch.no_grad()
def count_outputs(knowledge: Knowledge, *, by_bias: bool = False) -> int | None:
    """Return how many outputs the last linear layer has; None where no input is known that the network takes.

    Args:
        by_bias: only the layer's bias is read, so that its weights may be used elsewhere, too.

    Raises:
        KnowledgeError: the network does not end in such a layer, see `output_layer` and `last_bias_name`.
    """
    assert knowledge.model is not None
    model = deepcopy(knowledge.model()).eval()
    inputs = probe_inputs(model, knowledge)
    if inputs is None:
        return None
    name = last_bias_name(model, inputs) if by_bias else f"{output_layer(model, inputs)[0]}.weight"
    return len(model.get_parameter(name))


def output_layer(model: nn.Module, inputs: Tensor) -> tuple[str, Tensor]:
    """Find the linear layer whose outputs are the model's; return its name and its inputs.

    Args:
        inputs: `example ...`, as the model takes them.
    """
    name, features = _find_output_layer(model, inputs)
    _check_used_once(model, inputs, name, _copy_parameters(model, name))
    return name, features


def _find_output_layer(model: nn.Module, inputs: Tensor) -> tuple[str, Tensor]:
    """Find what `output_layer` does, whatever else uses the layer's weights and bias."""
    calls: list[tuple[str, nn.Module, tuple[Tensor, ...], Tensor]] = []

    def record(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((name, layer, inputs, output))

    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if not any(layer.children()):
                hooks.enter_context(hook_outputs(layer, partial(record, name)))
        outputs = model(inputs)
    # The last layer is the one whose output is that of the model, unchanged.
    linear = [call for call in calls if isinstance(call[1], nn.Linear)]
    last = next((call for call in reversed(linear) if torch.equal(call[3], outputs)), None)
    if last is None:
        end = "changes what its last linear layer gives" if linear else "has no linear layer"
        if calls and not isinstance(calls[-1][1], nn.Linear):
            end = f"ends in {type(calls[-1][1]).__name__}, not in a linear layer"
        raise KnowledgeError(f"labels cannot be recovered: the model {end}; {_REMEDY}")
    if outputs.ndim < 2 or outputs.shape[1] == 1:
        raise KnowledgeError(
            "labels cannot be recovered: the model has one output, whose gradient is summed over all examples, "
            f"targets and classes alike; {_REMEDY}"
        )
    if has_loss_term(outputs) and _term_moves_layer(model, last[0], inputs):
        raise KnowledgeError(
            "labels cannot be recovered: the term that the network adds to the loss changes the gradient of its last "
            f"linear layer, from which they are read; {_REMEDY}"
        )
    return last[0], last[2][0]


@torch.enable_grad()
def _check_used_once(model: nn.Module, inputs: Tensor, name: str, parameters: Mapping[str, Tensor]) -> None:
    """Raise KnowledgeError where outputs depend on parameters of the last layer in another way as well.

    The gradient of a random sum of outputs is compared with that of the layer alone.

    Args:
        inputs: `example ...`, as the model takes them.
        parameters: copies of those that are read, by name; none of a layer that clients do not train.
    """
    if not parameters:
        return
    calls: list[tuple[Tensor, Tensor]] = []
    layer = model.get_submodule(name)
    with hook_outputs(layer, lambda _, arguments, output: calls.append((arguments[0].detach(), output))):
        outputs = functional_call(model, dict(parameters), (inputs,))
    # The layer may be called for something else that does not enter the outputs.
    features = next(features for features, output in reversed(calls) if torch.equal(output, outputs))
    weights = torch.randn(outputs.shape, generator=generator("uses of a layer")).to(outputs)
    gradients = torch.autograd.grad((outputs * weights).sum(), list(parameters.values()), materialize_grads=True)
    rows = weights.flatten(0, -2).float()
    expected = {"weight": rows.T @ features.flatten(0, -2).float(), "bias": rows.sum(0)}
    for key, gradient in zip(parameters, gradients, strict=True):
        kind = key.rpartition(".")[2]
        if kind not in expected:
            raise KnowledgeError(
                "labels cannot be recovered: the model computes the weights of its last linear layer from others, as "
                f"'{key}'; {_REMEDY}"
            )
        if (gradient.float() - expected[kind]).norm() > USE_TOLERANCE * gradient.norm():
            raise KnowledgeError(
                f"labels cannot be recovered: the model uses '{key}' of its last linear layer elsewhere, too, which "
                f"changes its gradient; {_REMEDY}"
            )


def _term_moves_layer(model: nn.Module, layer: str, inputs: Tensor) -> bool:
    """Return whether the loss term that comes with the outputs depends on the parameters of a layer."""
    parameters = _copy_parameters(model, layer)
    with torch.enable_grad():
        term = loss_term_of(functional_call(model, parameters, (inputs,)))
        if term is None or not term.requires_grad or not parameters:
            return False
        gradients = torch.autograd.grad(term.sum(), list(parameters.values()), allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _copy_parameters(model: nn.Module, layer: str) -> dict[str, Tensor]:
    """Return copies of the parameters of a layer, also of those that it shares with another one."""
    every = model.named_parameters(remove_duplicate=False)
    return {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in every
        if name.rpartition(".")[0] == layer
    }


@torch.no_grad()
def last_bias_name(model: nn.Module, inputs: Tensor) -> str:
    """Return the name of the bias of the layer whose outputs are the model's.

    The layer's weights may be those of another one, as of an embedding: they change nothing of the bias's gradient.
    """
    name, _ = _find_output_layer(model, inputs)
    if model.get_submodule(name).bias is None:
        raise KnowledgeError(
            "labels are withheld and cannot be counted: the model's last linear layer has no bias; "
            "grant them with adversary.knowledge.labels = true"
        )
    bias = f"{name}.bias".removeprefix(".")
    read = {key: parameter for key, parameter in _copy_parameters(model, name).items() if key == bias}
    _check_used_once(model, inputs, name, read)
    return bias


def has_own_weights(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether the layer whose outputs are the model's has weights that nothing else uses or computes."""
    try:
        name, _ = output_layer(model, inputs)
    except KnowledgeError:
        return False
    return f"{name}.weight".removeprefix(".") in dict(model.named_parameters())


def untrained_layer_error(name: str) -> KnowledgeError:
    """Return the error for a last layer that was not trained.

    Args:
        name: of its weight or bias.
    """
    return KnowledgeError(f"labels cannot be recovered: {name} of the last linear layer did not move; {_REMEDY}")


def apportion_counts(counts: Tensor, total: int) -> Tensor:
    """Round `counts` to integers that sum to `total`, in proportion where they are above 0.

    If none is above 0, which noise can cause, all classes count nearly alike, the largest most.
    What rounding down leaves over goes to the largest remainders, on ties in the order of the
    classes.

    >>> apportion_counts(torch.tensor([1.6, 0.9, -0.5]), 5)
    tensor([3, 2, 0])
    """
    if not counts.isfinite().all():
        raise AttackError(
            "labels cannot be counted: what counts them is NaN or infinite, as the model's outputs may be"
        )
    positive = counts.clamp_min(0)
    if not positive.any():
        positive = 1 + (counts - counts.max()).softmax(0)
    floor = (positive / positive.sum() * total).floor().long()
    missing = total - int(floor.sum())
    remainders = positive / positive.sum() * total - floor
    floor[remainders.argsort(descending=True, stable=True)[:missing]] += 1
    return floor


def expand_counts(counts: Tensor) -> Tensor:
    """Return `example`, each class as often as `counts` says, in ascending order.

    >>> expand_counts(torch.tensor([2, 0, 1]))
    tensor([0, 0, 2])
    """
    return torch.repeat_interleave(torch.arange(len(counts)), counts)
