"""Local training as a pure function of (state, data, settings, randomness), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.defense import Defense, replaced, replaced_batch
from fedsim.errors import RunError
from fedsim.progress import tracked
from fedsim.randomness import generator, seeded
from fedsim.task import Loss
from fedsim.training.model_state import check_broadcast, load_state, state_of, statistics_of
from fedsim.training.modes import forward, frozen, set_evaluation_modes, set_modes
from fedsim.training.sampling import batches
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
) -> tuple[dict[str, Tensor], float]:
    """Train from `before` on a client's data and return (w_T, mean training loss).

    `model` only lends its architecture; its weights are overwritten. All randomness (batch order,
    dropout, defenses) follows from `key`.

    Args:
        inputs: `example ...` in model units.
        labels: `example`, class indices or targets.
        loss: what is minimised.
        order: the examples of each step, `batches_of_round` where batches go on from round to round; None
            draws them by `key`.
        before_step: called before each step, while `model` holds the weights so far.

    Raises:
        RunError: the weights became NaN or infinite, or a batch of one example was to be normalised.
    """
    check_broadcast(model, before)
    load_state(model, before)
    set_modes(model, settings)
    parameters = dict(model.named_parameters())
    anchors = {name: p.detach().clone() for name, p in parameters.items()} if settings.proximal_mu else {}
    optimizer = new_optimizer(model, settings)
    if order is None:
        order = batches(len(inputs), settings, generator(*key, "order"))
    noise = generator(*key, "defense")
    losses: list[Tensor] = []
    with seeded(*key, "dropout"), frozen(model, settings):
        for index in order:
            if before_step is not None:
                before_step()
            batch, targets = _defended_batch(inputs[index], labels[index], defenses, noise)
            objective = loss(forward(model, batch), targets)
            losses.append(objective.detach())
            for name, anchor in anchors.items():
                objective = objective + settings.proximal_mu / 2 * (parameters[name] - anchor).square().sum()
            optimizer.zero_grad(set_to_none=True)
            objective.backward()  # type: ignore[no-untyped-call]
            if defenses:
                _defend_gradient(parameters, defenses, noise)
            optimizer.step()
    after = state_of(model, statistics=settings.batch_norm_statistics == "shared")
    if broken := non_finite(after):
        if spoilt := non_finite(before):
            raise RunError(
                f"the model that was broadcast is NaN or infinite in {spoilt[0]}; lower the step size in [strategy]"
            )
        raise RunError(
            f"local training diverged: {broken[0]} is NaN or infinite after {len(losses)} steps; "
            "lower training.learning_rate"
        )
    return after, torch.stack(losses).mean().item()


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
        The gradient by parameter, zero where a parameter is frozen or not used; the buffers that travel beside
        it (BatchNorm's running statistics after this batch); the mini-batch's mean loss.

    Raises:
        RunError: the gradient is NaN or infinite, or a batch of one example was to be normalised.
    """
    check_broadcast(model, before)
    load_state(model, before)
    set_modes(model, settings)
    model.zero_grad(set_to_none=True)
    noise = generator(*key, "defense")
    with seeded(*key, "dropout"), frozen(model, settings):
        batch, targets = _defended_batch(inputs, labels, defenses, noise)
        objective = loss(forward(model, batch), targets)
        objective.backward()  # type: ignore[no-untyped-call]
        if defenses:
            _defend_gradient(dict(model.named_parameters()), defenses, noise)
    # A shared parameter travels under each of its names, and each has to take the server's step.
    slopes = {name: (p, p.grad) for name, p in model.named_parameters(remove_duplicate=False)}
    gradient = {name: torch.zeros_like(p) if g is None else g.detach().clone() for name, (p, g) in slopes.items()}
    model.zero_grad(set_to_none=True)
    if broken := non_finite(gradient):
        raise RunError(
            f"training diverged: the gradient of {broken[0]} is NaN or infinite; lower strategy.learning_rate"
        )
    kept = state_of(model, statistics=settings.batch_norm_statistics == "shared")
    return gradient, {name: tensor for name, tensor in kept.items() if name not in gradient}, objective.item()


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


def new_optimizer(model: nn.Module, settings: LocalTraining) -> torch.optim.Optimizer:
    """The optimizer that `settings` name, over the parameters of `model`."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(),
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)


def _defended_batch(
    batch: Tensor, targets: Tensor, defenses: Sequence[Defense], noise: torch.Generator
) -> tuple[Tensor, Tensor]:
    for defense in defenses:
        batch, targets = replaced_batch(defense, batch, targets, noise)
    return batch, targets


def _defend_gradient(parameters: dict[str, nn.Parameter], defenses: Sequence[Defense], noise: torch.Generator) -> None:
    gradient: State = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for defense in defenses:
        gradient = replaced(defense, "on_gradient", gradient, noise)
    for name, value in gradient.items():
        parameters[name].grad = value
