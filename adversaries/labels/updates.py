"""Labels from an update of any number of steps, by counting or, after many steps, by simulated training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from adversaries.labels.last_layer import LastLayer, apportioned, completed, last_bias, spelled_out, untrained
from adversaries.labels.logit_gradient import logit_gradient
from adversaries.named_states import NamedStates, named_states
from adversaries.scene import known_steps
from fedsim.attacks import Knowledge
from fedsim.defense import Defense
from fedsim.errors import KnowledgeError, RunError
from fedsim.training.loop import local_update
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State, Update

log = logging.getLogger("fedsim." + __name__)

_PROBES = 512
_TURNS = 20
_SIMULATED_STEPS = 1000
_GROWN = 2.0  # features of noise that grow or shrink by more do not stay as they are
_UNEXPLAINED = 0.5  # share of the movement of the bias that a simulation may leave over
_TRAININGS = 4  # of a copy of the model
_SHORT = 1.0  # learning rate x local steps up to which noise counts better than simulations of noise correct
_LEAST_PART = 0.02  # of the movement by the slope at w_0, to divide by
_LONG = 2.0  # learning rate x local steps from which counts were found to come near to guessing
_STEADY = 0.1  # where what the model makes of noise changed by less (total variation), noise stands in for data


@torch.no_grad()
def count_labels(
    update: Update, knowledge: Knowledge, model: nn.Module, before: State, after: State, rng: torch.Generator
) -> Tensor:
    """Count labels from the last linear layer of a FedAvg update of any number of steps.

    With the mean cross-entropy, the mean gradient of that layer's bias over N examples is p_c - n_c / N, where p is
    the mean softmax output and n_c the number of examples of class c. So over a round the bias moves
    by -s (p_c - n_c / N), with s = learning rate x local steps and p averaged along the way. A first p
    is that of noise inputs, averaged over both ends of the round. With many steps at a large rate noise no longer
    stands in for data: p then comes from simulating the layer's training (`_by_simulation`) or, where layers below
    changed the features too, that of the whole model (`_by_trained_copy`). Where neither explains the update, or
    training was long enough to fit the client's data, a warning says that counts may come near to guessing
    (`benchmarks/label_counts.py`). Where the learning rate, E and B are withheld, nothing is simulated, and s is read
    off a class that does not occur, for which the ratio of movement to p is largest; so at least one class must be
    absent then. A gradient that was sent is that of one step at w_0 and is read as it is: there s is 1 and p that at
    w_0. Where clients minimise a cross-entropy with class weights or label smoothing, or a sum, the formulas are those
    of its derivative (`logit_gradient`), and nothing is simulated.

    Args:
        before: w_0 under the names of `model`'s parameters.
        after: w_T likewise; not read where a gradient was sent.

    Returns:
        `example`, N labels in ascending order.

    Raises:
        KnowledgeError: the model has no final linear layer with a bias for each class, or no classes; or the loss is
            no cross-entropy.

    References:
        Dimitrov et al.: Data Leakage in Federated Averaging, TMLR 2022; Geng et al.:
        Towards General Deep Leakage in Federated Learning, 2021. Differs: counts by the bias instead of
        the weights. Chen and Vikalo: Recovering Labels from Local Updates in Federated Learning, ICML 2024, for how
        sure the model is of each class, simulated over the steps. Differs: see `_by_simulation`.
        Assumes SGD, with momentum where that is granted; with Adam counts are rougher.
    """
    probes = _probes(model, knowledge, rng)
    name = last_bias(model, probes)
    states = named_states(update, model, f"round {update.round}, client {update.client}")
    directions = layer_directions(name, states, knowledge.defenses or ())
    moved = directions[name]
    if not moved.any():
        if not model.get_parameter(name).requires_grad:
            raise untrained(name)
        log.warning("round %d, client %d: %s was not sent; labels are guesses", update.round, update.client, name)
    form = logit_gradient(knowledge.loss or cross_entropy, len(moved), knowledge.device)
    if update.gradient is not None:
        seen = _seen(model, name, before, probes)[0]
        return spelled_out(form.count(seen, moved, update.num_examples))
    (first, start), (q, end) = (_seen(model, name, weights, probes) for weights in (before, after))
    p = (first + q) / 2
    known = steps_times_rate(update.num_examples, knowledge)
    if not (known or form.is_mean_cross_entropy):
        raise KnowledgeError(
            "labels cannot be counted: the loss that clients minimise is not the mean cross-entropy alone, and the "
            "size of their steps is not known; grant learning_rate, local_epochs and batch_size, or the labels with "
            "adversary.knowledge.labels = true"
        )
    scale = known or (moved / p.clamp_min(1e-12)).max().item()
    if not scale > 0:
        scale = moved.abs().max().item() or 1.0
    count = update.num_examples
    steps = known_steps(knowledge, count)
    if not (known and steps):
        return spelled_out(form.count(p, moved / scale, count))
    if not form.is_mean_cross_entropy:  # what follows simulates that
        if scale > _SHORT:
            log.warning(
                "round %d, client %d: learning rate x local steps is %.3g; counts may come near to guessing",
                update.round,
                update.client,
                scale,
            )
        return spelled_out(form.count(p, moved / scale, count))
    shares = p - moved / scale
    layer = _moved_layer(states.before, directions, scale, non_negative=bool((start >= 0).all()))
    found = None
    if _GROWN > end.norm() / start.norm().clamp_min(1e-12) > 1 / _GROWN:
        found = _by_simulation(layer, shares, ((start + end) / 2).mean(0), count, steps, scale)
    labels, cause = spelled_out(apportioned(shares if found is None else found, count)), ""
    steady = (q - first).abs().sum() / 2 <= _STEADY
    if not steady and scale > _LONG:
        cause = f"learning rate x local steps is {scale:.3g}, long enough to fit its data"
    if not steady and found is None:
        slope = moved / scale
        labels, unexplained = _by_trained_copy(model, update, before, slope, name, labels, first, probes, knowledge)
        if unexplained > _UNEXPLAINED:
            cause = "training that is simulated with the labels that were counted does not explain the update"
    if cause:
        log.warning("round %d, client %d: %s; counts may come near to guessing", update.round, update.client, cause)
    return labels


def _by_simulation(
    layer: LastLayer, first: Tensor, noise: Tensor, num_examples: int, steps: int, scale: float
) -> Tensor | None:
    """Shares of the classes with which simulated training of the last layer moves it as it was seen to move.

    One feature vector x_k stands for each class. Training from w_0 with shares n_k / N and these vectors shows how
    sure of class c the model is about examples of class k, p_kc, on average over the steps. The mean gradients of bias
    and weights, sum_k (n_k / N) p_kc - n_c / N and sum_k (n_k / N) p_kc x_k - (n_c / N) x_c, then give shares and
    vectors, and all that is done in turn. Assumes SGD with whole batches, and vectors that stay as they are.

    Args:
        layer: at w_0, with gradients that are means over the steps.
        first: shares to start from, as `apportioned` takes them.
        noise: `feature`, of noise; the vectors start there where every class occurs.
        scale: learning rate x local steps.

    Returns:
        `class`; None where the simulation, with the shares it found, moves the bias otherwise than it moved.

    References:
        Chen and Vikalo: Recovering Labels from Local Updates in Federated Learning, ICML 2024. Differs: reads the
        vectors off the update, where the paper has an auxiliary data set, simulates each step of the layer, where it
        draws logits for each epoch, and does not leave the layer's weights out.
    """
    assert layer.bias_gradient is not None
    slope, target = layer.bias_gradient, layer.weight_gradient
    steps = min(steps, _SIMULATED_STEPS)
    share = _shares(first)
    features = _of_absent(layer, share, noise, num_examples).expand_as(target)
    for _ in range(_TURNS):
        sure = _sureness(layer, features, share, steps, scale / steps)
        simulated = share @ sure - share
        share = (share + _shares(share @ sure - slope)) / 2
        solved = ((share[:, None] * sure).mT @ features - target) / share[:, None].clamp_min(1 / num_examples)
        if layer.non_negative:
            solved = solved.clamp_min(0)
        counted = share[:, None] > 0.5 / num_examples
        features = torch.where(counted, solved, _of_absent(layer, share, noise, num_examples))
    return share if (simulated - slope).norm() <= _UNEXPLAINED * slope.norm() else None


def _by_trained_copy(
    model: nn.Module,
    update: Update,
    before: State,
    slope: Tensor,
    name: str,
    labels: Tensor,
    first: Tensor,
    probes: Tensor,
    knowledge: Knowledge,
) -> tuple[Tensor, float]:
    """The labels with which training the whole model on noise moves the last bias most nearly as it was seen to move.

    A copy is trained from w_0 on noise with the labels so far; where that explains the update, or where a round moves
    little (`_SHORT`), they stay. Else shares of the classes are corrected by 1/a of the difference between the
    movements of the bias, where a is how far it moves in the simulation, as a share of how far the slope at w_0 alone
    would move it; and that in turn.

    Args:
        slope: `class`, how far the bias moved, over learning rate x local steps.
        name: of that bias.
        labels: `example`, to start from.
        first: `class`, the mean softmax output at w_0, of noise.
        probes: noise.

    Returns:
        The labels, and what their simulation leaves over, as a share of the movement that was seen.

    References:
        Chen and Vikalo: Recovering Labels from Local Updates in Federated Learning, ICML 2024. Differs: trains on
        noise, where the paper has an auxiliary data set, and reads the movement of the bias alone.
    """
    count = update.num_examples
    steps, rate = known_steps(knowledge, count), knowledge.learning_rate
    if steps is None or rate is None or steps > _SIMULATED_STEPS:
        return labels, float("inf")
    plan = LocalTraining(
        local_epochs=knowledge.local_epochs if knowledge.local_steps is None else None,
        local_steps=knowledge.local_steps,
        batch_size=knowledge.batch_size or count,
        learning_rate=rate,
        momentum=knowledge.momentum or 0.0,
        weight_decay=knowledge.weight_decay or 0.0,
        proximal_mu=knowledge.proximal_mu or 0.0,
    )
    scale, own = steps_times_rate(count, knowledge) or 1.0, deepcopy(model)
    inputs, key = probes[torch.arange(count) % len(probes)], (update.round, update.client)
    tried: list[tuple[float, Tensor]] = []
    for _ in range(_TRAININGS if scale > _SHORT else 1):
        try:
            with torch.enable_grad():
                end, _ = local_update(own, before, inputs, labels.to(inputs.device), plan, key=key)
        except RunError:  # it diverged, or BatchNorm got one example
            tried.append((float("inf"), labels))
            break
        share = labels.bincount(minlength=len(slope)).double() / count
        simulated = (before[name] - end[name]).double().cpu() / scale
        tried.append((((simulated - slope).norm() / slope.norm().clamp_min(1e-12)).item(), labels))
        if tried[0][0] <= _UNEXPLAINED:
            break
        away = first - share
        part = (simulated @ away / (away @ away).clamp_min(1e-12)).clamp(_LEAST_PART, 1)
        labels = spelled_out(apportioned(share + (simulated - slope) / part, count))
    unexplained, labels = min(tried, key=lambda one: one[0])
    return labels, unexplained


def _sureness(layer: LastLayer, features: Tensor, share: Tensor, steps: int, rate: float) -> Tensor:
    """`class class`: the softmax output of each class's vector, averaged over simulated steps; 0 for absent classes."""
    assert layer.bias is not None
    there = share > 0
    weight, bias, inputs, part = layer.weight, layer.bias, features[there], share[there, None]
    labels, total = torch.diag(share)[there], torch.zeros_like(share).repeat(len(inputs), 1)
    for _ in range(steps):
        p = (inputs @ weight.mT + bias).softmax(1)
        total += p
        wrong = part * p - labels
        weight, bias = weight - rate * wrong.mT @ inputs, bias - rate * wrong.sum(0)
    return torch.zeros_like(share).repeat(len(share), 1).index_put((there,), total / steps)


def _of_absent(layer: LastLayer, share: Tensor, noise: Tensor, num_examples: int) -> Tensor:
    """The mean feature vector: what the rows of classes that do not occur moved along; that of noise where all do."""
    assert layer.bias_gradient is not None
    absent = (apportioned(share, num_examples) == 0) & (layer.bias_gradient > 0)
    if not absent.any():
        return noise
    return layer.weight_gradient[absent].sum(0) / layer.bias_gradient[absent].sum()


def _moved_layer(before: State, directions: State, scale: float, *, non_negative: bool) -> LastLayer:
    """The last linear layer at w_0, and its movement over `scale` for its gradient."""
    weight, bias = directions
    return LastLayer(
        weight=before[weight].double().cpu(),
        bias=before[bias].double().cpu(),
        weight_gradient=directions[weight] / scale,
        bias_gradient=directions[bias] / scale,
        non_negative=non_negative,
    )


def layer_directions(bias: str, states: NamedStates, defenses: Sequence[Defense]) -> State:
    """How far the last layer moved, weights first, against the sign of training; what was left out is filled in."""
    names = [f"{bias.removesuffix('bias')}{kind}" for kind in ("weight", "bias")]
    moved = {name: states.direction(name, torch.float64).cpu() for name in names}
    return completed(moved, defenses) if defenses else moved


def _shares(parts: Tensor) -> Tensor:
    """`parts` above 0, as shares of their sum; equal ones where none is."""
    positive = parts.clamp_min(0)
    return positive / positive.sum() if positive.any() else torch.full_like(parts, 1 / len(parts))


def _probes(model: nn.Module, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
    """Uniform noise in the range of inputs, `example ...`."""
    assert knowledge.input_shape is not None
    assert knowledge.value_range is not None
    axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
    low, high = (torch.as_tensor(end).reshape(axes) for end in knowledge.value_range)
    return (low + (high - low) * torch.rand((_PROBES, *knowledge.input_shape), generator=rng)).to(
        next(model.parameters())
    )


def _seen(model: nn.Module, name: str, state: State, probes: Tensor) -> tuple[Tensor, Tensor]:
    """`class`, the mean softmax output, and `example feature`, what goes into the last layer, whose bias is `name`."""
    inputs: list[Tensor] = []
    layer = model.get_submodule(name.rpartition(".")[0])
    hook = layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    try:
        logits: Tensor = functional_call(model, dict(state), (probes,))
    finally:
        hook.remove()
    return logits.double().softmax(1).mean(0).cpu(), inputs[-1].double().cpu()


def steps_times_rate(num_examples: int, knowledge: Knowledge) -> float | None:
    """How far a gradient that stays the same moves a weight; None where that is not known, or not how clients step.

    With momentum m the gradient of step i of T moves it by the learning rate times 1 + m + ... + m^(T - i).
    """
    steps, rate, share = known_steps(knowledge, num_examples), knowledge.learning_rate, knowledge.momentum or 0.0
    if steps is None or rate is None or (knowledge.optimizer or "sgd") != "sgd":
        return None
    if not 0 < share < 1:
        return rate * steps
    return rate * (steps - share * (1 - share**steps) / (1 - share)) / (1 - share)
