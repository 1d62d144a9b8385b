"""Label recovery from an update of any number of steps, by counting or by simulated training."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedsim.base.errors import KnowledgeError, RunError
from fedsim.base.module_hooks import hook_inputs
from fedsim.interfaces.attack import Knowledge, warn
from fedsim.interfaces.defense import Defense
from fedsim.inversion.labels.last_layer import (
    LastLayer,
    apportion_counts,
    expand_counts,
    fill_dropped_entries,
    has_own_weights,
    last_bias_name,
    untrained_layer_error,
)
from fedsim.inversion.labels.logit_gradient import logit_gradient
from fedsim.inversion.model_checks import random_inputs
from fedsim.inversion.named_states import NamedStates, named_states
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_update
from fedsim.training.settings import LocalTraining, known_steps

_NUM_PROBES = 512
_SIMULATION_ROUNDS = 20
_MAX_SIMULATED_STEPS = 1000
_MAX_FEATURE_GROWTH = 2.0
"""Features of noise that grow or shrink by more do not stay as they are."""
_MAX_UNEXPLAINED = 0.5
"""Largest share of the movement of the bias that a simulation may leave unexplained."""
_MODEL_TRAININGS = 4
"""Number of trainings of a copy of the model."""
_SHORT_TRAINING = 1.0
"""Learning rate x local steps up to which counts by noise are better than corrected ones."""
_LEAST_MOVEMENT_SHARE = 0.02
"""Smallest share of the movement by the gradient at w_0, to divide by."""
_LONG_TRAINING = 2.0
"""Learning rate x local steps from which counts were measured to come near to guessing."""
_STEADY_OUTPUTS = 0.1
"""Total variation of the outputs for noise over a round below which noise stands in for data."""


@torch.no_grad()
def count_labels(
    update: Update,
    knowledge: Knowledge,
    model: nn.Module,
    before: State,
    after: State,
    rng: torch.Generator,
) -> Tensor:
    """Count labels from the last linear layer of a FedAvg update of any number of steps.

    With the mean cross-entropy, the mean gradient of that layer's bias over N examples is p_c - n_c
    / N, where p is the mean softmax output and n_c the number of examples of class c. So over a
    round the bias moves by -s (p_c - n_c / N), with s = learning rate x local steps and p averaged
    along the way.

    1. A first p is that of noise inputs, averaged over both ends of the round.
    2. After many steps at a large rate noise no longer stands in for data: p then comes from
       simulating the layer's training (`_simulate_last_layer`) or, if layers below changed the
       features too, that of the whole model (`_simulate_model`).
    3. If neither explains the update, or training was long enough to fit the client's data, a
       warning says that counts may come near to guessing (`python -m studies label_counts`).

    If the learning rate, E and B are withheld, nothing is simulated, and s is read off a class that
    does not occur, for which the ratio of movement to p is largest; so at least one class must be
    absent. A gradient that was sent is that of one step at w_0: s is 1 and p that at w_0. If
    clients minimise a cross-entropy with class weights or label smoothing, or a sum, the formulas
    are those of its derivative (`logit_gradient`), and nothing is simulated.

    Args:
        model: of the federation; it lends its architecture.
        before: w_0 under the names of `model`'s parameters.
        after: w_T likewise; not read if a gradient was sent.

    Returns:
        `example`, N labels in ascending order.

    References:
        [Dimitrov2022]; [Geng2021]. Differs: counts by the bias instead of the weights. [Chen2024]
        for the model's confidence in each class, simulated over the steps. Differs: see
        `_simulate_last_layer`. Assumes SGD, with momentum if that is granted; with Adam counts are
        rougher.
    """
    probes = _noise_inputs(model, knowledge, rng)
    name = last_bias_name(model, probes)
    states = named_states(update, model, update.name)
    owns_weights = has_own_weights(model, probes)
    directions = layer_directions(name, states, knowledge.defenses_in(update.round), owns_weights=owns_weights)
    movement = directions[name]
    if not movement.any():
        if not model.get_parameter(name).requires_grad:
            raise untrained_layer_error(name)
        warn(f"{update.name}: {name} was not sent; labels are guesses")
    form = logit_gradient(knowledge.loss or cross_entropy, len(movement), knowledge.device)
    count = update.num_examples
    if update.gradient is not None:
        outputs = _layer_outputs(model, name, before, probes)[0]
        return expand_counts(form.count_labels(outputs, movement, count))

    # 1. Take p from noise at both ends, and s from the training or from an absent class.
    ends = _RoundEnds.compute(model, name, (before, after), probes)
    known_size = total_step_size(count, knowledge)
    if not (known_size or form.is_mean_cross_entropy):
        raise KnowledgeError(
            "labels cannot be counted: the loss that clients minimise is not the mean "
            "cross-entropy alone, and the size of their steps is not known; grant learning_rate, "
            "local_epochs and batch_size, or the labels with adversary.knowledge.labels = true"
        )
    step_size = known_size or _read_absent_class(movement, ends.mean_outputs)
    gradient = movement / step_size
    steps = known_steps(knowledge, count)
    if not (known_size and steps and form.is_mean_cross_entropy):  # which is what is simulated
        if known_size and steps and step_size > _SHORT_TRAINING:
            _warn_of_guesses(update, f"learning rate x local steps is {step_size:.3g}")
        return expand_counts(form.count_labels(ends.mean_outputs, gradient, count))

    # 2. Simulate the training of the last layer or, where noise does not stand in for data, of the whole model.
    shares, simulated_shares = ends.mean_outputs - gradient, None
    if owns_weights and ends.have_like_features:
        non_negative = bool((ends.features[0] >= 0).all())
        layer = _averaged_layer(states.before, directions, step_size, non_negative=non_negative)
        noise = ((ends.features[0] + ends.features[1]) / 2).mean(0)
        simulated_shares = _simulate_last_layer(layer, shares, noise, count, steps, step_size)
    labels = expand_counts(apportion_counts(shares if simulated_shares is None else simulated_shares, count))
    unexplained = 0.0
    if simulated_shares is None and not ends.are_steady:
        labels, unexplained = _simulate_model(
            model, update, before, gradient, name, labels, ends.outputs[0], probes, knowledge
        )

    # 3. Warn where counts may be guesses.
    if unexplained > _MAX_UNEXPLAINED:
        _warn_of_guesses(
            update, "training that is simulated with the labels that were counted does not explain the update"
        )
    elif step_size > _LONG_TRAINING and not ends.are_steady:
        _warn_of_guesses(update, f"learning rate x local steps is {step_size:.3g}, long enough to fit its data")
    return labels


def check_label_source(update: Update, knowledge: Knowledge, model: nn.Module) -> None:
    """Check that labels can be counted in messages of the form of `update`.

    Raises:
        KnowledgeError, AttackError: they cannot, whatever the values are.
    """
    name = last_bias_name(model, random_inputs(knowledge, next(model.parameters())))
    shapes = named_states(update, model, update.name).shapes
    if name not in shapes or not model.get_parameter(name).requires_grad:
        raise untrained_layer_error(name)


@dataclass(frozen=True)
class _RoundEnds:
    """What the model makes of noise at w_0 and at w_T.

    Attributes:
        outputs: `class`, the mean softmax output at each end.
        features: `probe feature`, the inputs of the last layer at each end.
    """

    outputs: tuple[Tensor, Tensor]
    features: tuple[Tensor, Tensor]

    @classmethod
    def compute(cls, model: nn.Module, name: str, states: tuple[State, State], probes: Tensor) -> _RoundEnds:
        """Compute both at these states of the model, whose last bias is called `name`."""
        before, after = (_layer_outputs(model, name, state, probes) for state in states)
        return cls((before[0], after[0]), (before[1], after[1]))

    @property
    def mean_outputs(self) -> Tensor:
        """Return p, `class`."""
        return (self.outputs[0] + self.outputs[1]) / 2

    @property
    def are_steady(self) -> bool:
        """Return whether outputs hardly change, so that noise stands in for data."""
        return bool((self.outputs[1] - self.outputs[0]).abs().sum() / 2 <= _STEADY_OUTPUTS)

    @property
    def have_like_features(self) -> bool:
        """Return whether the layers below the last one changed little."""
        growth = self.features[1].norm() / self.features[0].norm().clamp_min(1e-12)
        return bool(_MAX_FEATURE_GROWTH > growth > 1 / _MAX_FEATURE_GROWTH)


def _read_absent_class(movement: Tensor, p: Tensor) -> float:
    """Return s by a class that does not occur, for which the ratio of movement to p is largest."""
    step_size = (movement / p.clamp_min(1e-12)).max().item()
    return step_size if step_size > 0 else movement.abs().max().item() or 1.0


def _warn_of_guesses(update: Update, cause: str) -> None:
    warn(f"{update.name}: {cause}; counts may come near to guessing")


def _simulate_last_layer(
    layer: LastLayer,
    shares: Tensor,
    noise: Tensor,
    num_examples: int,
    steps: int,
    step_size: float,
) -> Tensor | None:
    """Find the shares of the classes with which simulated training moves the last layer as seen.

    One feature vector x_k stands for each class. Training from w_0 with shares n_k / N and these
    vectors gives the confidence in class c about examples of class k, p_kc, on average over the
    steps. The mean gradients of bias and weights, sum_k (n_k / N) p_kc - n_c / N and sum_k (n_k /
    N) p_kc x_k - (n_c / N) x_c, then give new shares and vectors, and all is repeated. Assumes SGD
    with whole batches, and features that do not change.

    Args:
        layer: at w_0, with gradients that are means over the steps.
        shares: `class`, to start from, as `apportion_counts` takes them.
        noise: `feature`, of noise; the vectors start there if every class occurs.
        num_examples: N.
        steps: T.
        step_size: learning rate x local steps.

    Returns:
        `class`; None if the simulation with the shares it found does not explain the bias.

    References:
        [Chen2024].
        Differs: reads the vectors off the update, where the paper has an auxiliary data set,
        simulates each step of the layer, where it draws logits for each epoch, and does not leave
        the layer's weights out.
    """
    assert layer.bias_gradient is not None
    bias_gradient, weight_gradient = layer.bias_gradient, layer.weight_gradient
    steps = min(steps, _MAX_SIMULATED_STEPS)
    shares = _normalise_shares(shares)
    features = _mean_features(layer, shares, noise, num_examples).expand_as(weight_gradient)
    for _ in range(_SIMULATION_ROUNDS):
        # Simulate, and move the shares half of the way.
        confidences = _simulate_confidences(layer, features, shares, steps, step_size / steps)
        simulated = shares @ confidences - shares
        shares = (shares + _normalise_shares(shares @ confidences - bias_gradient)) / 2
        # Solve for the features of the classes that occur.
        solved = (shares[:, None] * confidences).mT @ features - weight_gradient
        solved = solved / shares[:, None].clamp_min(1 / num_examples)
        if layer.non_negative:
            solved = solved.clamp_min(0)
        occurs = shares[:, None] > 0.5 / num_examples
        mean_features = _mean_features(layer, shares, noise, num_examples)
        features = torch.where(occurs, solved, mean_features)
    unexplained = (simulated - bias_gradient).norm()
    return shares if unexplained <= _MAX_UNEXPLAINED * bias_gradient.norm() else None


def _simulate_model(
    model: nn.Module,
    update: Update,
    before: State,
    gradient: Tensor,
    name: str,
    labels: Tensor,
    outputs: Tensor,
    probes: Tensor,
    knowledge: Knowledge,
) -> tuple[Tensor, float]:
    """Find the labels with which training the whole model on noise moves the last bias as seen.

    A copy is trained from w_0 on noise with the labels so far. If that explains the update, or if
    training is short (`_SHORT_TRAINING`), they stay. Else shares of the classes are corrected by
    1/a of the difference between the movements of the bias, where a is the simulated movement as a
    share of that by the gradient at w_0 alone, and the copy is trained again.

    Args:
        gradient: `class`, the movement of the bias over learning rate x local steps.
        labels: `example`, to start from.
        outputs: `class`, the mean softmax output for noise at w_0.

    Returns:
        The labels, and the share of the bias's movement that their simulation leaves unexplained.

    References:
        [Chen2024].
        Differs: trains on noise, where the paper has an auxiliary data set, and reads the movement
        of the bias alone.
    """
    count = update.num_examples
    steps, learning_rate = known_steps(knowledge, count), knowledge.learning_rate
    if steps is None or learning_rate is None or steps > _MAX_SIMULATED_STEPS:
        return labels, float("inf")
    plan = LocalTraining(
        local_epochs=knowledge.local_epochs if knowledge.local_steps is None else None,
        local_steps=knowledge.local_steps,
        batch_size=knowledge.batch_size or count,
        learning_rate=learning_rate,
        momentum=knowledge.momentum or 0.0,
        weight_decay=knowledge.weight_decay or 0.0,
        proximal_mu=knowledge.proximal_mu or 0.0,
    )
    step_size, copy = total_step_size(count, knowledge) or 1.0, deepcopy(model)
    inputs, key = probes[torch.arange(count) % len(probes)], (update.round, update.client)
    trials: list[tuple[float, Tensor]] = []
    for _ in range(_MODEL_TRAININGS if step_size > _SHORT_TRAINING else 1):
        # Train a copy with these labels.
        try:
            with torch.enable_grad():
                end, _ = local_update(copy, before, inputs, labels.to(inputs.device), plan, key=key)
        except RunError:  # it diverged, or BatchNorm got one example
            trials.append((float("inf"), labels))
            break
        # Compare the movements of the bias.
        shares = labels.bincount(minlength=len(gradient)).double() / count
        simulated = (before[name] - end[name]).double().cpu() / step_size
        unexplained = (simulated - gradient).norm() / gradient.norm().clamp_min(1e-12)
        trials.append((unexplained.item(), labels))
        if trials[0][0] <= _MAX_UNEXPLAINED:
            break
        # Correct the shares.
        initial = outputs - shares
        movement_share = simulated @ initial / (initial @ initial).clamp_min(1e-12)
        movement_share = movement_share.clamp(_LEAST_MOVEMENT_SHARE, 1)
        corrected = shares + (simulated - gradient) / movement_share
        labels = expand_counts(apportion_counts(corrected, count))
    least_unexplained, labels = min(trials, key=lambda trial: trial[0])
    return labels, least_unexplained


def _simulate_confidences(
    layer: LastLayer, features: Tensor, shares: Tensor, steps: int, learning_rate: float
) -> Tensor:
    """Return `class class`, the softmax output for each class's features, averaged over steps.

    Rows of absent classes are 0.
    """
    assert layer.bias is not None
    occurs = shares > 0
    weight, bias = layer.weight, layer.bias
    inputs, input_shares = features[occurs], shares[occurs, None]
    targets = torch.diag(shares)[occurs]
    total = torch.zeros_like(shares).repeat(len(inputs), 1)
    for _ in range(steps):
        p = (inputs @ weight.mT + bias).softmax(1)
        total += p
        errors = input_shares * p - targets
        weight, bias = weight - learning_rate * errors.mT @ inputs, bias - learning_rate * errors.sum(0)
    rows = torch.zeros_like(shares).repeat(len(shares), 1)
    return rows.index_put((occurs,), total / steps)


def _mean_features(layer: LastLayer, shares: Tensor, noise: Tensor, num_examples: int) -> Tensor:
    """Return the mean features, along which the rows of absent classes moved; else `noise`."""
    assert layer.bias_gradient is not None
    absent = (apportion_counts(shares, num_examples) == 0) & (layer.bias_gradient > 0)
    if not absent.any():
        return noise
    return layer.weight_gradient[absent].sum(0) / layer.bias_gradient[absent].sum()


def _averaged_layer(before: State, directions: State, step_size: float, *, non_negative: bool) -> LastLayer:
    """Return the last layer at w_0, with its movement over `step_size` as its gradient."""
    weight, bias = directions
    return LastLayer(
        weight=before[weight].double().cpu(),
        bias=before[bias].double().cpu(),
        weight_gradient=directions[weight] / step_size,
        bias_gradient=directions[bias] / step_size,
        non_negative=non_negative,
    )


def layer_directions(bias: str, states: NamedStates, defenses: Sequence[Defense], *, owns_weights: bool) -> State:
    """Return w_0 - w_T of the last layer, weights first; what defenses dropped is filled in.

    Args:
        owns_weights: nothing but the layer uses its weights; else the bias is all that is read, and nothing filled in.
    """
    names = [f"{bias.removesuffix('bias')}{kind}" for kind in ("weight", "bias")][not owns_weights :]
    for name in names:
        if name not in states.shapes:
            raise untrained_layer_error(name)
    directions = {name: states.direction(name, torch.float64).cpu() for name in names}
    return fill_dropped_entries(directions, defenses) if defenses and owns_weights else directions


def _normalise_shares(shares: Tensor) -> Tensor:
    """Clamp `shares` at 0 and divide by their sum; equal shares if none is above 0."""
    positive = shares.clamp_min(0)
    return positive / positive.sum() if positive.any() else torch.full_like(shares, 1 / len(shares))


def _noise_inputs(model: nn.Module, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
    """Return uniform noise in the range of inputs, `example ...`."""
    assert knowledge.input_shape is not None
    assert knowledge.value_range is not None
    axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
    low, high = (torch.as_tensor(end).reshape(axes) for end in knowledge.value_range)
    uniform = torch.rand((_NUM_PROBES, *knowledge.input_shape), generator=rng)
    return (low + (high - low) * uniform).to(next(model.parameters()))


def _layer_outputs(model: nn.Module, name: str, state: State, probes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean softmax output, `class`, and the last layer's inputs, `example feature`.

    Args:
        name: of the last layer's bias.
    """
    features: list[Tensor] = []
    layer = model.get_submodule(name.rpartition(".")[0])
    with hook_inputs(layer, lambda _, inputs: features.append(inputs[0])):
        logits: Tensor = functional_call(model, dict(state), (probes,))
    return logits.double().softmax(1).mean(0).cpu(), features[-1].double().cpu()


def total_step_size(num_examples: int, knowledge: Knowledge) -> float | None:
    """Return how far a constant gradient of 1 moves a weight over all local steps.

    With momentum m the gradient of step i of T moves it by the learning rate times 1 + m + ... +
    m^(T - i).

    Returns:
        None if the number of steps or the learning rate is not known, or clients do not use SGD.
    """
    steps, rate = known_steps(knowledge, num_examples), knowledge.learning_rate
    momentum = knowledge.momentum or 0.0
    if steps is None or rate is None or (knowledge.optimizer or "sgd") != "sgd":
        return None
    if not 0 < momentum < 1:
        return rate * steps
    geometric = momentum * (1 - momentum**steps) / (1 - momentum)
    return rate * (steps - geometric) / (1 - momentum)
