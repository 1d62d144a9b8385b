"""A client's message under the names of the model that is attacked, whatever the federation calls its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsim.errors import TranscriptError
from fedsim.training.model_state import load_whole_numbers, orders_of, statistics_of
from fedsim.wire.messages import State, Update, by_any, by_name
from fedsim.wire.payloads import Payload


class NamedStates(NamedTuple):
    """An update under the names of a model, in float32 where it was sent in half precision.

    Attributes:
        shapes: of the model's parameters.
        floating: names of buffers that may be sent.
        before: w_0.
        after: w_T; beside a gradient, buffers alone.
        gradient: what was sent instead of weights, or None.
        delta: w_T - w_0 as it was sent instead of weights, or None.
    """

    shapes: Mapping[str, torch.Size]
    floating: Sequence[str]
    before: State
    after: State
    gradient: State | None
    delta: State | None

    def direction(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """w_0 - w_T of a parameter in `dtype`: minus the delta where one was sent, or the gradient that was sent."""
        if self.gradient is not None:
            return self.gradient[name].to(dtype)
        if self.delta is not None:
            return -self.delta[name].to(dtype)
        return self.before[name].to(dtype) - self.after[name].to(dtype)

    @property
    def payload(self) -> Payload:
        """What was sent, dense."""
        sent = Payload.dense(self.after, "weights")
        if self.gradient is not None:
            return Payload.dense(self.gradient, "gradient") | sent
        return sent if self.delta is None else sent | Payload.dense(self.delta)


def named_states(update: Update, model: nn.Module, where: str) -> NamedStates:
    """The states of `update` under the names of `model`, whatever the federation calls its arrays.

    Integers and booleans that the server sent, such as a permutation or a mask, are put into `model`.

    Raises:
        TranscriptError: the update is not one of this model.
    """
    orders = orders_of(model)
    real, shapes = orders[1], orders[-1]
    floating = [name for name, _ in model.named_buffers() if name in real]
    returned = orders if update.gradient is None else ({n: real[n] for n in floating if n in update.after},)
    before, after, gradient, delta = by_any(update.before, orders), by_any(update.after, returned), None, None
    if update.gradient is not None:
        gradient = by_name(update.gradient, shapes)
    if before is None:
        raise _of_another_model(where, "weights w_0", update.before, orders)
    if gradient is None and update.gradient is not None:
        raise _of_another_model(where, "gradients", update.gradient, (shapes,))
    if after is None:
        what = "weights w_T" if update.gradient is None else "buffers beside the gradient"
        raise _of_another_model(where, what, update.after, returned)
    if update.sends_delta:
        moved = by_any(update.pseudo_gradient, orders)
        assert moved is not None  # it has the names and shapes of w_0
        delta = {name: -tensor for name, tensor in moved.items()}
    load_whole_numbers(model, update.before)
    return NamedStates(
        shapes=shapes,
        floating=floating,
        before=before,
        after=after,
        gradient=gradient,
        delta=delta,
    )


def _of_another_model(
    where: str, what: str, state: State, orders: Sequence[Mapping[str, torch.Size]]
) -> TranscriptError:
    """Names the first tensor that differs from the model's parameters, or else says how many there are."""
    shapes = next((names for names in orders if len(names) == len(state)), orders[-1])
    if all(key.isdigit() for key in state):
        state = dict(zip(shapes, (state[key] for key in sorted(state, key=int)), strict=False))
    told = f"are {len(state)} tensors, the model has {len(shapes)}"
    for name, shape in orders[-1].items():
        if name not in state:
            told = f"have no {name}, the model has one of shape {tuple(shape)}"
            break
        if state[name].shape != shape:
            told = f"have {name} of shape {tuple(state[name].shape)}, the model {tuple(shape)}"
            break
    return TranscriptError(f"{where}: the recorded {what} {told}; attack with the model of that federation")


def running_statistics(model: nn.Module) -> list[str]:
    """Names of the running statistics of its BatchNorm layers, where they keep any; counters are none."""
    buffers = dict(model.named_buffers())
    return sorted(name for name in statistics_of(model) if buffers[name].is_floating_point())
