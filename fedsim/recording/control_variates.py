"""Control variates in a recording: what a server knows of SCAFFOLD's clients beside their updates.

The server sends its control variate c as `control/NAME` beside parameter NAME. A client answers
with c + (c_i+ - c_i), so whoever saw all its messages knows c_i, the sum of the changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.base.errors import TranscriptError
from fedsim.recording.known_terms import read_distance
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import Update

CONTROL_PREFIX = "control/"
"""Beginning of the names of control variates among the arrays of a message."""
_MIN_TELLING_RESIDUAL = 1e-3
"""Share of a move below which rounding alone may leave it unexplained."""
_MAX_RESIDUAL = 0.02
"""Share of a move up to which the control variates of a client without defenses may leave it unexplained."""


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
    """Return whether control variates are among these names."""
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
    distance = read_distance(update.config, update.num_examples) or fit_distance(moves, mean_steps)
    gradient_move = _estimate_gradient_move(distance, moves, mean_steps, server_control, own_control)
    payload = Payload.from_dense(after, "weights")
    return replace(update, before=before, payload=payload, gradient_move=gradient_move or None)


def _estimate_gradient_move(
    distance: float, moves: State, mean_steps: State, server_control: State, own_control: State
) -> dict[str, Tensor]:
    """Return by name K eta g, the move that the local gradients made; empty where the client made no step.

    Args:
        distance: K eta, or 0.
        moves: w_t - w_T, in float64.
        mean_steps: c + (c_i+ - c_i), in float64.
        server_control: c.
        own_control: c_i before this round; parameters that are left out have 0.
    """
    gradient_move: dict[str, Tensor] = {}
    if distance:
        for name, control in server_control.items():
            # The estimate of least variance from both, whose noise is of one size.
            mean_step = (mean_steps[name] + distance * moves[name]) / (1 + distance**2)
            mean_gradient = mean_step - control.double() + own_control.get(name, torch.zeros(())).double()
            gradient_move[name] = (distance * mean_gradient).to(control.dtype)
    return gradient_move


class AppControls(NamedTuple):
    """What a client of an app and its server sent in one round, by the names of the model's tensors in messages.

    Attributes:
        server_control: c.
        own_control: c_i before this round, in float64; parameters that are left out have 0.
        moves: w_t - w_T, in float64.
        steps_by_reading: c_i+ - c_i + c, the mean step of the client, by what it may have sent: the `change` of its
            control variate or its new `value`.
    """

    server_control: dict[str, Tensor]
    own_control: dict[str, Tensor]
    moves: dict[str, Tensor]
    steps_by_reading: dict[str, dict[str, Tensor]]


def read_app_controls(update: Update, earlier_updates: Iterable[Update], message_format: MessageFormat) -> AppControls:
    """Read the control variates of a round.

    Args:
        update: as it was recorded.
        earlier_updates: all that the client sent before.
        message_format: says where control variates are, and what clients send of theirs.
    """
    server_control, sent = message_format.read_controls(update)
    # c_i before this round, by both readings of what the client sent.
    total: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for earlier in earlier_updates:
        _, earlier_sent = message_format.read_controls(earlier)
        for name in server_control:
            last[name] = earlier_sent[name].double()
            total[name] = total.get(name, 0.0) + last[name]
    steps_by_reading: dict[str, dict[str, Tensor]] = {"change": {}, "value": {}}
    for name, control in server_control.items():
        steps_by_reading["change"][name] = control.double() + sent[name].double()
        steps_by_reading["value"][name] = steps_by_reading["change"][name] - last.get(name, 0.0)
    own_control = last if message_format.control_replies == "value" else total
    moves = {name: move for name, move in message_format.read_moves(update).items() if name in server_control}
    return AppControls(server_control, own_control, moves, steps_by_reading)


def remove_app_controls(update: Update, earlier_updates: Iterable[Update], message_format: MessageFormat) -> Update:
    """Return an update of an app with the move that the local gradients made, see `remove_controls`.

    Args:
        update: as it was recorded.
        earlier_updates: all that the client sent before.
        message_format: says where control variates are, and what clients send of theirs.

    Raises:
        TranscriptError: they are not as the format says, or what the client sent fits the other reading of
            `control_replies` better, or neither.
    """
    server_control, own_control, moves, steps_by_reading = read_app_controls(update, earlier_updates, message_format)
    # A client moves by K eta times its mean step, so that the right reading leaves the smaller residual.
    residuals = {reading: _fit_residual(moves, steps) for reading, steps in steps_by_reading.items()}
    stated = message_format.control_replies
    other = "value" if stated == "change" else "change"
    if residuals[stated] > _MIN_TELLING_RESIDUAL and residuals[other] < residuals[stated] / 2:
        raise TranscriptError(
            f"{update.name}: [app] control_replies says that it sent the {stated} of "
            f"its control variate, and as its {other} what it sent fits its move better ({residuals[other]:.2g} of the "
            f"move is left, not {residuals[stated]:.2g}); set control_replies = '{other}'"
        )
    if residuals[stated] > _MAX_RESIDUAL and not message_format.defended:
        raise TranscriptError(
            f"{update.name}: what it sent of its control variate leaves "
            f"{residuals[stated]:.2g} of its move unexplained; [app] controls reads SCAFFOLD's option II, where c_i+ - "
            "c_i + c is the mean step of the client; leave it out where the app does otherwise, or set defended = true "
            "where clients round what they send or add noise to it"
        )
    # How far a client goes is fitted: what an app calls its learning rate may be that of the server.
    mean_steps = steps_by_reading[stated]
    distance = fit_distance(moves, mean_steps)
    gradient_move = _estimate_gradient_move(distance, moves, mean_steps, server_control, own_control)
    return replace(update, gradient_move=gradient_move or None)


def _fit_residual(moves: State, mean_steps: State) -> float:
    """Return the norm of what no multiple of the mean steps explains of the moves, divided by that of the moves."""
    distance = fit_distance(moves, mean_steps)
    left, size = 0.0, 0.0
    for name, move in moves.items():
        left += float((move - distance * mean_steps[name]).square().sum())
        size += float(move.square().sum())
    return math.sqrt(left / size) if size else 0.0


def fit_distance(moves: State, mean_steps: State) -> float:
    """Return K eta by least squares, as a move is K eta times the mean step."""
    product, square = 0.0, 0.0
    for name, mean_step in mean_steps.items():
        product += float((mean_step * moves[name]).sum())
        square += float(mean_step.square().sum())
    return product / square if square else 0.0
