"""Updates as the server sees them, and checks of the states that they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedsim.base.errors import TranscriptError
from fedsim.recording.payloads import Payload
from fedsim.recording.payloads import State as State


@dataclass(frozen=True, kw_only=True)
class Update:
    """Update of one client in one round, as the server sees it: `(w_t, payload, N)`.

    Attributes:
        round: server round, counted from 1.
        client: the client's partition id, or Flower's node id where the app reports none.
        before: w_t, the state that the server broadcast.
        payload: the arrays of the client in the form in which it sent them.
        num_examples: N, the number of local examples that the client reported; for a gradient, the
            size of its mini-batch.
        metrics: further numbers that the client reported, e.g. `train_loss`.
        config: the protocol facts that the server sent along, e.g. the number of local epochs.
        records: names of the records of arrays that the client sent, where it or the server sent
            several. Arrays are then called RECORD/NAME, and a `MessageFormat` selects the record of
            the model.
        members: ids of the clients whose sum it is (secure aggregation); `client` is the first of
            them.
        message: number, from 1, of the server's message to this client in this round that it
            answers; 0 for a message that is only expected, as it has to be checked before a federation runs.
        remarks: sentences on unexpected shapes or types of its tensors; see `Payload.remarks`.
        gradient_move: by name, w_t - w_T as the client's local gradients alone would have given it,
            without what its algorithm added to them and the server knows, such as control variates;
            None where it added nothing of that kind.
    """

    round: int
    client: int
    before: State
    payload: Payload
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    records: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    message: int = 1
    remarks: tuple[str, ...] = ()
    gradient_move: State | None = None

    @property
    def name(self) -> str:
        """Return what to call the message where a sentence about it begins."""
        return f"round {self.round}, client {self.client}" if self.message else "the clients"

    @cached_property
    def after(self) -> State:
        """Return w_T: the state that the client returned, or w_t plus the delta that it sent.

        For a client that sent a gradient, it holds only what came with it (BatchNorm's running
        statistics), often nothing.
        """
        return self.payload.weights_after(self.before)

    @cached_property
    def gradient(self) -> State | None:
        """Return the gradient at w_t of a FedSGD client; None for weights or a delta."""
        return self.payload.values("gradient", self.before) or None

    @property
    def sends_delta(self) -> bool:
        """Return whether the client sent w_T - w_t instead of w_T."""
        return self.payload.kind == "delta"

    @property
    def states_move(self) -> bool:
        """Return whether `pseudo_gradient` is more than the difference of w_t and w_T.

        It is where the client sent a delta, and where a `gradient_move` is known.
        """
        return self.sends_delta or self.gradient_move is not None

    @cached_property
    def pseudo_gradient(self) -> State:
        """Return w_t - w_T: the sum of the local gradients, scaled by the step size.

        For a client that sent a gradient, it is that gradient; for a delta, its exact negative.
        What a client's algorithm added to its gradients is left out, see `gradient_move`.

        Raises:
            TranscriptError: w_T is not of the same tensors as w_t.
        """
        if self.gradient is not None:
            return self.gradient
        for name, tensor in self.before.items():  # a subtraction could broadcast other shapes
            if name not in self.after or self.after[name].shape != tensor.shape:
                got = f"shape {tuple(self.after[name].shape)}" if name in self.after else "nothing"
                raise TranscriptError(
                    f"round {self.round}, client {self.client}: of '{name}', {tuple(tensor.shape)}, it sent {got}, "
                    "so there is no pseudo-gradient; where clients send back a part alone, [app] frozen, record, "
                    "module or names can say which, or leave this update out"
                )
        deltas = self.payload.values("delta", self.before)
        moves: dict[str, Tensor] = {}
        for name, tensor in self.before.items():
            if self.gradient_move is not None and name in self.gradient_move:
                moves[name] = self.gradient_move[name]
            elif name in deltas:
                moves[name] = -deltas[name]
            else:
                moves[name] = _subtract(tensor, self.after[name])
        return moves


def _subtract(before: Tensor, after: Tensor) -> Tensor:
    """Return `before` - `after`, in int64 where both are integers or booleans.

    Booleans cannot be subtracted, and unsigned integers would wrap around.
    """
    if before.is_floating_point() or after.is_floating_point():
        return before - after
    return before.long() - after.long()


def describe_misfit(sent: State, got: State) -> str | None:
    """Return how a tensor of `got` differs in shape or type from that in `sent`, or None."""
    return Payload.from_dense({name: got[name] for name in sent if name in got}, "weights").describe_misfit(sent)


def float_norm(state: State) -> float:
    """Return the Euclidean norm of all floating-point numbers of a state; counters, as of batches, are none."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in state.values() if t.is_floating_point()))


def compare_states(first: State, second: State) -> tuple[float, float, float]:
    """Return the inner product of two states, and the squared norms of both, over the real tensors that fit."""
    product, first_square, second_square = 0.0, 0.0, 0.0
    for name, tensor in first.items():
        if tensor.is_floating_point() and name in second and second[name].shape == tensor.shape:
            values, other_values = tensor.double(), second[name].double()
            product += float((values * other_values).sum())
            first_square += float(values.square().sum())
            second_square += float(other_values.square().sum())
    return product, first_square, second_square


def non_finite_names(state: State) -> list[str]:
    """Return the names of the tensors in `state` that hold NaN or infinity.

    >>> non_finite_names({"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])})
    ['b']
    """
    floats = {name: t for name, t in state.items() if t.is_floating_point() and t.numel()}
    # Cheap test first: where the sum is finite, so is each number (the converse does not hold).
    suspects = [name for name, tensor in floats.items() if not math.isfinite(tensor.sum().item())]
    return [name for name in suspects if not torch.isfinite(floats[name]).all()]


def match_names(state: State, names: Mapping[str, torch.Size]) -> State | None:
    """Return the tensors that a model names, or None where one is missing or has another shape.

    Flower apps that send a plain list of arrays call them "0", "1", ...; those are matched by
    order.

    Args:
        names: the model's names and shapes.

    >>> state = {"0": torch.ones(2), "1": torch.ones(3)}
    >>> list(match_names(state, {"weight": torch.Size([2]), "bias": torch.Size([3])}))
    ['weight', 'bias']
    >>> match_names(state, {"1": torch.Size([3]), "0": torch.Size([2])})["0"].shape  # a model that calls its own so
    torch.Size([2])
    """
    if all(key.isdigit() for key in state) and len(state) == len(names) and state.keys() != names.keys():
        ordered = [state[key] for key in sorted(state, key=int)]
        state = dict(zip(names, ordered, strict=True))
    if any(name not in state or state[name].shape != shape for name, shape in names.items()):
        return None
    return {name: state[name] for name in names}


def match_any_names(state: State, orders: Iterable[Mapping[str, torch.Size]]) -> State | None:
    """Return `state` under the first of these sets of names that `match_names` accepts, or None."""
    for names in orders:
        named_state = match_names(state, names)
        if named_state is not None:
            return named_state
    return None


_MAX_PROPOSED = 8
"""Most tensors whose names and shapes one sentence proposes."""


def propose_format(state: State, orders: Iterable[Mapping[str, torch.Size]]) -> str:
    """Say what [app] can say of tensors that are not those of a model; empty where nothing is known.

    Args:
        state: tensors by name.
        orders: names and shapes of the model's tensors, as `match_any_names` takes them.

    >>> propose_format({"flat": torch.ones(6)}, [{"w": torch.Size([2, 2]), "b": torch.Size([2])}])
    'it is a vector of as many numbers as the model has; if it holds its tensors in this order, say in [app] names = \
["w", "b"] and shapes = { "w" = [2, 2], "b" = [2] }'
    """
    tensors = list(state.values())
    for names in orders:
        proposed, shapes = list[str](), list[str]()
        for name, shape in list(names.items())[:_MAX_PROPOSED]:
            proposed.append(f'"{name}"')
            shapes.append(f'"{name}" = {list(shape)}')
        if len(names) > _MAX_PROPOSED:
            proposed.append("...")
            shapes.append("...")
        stated_names = f"[app] names = [{', '.join(proposed)}]"
        all_names = " with all of them, as model.named_parameters() gives them" if len(names) > _MAX_PROPOSED else ""
        is_vector = len(names) > 1 and len(tensors) == 1 and tensors[0].ndim == 1
        if is_vector and tensors[0].numel() == sum(shape.numel() for shape in names.values()):
            return (
                "it is a vector of as many numbers as the model has; if it holds its tensors in this order, say in "
                f"{stated_names} and shapes = {{ {', '.join(shapes)} }}{all_names}"
            )
        if names.keys() != state.keys() and list(names.values()) == [tensor.shape for tensor in tensors]:
            return (
                "their shapes are those of the model's tensors, and their names are others; if they come in this "
                f"order, say in {stated_names}{all_names}"
            )
    positions = [name for name, tensor in state.items() if not tensor.is_floating_point() and tensor.numel() > 1]
    if positions and all(tensor.ndim < 2 for tensor in tensors):
        return (
            f"'{positions[0]}' holds whole numbers, as the positions of a sparse update, and fedsim reads tensors in "
            "their full shape; record what the server makes of them (docs/how-to/import-a-recording.md)"
        )
    return ""
