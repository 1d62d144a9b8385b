"""Local training as a pure function of (state, data, settings, randomness), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedsim.defense import Defense, replaced, replaced_batch
from fedsim.errors import RunError
from fedsim.progress import tracked
from fedsim.randomness import generator, seeded
from fedsim.task import Loss
from fedsim.training.settings import LocalTraining as LocalTraining
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


def state_of(model: nn.Module, *, statistics: bool = True) -> dict[str, Tensor]:
    """A copy of the parameters and floating-point buffers of `model`, in its own order.

    Integer buffers (BatchNorm's batch counter) are bookkeeping of one process and never travel.

    Args:
        statistics: whether BatchNorm's running statistics are part of it.
    """
    withheld = set() if statistics else statistics_of(model)
    kept = {k: v for k, v in model.state_dict().items() if v.is_floating_point() and k not in withheld}
    return {name: tensor.detach().clone() for name, tensor in kept.items()}


def statistics_of(model: nn.Module) -> set[str]:
    """Names of the running statistics of BatchNorm layers."""
    layers = [(f"{name}." if name else "", m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    return {f"{prefix}{name}" for prefix, layer in layers for name, _ in layer.named_buffers(recurse=False)}


def load_state(model: nn.Module, state: State) -> None:
    """Copy `state` into `model`; integer buffers keep their values.

    Raises:
        RunError: `state` has a tensor that the model has not, or in another shape.
    """
    own = model.state_dict()
    _check_tensors(own, state)
    model.load_state_dict({**own, **state})


def check_broadcast(model: nn.Module, state: State) -> None:
    """Whether `model` can be trained from `state`, which has each of its parameters and nothing else than the model.

    Raises:
        RunError: it cannot.
    """
    _check_tensors(model.state_dict(), state)
    if missing := [name for name, _ in model.named_parameters() if name not in state]:
        raise RunError(f"the broadcast has no '{missing[0]}', which is a parameter of the model; send all of them")


def _check_tensors(own: State, state: State) -> None:
    for name, tensor in state.items():
        if name not in own:
            raise RunError(f"the model has no '{name}', expected its own tensors alone; send nothing else beside them")
        if tensor.shape != own[name].shape:
            raise RunError(
                f"'{name}' has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)} as in the model"
            )


def batches(count: int, settings: LocalTraining, order: torch.Generator) -> Iterator[Tensor]:
    """The examples of each local step, drawn from `order`."""
    steps = settings.steps(count)
    while steps > 0:
        for index in torch.split(torch.randperm(count, generator=order), settings.batch_size)[:steps]:
            steps -= 1
            yield index


def batches_of_round(
    count: int, settings: LocalTraining, *, seed: int, client: int, number: int
) -> tuple[Tensor, ...] | None:
    """The examples of each step that a client takes in round `number`, where batches go on from round to round.

    Steps are counted from the first round on, whether or not the client took part in each; so what it does in a
    round follows from the seed, the client and the round alone. With ceil(count / B) batches an epoch, FedSGD's
    step of round r is batch (r - 1) mod ceil(count / B) of epoch (r - 1) div ceil(count / B).

    Args:
        count: examples that the client holds.
        seed: of the run.
        number: server round, counted from 1.

    Returns:
        Indices into its examples, one tensor a step; None where each round draws its own (`batches`).
    """
    if not settings.goes_on:
        return None
    steps, in_epoch = settings.steps(count), math.ceil(count / settings.batch_size)
    cuts: dict[int, tuple[Tensor, ...]] = {}
    found = []
    for step in range((number - 1) * steps, number * steps):
        epoch, place = divmod(step, in_epoch)
        epoch = 0 if settings.batches == "fixed" else epoch
        if epoch not in cuts:
            order = torch.randperm(count, generator=generator(seed, "batches", client, epoch))
            cuts = {epoch: torch.split(order, settings.batch_size)}
        found.append(cuts[epoch][place])
    return tuple(found)


def forward(model: nn.Module, batch: Tensor) -> Tensor:
    """What `model` makes of `batch`.

    Raises:
        RunError: BatchNorm was to normalise one example by itself.
    """
    try:
        outputs: Tensor = model(batch)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise RunError(
            "a batch of one example has no statistics to normalise it by; choose a training.batch_size that "
            "leaves no single example over, more test examples, or batch_norm = 'eval'"
        ) from error
    return outputs


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


def set_modes(model: nn.Module, settings: LocalTraining) -> None:
    """Put every layer of `model` into the mode that `settings` ask for."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train(settings.batch_norm == "train")
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.zero_()
        elif isinstance(module, _DropoutNd):
            module.train(settings.dropout)


def dropping(network: nn.Module) -> list[_DropoutNd]:
    """The dropout layers of `network` that drop anything in training."""
    return [layer for layer in network.modules() if isinstance(layer, _DropoutNd) and layer.p]


def set_evaluation_modes(model: nn.Module, state: State) -> None:
    """Put `model` into evaluation mode, but BatchNorm layers whose running statistics are not in `state`."""
    model.eval()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and f"{name}.running_mean".removeprefix(".") not in state:
            module.train()


@contextmanager
def frozen(model: nn.Module, settings: LocalTraining) -> Iterator[None]:
    """Keep scale and shift of BatchNorm layers from being trained, where `settings` ask for it."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    held = [p for layer in layers for p in layer.parameters() if p.requires_grad and settings.batch_norm == "frozen"]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


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
