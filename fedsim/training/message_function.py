"""A client's message as a function of its inputs, which measures differentiate and perturb."""

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

from fedsim.base.errors import ConfigError, is_device_failure
from fedsim.base.loss_term import select_examples
from fedsim.base.randomness import seed_globals
from fedsim.base.task import Loss, smooth_labels
from fedsim.recording.wire_format import State
from fedsim.training.message_jacobian import MessageJacobian, agree_up_to_rounding
from fedsim.training.modes import forward, set_modes, trained_shapes
from fedsim.training.optimizers import sgd_direction
from fedsim.training.settings import LocalTraining
from fedsim.training.stochastic_layers import generator_state

V = TypeVar("V")
ComputeGradient = Callable[[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]], dict[str, Tensor]]
"""Computes the gradient of a function of named tensors at given values."""
log = logging.getLogger(__name__)
MEMORY_BUDGET = 1 << 29
"""Default bytes of memory for what is computed at once, half a GiB."""
_FASTEST_BLOCK_BYTES = 1 << 26
"""Bytes beyond which small batches take longer at once than in blocks."""
_OUTPUT_TOLERANCE = 1e-3
"""Relative distance up to which outputs differ by rounding alone."""


@dataclass(frozen=True, kw_only=True)
class ClientMessage:
    """Function from the inputs of a client to its message: a gradient, or an update, as one vector.

    An update is (w_0 - w_T) / learning rate, the sum of the gradients of all steps, so that one
    step of plain SGD on the whole batch gives the gradient. The sum is taken before it is added to
    the weights: rounding there would lose digits, the more the smaller the steps are. BatchNorm's
    running statistics are left out. A layer that draws random numbers (dropout) draws the same ones
    each time. Build one by `create`.

    Attributes:
        model: in the modes of training.
        loss: what the client minimises.
        inputs: `example ...` in model units, the whole batch or all local data.
        labels: `example`.
        names: parameters that are trained, in the order of the vector.
        steps: indices of the examples of each local step.
        training: settings of local training; None for a single gradient.
        varying: ascending indices of the unknown examples; the inputs of all others are constants.
        budget: bytes of memory that may be used at once.
        weight: share of these examples' gradient in the message, below 1 where other examples add
            `rest` to it.
        rest: `number`, what examples that are not in `inputs` add to the message; None without any.
    """

    model: nn.Module
    loss: Loss
    inputs: Tensor
    labels: Tensor
    names: tuple[str, ...]
    steps: tuple[Tensor, ...]
    training: LocalTraining | None
    varying: tuple[int, ...]
    budget: int = MEMORY_BUDGET
    weight: float = 1.0
    rest: Tensor | None = None
    _results: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @classmethod
    def create(
        cls,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        labels: Tensor,
        *,
        training: LocalTraining | None = None,
        order: Sequence[Tensor] | None = None,
        budget: int = MEMORY_BUDGET,
    ) -> ClientMessage:
        """Create the message of one batch, or with `training` that of local training.

        Args:
            model: holds the weights that the client trains from; it is copied. Without `training`
                its layers stay in their modes.
            loss: as `fedsim.Task.loss`.
            inputs: `example ...` in model units; they are copied.
            labels: `example`.
            training: settings of local training; a client that sends a gradient sends that of
                `inputs`.
            order: indices of the examples of each step; by default in the order of `inputs`, epoch
                by epoch.
            budget: bytes of memory that may be used at once.

        Raises:
            ConfigError: the batch is empty, inputs and labels differ in number, no parameter is
                trained, or the optimizer is not SGD.
        """
        if not len(inputs) or len(inputs) != len(labels):
            raise ConfigError(
                f"measure: expected at least one example and a label for each, got {len(inputs)} "
                f"inputs and {len(labels)} labels"
            )
        # Prepare the model as a client does before it trains.
        model = deepcopy(model)
        names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        if training is not None:
            if training.optimizer != "sgd":
                raise ConfigError(
                    f"measure: of what optimizer '{training.optimizer}' sends there is no measure "
                    "yet; train by 'sgd', or measure the gradient"
                )
            set_modes(model, training, inputs)
            names, loss = tuple(trained_shapes(model, training)), smooth_labels(loss, training.label_smoothing)
        if not names:
            raise ConfigError("measure: the model has no parameter to train, so there is no gradient")
        _drop_running_statistics(model)
        all_examples = torch.arange(len(inputs))
        if training is None or training.sends == "gradient":
            steps: tuple[Tensor, ...] = (all_examples,)
        elif order is not None:
            steps = tuple(order)
        else:
            steps = tuple(_ordered_batches(all_examples, training))
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

    def vary_one_example(self, example: int) -> ClientMessage:
        """Return the same message as a function of one example, all others being known.

        Where examples do not mix in a gradient, the others add a constant to it and are not
        computed again. Results of `compute_once` for the example are cached here, for the measures
        that follow.
        """
        message = replace(self, varying=(example,))
        if self._is_a_sum:
            message = replace(
                self,
                inputs=self.inputs[[example]],
                labels=self.labels[[example]],
                steps=(torch.arange(1),),
                varying=(0,),
                weight=1 / len(self.inputs),
            )
            message = replace(message, rest=self.vector - message.vector)
        object.__setattr__(message, "_results", self._results.setdefault(("one unknown", example), {}))
        return message

    def compute_once(self, compute: Callable[..., V], *arguments: Hashable) -> V:
        """Return `compute(self, *arguments)`, cached for all measures; let the result be small."""
        if (compute, arguments) not in self._results:
            self._results[compute, arguments] = compute(self, *arguments)
        result: V = self._results[compute, arguments]
        return result

    @property
    def unknown_inputs(self) -> Tensor:
        """Return the true values of the inputs that vary, `example ...`."""
        return self.inputs[list(self.varying)]

    def __call__(self, unknown: Tensor) -> Tensor:
        """Return the message for the values `unknown` of the varying examples, `number`."""
        return self._join(self.contributions(unknown))

    def contributions(self, unknown: Tensor) -> tuple[Tensor, ...]:
        """Return what `inputs` contribute to the message, a tensor for each of `names`.

        It can be differentiated twice by `unknown`. What other examples add (`rest`) is left out.
        """
        return tuple(self._compute(unknown, _gradient_by_autograd).values())

    def call_in_transform(self, unknown: Tensor) -> Tensor:
        """Return the message as a call does, in a form that the transforms of torch.func accept.

        These do not notice where a second derivative is missing; `agree_up_to_rounding` shows it.
        """
        return self._join(self._compute(unknown, _gradient_by_transform).values())

    def _compute(self, unknown: Tensor, compute_gradient: ComputeGradient) -> State:
        """Compute the gradient or the update by parameter, without `rest`."""
        batch = unknown
        if len(self.varying) < len(self.inputs):
            batch = self.inputs.index_put((torch.tensor(self.varying),), unknown)
        # A single gradient.
        if self.training is None:
            gradient = self._gradient(self._weights, batch, self.labels, self.loss, compute_gradient)
            if self.weight == 1:
                return gradient
            return {name: self.weight * tensor for name, tensor in gradient.items()}
        # The update of local training.
        before, momentum = self._weights, dict[str, Tensor]()
        after, update = before, {name: torch.zeros_like(weight) for name, weight in before.items()}
        for index in self.steps:
            gradient = self._gradient(after, batch[index], self.labels[index], self.loss, compute_gradient)
            for name in self._updated_names:
                direction = sgd_direction(gradient[name], after[name], before[name], self.training, momentum, name)
                update[name] = update[name] + direction
            after = {name: weight - self.training.learning_rate * update[name] for name, weight in before.items()}
        return update  # and not the difference of the weights, in whose rounding small steps are lost

    def _join(self, contributions: Iterable[Tensor]) -> Tensor:
        """Return the whole message as one vector."""
        flat = torch.cat([tensor.flatten() for tensor in contributions])
        return flat if self.rest is None else self.rest + flat

    @cached_property
    def vector(self) -> Tensor:
        """Return the message itself, `number`."""
        with torch.no_grad():
            return self(self.unknown_inputs)

    @property
    def gradient_share(self) -> Tensor:
        """Return what the varying examples contribute to a gradient, `number`.

        Only their losses are differentiated.

        Raises:
            ConfigError: not all examples vary, and the message is an update, in which no example
                has a share of its own.
        """
        if self.rest is not None:
            return replace(self, rest=None).vector
        if len(self.varying) == len(self.inputs):
            return self.vector
        if self.training is not None:
            raise ConfigError(
                "measure: in an update of several steps no example has a share of its own; measure "
                "the whole update, or the gradient of a batch"
            )
        varying = torch.tensor(self.varying)

        def loss(outputs: Tensor, labels: Tensor, /, *, reduction: str = "sum") -> Tensor:
            return self.loss(select_examples(outputs, varying), labels[varying], reduction=reduction) / len(labels)

        with torch.no_grad():
            gradient = self._gradient(self._weights, self.inputs, self.labels, loss, _gradient_by_autograd)
            return self._join(gradient.values())

    @property
    def is_zero(self) -> bool:
        """Return whether the varying examples add nothing to the message."""
        return not (self.vector if self.training is not None else self.gradient_share).any()

    @cached_property
    def jacobian(self) -> MessageJacobian:
        """Return the Jacobian of the message at the true inputs.

        Raises:
            ConfigError: the inputs are integers, or the budget is too small for the Jacobian and
                one product.
            RunError: a layer cannot be differentiated twice.
        """
        self.check_continuous()
        self.check_memory("the derivative of what is sent", self.jacobian_bytes + self._batch_bytes)
        return MessageJacobian(self)

    def to_double(self) -> ClientMessage:
        """Return the same message, computed in float64."""
        labels = self.labels.double() if self.labels.is_floating_point() else self.labels
        return replace(
            self,
            model=deepcopy(self.model).double(),
            inputs=self.inputs.double(),
            labels=labels,
            rest=None if self.rest is None else self.rest.double(),
        )

    def perturbed_messages(self, noises: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the messages for the unknown inputs plus each of `noises`, in blocks.

        Args:
            noises: `example ...` each, on any device.

        Yields:
            The noises as they are once added and rounded, `point example ...`, and the messages,
            `point number`; as many points at once as the memory budget allows.

        Raises:
            ConfigError: the inputs are integers, or the budget is too small for one point.
        """
        self.check_continuous()
        self.check_memory("one perturbed batch", self._batch_bytes)
        remaining = iter(noises)
        while block := list(islice(remaining, self.max_points_at_once)):
            points = self.unknown_inputs + torch.stack(block).to(self.inputs.device)
            with torch.no_grad():
                yield points - self.unknown_inputs, self._messages_at(points)

    @property
    def max_points_at_once(self) -> int:
        """Return how many perturbed batches fit into the memory budget and are fast at once."""
        return min(self.budget, max(_FASTEST_BLOCK_BYTES, self._batch_bytes)) // self._batch_bytes

    @property
    def max_products_at_once(self) -> int:
        """Return how many products with the Jacobian fit into the memory that its graph leaves."""
        free_bytes = self.budget - self.jacobian_bytes
        return min(free_bytes, max(_FASTEST_BLOCK_BYTES // 2, self._batch_bytes)) // self._batch_bytes

    def check_memory(self, what: str, needed: int) -> None:
        """Raise ConfigError where the computation `what` needs more bytes than the budget."""
        if needed > self.budget:
            raise ConfigError(
                f"measure: {what} takes about {ceil(needed / 2**20)} MiB, and memory is "
                f"{self.budget / 2**20:.4g} MiB; raise memory, or measure fewer examples at once"
            )

    def check_continuous(self) -> None:
        """Raise ConfigError where the inputs are integers, which cannot be perturbed."""
        if not self.inputs.is_floating_point():
            raise ConfigError(
                "measure: the inputs are token ids, which cannot be changed a little; of texts "
                "only measures of the gradient itself are defined, such as gradient-norm"
            )

    def _messages_at(self, points: Tensor) -> Tensor:
        if not self._can_vectorise:
            return torch.stack([self(point) for point in points])
        messages: Tensor = vmap(self.call_in_transform, randomness="same")(points)
        return messages

    @cached_property
    def _can_vectorise(self) -> bool:
        """Return whether several perturbed batches can be computed at once; some layers cannot."""
        try:
            with torch.no_grad():
                (message,) = vmap(self.call_in_transform, randomness="same")(self.unknown_inputs[None])
        except (RuntimeError, NotImplementedError) as error:
            if is_device_failure(error):
                raise
            log.info("not vectorised, so one perturbed batch at a time: %s", error)
            return False
        return agree_up_to_rounding(message, self.vector)

    @cached_property
    def _is_a_sum(self) -> bool:
        """Return whether the message is a gradient to which each example adds a term of its own."""
        if self.training is not None or self._has_stochastic_layers:
            return False
        if len(self.inputs) == 1 or self.rest is not None:
            return False
        if any(_normalises_by_batch(module) for module in self.model.modules()):
            return False
        with torch.no_grad():
            single_outputs = torch.cat([self.model(example[None]) for example in self.inputs])
            batch_outputs = self.model(self.inputs)
        distance = (single_outputs - batch_outputs).norm()
        return bool(batch_outputs.any()) and bool(distance <= _OUTPUT_TOLERANCE * batch_outputs.norm())

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].detach() for name in self.names}

    @cached_property
    def _has_stochastic_layers(self) -> bool:
        """Return whether any layer draws random numbers, as the state of torch's generator shows."""
        before = generator_state(self.inputs.device)
        with torch.no_grad():
            forward(self.model, self.inputs)
        return not torch.equal(before, generator_state(self.inputs.device))

    @cached_property
    def _updated_names(self) -> Sequence[str]:
        """Return the parameters that local steps change.

        As in torch, weight decay alone does not change a parameter that the loss does not depend
        on.
        """
        assert self.training is not None
        if not self.training.weight_decay or self.training.proximal_mu:
            return self.names
        parameters = dict(self.model.named_parameters())
        with torch.enable_grad():
            loss = self.loss(forward(self.model, self.inputs), self.labels)
            gradients = torch.autograd.grad(loss, [parameters[name] for name in self.names], allow_unused=True)
        return [name for name, gradient in zip(self.names, gradients, strict=True) if gradient is not None]

    def _gradient(
        self, weights: State, inputs: Tensor, labels: Tensor, loss: Loss, compute_gradient: ComputeGradient
    ) -> State:
        """Compute the gradient of `loss`, in the order of `weights`."""
        network = _CheckedForward(self.model)
        parameters = {f"model.{name}": tensor for name, tensor in weights.items()}

        def loss_of(parameters: dict[str, Tensor]) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # fused attention kernels cannot be differentiated twice
                return loss(functional_call(network, parameters, (inputs,)), labels)

        with seed_globals("measure", "dropout") if self._has_stochastic_layers else contextlib.nullcontext():
            gradient = compute_gradient(loss_of, parameters)
        return {name: gradient[f"model.{name}"] for name in weights}

    @property
    def _batch_bytes(self) -> int:
        """Estimate the memory of one more batch: twice its forward pass, and vectors."""
        return 2 * self._forward_bytes + (3 if self.training is None else 6) * self._vector_bytes

    @property
    def jacobian_bytes(self) -> int:
        """Estimate the memory of computing the Jacobian: two graphs of all steps, and vectors."""
        passes = sum(map(len, self.steps)) / len(self.inputs)
        return int(4 * passes * self._forward_bytes) + (2 * len(self.steps) + 10) * self._vector_bytes

    @property
    def _vector_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())

    @cached_property
    def _forward_bytes(self) -> int:
        """Count the memory that autograd stores in a forward pass of all inputs."""
        stored_bytes = 0

        def count_bytes(tensor: Tensor) -> Tensor:
            nonlocal stored_bytes
            stored_bytes += tensor.numel() * tensor.element_size()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(count_bytes, lambda tensor: tensor)
        with torch.enable_grad(), hooks:
            self.loss(forward(self.model, self.inputs), self.labels)
        return stored_bytes


def _gradient_by_autograd(
    loss_of: Callable[[dict[str, Tensor]], Tensor], parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Compute the gradient; where gradients are enabled, it can be differentiated further."""
    create_graph = torch.is_grad_enabled()
    leaves: dict[str, Tensor] = {}
    with torch.enable_grad():
        for name, tensor in parameters.items():
            leaves[name] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        gradients = torch.autograd.grad(
            loss_of(leaves),
            list(leaves.values()),
            create_graph=create_graph,
            materialize_grads=True,
        )
    return dict(zip(leaves, gradients, strict=True))


def _gradient_by_transform(
    loss_of: Callable[[dict[str, Tensor]], Tensor], parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    gradient: dict[str, Tensor] = grad(loss_of)(parameters)
    return gradient


class _CheckedForward(nn.Module):
    """Model run by `fedsim.training.modes.forward`, for its error on batches of one example."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return forward(self.model, inputs)


def _drop_running_statistics(model: nn.Module) -> None:
    """Drop the running statistics of layers that normalise by the batch, which never use them."""
    for module in model.modules():
        if _normalises_by_batch(module):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None


def _normalises_by_batch(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _ordered_batches(examples: Tensor, training: LocalTraining) -> Iterator[Tensor]:
    """Yield the batches of all steps, epoch by epoch in the order of `examples`."""
    batches = torch.split(examples, training.batch_size)
    for step in range(training.steps(len(examples))):
        yield batches[step % len(batches)]
