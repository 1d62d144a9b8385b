"""Control variates in a recording: what a server knows of SCAFFOLD's clients beside their updates.

The server sends its control variate c as `control/NAME` beside parameter NAME. A client answers
with c + (c_i+ - c_i), so whoever saw all its messages knows c_i, the sum of the changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.recording.known_terms import read_distance
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
    """Return the update of the model alone, with the move that the local gradients made.

    Each of the K steps added c - c_i to its gradient, so a client moves by K eta (g + c - c_i),
    where g is its mean gradient, and changes its control variate by g - c_i. Both are read, because
    a defense changes both alike: where K eta is small, noise that hides the move hides little of
    the other. w_T stays the model that the client returned, whose losses tell on what it trained.

    Args:
        update: as it was recorded.
        own_control: c_i before this round, by name; parameters that are left out have 0.
    """
    before, server_control = split_controls(update.before)
    after, sent = split_controls(update.after)
    moves: dict[str, Tensor] = {}
    mean_steps: dict[str, Tensor] = {}
    for name in server_control:
        moves[name] = before[name].double() - after[name].double()
        mean_steps[name] = sent[name].double()  # c + (g - c_i)
    gradient_move: dict[str, Tensor] = {}
    distance = read_distance(update.config, update.num_examples) or _fit_distance(moves, mean_steps)
    if distance:
        for name, control in server_control.items():
            # The estimate of least variance from both, whose noise is of one size.
            mean_step = (mean_steps[name] + distance * moves[name]) / (1 + distance**2)
            mean_gradient = mean_step - control.double() + own_control.get(name, torch.zeros(())).double()
            gradient_move[name] = (distance * mean_gradient).to(after[name].dtype)
    payload = Payload.from_dense(after, "weights")
    return replace(update, before=before, payload=payload, gradient_move=gradient_move or None)


def _fit_distance(moves: State, mean_steps: State) -> float:
    """Return K eta by least squares, as a move is K eta times the mean step."""
    product, square = 0.0, 0.0
    for name, mean_step in mean_steps.items():
        product += float((mean_step * moves[name]).sum())
        square += float(mean_step.square().sum())
    return product / square if square else 0.0
