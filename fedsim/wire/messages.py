"""What crosses the wire: states, and what the server saw of one client in one round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedsim.errors import TranscriptError
from fedsim.wire.payloads import Payload
from fedsim.wire.payloads import State as State


@dataclass(frozen=True, kw_only=True)
class Update:
    """What the server saw of one client in one round: `(w_t, payload, N)`.

    Attributes:
        round: server round, counted from 1.
        client: the client's partition id, or Flower's node id where the app reports none.
        before: w_t, the state that the server broadcast.
        payload: what the client sent, as it sent it.
        num_examples: N, the number of local examples that the client reported; of a gradient, those of
            the mini-batch that it is the mean of.
        metrics: further numbers that the client reported, e.g. `train_loss`.
        config: the protocol facts that the server sent along, e.g. its local epochs.
        records: where a message held several records of arrays, or other ones came back: the names of those that the
            client sent. All arrays are then called RECORD/NAME, and `fedsim.recording.reading` says which are meant.
        members: of the sum over a group (secure aggregation), the ids of its clients; `client` is the first of them.
        message: which of the messages that the server sent this client in this round it answers, counted from 1.
        remarks: what is odd about the tensors that it sent, a sentence each; see `Payload.remarks`.
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

    @cached_property
    def after(self) -> State:
        """w_T, the state that the client returned, or w_t and the delta that it sent.

        Of a client that sent a gradient, what came with it (BatchNorm's running statistics), often nothing.
        """
        return self.payload.after(self.before)

    @cached_property
    def gradient(self) -> State | None:
        """What a FedSGD client sent instead of weights, at w_t; None where weights or a delta were sent."""
        return self.payload.values("gradient", self.before) or None

    @property
    def sends_delta(self) -> bool:
        """Whether the client sent w_T - w_t instead of w_T."""
        return self.payload.kind == "delta"

    @cached_property
    def pseudo_gradient(self) -> State:
        """w_t - w_T: the direction of the local gradients, summed and scaled by the step size.

        Of a client that sent a gradient, that gradient; of what was sent as a delta, its negative to the bit.

        Raises:
            TranscriptError: w_T is not of the same tensors as w_t.
        """
        if self.gradient is not None:
            return self.gradient
        for name, tensor in self.before.items():  # a tensor of one element would be spread over all of another
            if name not in self.after or self.after[name].shape != tensor.shape:
                got = f"shape {tuple(self.after[name].shape)}" if name in self.after else "nothing"
                raise TranscriptError(
                    f"round {self.round}, client {self.client}: of '{name}', {tuple(tensor.shape)}, it sent {got}, "
                    "so there is no pseudo-gradient; where clients send back a part alone, [app] frozen, record, "
                    "module or names can say which, or leave this update out"
                )
        deltas = self.payload.values("delta", self.before)
        return {
            name: -deltas[name] if name in deltas else _difference(tensor, self.after[name])
            for name, tensor in self.before.items()
        }


def _difference(before: Tensor, after: Tensor) -> Tensor:
    """Subtract `after` from `before`; booleans cannot be subtracted, and unsigned integers would wrap around."""
    if before.is_floating_point() or after.is_floating_point():
        return before - after
    return before.long() - after.long()


def misfit(sent: State, got: State) -> str | None:
    """Which tensor of numbers came back under its name in another shape, or as no floating-point numbers."""
    return Payload.dense({name: got[name] for name in sent if name in got}, "weights").misfit(sent)


def non_finite(state: State) -> list[str]:
    """Names of the tensors in `state` that hold NaN or infinity."""
    floats = {name: t for name, t in state.items() if t.is_floating_point() and t.numel()}
    # Cheap first: where the sum is finite, so is each number (the converse does not hold).
    doubtful = [name for name, tensor in floats.items() if not math.isfinite(tensor.sum().item())]
    return [name for name in doubtful if not torch.isfinite(floats[name]).all()]


def by_name(state: State, names: Mapping[str, torch.Size]) -> State | None:
    """`state` under the names of a model, or None where it does not fit.

    Flower apps that send a plain list of arrays call them "0", "1", ...; those are matched by order.
    Entries that the model does not name are left out.
    """
    if all(key.isdigit() for key in state) and len(state) == len(names):
        ordered = [state[key] for key in sorted(state, key=int)]
        state = dict(zip(names, ordered, strict=True))
    if any(name not in state or state[name].shape != shape for name, shape in names.items()):
        return None
    return {name: state[name] for name in names}


def by_any(state: State, orders: Iterable[Mapping[str, torch.Size]]) -> State | None:
    """`state` by the first of these sets of names that it fits, see `by_name`; None where it fits none."""
    return next((named for names in orders if (named := by_name(state, names)) is not None), None)
