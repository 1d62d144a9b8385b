"""Local training as a pure function of (state, data, settings, randomness), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.defense import Defense
from fedsim.errors import RunError
from fedsim.progress import tracked
from fedsim.randomness import seeded
from fedsim.task import Loss, smoothed
from fedsim.training.canaries import SIZE, Canaries
from fedsim.training.gradients import put_gradient
from fedsim.training.hooks import Hooks
from fedsim.training.model_state import check_broadcast, load_state, state_of, statistics_of
from fedsim.training.modes import forward, frozen, set_evaluation_modes, set_modes
from fedsim.training.optimizers import SGD, Adam, Optimizer
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State, non_finite


def local_update(
    model: nn.Module,
    before: State,
    inputs: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    *,
    key: tuple[int | str, ...],
    defenses: Sequence[Defense] = (),
    loss: Loss = cross_entropy,
    order: Iterable[Tensor] | None = None,
    before_step: Callable[[], None] | None = None,
    canaries: Canaries | None = None,
) -> tuple[dict[str, Tensor], float]:
    """Train from `before` on a client's data and return (w_T, mean training loss).

    `model` only lends its architecture; its weights are overwritten. All randomness (batch order, dropout,
    defenses) follows from `key`. Where Poisson sampling left every batch empty, the loss is that of w_T on all data.

    Args:
        inputs: `example ...` in model units.
        labels: `example`, class indices or targets.
        loss: what is minimised, of labels that are smoothed as `settings` say.
        order: the examples of each step, `batches_of_round` where batches go on from round to round; None
            draws them by `key`, as the defenses ask.
        before_step: called before each step, while `model` holds the weights so far.
        canaries: gradients that are put among those of the examples, to measure what the defenses let through.

    Raises:
        ConfigError: the defenses do not go together, or not with these settings or this model; labels of no classes
            are to be smoothed.
        RunError: the weights became NaN or infinite, or a batch of one example was to be normalised.
    """
    _start(model, before, settings, inputs)
    hooks = Hooks(defenses, model, settings, len(inputs), key, canaries)
    optimizer, pull = new_optimizer(model, settings), _proximal_term(model, settings)
    losses: list[Tensor | None] = []
    objective = smoothed(loss, settings.label_smoothing)
    with seeded(*key, "dropout"), frozen(model, settings):
        for index in hooks.order(order):
            if before_step is not None:
                before_step()
            optimizer.zero_grad()
            losses.append(put_gradient(model, inputs[index], labels[index], objective, hooks, pull))
            optimizer.step()
    after = state_of(model, statistics=settings.batch_norm_statistics == "shared")
    _check_weights(before, after, len(losses), canaries)
    if known := [some for some in losses if some is not None]:
        return after, torch.stack(known).mean().item()
    return after, evaluate(model, after, inputs, labels, objective)["loss"]


def local_gradient(
    model: nn.Module,
    before: State,
    inputs: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    *,
    key: tuple[int | str, ...],
    defenses: Sequence[Defense] = (),
    loss: Loss = cross_entropy,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The gradient of the mean loss of one mini-batch at `before`: what a FedSGD client sends.

    Layers are in the modes of local training, and all randomness follows from `key`, as in `local_update`.

    Args:
        inputs: `example ...` in model units, the mini-batch alone.
        labels: `example`, class indices or targets.

    Returns:
        The gradient by parameter, zero where a parameter is frozen or not used; the buffers that are sent beside
        it (BatchNorm's running statistics after this batch); the mini-batch's mean loss.

    Raises:
        ConfigError: as from `local_update`.
        RunError: the gradient is NaN or infinite, or a batch of one example was to be normalised.
    """
    _start(model, before, settings, inputs)
    model.zero_grad(set_to_none=True)
    hooks = Hooks(defenses, model, settings, len(inputs), key)
    with seeded(*key, "dropout"), frozen(model, settings):
        mean = put_gradient(model, inputs, labels, smoothed(loss, settings.label_smoothing), hooks)
    assert mean is not None
    # A shared parameter is sent under each of its names, and each has to take the server's step.
    slopes = {name: (p, p.grad) for name, p in model.named_parameters(remove_duplicate=False)}
    gradient = {name: torch.zeros_like(p) if g is None else g.detach().clone() for name, (p, g) in slopes.items()}
    model.zero_grad(set_to_none=True)
    if broken := non_finite(gradient):
        raise RunError(
            f"training diverged: the gradient of {broken[0]} is NaN or infinite; lower strategy.learning_rate"
        )
    kept = state_of(model, statistics=settings.batch_norm_statistics == "shared")
    return gradient, {name: tensor for name, tensor in kept.items() if name not in gradient}, mean.item()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    state: State,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss = cross_entropy,
    *,
    called: str = "",
) -> dict[str, float]:
    """Mean `loss`, and for classes `accuracy` (in [0, 1]), of `state` on data in model units.

    BatchNorm layers whose running statistics are not in `state` normalise by the batch.

    Args:
        called: what `fedsim.progress` calls this; it tells nothing of an evaluation without a name.

    Raises:
        RunError: such a layer got one example to normalise.
    """
    load_state(model, state)
    set_evaluation_modes(model, state)
    total, correct = 0.0, 0
    # On a CPU what a batch of 100 needs stays in the caches; statistics of a batch are better of a larger one.
    small = inputs.device.type == "cpu" and statistics_of(model) <= set(state)
    pieces = max(1, math.ceil(len(inputs) / (100 if small else 500)))
    batches = zip(inputs.tensor_split(pieces), labels.tensor_split(pieces), strict=True)
    for batch, targets in tracked(batches, called, pieces) if called else batches:
        outputs = forward(model, batch)
        total += loss(outputs, targets).item() * len(targets)
        correct += int((outputs.argmax(1) == targets).sum())
    metrics = {"loss": total / len(labels)}
    return metrics if labels.is_floating_point() else metrics | {"accuracy": correct / len(labels)}


def new_optimizer(model: nn.Module, settings: LocalTraining) -> Optimizer:
    """The optimizer that `settings` name, over the parameters of `model`."""
    decay = settings.weight_decay
    if settings.optimizer == "sgd":
        return SGD(model.parameters(), settings.learning_rate, momentum=settings.momentum, weight_decay=decay)
    decoupled = settings.optimizer == "adamw"
    return Adam(model.parameters(), settings.learning_rate, weight_decay=decay, decoupled=decoupled)


def _start(model: nn.Module, before: State, settings: LocalTraining, inputs: Tensor) -> None:
    """Put the broadcast into `model`, and its layers into the modes of local training."""
    check_broadcast(model, before)
    load_state(model, before)
    set_modes(model, settings, inputs)


def _proximal_term(model: nn.Module, settings: LocalTraining) -> Callable[[], list[Tensor]]:
    """Returns FedProx's penalty at the weights of the moment, a summand for each parameter, if there is a penalty."""
    parameters = list(model.parameters()) if settings.proximal_mu else []
    anchors = [parameter.detach().clone() for parameter in parameters]

    def summands() -> list[Tensor]:
        pairs = zip(parameters, anchors, strict=True)
        return [settings.proximal_mu / 2 * (parameter - anchor).square().sum() for parameter, anchor in pairs]

    return summands


def _check_weights(before: State, after: State, steps: int, canaries: Canaries | None) -> None:
    broken = non_finite(after)
    if not broken:
        return
    if spoilt := non_finite(before):
        raise RunError(
            f"the model that was broadcast is NaN or infinite in {spoilt[0]}; lower the step size in [strategy]"
        )
    unclipped = "" if canaries is None else f"; or no defense clips canaries, which are gradients of norm {SIZE:g}"
    raise RunError(
        f"local training diverged: {broken[0]} is NaN or infinite after {steps} steps; lower training.learning_rate"
        f"{unclipped}"
    )
