"""Terms that an algorithm adds to a client's local gradients, and that its server knows as well.

SCAFFOLD's are in `fedsim.recording.control_variates`. FedDyn's is linear: each local step adds
-alpha S to the gradient, where S is the sum of the client's earlier moves w_t - w_T. Whoever saw
all its messages knows S, so nothing is hidden by it, as far as no defense changed what was sent:
the client's own S is of its moves before that. The server says alpha along with the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import Update

LINEAR_KEY = "linear-alpha"
"""Key of alpha among the facts that a server sends along."""
_MOVE_PREFIX = "gradient-move/"
"""Beginning of the names of `Update.gradient_move` in the copy of a recording."""
_STATISTICS = ("running_mean", "running_var")


def sum_moves(updates: Iterable[Update]) -> dict[str, Tensor]:
    """Return S of a client after these updates, which are all that it sent so far, in float64.

    Running statistics of BatchNorm layers are no parameters and have no part in it.
    """
    total: dict[str, Tensor] = {}
    for update in updates:
        for name, tensor in update.before.items():
            if is_parameter(name, tensor):
                move = tensor.double() - update.after[name].double()
                total[name] = total[name] + move if name in total else move
    return total


def is_parameter(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of a message is a parameter, by its name and type."""
    return tensor.is_floating_point() and not is_statistic(name)


def is_statistic(name: str) -> bool:
    """Return whether a tensor of this name is a running statistic of a BatchNorm layer.

    >>> is_statistic("2.running_mean"), is_statistic("2.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in _STATISTICS


def remove_linear_term(update: Update, earlier_moves: State, config: Mapping[str, object]) -> Update:
    """Return the update with the move that the client made without FedDyn's linear term.

    K local steps with step size eta moved it by eta times the sum of its gradients, less
    K eta alpha S. w_T stays the model that it returned.

    Args:
        update: as it was recorded.
        earlier_moves: S before this round, by name.
    """
    factor = float(config[LINEAR_KEY]) * (read_distance(config, update.num_examples) or 0.0)  # type: ignore[arg-type]
    gradient_move: dict[str, Tensor] = {}
    for name, before in update.before.items():
        if is_parameter(name, before):
            move = before.double() - update.after[name].double()
            if name in earlier_moves:
                move = move + factor * earlier_moves[name]
            gradient_move[name] = move.to(before.dtype)
    return replace(update, gradient_move=gradient_move)


def read_distance(config: Mapping[str, object], num_examples: int) -> float | None:
    """Return K eta by what the server sent along, and N; None where it sent no such settings.

    >>> read_distance({"learning-rate": 0.1, "local-epochs": 2, "batch-size": 8}, 20)
    0.6000000000000001
    """
    numbers = {key: value for key, value in config.items() if isinstance(value, int | float)}
    if "learning-rate" not in numbers:
        return None
    if "local-steps" in numbers:
        return numbers["local-steps"] * numbers["learning-rate"]
    if "local-epochs" not in numbers or "batch-size" not in numbers:
        return None
    steps = numbers["local-epochs"] * math.ceil(num_examples / numbers["batch-size"])
    return steps * numbers["learning-rate"]


def pack_move(update: Update) -> Update:
    """Return the update with its `gradient_move` among its arrays, as a copy of a recording has it."""
    if update.gradient_move is None:
        return update
    moves = {f"{_MOVE_PREFIX}{name}": tensor for name, tensor in update.gradient_move.items()}
    payload = update.payload | Payload.from_dense(moves, "weights")
    return replace(update, payload=payload, gradient_move=None)


def holds_move(names: Iterable[str]) -> bool:
    """Return whether there is a `gradient_move` among the arrays of these names.

    >>> holds_move(["0.weight", "gradient-move/0.weight"]), holds_move(["0.weight"])
    (True, False)
    """
    return any(name.startswith(_MOVE_PREFIX) for name in names)


def unpack_move(update: Update) -> Update:
    """Return the update that `pack_move` was given."""
    tensors, moves = dict(update.payload.tensors), dict[str, Tensor]()
    for name in update.payload.tensors:
        if name.startswith(_MOVE_PREFIX):
            moves[name.removeprefix(_MOVE_PREFIX)] = update.after[name]
            del tensors[name]
    return replace(update, payload=Payload(tensors), gradient_move=moves) if moves else update
