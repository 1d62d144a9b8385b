"""Local training as a pure function of (state, data, settings, randomness), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.base.errors import RunError
from fedsim.base.progress import track
from fedsim.base.randomness import seed_globals
from fedsim.base.task import Goal, Loss, count_correct, goal_of, smooth_labels
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import ClientRound
from fedsim.recording.wire_format import State, non_finite_names
from fedsim.training.canaries import CANARY_VALUE, Canaries
from fedsim.training.gradients import put_gradient
from fedsim.training.hooks import TrainingHooks
from fedsim.training.model_state import copy_state, load_broadcast, load_state, running_statistics
from fedsim.training.modes import (
    forward,
    freeze_all_except,
    freeze_parameters,
    set_evaluation_modes,
    set_modes,
)
from fedsim.training.network_structure import keep_structure
from fedsim.training.optimizers import SGD, Adam, Optimizer
from fedsim.training.penalties import LocalObjective, make_penalties
from fedsim.training.settings import LocalTraining

_PLAIN = LocalObjective()


def local_update(
    model: nn.Module,
    before: State,
    inputs: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    *,
    key: tuple[int | str, ...],
    defenses: Sequence[Defense] = (),
    client_round: ClientRound | None = None,
    loss: Loss = cross_entropy,
    order: Iterable[Tensor] | None = None,
    before_step: Callable[[], None] | None = None,
    canaries: Canaries | None = None,
    objective: LocalObjective = _PLAIN,
) -> tuple[dict[str, Tensor], float]:
    """Train from `before` on a client's data; return (w_T, mean training loss).

    Only the architecture of `model` is used; its weights are overwritten. All randomness (batch
    order, dropout, defenses) follows from `key`. Where Poisson sampling left every batch empty, the
    loss is that of w_T on all data.

    Args:
        inputs: `example ...` in model units.
        labels: `example`, class indices or targets.
        loss: objective, before labels are smoothed as `settings` ask.
        order: indices of the examples of each step, from `round_batches` where batches continue
            from round to round; None draws them by `key`, as the defenses ask.
        before_step: called before each step, while `model` holds the current weights.
        canaries: gradients that are put among those of the examples, to measure what the defenses
            let through.
        objective: what a client algorithm asks for besides: terms of the objective, and which
            parameters are trained.

    Raises:
        ConfigError: the defenses do not go together, or not with these settings or this model; or
            labels that are no classes are to be smoothed.
        RunError: the weights became NaN or infinite, or BatchNorm was given a batch of one example.
    """
    _load_broadcast(model, before, settings, inputs)
    client_round = client_round or ClientRound(key=key, broadcast=before)
    optimizer = new_optimizer(model, settings)
    losses: list[Tensor | None] = []
    smoothed_loss = smooth_labels(loss, settings.label_smoothing)
    with (
        keep_structure(model, defenses),
        seed_globals(*key, "dropout"),
        freeze_parameters(model, settings),
        freeze_all_except(model, objective.trained),
    ):
        hooks = TrainingHooks(defenses, model, settings, len(inputs), client_round, canaries)
        penalties = make_penalties(model, settings, objective)
        for index in hooks.batch_order(order):
            if before_step is not None:
                before_step()
            optimizer.zero_grad()
            index = index.to(inputs.device)
            batch = inputs.index_select(0, index), labels.index_select(0, index)  # faster than by brackets
            losses.append(put_gradient(model, *batch, smoothed_loss, hooks, penalties, objective.feature_loss))
            optimizer.step()
    after = copy_state(model, statistics=settings.batch_norm_statistics == "shared")
    _check_weights(before, after, losses, canaries)
    if batch_losses := [batch_loss for batch_loss in losses if batch_loss is not None]:
        return after, torch.stack(batch_losses).mean().item()
    return after, evaluate(model, after, inputs, labels, smoothed_loss)["loss"]


def local_gradient(
    model: nn.Module,
    before: State,
    inputs: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    *,
    key: tuple[int | str, ...],
    defenses: Sequence[Defense] = (),
    client_round: ClientRound | None = None,
    loss: Loss = cross_entropy,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Compute the gradient of a mini-batch's mean loss at `before`, which a FedSGD client sends.

    Layers are in the modes of local training, and all randomness follows from `key`, as in
    `local_update`.

    Args:
        inputs: `example ...` in model units, only the mini-batch.
        labels: `example`, class indices or targets.

    Returns:
        The gradient by parameter, zero where a parameter is frozen or not used; the buffers that
        are sent with it (BatchNorm's running statistics after this batch); the mini-batch's mean
        loss.
    """
    _load_broadcast(model, before, settings, inputs)
    model.zero_grad(set_to_none=True)
    client_round = client_round or ClientRound(key=key, broadcast=before)
    with keep_structure(model, defenses), seed_globals(*key, "dropout"), freeze_parameters(model, settings):
        hooks = TrainingHooks(defenses, model, settings, len(inputs), client_round)
        mean = put_gradient(model, inputs, labels, smooth_labels(loss, settings.label_smoothing), hooks)
    assert mean is not None
    # A shared parameter is sent under each of its names, and each has to take the server's step.
    gradient: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is None:
            gradient[name] = torch.zeros_like(parameter)
        else:
            gradient[name] = parameter.grad.detach().clone()
    model.zero_grad(set_to_none=True)
    if broken := non_finite_names(gradient):
        raise RunError(
            f"training diverged: the gradient of {broken[0]} is NaN or infinite; lower strategy.learning_rate, or the "
            "noise that defenses add"
        )
    state = copy_state(model, statistics=settings.batch_norm_statistics == "shared")
    buffers = {name: tensor for name, tensor in state.items() if name not in gradient}
    return gradient, buffers, mean.item()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    state: State,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss = cross_entropy,
    *,
    progress_name: str = "",
) -> dict[str, float]:
    """Compute the mean `loss` of `state` on given data, and of classes and labels the `accuracy` in [0, 1].

    Of several labels the accuracy is the mean share of an example's labels that are right, and of masks the share of
    the pixels.

    BatchNorm layers whose running statistics are not in `state` normalise by the batch.

    Args:
        inputs: `example ...` in model units.
        labels: `example`, class indices or targets; of several labels or numbers `example target`.
        progress_name: name in progress reports; an evaluation without a name is not reported.
    """
    load_state(model, state)
    set_evaluation_modes(model, state)
    total, correct, goal = 0.0, 0.0, goal_of(loss)
    # Batches of 100 stay in a CPU's caches; statistics of a batch are better from a larger one.
    use_small_batches = inputs.device.type == "cpu" and running_statistics(model) <= set(state)
    num_batches = max(1, math.ceil(len(inputs) / (100 if use_small_batches else 500)))
    batches = zip(inputs.tensor_split(num_batches), labels.tensor_split(num_batches), strict=True)
    for batch, targets in track(batches, progress_name, num_batches) if progress_name else batches:
        outputs = forward(model, batch)
        total += loss(outputs, targets).item() * len(targets)
        num_correct = count_correct(outputs, targets, goal)
        correct += 0 if num_correct is None else num_correct.item()
    metrics = {"loss": total / len(labels)}
    has_accuracy = goal == "labels" or not labels.is_floating_point()
    return metrics | {"accuracy": correct / len(labels)} if has_accuracy else metrics


def evaluate_constant(labels: Tensor, goal: Goal = "classes") -> float:
    """Compute what the best answer gets that is the same for all examples.

    For classes, of examples or of pixels, it is the accuracy of the most frequent one, and for labels that of the more
    frequent answer to each; for a regression the mean squared error of the mean target.

    Args:
        labels: `example`, class indices or targets; of several labels or numbers `example target`.
        goal: what is predicted; it only tells labels from numbers.

    >>> evaluate_constant(torch.tensor([0, 1, 1, 2])), evaluate_constant(torch.tensor([1.0, 3.0]))
    (0.5, 1.0)
    """
    if goal == "labels":
        shares = labels.double().mean(0)
        return torch.maximum(shares, 1 - shares).mean().item()
    if labels.is_floating_point():
        return labels.double().var(0, correction=0).mean().item()
    return int(labels.flatten().bincount().max()) / labels.numel()


def new_optimizer(model: nn.Module, settings: LocalTraining) -> Optimizer:
    """Create the optimizer that `settings` name, over the parameters of `model`."""
    decay = settings.weight_decay
    if settings.optimizer == "sgd":
        return SGD(
            model.parameters(),
            settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=decay,
        )
    decoupled = settings.optimizer == "adamw"
    return Adam(model.parameters(), settings.learning_rate, weight_decay=decay, decoupled=decoupled)


def _load_broadcast(model: nn.Module, before: State, settings: LocalTraining, inputs: Tensor) -> None:
    """Load the broadcast into `model`, and put its layers into the modes of local training."""
    load_broadcast(model, before)
    set_modes(model, settings, inputs)


def _check_weights(before: State, after: State, losses: Sequence[Tensor | None], canaries: Canaries | None) -> None:
    broken_names = non_finite_names(after)
    if not broken_names:
        return
    if broadcast_names := non_finite_names(before):
        raise RunError(
            f"the model that was broadcast is NaN or infinite in {broadcast_names[0]}; lower the "
            "step size in [strategy]"
        )
    if losses and losses[0] is not None and not losses[0].isfinite():
        raise RunError(
            f"local training diverged before its first step, whose loss is {losses[0].item()}; lower what moved the "
            "model so far (training.learning_rate, the step size in [strategy], noise of defenses), or look for "
            "examples of huge values"
        )
    remedy = "lower training.learning_rate"
    if canaries is not None:
        remedy += f"; or no defense clips canaries, which are gradients of norm {CANARY_VALUE:g}"
    raise RunError(f"local training diverged: {broken_names[0]} is NaN or infinite after {len(losses)} steps; {remedy}")
