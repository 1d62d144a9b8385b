"""Local training as a pure function of (state, data, settings, randomness), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedsim.defense import Defense, replaced, replaced_batch
from fedsim.errors import ConfigError, RunError
from fedsim.progress import tracked
from fedsim.randomness import generator, seeded
from fedsim.task import Loss
from fedsim.wire.messages import State, non_finite

_MOST = {"local_epochs": 10**6, "local_steps": 10**6, "batch_size": 10**9}
"""What is beyond is a slip of the keyboard."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client trains. One of `local_epochs` and `local_steps` is set.

    A client who sends a gradient takes that of one mini-batch at w_t (FedSGD), and so no step itself: the server does,
    by its own learning rate. What would change its steps is refused.

    Attributes:
        local_epochs: E, passes over the local data, each in a new order.
        local_steps: number of optimizer steps instead; batches go on across epochs.
        batch_size: B; the last batch of an epoch may be smaller.
        batches: `reshuffled` cuts the local data into other batches each epoch, `fixed` into the same ones, in the
            same order, for the whole federation; then, and where gradients are sent, a round goes on with the
            batch after the last one of the round before. Otherwise each round begins a new epoch.
        learning_rate: step size of the optimizer.
        optimizer: `sgd`, `adam` or `adamw`.
        momentum: of SGD.
        weight_decay: L2 penalty (decoupled in `adamw`).
        batch_norm: `train` normalises by the batch and updates running statistics, `eval`
            normalises by the running statistics and leaves them alone, `frozen` does not train scale
            and shift either. The count of batches, which does not travel, begins at 0 in each round.
        batch_norm_statistics: whether running statistics travel, `shared`, or are `withheld`; then
            they are in no message, and evaluation normalises by the batch.
        dropout: whether dropout layers drop.
        proximal_mu: weight of the proximal term; FedProx's server sets it.
        sends: `weights` after local training, or the `gradient` of one mini-batch; FedSGD's server sets it.
    """

    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int = 10
    batches: Literal["reshuffled", "fixed"] = "reshuffled"
    learning_rate: float = 0.01
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_norm: Literal["train", "eval", "frozen"] = "train"
    batch_norm_statistics: Literal["shared", "withheld"] = "shared"
    dropout: bool = True
    proximal_mu: float = 0.0
    sends: Literal["weights", "gradient"] = "weights"

    def __post_init__(self) -> None:
        if self.sends == "gradient":
            self._check_one_gradient()
        if (self.local_epochs is None) == (self.local_steps is None):
            raise ConfigError("training: set local_epochs or local_steps, exactly one of them")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                expected = "at least 1" if value < 1 else f"at most {most}"
                raise ConfigError(f"training.{name}: expected {expected}, got {value}")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"training.learning_rate: expected a finite value above 0, got {self.learning_rate}")
        for name in ("momentum", "weight_decay", "proximal_mu"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"training.{name}: expected a finite value of at least 0, got {value}")
        if self.momentum >= 1:
            raise ConfigError(f"training.momentum: expected less than 1, or steps grow for ever, got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"training.momentum: belongs to optimizer 'sgd', got '{self.optimizer}'")
        if self.batch_norm_statistics == "withheld" and self.batch_norm != "train":
            raise ConfigError(
                f"training.batch_norm: '{self.batch_norm}' normalises by running statistics, but they are withheld; "
                "set batch_norm_statistics to 'shared' or batch_norm to 'train'"
            )

    def _check_one_gradient(self) -> None:
        if self.local_epochs is not None:
            raise ConfigError(
                "training.local_epochs: clients who send gradients take one mini-batch a round; "
                "set local_steps = 1 instead"
            )
        if self.local_steps != 1:
            raise ConfigError(
                f"training.local_steps: clients who send gradients take one mini-batch a round, expected 1, "
                f"got {self.local_steps}"
            )
        for name, expected in (("optimizer", "sgd"), ("momentum", 0.0), ("weight_decay", 0.0), ("proximal_mu", 0.0)):
            if getattr(self, name) != expected:
                raise ConfigError(
                    f"training.{name}: clients who send gradients take no step themselves, expected {expected!r}, "
                    f"got {getattr(self, name)!r}; leave it out"
                )

    @property
    def goes_on(self) -> bool:
        """Whether a round's batches follow upon those of the round before; see `batches_of_round`."""
        return self.batches == "fixed" or self.sends == "gradient"

    def steps(self, num_examples: int) -> int:
        """T, the optimizer steps of one round for a client with `num_examples`."""
        if self.local_steps is not None:
            return self.local_steps
        return (self.local_epochs or 0) * math.ceil(num_examples / self.batch_size)


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
