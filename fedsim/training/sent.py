"""What a client sends, as a function of its inputs: what measures of exposure differentiate and perturb."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.errors import ConfigError, RunError
from fedsim.randomness import seeded
from fedsim.task import Loss, smoothed
from fedsim.training.modes import dropping, forward, set_modes, trained
from fedsim.training.settings import LocalTraining

log = logging.getLogger("fedsim." + __name__)
BUDGET = 1 << 29
"""Bytes of memory for what is computed at once, half a GiB."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a client sends of a batch: its gradient, or the update of local training, as one vector.

    An update is (w_0 - w_T) / learning rate, the sum of the gradients of all steps, so that one step of plain SGD on
    the whole batch gives the gradient. BatchNorm's running statistics are not in it. Where a layer draws (dropout), it
    draws the same each time. Make one by `of`.

    Attributes:
        model: in the modes of training.
        loss: what the client minimises.
        inputs: `example ...` in model units, the whole batch or all local data.
        labels: `example`.
        names: of the parameters that are trained, in the order of the vector.
        steps: the examples of each local step.
        training: how the client steps; None of a single gradient.
        varying: `example` places of those examples that are unknown, ascending; the others are held at their values.
        budget: bytes of memory that may be used at once.
    """

    model: nn.Module
    loss: Loss
    inputs: Tensor
    labels: Tensor
    names: tuple[str, ...]
    steps: tuple[Tensor, ...]
    training: LocalTraining | None
    varying: tuple[int, ...]
    budget: int = BUDGET

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        labels: Tensor,
        *,
        training: LocalTraining | None = None,
        order: Sequence[Tensor] | None = None,
        budget: int = BUDGET,
    ) -> Sent:
        """Of one batch, or with `training` of a client's local training on its data.

        Args:
            model: with the weights that the client trains from; it is copied. Without `training` its layers stay in
                their modes.
            loss: as `fedsim.Task.loss`.
            inputs: `example ...` in model units.
            labels: `example`.
            training: how the client trains; one that sends the gradient of a mini-batch sends that of `inputs`.
            order: the examples of each step; by default those of `training` in the order that they are in.
            budget: bytes of memory that may be used at once.

        Raises:
            ConfigError: nothing is trained, or the client trains by another optimizer than SGD.
        """
        model = deepcopy(model)
        names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        if training is not None:
            if training.optimizer != "sgd":
                raise ConfigError(
                    f"measure: of what optimizer '{training.optimizer}' sends there is no measure yet; train by 'sgd', "
                    "or measure the gradient"
                )
            set_modes(model, training)
            names, loss = tuple(trained(model, training)), smoothed(loss, training.label_smoothing)
        if not names:
            raise ConfigError("measure: the model has no parameter to train, so there is no gradient")
        _normalise_by_batch_alone(model)
        everything = torch.arange(len(inputs))
        if training is None or training.sends == "gradient":
            steps: tuple[Tensor, ...] = (everything,)
        else:
            steps = tuple(order) if order is not None else tuple(_in_order(everything, training))
        return cls(
            model=model,
            loss=loss,
            inputs=inputs,
            labels=labels,
            names=names,
            steps=steps,
            training=None if training is None or training.sends == "gradient" else training,
            varying=tuple(range(len(inputs))),
            budget=budget,
        )

    def alone(self, example: int) -> Sent:
        """The same, with all but one example known."""
        return replace(self, varying=(example,))

    @property
    def unknown(self) -> Tensor:
        """The true values of the inputs that vary, `example ...`."""
        return self.inputs[list(self.varying)]

    def __call__(self, unknown: Tensor) -> Tensor:
        """What is sent if the varying examples were `unknown`, `number`; can be differentiated twice by it."""
        batch = unknown
        if len(self.varying) < len(self.inputs):
            batch = self.inputs.index_put((torch.tensor(self.varying),), unknown)
        before = self._weights
        after, momentum = before, dict[str, Tensor]()
        for index in self.steps:
            slopes = self._slopes(after, batch[index], self.labels[index])
            if self.training is None:
                return self._flat(slopes)
            after = self._stepped(before, after, slopes, momentum, self.training)
        assert self.training is not None
        rate = self.training.learning_rate
        return self._flat({name: (before[name] - after[name]) / rate for name in self.names})

    @cached_property
    def vector(self) -> Tensor:
        """What is sent, `number`."""
        with torch.no_grad():
            return self(self.unknown)

    @property
    def share(self) -> Tensor:
        """What the varying examples contribute to a gradient, `number`: theirs are the only losses that count.

        Raises:
            ConfigError: not all examples vary, and an update is sent, to which none has a share of its own.
        """
        if len(self.varying) == len(self.inputs):
            return self.vector
        if self.training is not None:
            raise ConfigError(
                "measure: in an update of several steps no example has a share of its own; measure the whole update, "
                "or the gradient of a batch"
            )
        place = torch.tensor(self.varying)

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return self.loss(outputs[place], labels[place], reduction="sum") / len(labels)

        with torch.no_grad():
            return self._flat(self._slopes(self._weights, self.inputs, self.labels, loss))

    @property
    def is_zero(self) -> bool:
        """Whether nothing is sent, so that there is nothing to read."""
        return not self.vector.any()

    @cached_property
    def linear(self) -> Linear:
        """Its derivative at the true inputs.

        Raises:
            ConfigError: the inputs are integers.
            RunError: a layer cannot be differentiated twice.
        """
        self.check_continuous()
        return Linear(self)

    def at(self, points: Tensor) -> Iterator[Tensor]:
        """What is sent at each of `point example ...`, in blocks of `point number` that keep to the memory budget.

        Raises:
            ConfigError: the inputs are integers; the budget is too small for one point.
        """
        self.check_continuous()
        one = self._bytes_of_one
        if one > self.budget:
            raise ConfigError(
                f"measure: one perturbed batch takes about {one / 2**20:.1f} MiB, and memory is "
                f"{self.budget / 2**20:.3g} MiB; raise memory, or measure fewer examples at once"
            )
        many = vmap(self, randomness="same")
        for block in torch.split(points, self.budget // one):
            with torch.no_grad():
                yield many(block)

    def check_continuous(self) -> None:
        """Raise ConfigError where inputs cannot be changed a little."""
        if not self.inputs.is_floating_point():
            raise ConfigError(
                "measure: the inputs are token ids, which cannot be changed a little; of texts only measures of the "
                "gradient itself are defined, such as gradient-norm"
            )

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].detach() for name in self.names}

    @cached_property
    def _draws(self) -> bool:
        return any(layer.training for layer in dropping(self.model))

    def _slopes(
        self,
        weights: dict[str, Tensor],
        inputs: Tensor,
        labels: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The gradient of `loss`, by default what the client minimises."""
        network = _Forward(self.model)
        named = {f"model.{name}": tensor for name, tensor in weights.items()}

        def value(named: dict[str, Tensor]) -> Tensor:
            return (loss or self.loss)(functional_call(network, named, (inputs,)), labels)

        with seeded("measure", "dropout") if self._draws else contextlib.nullcontext():
            slopes: dict[str, Tensor] = grad(value)(named)
        return {name: slopes[f"model.{name}"] for name in weights}

    def _stepped(
        self,
        before: dict[str, Tensor],
        after: dict[str, Tensor],
        slopes: dict[str, Tensor],
        momentum: dict[str, Tensor],
        training: LocalTraining,
    ) -> dict[str, Tensor]:
        """The weights after one step of SGD; `momentum` is changed."""
        made = {}
        for name, slope in slopes.items():
            way = slope + training.proximal_mu * (after[name] - before[name]) + training.weight_decay * after[name]
            if training.momentum:
                way = momentum[name] = way + training.momentum * momentum[name] if name in momentum else way
            made[name] = after[name] - training.learning_rate * way
        return made

    def _flat(self, state: dict[str, Tensor]) -> Tensor:
        return torch.cat([state[name].flatten() for name in self.names])

    @cached_property
    def _bytes_of_one(self) -> int:
        """About how much memory one more batch takes: what its forward pass keeps, twice, and the vectors."""
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.loss(forward(self.model, self.inputs), self.labels)
        vector = sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())
        return 2 * kept + (len(self.steps) + 2) * vector


class Linear:
    """The derivative J of what is sent by the inputs that vary, and its transpose, exactly.

    J v is made in forward mode. Where a layer has no derivative of that kind it is the derivative of J' u by u, which
    is as exact and takes about twice as long; `forward_mode` says which.

    Attributes:
        shape: `example ...`, of the inputs that vary.
        forward_mode: whether J v is made in forward mode.
    """

    def __init__(self, sent: Sent) -> None:
        self._call, self._at = sent, sent.unknown
        self.shape = self._at.shape
        self._inputs = self._at.clone().requires_grad_()
        try:
            self._sent = sent(self._inputs)
            self.pull(torch.zeros_like(self._sent))
        except RuntimeError as error:
            raise RunError(
                "measure: what this model sends cannot be differentiated by its inputs, for want of a second "
                f"derivative ({_first_line(error)}); a layer made of plain operations has one"
            ) from error
        try:
            self._forward(torch.zeros_like(self._at))
            self.forward_mode = True
        except (RuntimeError, NotImplementedError) as error:
            log.info("no forward-mode derivative, so double backward: %s", _first_line(error))
            self.forward_mode = False

    @property
    def size(self) -> int:
        """How many numbers vary."""
        return self._at.numel()

    def push(self, direction: Tensor) -> Tensor:
        """J v of `number`, flat: how what is sent changes along it."""
        shaped = direction.reshape(self.shape)
        return self._forward(shaped) if self.forward_mode else self._twice(shaped)

    def pull(self, vector: Tensor) -> Tensor:
        """J' u of `number`, flat."""
        return _derivative(self._sent, self._inputs, vector).flatten()

    def _forward(self, direction: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = jvp(self._call, (self._at,), (direction,))[1]
        return made

    def _twice(self, direction: Tensor) -> Tensor:
        probe, pulled = self._pulled
        return _derivative(pulled, probe, direction)

    @cached_property
    def _pulled(self) -> tuple[Tensor, Tensor]:
        """A vector u and J' u as a function of it."""
        probe = torch.zeros_like(self._sent, requires_grad=True)
        return probe, _derivative(self._sent, self._inputs, probe, create_graph=True)


def _derivative(outputs: Tensor, by: Tensor, along: Tensor, *, create_graph: bool = False) -> Tensor:
    if not outputs.requires_grad:
        return torch.zeros_like(by)
    (made,) = torch.autograd.grad(
        outputs, by, along, retain_graph=True, create_graph=create_graph, materialize_grads=True
    )
    return made


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


class _Forward(nn.Module):
    """A model by `forward`, which says what a batch of one example lacks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return forward(self.model, inputs)


def _normalise_by_batch_alone(model: nn.Module) -> None:
    """Let layers that normalise by the batch forget their running statistics, which they would only change."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.training:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None


def _in_order(examples: Tensor, training: LocalTraining) -> Iterator[Tensor]:
    """Batches of `training`, epoch by epoch in the order that examples are in."""
    batches = torch.split(examples, training.batch_size)
    for step in range(training.steps(len(examples))):
        yield batches[step % len(batches)]
