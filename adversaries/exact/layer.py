"""First linear layer of an update: how it changed, and which units an input leaves silent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.exact.mixture import InputMixture
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.interfaces.attack import Knowledge, warn
from fedsim.inversion.labels.last_layer import output_layer
from fedsim.inversion.model_checks import random_inputs
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.restart import claimed_labels
from fedsim.recording.wire_format import Update
from fedsim.training.first_layer import find_first_layer, is_rectified

_REMEDY = "choose an attack that matches gradients, such as sme"
_DECAY_ROUNDS, _WORTHWHILE, _TINY = 30, 0.9, 1e-300


@dataclass(frozen=True, kw_only=True)
class FirstLayer:
    """First linear layer z = W x + c of an update, in float64 on the CPU.

    Attributes:
        problem: the update as a whole.
        shape: of one example.
        weight: `unit input`, W_0 - W_T, or the gradient that was sent.
        bias: `unit`, likewise for c.
        endpoints: W, `unit input`, and c, `unit`, at w_0 and at w_T, or only at w_0 if a gradient
            was sent.
    """

    problem: InversionProblem
    shape: tuple[int, ...]
    name: str
    weight: Tensor
    bias: Tensor
    endpoints: tuple[tuple[Tensor, Tensor], ...]

    def silence(self, inputs: Tensor) -> Tensor:
        """Return `example unit`, how far z stays below 0 at w_0 and w_T; negative if it fires.

        Args:
            inputs: `example input`, float64.
        """
        return -self._preactivations(inputs).amax(0)

    def agreement(self, inputs: Tensor, zeros: Tensor, units: Tensor) -> Tensor:
        """Return `example`, the share of units about which inputs and update agree.

        Units count if they are silent at both ends for the example, or fire at both.

        Args:
            inputs: `example input`, float64.
            zeros: `unit example`, where no gradient of the example reached the unit.
            units: `unit`, their indices.
        """
        preactivations = self._preactivations(inputs)[:, :, units]
        silent, fires = preactivations.amax(0) < 0, preactivations.amin(0) > 0
        wrong = (silent & ~zeros.T) | (fires & zeros.T)
        return 1 - wrong.sum(1) / (silent | fires).sum(1).clamp_min(1)

    def _preactivations(self, inputs: Tensor) -> Tensor:
        """Return `end example unit`, z at w_0 and at w_T."""
        return torch.stack([inputs @ weight.T + bias for weight, bias in self.endpoints])

    def clamp_inputs(self, inputs: Tensor) -> Tensor:
        """Clamp inputs, `example input`, to the range of an input."""
        scaling, values = self.problem.scaling, inputs.reshape(-1, *self.shape)
        return values.clamp(scaling.low.double().cpu(), scaling.high.double().cpu()).flatten(1)

    def to_unit_range(self, inputs: Tensor) -> Tensor:
        """Return the data of a finding, `example ...`, for `example input`: float32 in [0, 1]."""
        scaling, values = self.problem.scaling, inputs.reshape(-1, *self.shape)
        low, high = scaling.low.double().cpu(), scaling.high.double().cpu()
        return ((values - low) / (high - low)).clamp(0, 1).float()

    @property
    def range_width(self) -> float:
        """Return the width of the range of an input; for several channels the narrowest."""
        return float((self.problem.scaling.high - self.problem.scaling.low).min())


def read_first_layer(update: Update, knowledge: Knowledge, *, relu: bool = True) -> FirstLayer:
    """Read the first linear layer of an update, without what weight decay did to it.

    Args:
        relu: the attack reads the zeros of ReLU, and so needs one behind the layer.
    """
    assert knowledge.input_shape is not None
    problem = build_problem(update, knowledge, body_alone=True)
    probes = random_inputs(knowledge, problem.before[0])
    weight, bias = _find_weight_and_bias(problem.model, problem.parameter_names, probes, problem.where)
    name = weight.rpartition(".")[0]
    # Read how it changed.
    weight_index, bias_index = problem.parameter_names.index(weight), problem.parameter_names.index(bias)
    direction = problem.direction
    weight_change = direction[weight_index].double().cpu()
    bias_change = direction[bias_index].double().cpu()
    if not weight_change.any():
        raise AttackError(
            f"{problem.where}: the first linear layer '{name}' did not move, as where all its "
            f"units are dead or all inputs are 0; {_REMEDY}"
        )
    if not bias_change.any():
        raise AttackError(
            f"{problem.where}: the bias of the first linear layer '{name}' did not move, from "
            f"which the scale of each input is read; {_REMEDY}"
        )
    # Read its weights at both ends.
    ends = []
    for state in (problem.before, problem.after) if problem.after else (problem.before,):
        ends.append((state[weight_index].double().cpu(), state[bias_index].double().cpu()))
    layer = FirstLayer(
        problem=problem,
        shape=tuple(knowledge.input_shape),
        name=name,
        weight=weight_change,
        bias=bias_change,
        endpoints=tuple(ends),
    )
    layer = _remove_weight_decay(layer)
    if relu and not is_rectified(problem.model, name, probes):
        raise _missing_relu_error(problem.where, name, _suggest_without_relu(layer))
    return layer


def check_first_layer(
    knowledge: Knowledge, num_examples: int | None = None, *, relu: bool = True, stacked: bool = False
) -> None:
    """Check the first linear layer of the network as it is built, before any message is there.

    Args:
        num_examples: N, which it has to distinguish; None where it is not known yet.
        relu: whether a ReLU has to follow it.
        stacked: the units of several rounds are read together, however many they are (`stack_layers`).

    Raises:
        AttackError: there is no such layer that can be read, or it cannot distinguish so many examples.
    """
    where = "the network"
    assert knowledge.model is not None
    model = deepcopy(knowledge.model()).eval()
    parameters = dict(model.named_parameters())
    # A network of which nothing needs a gradient was frozen to be run; it does not say what clients train.
    names = [name for name, parameter in parameters.items() if parameter.requires_grad] or list(parameters)
    probes = random_inputs(knowledge, next(iter(parameters.values())))
    weight, _ = _find_weight_and_bias(model, names, probes, where)
    name = weight.rpartition(".")[0]
    if relu and not is_rectified(model, name, probes):
        raise _missing_relu_error(where, name, _REMEDY)
    units, inputs = model.get_parameter(weight).shape
    most = (inputs if stacked else min(units, inputs)) - 1
    if num_examples is not None and num_examples > most:
        raise AttackError(
            f"N is {num_examples}, but the network's first linear layer, with {units} units and {inputs} inputs, "
            f"distinguishes at most {most} examples; attack clients with fewer examples, or {_REMEDY}"
        )


def check_first_layer_is_sent(update: Update, knowledge: Knowledge) -> None:
    """Raise AttackError where messages of the form of `update` hold no first linear layer that is trained."""
    problem = build_problem(update, knowledge, body_alone=True)
    probes = random_inputs(knowledge, problem.before[0])
    _find_weight_and_bias(problem.model, problem.parameter_names, probes, update.name)


def _missing_relu_error(where: str, name: str, remedy: str) -> AttackError:
    return AttackError(
        f"{where}: no ReLU directly follows the first linear layer '{name}', whose zeros distinguish the inputs; "
        f"{remedy}"
    )


def _find_weight_and_bias(model: nn.Module, trained: Collection[str], probes: Tensor, where: str) -> tuple[str, str]:
    """Return the names of the weight and the bias of the first linear layer, which are both trained."""
    input_layer = find_first_layer(model, probes)
    if input_layer is None or input_layer.weight not in trained:
        raise AttackError(
            f"{where}: no linear layer that is trained and sent takes the inputs themselves "
            "(convolutions, embeddings, dropout or a normalisation come first, or its weights are used twice, as by a "
            f"term of the loss); {_REMEDY}"
        )
    name = input_layer.weight.rpartition(".")[0]
    bias = f"{name}.bias".removeprefix(".")
    if bias not in trained:
        raise AttackError(
            f"{where}: the first linear layer '{name}' has no bias that is trained, from "
            f"which the scale of each input is read; {_REMEDY}"
        )
    if not input_layer.bias_is_used_once:
        raise AttackError(
            f"{where}: the model uses the bias of the first linear layer '{name}' elsewhere, too, so that its "
            f"change does not reveal the scale of each input; {_REMEDY}"
        )
    return input_layer.weight, bias


def _suggest_without_relu(layer: FirstLayer) -> str:
    """Return what to do where no ReLU follows the layer; behind BatchNorm the bias does not move either."""
    try:
        InputMixture.from_update(layer.weight, layer.bias, layer.problem.num_examples, "", exact=False)
    except AttackError:
        return _REMEDY
    return "choose 'cocktail-party' without refine, which needs none"


def _remove_weight_decay(layer: FirstLayer) -> FirstLayer:
    """Return the layer's change without the part of weight decay, if there is any.

    In each step of SGD, with momentum or without, weight decay adds a multiple of the weights to
    the gradient, and the same or another one, often none, of the biases. So in the end multiples of
    w_0 were added to what the inputs made of the update. The latter has a rank of N at most, which
    gives the multiples: they minimise what remains without the N largest directions.
    """
    weight, bias = layer.endpoints[0]
    num_examples = layer.problem.num_examples
    starts = [
        torch.cat([weight, 0 * bias[:, None]], 1),
        torch.cat([0 * weight, bias[:, None]], 1),
    ]
    change = torch.cat([layer.weight, layer.bias[:, None]], 1)
    if len(change) < change.shape[1]:
        change, starts = change.T, [start.T for start in starts]
    if num_examples >= change.shape[1]:  # nothing would be left
        return layer
    multiples = [0.0, 0.0]
    for _ in range(_DECAY_ROUNDS):
        # Take away the multiples so far, and then the N largest directions.
        decay = sum(multiple * start for multiple, start in zip(multiples, starts, strict=True))
        data_part = change - decay
        largest = torch.linalg.eigh(data_part.T @ data_part).eigenvectors[:, -num_examples:]
        residual = data_part - data_part @ largest @ largest.T
        start_residuals = [(start - start @ largest @ largest.T).flatten() for start in starts]
        design = torch.stack(start_residuals, 1)
        # Fit the residual by multiples of w_0.
        norms = torch.stack([start.norm() for start in starts]).clamp_min(_TINY)
        gram = design.T @ design / norms / norms[:, None] + _TINY * torch.eye(2, dtype=norms.dtype)
        target = (design.T @ residual.flatten() / norms)[:, None]
        steps = torch.linalg.lstsq(gram, target).solution[:, 0] / norms
        unexplained = float((residual.flatten() - design @ steps).norm())
        if unexplained > _WORTHWHILE * float(residual.norm()):
            break
        multiples = [m + float(step) for m, step in zip(multiples, steps, strict=True)]
    if not any(multiples):
        return layer
    return replace(
        layer,
        weight=layer.weight - multiples[0] * weight,
        bias=layer.bias - multiples[1] * bias,
    )


def stack_layers(layers: Sequence[FirstLayer]) -> FirstLayer:
    """Stack the layers of several updates that are made of the same inputs, with the units of all.

    N of the result is the largest of theirs.
    """
    largest = max(layers, key=lambda layer: layer.problem.num_examples)
    names = [layer.problem.where for layer in layers]
    where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    ends = []
    for states in zip(*(layer.endpoints for layer in layers), strict=True):
        weights, biases = zip(*states, strict=True)
        ends.append((torch.cat(weights), torch.cat(biases)))
    return replace(
        largest,
        problem=replace(largest.problem, where=where),
        weight=torch.cat([layer.weight for layer in layers]),
        bias=torch.cat([layer.bias for layer in layers]),
        endpoints=tuple(ends),
    )


def read_labels(layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Recover the label of each input from the update of the last layer.

    It is `example`, of several labels or numbers `example target`, or of masks `example height width`.

    With the cross-entropy the update of the last layer is G^T H, where H holds the features of one
    example a row and G, `example class`, is below 0 at the true class only. G is found by least
    squares for the features at w_0. With the binary cross-entropy of several labels it is below 0
    where an example has the label. If the model does not end in such a layer, and for numbers,
    labels are what the returned model, or else that at w_0, predicts; so are masks.

    Args:
        inputs: `example input`, in the model's range.
    """
    problem = layer.problem
    values = inputs.reshape(-1, *layer.shape).to(problem.before[0])
    if problem.unknown_names:
        warn(f"{problem.where}: a part of the model never left the client, so labels are guesses of a random one")
    try:
        problem.model.load_state_dict(_state_of(problem, problem.before), strict=False)
        name, last_inputs = output_layer(problem.model, values)
        weight_index = problem.parameter_names.index(f"{name}.weight".removeprefix("."))
        bias_index = problem.parameter_names.index(f"{name}.bias".removeprefix("."))
    except (KnowledgeError, ValueError):
        return _predict_with_warning(layer, inputs)
    if problem.goal in ("numbers", "masks"):
        return _predict_with_warning(layer, inputs)
    direction = problem.direction
    weight = direction[weight_index].double().cpu()
    bias = direction[bias_index].double().cpu()
    ones = torch.ones(len(values), 1, dtype=torch.float64)
    features = torch.cat([last_inputs.double().cpu(), ones], 1)
    change = torch.cat([weight, bias[:, None]], 1)
    gradients: Tensor = torch.linalg.lstsq(features.T, change.T, driver="gelsd").solution
    return (gradients < 0).float() if problem.goal == "labels" else gradients.argmin(1)


def _predict_with_warning(layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Return what `predict_labels` does, and warn that no more is known of the labels."""
    warn(f"{layer.problem.where}: labels cannot be read from the last layer; they are what the model predicts")
    return predict_labels(layer, inputs)


def predict_labels(layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Return the label of each input as the returned model, or else that at w_0, predicts it.

    It is `example`, of several labels or numbers `example target`, or of masks `example height width`.

    Args:
        inputs: `example input`, in the model's range.
    """
    problem = layer.problem
    values = inputs.reshape(-1, *layer.shape).to(problem.before[0])
    state = _state_of(problem, problem.after or problem.before)
    with torch.no_grad():
        outputs: Tensor = functional_call(problem.model, state, (values,))
    if problem.goal == "masks":
        return outputs.argmax(1).cpu()
    outputs = outputs.reshape(len(values), -1)
    if outputs.shape[1] == 1 and problem.goal != "labels":
        return outputs[:, 0].float().cpu()
    return claimed_labels(problem, outputs.float()).cpu()


def _state_of(problem: InversionProblem, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the state of the model with these weights."""
    return {**dict(zip(problem.parameter_names, weights, strict=True)), **problem.buffers}
