"""What a client sends, as a function of its inputs: what measures of exposure differentiate and perturb."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.errors import ConfigError
from fedsim.randomness import seeded
from fedsim.task import Loss, smoothed
from fedsim.training.linear import Linear, alike
from fedsim.training.modes import forward, set_modes, trained
from fedsim.training.optimizers import sgd_direction
from fedsim.training.settings import LocalTraining
from fedsim.training.stochastic_layers import generator_state
from fedsim.wire.messages import State

V = TypeVar("V")
Slopes = Callable[[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]], dict[str, Tensor]]
"""How a gradient is made: from a function of named tensors and their values."""
log = logging.getLogger("fedsim." + __name__)
BUDGET = 1 << 29
"""Bytes of memory for what is computed at once, half a GiB."""
_QUICKEST = 1 << 26
"""Bytes beyond which small batches take longer at once than in parts."""
_SAME = 1e-3
"""By how much outputs may differ by rounding, beside their size."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a client sends of a batch: its gradient, or the update of local training, as one vector.

    An update is (w_0 - w_T) / learning rate, the sum of the gradients of all steps, so that one step of plain SGD on
    the whole batch gives the gradient. It is that sum before it is added to the weights, whose rounding takes digits
    from it, the more the smaller the steps are. BatchNorm's running statistics are not in it. Where a layer draws
    (dropout), it draws the same each time. Make one by `of`.

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
        weight: of these examples' gradient in what is sent, below 1 where other examples add `rest` to it.
        rest: what examples that are not in `inputs` add, `number`; None where there are no others.
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
    weight: float = 1.0
    rest: Tensor | None = None
    _found: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

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
            inputs: `example ...` in model units; they are copied.
            labels: `example`.
            training: how the client trains; one that sends the gradient of a mini-batch sends that of `inputs`.
            order: the examples of each step; by default those of `training` in the order that they are in.
            budget: bytes of memory that may be used at once.

        Raises:
            ConfigError: the batch is empty, or there is not one label for each input; nothing is trained, or the client
                trains by another optimizer than SGD.
        """
        if not len(inputs) or len(inputs) != len(labels):
            raise ConfigError(
                f"measure: expected at least one example and a label for each, got {len(inputs)} inputs and "
                f"{len(labels)} labels"
            )
        model = deepcopy(model)
        names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        if training is not None:
            if training.optimizer != "sgd":
                raise ConfigError(
                    f"measure: of what optimizer '{training.optimizer}' sends there is no measure yet; train by 'sgd', "
                    "or measure the gradient"
                )
            set_modes(model, training, inputs)
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
            inputs=inputs.clone(),
            labels=labels.clone(),
            names=names,
            steps=steps,
            training=None if training is None or training.sends == "gradient" else training,
            varying=tuple(range(len(inputs))),
            budget=budget,
        )

    def alone(self, example: int) -> Sent:
        """The same, with all but one example known.

        Where examples do not mix in a gradient, the others add a constant to it, and are not computed again. What is
        found `once` of an example is kept here, for the measures to come.
        """
        one = replace(self, varying=(example,))
        if self._is_a_sum:
            one = replace(
                self,
                inputs=self.inputs[[example]],
                labels=self.labels[[example]],
                steps=(torch.arange(1),),
                varying=(0,),
                weight=1 / len(self.inputs),
            )
            one = replace(one, rest=self.vector - one.vector)
        object.__setattr__(one, "_found", self._found.setdefault(("alone", example), {}))
        return one

    def once(self, compute: Callable[..., V], *arguments: Hashable) -> V:
        """`compute(self, *arguments)`, which is kept for all measures that ask for the same; let it be small."""
        if (compute, arguments) not in self._found:
            self._found[compute, arguments] = compute(self, *arguments)
        found: V = self._found[compute, arguments]
        return found

    @property
    def unknown(self) -> Tensor:
        """The true values of the inputs that vary, `example ...`."""
        return self.inputs[list(self.varying)]

    def __call__(self, unknown: Tensor) -> Tensor:
        """What is sent if the varying examples were `unknown`, `number`."""
        return self._whole(self.own(unknown))

    def own(self, unknown: Tensor) -> tuple[Tensor, ...]:
        """What these examples send, a tensor for each of `names`; can be differentiated twice by `unknown`."""
        return tuple(self._made(unknown, _by_autograd).values())

    def transformed(self, unknown: Tensor) -> Tensor:
        """As a call, for the transforms of torch.func, which do not notice where a second derivative is missing."""
        return self._whole(self._made(unknown, lambda value, named: grad(value)(named)).values())

    def _made(self, unknown: Tensor, slopes_of: Slopes) -> State:
        batch = unknown
        if len(self.varying) < len(self.inputs):
            batch = self.inputs.index_put((torch.tensor(self.varying),), unknown)
        if self.training is None:
            slopes = self._slopes(self._weights, batch, self.labels, self.loss, slopes_of)
            return slopes if self.weight == 1 else {name: self.weight * slope for name, slope in slopes.items()}
        before, momentum = self._weights, dict[str, Tensor]()
        after, moved = before, {name: torch.zeros_like(weight) for name, weight in before.items()}
        for index in self.steps:
            slopes = self._slopes(after, batch[index], self.labels[index], self.loss, slopes_of)
            for name in self._moving:
                way = sgd_direction(slopes[name], after[name], before[name], self.training, momentum, name)
                moved[name] = moved[name] + way
            after = {name: weight - self.training.learning_rate * moved[name] for name, weight in before.items()}
        return moved  # and not what the weights lost, in whose rounding small steps drown

    def _whole(self, own: Iterable[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in own])
        return flat if self.rest is None else self.rest + flat

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
        if self.rest is not None:
            return replace(self, rest=None).vector
        if len(self.varying) == len(self.inputs):
            return self.vector
        if self.training is not None:
            raise ConfigError(
                "measure: in an update of several steps no example has a share of its own; measure the whole update, "
                "or the gradient of a batch"
            )
        place = torch.tensor(self.varying)

        def loss(outputs: Tensor, labels: Tensor, /, *, reduction: str = "sum") -> Tensor:
            return self.loss(outputs[place], labels[place], reduction=reduction) / len(labels)

        with torch.no_grad():
            return self._whole(self._slopes(self._weights, self.inputs, self.labels, loss, _by_autograd).values())

    @property
    def is_zero(self) -> bool:
        """Whether the varying examples add nothing to what is sent, so that there is nothing to read."""
        return not (self.vector if self.training is not None else self.share).any()

    @cached_property
    def linear(self) -> Linear:
        """Its derivative at the true inputs.

        Raises:
            ConfigError: the inputs are integers; the budget is too small for it and one product.
            RunError: a layer cannot be differentiated twice.
        """
        self.check_continuous()
        self.check_memory("the derivative of what is sent", self.bytes_of_derivative + self._bytes_of_one)
        return Linear(self)

    def double(self) -> Sent:
        """The same in float64."""
        labels = self.labels.double() if self.labels.is_floating_point() else self.labels
        return replace(
            self,
            model=deepcopy(self.model).double(),
            inputs=self.inputs.double(),
            labels=labels,
            rest=None if self.rest is None else self.rest.double(),
        )

    def around(self, noises: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """What is sent where the unknown inputs are off by each of `noises` (`example ...`, on any device), in blocks.

        Yields:
            By how much they are off once added and rounded, `point example ...`, and what is sent, `point number`; as
            many points at once as the memory budget allows.

        Raises:
            ConfigError: the inputs are integers; the budget is too small for one point.
        """
        self.check_continuous()
        self.check_memory("one perturbed batch", self._bytes_of_one)
        left = iter(noises)
        while block := list(islice(left, self.at_once)):
            points = self.unknown + torch.stack(block).to(self.inputs.device)
            with torch.no_grad():
                yield points - self.unknown, self._many(points)

    @property
    def at_once(self) -> int:
        """How many perturbed batches are made at once: as the memory budget allows, and no more than is quick."""
        return min(self.budget, max(_QUICKEST, self._bytes_of_one)) // self._bytes_of_one

    @property
    def products_at_once(self) -> int:
        """How many products with its derivative are made at once, beside what is kept for all of them."""
        left = self.budget - self.bytes_of_derivative
        return min(left, max(_QUICKEST // 2, self._bytes_of_one)) // self._bytes_of_one

    def check_memory(self, what: str, needed: int) -> None:
        """Raise ConfigError where `what` takes more bytes than the budget."""
        if needed > self.budget:
            raise ConfigError(
                f"measure: {what} takes about {ceil(needed / 2**20)} MiB, and memory is {self.budget / 2**20:.4g} MiB; "
                "raise memory, or measure fewer examples at once"
            )

    def check_continuous(self) -> None:
        """Raise ConfigError where inputs cannot be changed a little."""
        if not self.inputs.is_floating_point():
            raise ConfigError(
                "measure: the inputs are token ids, which cannot be changed a little; of texts only measures of the "
                "gradient itself are defined, such as gradient-norm"
            )

    def _many(self, points: Tensor) -> Tensor:
        if not self._vectorises:
            return torch.stack([self(point) for point in points])
        made: Tensor = vmap(self.transformed, randomness="same")(points)
        return made

    @cached_property
    def _vectorises(self) -> bool:
        """Whether several perturbed batches can be made at once, of which some layers are not capable."""
        try:
            with torch.no_grad():
                (one,) = vmap(self.transformed, randomness="same")(self.unknown[None])
        except (RuntimeError, NotImplementedError) as error:
            log.info("not vectorised, so one perturbed batch at a time: %s", error)
            return False
        return alike(one, self.vector)

    @cached_property
    def _is_a_sum(self) -> bool:
        """Whether a gradient is sent to which each of several examples adds its own part, whatever the others are."""
        if self.training is not None or self._draws or len(self.inputs) == 1 or self.rest is not None:
            return False
        if any(_normalises_by_batch(module) for module in self.model.modules()):
            return False
        with torch.no_grad():
            apart, together = torch.cat([self.model(example[None]) for example in self.inputs]), self.model(self.inputs)
        return bool(together.any()) and bool((apart - together).norm() <= _SAME * together.norm())

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].detach() for name in self.names}

    @cached_property
    def _draws(self) -> bool:
        """Whether any layer draws, as dropout does, which the state of torch's generator shows."""
        before = generator_state(self.inputs.device)
        with torch.no_grad():
            forward(self.model, self.inputs)
        return not torch.equal(before, generator_state(self.inputs.device))

    @cached_property
    def _moving(self) -> Sequence[str]:
        """What local steps move: as in torch, a parameter that the loss does not know is not decayed by itself."""
        assert self.training is not None
        if not self.training.weight_decay or self.training.proximal_mu:
            return self.names
        parameters = dict(self.model.named_parameters())
        with torch.enable_grad():
            loss = self.loss(forward(self.model, self.inputs), self.labels)
            slopes = torch.autograd.grad(loss, [parameters[name] for name in self.names], allow_unused=True)
        return [name for name, slope in zip(self.names, slopes, strict=True) if slope is not None]

    def _slopes(self, weights: State, inputs: Tensor, labels: Tensor, loss: Loss, slopes_of: Slopes) -> State:
        """The gradient of `loss`, in the order of `weights`."""
        network = _Forward(self.model)
        named = {f"model.{name}": tensor for name, tensor in weights.items()}

        def value(named: dict[str, Tensor]) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention cannot be differentiated twice
                return loss(functional_call(network, named, (inputs,)), labels)

        with seeded("measure", "dropout") if self._draws else contextlib.nullcontext():
            slopes = slopes_of(value, named)
        return {name: slopes[f"model.{name}"] for name in weights}

    @property
    def _bytes_of_one(self) -> int:
        """About how much memory one more batch takes: what its forward pass keeps, twice, and vectors."""
        return 2 * self._bytes_of_pass + (3 if self.training is None else 6) * self._bytes_of_vector

    @property
    def bytes_of_derivative(self) -> int:
        """About how much memory the derivative takes while it is made: two graphs through all steps, and vectors."""
        passes = sum(map(len, self.steps)) / len(self.inputs)
        return int(4 * passes * self._bytes_of_pass) + (2 * len(self.steps) + 10) * self._bytes_of_vector

    @property
    def _bytes_of_vector(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())

    @cached_property
    def _bytes_of_pass(self) -> int:
        """How much memory a forward pass of all inputs keeps."""
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.loss(forward(self.model, self.inputs), self.labels)
        return kept


def _by_autograd(value: Callable[[dict[str, Tensor]], Tensor], named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient; its graph is kept where gradients are enabled."""
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        named = {name: t if t.requires_grad else t.detach().requires_grad_() for name, t in named.items()}
        by = list(named.values())
        slopes = torch.autograd.grad(value(named), by, create_graph=keep, materialize_grads=True)
    return dict(zip(named, slopes, strict=True))


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
        if _normalises_by_batch(module):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None


def _normalises_by_batch(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _in_order(examples: Tensor, training: LocalTraining) -> Iterator[Tensor]:
    """Batches of `training`, epoch by epoch in the order that examples are in."""
    batches = torch.split(examples, training.batch_size)
    for step in range(training.steps(len(examples))):
        yield batches[step % len(batches)]
