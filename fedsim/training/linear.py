"""The derivative of what a client sends by its inputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap
from torch.nn.functional import one_hot

from fedsim.errors import RunError, first_line
from fedsim.randomness import generator

if TYPE_CHECKING:
    from fedsim.training.sent import Sent

log = logging.getLogger("fedsim." + __name__)
_AGREE = 1e-2
_ABOUT = 0.1
"""By how much a derivative in float32 may be off, beside its length: a lost path changes more."""
_NEARBY = (1e-6, 1e-8)
"""Lengths of a step, beside that of a random direction: large networks have a kink within the first now and then."""
_ROUNDING = 1e-6
"""Of what is sent, by how much its derivative may be off by rounding, where it hardly depends on the inputs."""

_TINY = 1e-300


class Linear:
    """The derivative J of what is sent by the inputs that vary, and its transpose, exactly.

    One J v is the derivative of J' u by u, for which a graph is kept. Several at once are made in forward mode. Where a
    layer has no derivative of that kind, or cannot be vectorised, they are made one by one, which is as exact and takes
    longer; `forward_mode` says which.

    Attributes:
        shape: `example ...`, of the inputs that vary.
    """

    def __init__(self, sent: Sent) -> None:
        self._call, self._at = sent, sent.unknown
        self.shape = self._at.shape
        self._inputs = self._at.clone().requires_grad_()
        try:
            self._sent = sent.own(self._inputs)
            reason = "" if self._is_a_derivative() else "its backward pass is taken for a constant"
        except (RuntimeError, NotImplementedError) as error:
            reason = first_line(error)
        if reason:
            raise RunError(
                "measure: what this model sends cannot be differentiated by its inputs, for want of a second "
                f"derivative{_of_layer(sent)} ({reason}); build the layer of plain operations of torch"
            )

    @property
    def size(self) -> int:
        """How many numbers vary."""
        return self._at.numel()

    @cached_property
    def forward_mode(self) -> bool:
        """Whether several products are made at once, J v in forward mode."""
        direction = self._random(self._at)
        try:
            with warnings.catch_warnings():  # torch warns of itself when it first vectorises a derivative
                warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)
                pushed = self._push_many(direction[None])
                pulled = self._pull_many(pushed)
        except (RuntimeError, NotImplementedError) as error:
            log.info("no vectorised forward-mode derivative, so one double backward each: %s", first_line(error))
            return False
        return alike(pushed[0], self.push(direction)) and alike(pulled[0], self.pull(pushed[0]))

    def push(self, directions: Tensor) -> Tensor:
        """J v of `number`, flat: how what is sent changes along v; of `direction number` by each."""
        if directions.dim() == 1:
            probes, pulled = self._pulled
            return _flat(_derivative((pulled,), probes, (directions.reshape(self.shape),)))
        return self._push_many(directions) if self.forward_mode else torch.stack([self.push(v) for v in directions])

    def pull(self, vectors: Tensor) -> Tensor:
        """J' u of `number`, flat; of `vector number` of each."""
        if vectors.dim() == 1:
            return _flat(_derivative(self._sent, (self._inputs,), self._parts(vectors)))
        return self._pull_many(vectors) if self.forward_mode else torch.stack([self.pull(u) for u in vectors])

    def blocks(self, directions: Tensor) -> Sequence[Tensor]:
        """`direction number` in parts that keep to the memory budget."""
        return torch.split(directions, self._call.products_at_once)

    def units(self) -> Iterator[Tensor]:
        """The unit vectors of all numbers that vary, `direction number`, in such parts."""
        for some in self.blocks(torch.arange(self.size)):
            yield one_hot(some, self.size).to(self._at)

    def _push_many(self, directions: Tensor) -> Tensor:
        def push(direction: Tensor) -> Tensor:
            made: Tensor = jvp(self._call.transformed, (self._at,), (direction,))[1]
            return made

        with torch.no_grad():
            many: Tensor = vmap(push, randomness="same")(directions.reshape(-1, *self.shape))
        return many

    def _pull_many(self, vectors: Tensor) -> Tensor:
        with torch.no_grad():
            many: Tensor = vmap(self._transpose)(vectors)[0]
        return many.flatten(1)

    def _is_a_derivative(self) -> bool:
        """Whether J v is what is sent ahead less what is sent behind, as it is not where autograd lost a path.

        That is asked in float64 and nearby, where some step crosses no kink; and whether |J v| is v' J' u, u being the
        direction of J v.
        """
        direction, exact = self._random(self._at), self._call.double()
        pushed, rounding = self.push(direction).double(), 2 * _ROUNDING * self._call.vector.double().norm()

        def agrees(length: float) -> bool:
            step = length * direction.double().reshape(self.shape)
            with torch.no_grad():
                apart = (exact(exact.unknown + step) - exact(exact.unknown - step)) / (2 * length)
            # what is not finite diverges, which measures say themselves
            return not apart.isfinite().all() or bool((pushed - apart).norm() <= _ABOUT * apart.norm() + rounding)

        if not pushed.isfinite().all():
            return True
        length = pushed.norm()  # squares of small numbers do not fit into float32
        back = (self.pull((pushed / length.clamp_min(_TINY)).to(direction)) @ direction).double()
        return bool((length - back).abs() <= _ABOUT * length + rounding) and any(map(agrees, _NEARBY))

    @staticmethod
    def _random(like: Tensor) -> Tensor:
        return torch.randn(like.numel(), generator=generator("measure", "direction")).to(like)

    @cached_property
    def _transpose(self) -> Callable[[Tensor], tuple[Tensor]]:
        with torch.no_grad():
            made: Callable[[Tensor], tuple[Tensor]] = vjp(self._call.transformed, self._at)[1]
        return made

    def _parts(self, vector: Tensor) -> tuple[Tensor, ...]:
        pieces = torch.split(vector, [tensor.numel() for tensor in self._sent])
        return tuple(piece.reshape(tensor.shape) for piece, tensor in zip(pieces, self._sent, strict=True))

    @cached_property
    def _pulled(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """A vector u, in parts, and J' u as a function of it."""
        probes = tuple(torch.zeros_like(tensor, requires_grad=True) for tensor in self._sent)
        (pulled,) = _derivative(self._sent, (self._inputs,), probes, create_graph=True)
        return probes, pulled


def _derivative(
    outputs: tuple[Tensor, ...], by: tuple[Tensor, ...], along: tuple[Tensor, ...], *, create_graph: bool = False
) -> tuple[Tensor, ...]:
    if not any(tensor.requires_grad for tensor in outputs):
        return tuple(torch.zeros_like(tensor) for tensor in by)
    changing = [(tensor, factor) for tensor, factor in zip(outputs, along, strict=True) if tensor.requires_grad]
    some, factors = zip(*changing, strict=True)
    return torch.autograd.grad(some, by, factors, retain_graph=True, create_graph=create_graph, materialize_grads=True)


def _flat(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in parts])


def alike(some: Tensor, other: Tensor) -> bool:
    """Whether they differ by rounding alone: torch.func takes a missing second derivative for zero."""
    return bool((some - other).norm() <= _AGREE * other.norm())


def _of_layer(sent: Sent) -> str:
    """The first layer that cannot be differentiated twice, in words; nothing where none was found."""
    seen: list[tuple[str, nn.Module, Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda module, given, _, name=name: seen.append((name, module, given[0])))
        for name, layer in sent.model.named_modules()
        if not list(layer.children())
    ]
    with torch.no_grad():
        sent.model(sent.inputs)
    for hook in hooks:
        hook.remove()
    lacking = (f" of layer '{name}' ({type(layer).__name__})" for name, layer, at in seen if not _twice(layer, at))
    return next(lacking, "")


def _twice(layer: nn.Module, at: Tensor) -> bool:
    """Whether the second derivative of a layer is that of finite differences, in float64."""
    layer, at = deepcopy(layer).double(), at.double()
    direction = 1e-6 * torch.randn(at.shape, generator=generator("measure", "direction"), dtype=at.dtype).to(at.device)

    def slope(point: Tensor) -> Tensor:
        return torch.autograd.grad(layer(point).square().sum(), point, create_graph=True)[0]

    ahead, behind = (slope((at + sign * direction).requires_grad_()).detach() for sign in (1, -1))
    try:
        point = at.clone().requires_grad_()
        (made,) = torch.autograd.grad(slope(point), point, direction, materialize_grads=True)
    except (RuntimeError, NotImplementedError):
        return False
    return alike(2 * made, ahead - behind)
