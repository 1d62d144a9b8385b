"""The Jacobian of a client's message by its inputs: products with it and with its transpose."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.functional import one_hot

from fedsim.base.errors import RunError, first_line, is_device_failure
from fedsim.base.module_hooks import hook_outputs
from fedsim.base.randomness import generator

if TYPE_CHECKING:
    from fedsim.training.message_function import ClientMessage

log = logging.getLogger(__name__)
_ROUNDING_TOLERANCE = 1e-2
"""Relative distance up to which two derivatives count as equal: a missing one differs by far
more."""
_DIFFERENCE_TOLERANCE = 0.1
"""Relative distance of a float32 derivative to finite differences: a lost path changes more."""
_STEP_LENGTHS = (1e-6, 1e-8)
"""Steps of finite differences; large networks have a kink within the first now and then."""
_MESSAGE_ROUNDING = 1e-6
"""Rounding error of a derivative, relative to the message, which may hardly depend on the
inputs."""

_SMALLEST_NORM = 1e-300


class MessageJacobian:
    """Jacobian J of a client's message by its varying inputs, exact, as products J v and J' u.

    J v is the derivative of J' u by u, for which a graph is kept, so that the client's training is
    not simulated anew for each v, as in forward mode. Several products at once are computed by a
    vectorised backward pass. Where a layer cannot be vectorised, they are computed one by one, which
    is as exact and takes longer; `is_vectorised` tells which.

    Attributes:
        shape: `example ...`, of the inputs that vary.
    """

    def __init__(self, sent: ClientMessage) -> None:
        self._message, self._point = sent, sent.unknown_inputs
        self.shape = self._point.shape
        self._inputs = self._point.clone().requires_grad_()
        try:
            self._outputs = sent.contributions(self._inputs)
            reason = "" if self._is_a_derivative() else "its backward pass is taken for a constant"
        except (RuntimeError, NotImplementedError) as error:
            if is_device_failure(error):
                raise
            reason = first_line(error)
        if reason:
            raise RunError(
                "measure: what this model sends cannot be differentiated by its inputs, for want "
                f"of a second derivative{_describe_undifferentiable_layer(sent)} ({reason}); build "
                "the layer of plain operations of torch"
            )

    @property
    def size(self) -> int:
        """Return how many numbers vary."""
        return self._point.numel()

    @cached_property
    def is_vectorised(self) -> bool:
        """Return whether several products are computed at once."""
        direction = self._random_direction()
        try:
            with warnings.catch_warnings():  # torch itself warns when it first vectorises a derivative
                warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)
                pushed = self._push_many(direction[None])
                pulled = self._pull_many(pushed)
        except (RuntimeError, NotImplementedError) as error:
            if is_device_failure(error):
                raise
            log.info(
                "no vectorised derivative, so one double backward each: %s",
                first_line(error),
            )
            return False
        pushed_agree = agree_up_to_rounding(pushed[0], self.push_forward(direction))
        return pushed_agree and agree_up_to_rounding(pulled[0], self.pull_back(pushed[0]))

    def push_forward(self, directions: Tensor) -> Tensor:
        """Compute J v, the change of the message along v.

        Args:
            directions: v as `number`, flat, or several as `direction number`.
        """
        if directions.dim() == 1:
            probes, pulled = self._pulled_probes
            return _flatten(_differentiate((pulled,), probes, (directions.reshape(self.shape),)), 0)
        if self.is_vectorised:
            return self._push_many(directions)
        return torch.stack([self.push_forward(direction) for direction in directions])

    def pull_back(self, vectors: Tensor) -> Tensor:
        """Compute J' u, the gradient by the inputs of the message's product with u.

        Args:
            vectors: u as `number`, flat, or several as `vector number`.
        """
        if vectors.dim() == 1:
            return _flatten(_differentiate(self._outputs, (self._inputs,), self._split_vector(vectors)), 0)
        if self.is_vectorised:
            return self._pull_many(vectors)
        return torch.stack([self.pull_back(vector) for vector in vectors])

    def split_directions(self, directions: Tensor) -> Sequence[Tensor]:
        """Split `direction number` into blocks whose products keep to the memory budget."""
        return torch.split(directions, self._message.max_products_at_once)

    def unit_vectors(self) -> Iterator[Tensor]:
        """Yield the unit vectors of all numbers that vary, `direction number`, in such blocks."""
        for numbers in self.split_directions(torch.arange(self.size)):
            yield one_hot(numbers, self.size).to(self._point)

    def _push_many(self, directions: Tensor) -> Tensor:
        probes, pulled = self._pulled_probes
        shaped = directions.reshape(-1, *self.shape)
        return _flatten(_differentiate((pulled,), probes, (shaped,), is_grads_batched=True), 1)

    def _pull_many(self, vectors: Tensor) -> Tensor:
        with torch.no_grad():
            pulled: Tensor = vmap(self._transpose)(vectors)[0]
        return pulled.flatten(1)

    def _is_a_derivative(self) -> bool:
        """Return whether J v agrees with finite differences; where autograd lost a path, it does not.

        The differences are central, in float64, over steps so short that some cross no kink. |J v|
        has to be v' J' u as well, u being the direction of J v.
        """
        direction, exact = self._random_direction(), self._message.to_double()
        pushed = self.push_forward(direction).double()
        rounding = 2 * _MESSAGE_ROUNDING * self._message.vector.double().norm()

        def agrees_with_difference(length: float) -> bool:
            step = length * direction.double().reshape(self.shape)
            with torch.no_grad():
                difference = (exact(exact.unknown_inputs + step) - exact(exact.unknown_inputs - step)) / (2 * length)
            if not difference.isfinite().all():  # it diverges, which measures report themselves
                return True
            return bool((pushed - difference).norm() <= _DIFFERENCE_TOLERANCE * difference.norm() + rounding)

        if not pushed.isfinite().all():
            return True
        length = pushed.norm()  # squares of small numbers do not fit into float32
        unit = (pushed / length.clamp_min(_SMALLEST_NORM)).to(direction)
        length_by_transpose = (self.pull_back(unit) @ direction).double()
        transpose_agrees = (length - length_by_transpose).abs() <= _DIFFERENCE_TOLERANCE * length + rounding
        return bool(transpose_agrees) and any(map(agrees_with_difference, _STEP_LENGTHS))

    def _random_direction(self) -> Tensor:
        rng = generator("measure", "direction")
        return torch.randn(self._point.numel(), generator=rng).to(self._point)

    @cached_property
    def _transpose(self) -> Callable[[Tensor], tuple[Tensor]]:
        with torch.no_grad():
            transpose: Callable[[Tensor], tuple[Tensor]]
            transpose = vjp(self._message.call_in_transform, self._point)[1]
        return transpose

    def _split_vector(self, vector: Tensor) -> tuple[Tensor, ...]:
        pieces = torch.split(vector, [output.numel() for output in self._outputs])
        return tuple(piece.reshape(output.shape) for piece, output in zip(pieces, self._outputs, strict=True))

    @cached_property
    def _pulled_probes(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return a vector u, split by parameter, and J' u as a function of it."""
        probes = tuple(torch.zeros_like(output, requires_grad=True) for output in self._outputs)
        (pulled,) = _differentiate(self._outputs, (self._inputs,), probes, create_graph=True)
        return probes, pulled


def _differentiate(
    outputs: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    vectors: tuple[Tensor, ...],
    *,
    create_graph: bool = False,
    is_grads_batched: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients by `inputs` of `outputs` times `vectors`, or times each of a batch; zero without a path."""
    if not any(output.requires_grad for output in outputs):
        batch = vectors[0].shape[:1] if is_grads_batched else ()
        return tuple(tensor.new_zeros((*batch, *tensor.shape)) for tensor in inputs)
    pairs = zip(outputs, vectors, strict=True)
    dependent_outputs, dependent_vectors = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
    return torch.autograd.grad(
        dependent_outputs,
        inputs,
        dependent_vectors,
        retain_graph=True,
        create_graph=create_graph,
        is_grads_batched=is_grads_batched,
        materialize_grads=True,
    )


def _flatten(tensors: tuple[Tensor, ...], start: int) -> Tensor:
    return torch.cat([tensor.flatten(start) for tensor in tensors], start)


def agree_up_to_rounding(value: Tensor, reference: Tensor) -> bool:
    """Return whether `value` differs from `reference` by rounding alone.

    torch.func takes a missing second derivative for zero, which this shows.
    """
    return bool((value - reference).norm() <= _ROUNDING_TOLERANCE * reference.norm())


def _describe_undifferentiable_layer(message: ClientMessage) -> str:
    """Name the first layer without a second derivative, for an error text; '' without any."""
    calls: list[tuple[str, nn.Module, Tensor]] = []

    def record_as(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda layer, arguments, _: calls.append((name, layer, arguments[0]))

    with ExitStack() as hooks, torch.no_grad():
        for name, layer in message.model.named_modules():
            if not list(layer.children()):
                hooks.enter_context(hook_outputs(layer, record_as(name)))
        message.model(message.inputs)
    for name, layer, layer_inputs in calls:
        if not _has_second_derivative(layer, layer_inputs):
            return f" of layer '{name}' ({type(layer).__name__})"
    return ""


def _has_second_derivative(layer: nn.Module, point: Tensor) -> bool:
    """Return whether the second derivative of a layer is that of finite differences, in float64."""
    layer, point = deepcopy(layer).double(), point.double()
    noise = torch.randn(point.shape, generator=generator("measure", "direction"), dtype=point.dtype)
    direction = 1e-6 * noise.to(point.device)

    def gradient_at(inputs: Tensor) -> Tensor:
        squares = layer(inputs).square().sum()
        return torch.autograd.grad(squares, inputs, create_graph=True)[0]

    gradient_ahead = gradient_at((point + direction).requires_grad_()).detach()
    gradient_behind = gradient_at((point - direction).requires_grad_()).detach()
    try:
        inputs = point.clone().requires_grad_()
        (product,) = torch.autograd.grad(gradient_at(inputs), inputs, direction, materialize_grads=True)
    except (RuntimeError, NotImplementedError) as error:
        if is_device_failure(error):
            raise
        return False
    return agree_up_to_rounding(2 * product, gradient_ahead - gradient_behind)
