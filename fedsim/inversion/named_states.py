"""Translation of a client's message to the parameter names of the attacked model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsim.base.errors import AttackError, TranscriptError, join_first
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State, Update, match_any_names, match_names, propose_format
from fedsim.training.model_state import load_integer_buffers, running_statistics, sendable_shapes


class NamedStates(NamedTuple):
    """Update under the names of a model, in float32 if it was sent in half precision.

    Attributes:
        shapes: of the model's parameters.
        buffer_names: of the buffers that may be sent.
        before: w_0.
        after: w_T; only buffers if a gradient was sent.
        gradient: sent instead of weights, or None.
        delta: w_T - w_0 if it was sent instead of weights, or is known otherwise, see
            `Update.states_move`; or None.
    """

    shapes: Mapping[str, torch.Size]
    buffer_names: Sequence[str]
    before: State
    after: State
    gradient: State | None
    delta: State | None

    def direction(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return w_0 - w_T of a parameter in `dtype`, or the gradient that was sent.

        If the delta was sent, or is known otherwise, the result is minus the delta, to the bit.
        """
        if self.gradient is not None:
            return self.gradient[name].to(dtype)
        if self.delta is not None:
            return -self.delta[name].to(dtype)
        return self.before[name].to(dtype) - self.after[name].to(dtype)

    @property
    def payload(self) -> Payload:
        """Return what was sent, dense."""
        weights = Payload.from_dense(self.after, "weights")
        if self.gradient is not None:
            return Payload.from_dense(self.gradient, "gradient") | weights
        return weights if self.delta is None else weights | Payload.from_dense(self.delta)


def named_states(update: Update, model: nn.Module, where: str, *, body_alone: bool = False) -> NamedStates:
    """Return the states of `update` under the names of `model`.

    The federation's arrays may have other names, or only positions. Integers and booleans that the
    server sent, such as a permutation or a mask, are loaded into `model`.

    Args:
        body_alone: leave out the parts of the model that stay with the clients, as a private head
            does, whose values in `model` then mean nothing.
    """
    orders = sendable_shapes(model)
    if absent := find_absent_names(update.before, model):
        if not body_alone:
            raise missing_part_error(absent, where)
        orders = tuple({name: shape for name, shape in names.items() if name in update.before} for names in orders)
    floating_shapes, shapes = orders[1], orders[-1]
    buffer_names = [name for name, _ in model.named_buffers() if name in floating_shapes]
    returned_orders = orders
    if update.gradient is not None:
        returned_names = [name for name in buffer_names if name in update.after]
        returned_orders = ({name: floating_shapes[name] for name in returned_names},)
    before, after = match_any_names(update.before, orders), match_any_names(update.after, returned_orders)
    gradient, delta = None, None
    if update.gradient is not None:
        gradient = match_names(update.gradient, shapes)
    if before is None:
        raise _model_mismatch_error(where, "weights w_0", update.before, orders)
    if gradient is None and update.gradient is not None:
        raise _model_mismatch_error(where, "gradients", update.gradient, (shapes,))
    if after is None:
        content = "weights w_T" if update.gradient is None else "buffers sent with the gradient"
        raise _model_mismatch_error(where, content, update.after, returned_orders)
    if update.states_move:
        pseudo_gradient = match_any_names(update.pseudo_gradient, orders)
        assert pseudo_gradient is not None  # it has the names and shapes of w_0
        delta = {name: -tensor for name, tensor in pseudo_gradient.items()}
    load_integer_buffers(model, update.before)
    return NamedStates(
        shapes=shapes,
        buffer_names=buffer_names,
        before=before,
        after=after,
        gradient=gradient,
        delta=delta,
    )


def missing_part_error(names: Sequence[str], where: str) -> AttackError:
    """Return the error of an attack that needs all of a model, of which these parameters were not sent."""
    missing = join_first([repr(name) for name in names], 3)
    return AttackError(
        f"{where}: {missing} of the model are in no message, as of a part that stays with the clients, and this "
        "attack needs all of it; attack clients that send the whole model, or choose an attack that reads the first "
        "layer alone, such as analytic, or that finds the part along, such as sme"
    )


def find_absent_names(before: State, model: nn.Module) -> list[str]:
    """Return the parameters of `model` that a server does not have, where all that it has is of the model.

    A server that has none of them, or something else, has another model.
    """
    tensors = model.state_dict()
    parameters = [name for name, _ in model.named_parameters()]
    absent = [name for name in parameters if name not in before]
    if len(absent) == len(parameters):
        return []
    for name, tensor in before.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            return []
    return absent


def _model_mismatch_error(
    where: str, content: str, state: State, orders: Sequence[Mapping[str, torch.Size]]
) -> TranscriptError:
    """Return an error that names the first tensor that differs, or the number of tensors."""
    sent, shapes = state, next((names for names in orders if len(names) == len(state)), orders[-1])
    difference = f"are {len(state)} tensors, the model has {len(shapes)}"
    if all(key.isdigit() for key in state):
        tensors = (state[key] for key in sorted(state, key=int))
        state = dict(zip(shapes, tensors, strict=False))
    for name, shape in orders[-1].items():
        if name not in state:
            difference = f"have no {name}, the model has one of shape {tuple(shape)}"
            break
        if state[name].shape != shape:
            got = tuple(state[name].shape)
            difference = f"have {name} of shape {got}, the model {tuple(shape)}"
            break
    remedy = "attack with the model of that federation, or say with [app] names which arrays are the model's"
    return TranscriptError(
        f"{where}: the recorded {content} {difference}; {propose_format(sent, orders[::-1]) or remedy}"
    )


def running_statistic_names(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers' running statistics, without their counters."""
    buffers = dict(model.named_buffers())
    return sorted(name for name in running_statistics(model) if buffers[name].is_floating_point())
