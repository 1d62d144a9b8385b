"""Control variates in a recording: what a server knows of SCAFFOLD's clients beside their updates.

The server sends its control variate c as `control/NAME` beside parameter NAME. A client answers
with c + (c_i+ - c_i), so whoever saw all its messages knows c_i, the sum of the changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import Update

CONTROL_PREFIX = "control/"
"""Beginning of the names of control variates among the arrays of a message."""


def split_controls(state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the model in `state`, and the control variates by name of a parameter.

    >>> model, controls = split_controls({"w": torch.ones(1), "control/w": torch.zeros(1)})
    >>> list(model), list(controls)
    (['w'], ['w'])
    """
    model: dict[str, Tensor] = {}
    controls: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(CONTROL_PREFIX):
            controls[name.removeprefix(CONTROL_PREFIX)] = tensor
        else:
            model[name] = tensor
    return model, controls


def join_controls(model: State, controls: State) -> dict[str, Tensor]:
    """Return one state of both, the inverse of `split_controls`."""
    return {**model, **{f"{CONTROL_PREFIX}{name}": tensor for name, tensor in controls.items()}}


def holds_controls(names: Iterable[str]) -> bool:
    """Tell whether control variates are among these names."""
    return any(name.startswith(CONTROL_PREFIX) for name in names)


def sum_changes(updates: Iterable[Update]) -> dict[str, Tensor]:
    """Return c_i of a client after these updates, which are all that it sent so far, in float64."""
    total: dict[str, Tensor] = {}
    for update in updates:
        _, received = split_controls(update.before)
        _, sent = split_controls(update.after)
        for name, control in received.items():
            total[name] = total.get(name, 0.0) + (sent[name].double() - control.double())
    return total


def remove_controls(update: Update, own_control: State) -> Update:
    """Return the update as the same local gradients would have given it without control variates.

    Each of the K steps added c - c_i to its gradient, so w_T lies K eta (c_i - c) too far.

    Args:
        update: as it was recorded.
        own_control: c_i before this round, by name; parameters that are left out have 0.
    """
    before, server_control = split_controls(update.before)
    after, sent = split_controls(update.after)
    changes = {name: sent[name].double() - control.double() for name, control in server_control.items()}
    distance = _step_distance(before, after, server_control, changes)
    for name, control in server_control.items():
        drift = distance * (own_control.get(name, torch.zeros(())).double() - control.double())
        after[name] = (after[name].double() - drift).to(after[name].dtype)
    return replace(update, before=before, payload=Payload.from_dense(after, "weights"))


def _step_distance(before: State, after: State, server_control: State, changes: State) -> float:
    """Return K eta, which the message itself tells: c_i+ - c_i = (w_t - w_T) / (K eta) - c.

    It is fitted by least squares, as a defense may have changed the numbers.
    """
    product, square = 0.0, 0.0
    for name, control in server_control.items():
        mean_step = changes[name] + control.double()
        product += float((mean_step * (before[name].double() - after[name].double())).sum())
        square += float(mean_step.square().sum())
    return product / square if square else 0.0
