"""A client's messages over many rounds as matrices, and coordinates of their span (for LMRA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.target import Target
from fedsim.recording.wire_format import State, Update, non_finite_names

PAPER = cite("Driouich2022")

_STATISTICS = ("running_mean", "running_var")
_BLOCK_SIZE = 1 << 16  # parameters that are computed at once, in float64
_RELATIVE_ROUNDING = 1e-12  # eigenvalues of a Gram matrix below this share of the largest


@dataclass(frozen=True, kw_only=True)
class LocalUpdates:
    """Models that one client received and returned, one row a message, by ascending round.

    Attributes:
        client: whose messages these are.
        rounds: `message`.
        before: `message parameter`, theta_t, the models that the server broadcast.
        after: `message parameter`, theta_c,t, the models that the client returned.
        deltas: `message parameter`, theta_c,t - theta_t as sent; None if weights were sent.
        last_update: its last message.
    """

    client: int
    rounds: tuple[int, ...]
    before: Tensor
    after: Tensor
    deltas: Tensor | None
    last_update: Update

    @property
    def location(self) -> str:
        """Return the client and the rounds, for errors."""
        return f"client {self.client}, rounds {self.rounds[0]}-{self.rounds[-1]}"

    def compute_deltas(
        self,
        where: int | tuple[slice, slice] | slice = slice(None),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return theta_c,t - theta_t; to the bit as sent if deltas were.

        Args:
            where: selects messages, or messages and parameters.
            dtype: of the result and of the subtraction.
        """
        if self.deltas is not None:
            return self.deltas[where].to(dtype)
        return self.after[where].to(dtype) - self.before[where].to(dtype)

    def to_state(self, model: Tensor) -> dict[str, Tensor]:
        """Return a state with the names, shapes and types of the messages.

        Other tensors than parameters (running statistics of BatchNorm, integers) are as the client
        returned them last.

        Args:
            model: `parameter`.
        """
        state = {name: tensor.clone() for name, tensor in self.last_update.after.items()}
        for name, tensor in self.to_named_tensors(model).items():
            state[name].copy_(tensor)
        return state

    def to_named_tensors(self, model: Tensor) -> dict[str, Tensor]:
        """Return views of `parameter` by name, in the shapes of the trained parameters."""
        shapes = {name: self.last_update.after[name].shape for name in trained_names(self.last_update)}
        pieces = torch.split(model, [shape.numel() for shape in shapes.values()])
        views = {}
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            views[name] = piece.view(shape)
        return views


def read_updates(target: Target) -> LocalUpdates:
    """Read all messages that the victim sent in the rounds to attack."""
    rounds, client = target.participation_rounds(), target.victim
    tables: dict[str, Tensor] = {}
    update = None
    for index, number in enumerate(rounds):
        update = check_update(target.transcript.update(number, client), update)
        rows = {"before": flatten_state(update, update.before), "after": flatten_state(update, update.after)}
        if update.states_move:
            rows["deltas"] = -flatten_state(update, update.pseudo_gradient)
        if not tables:
            for name, row in rows.items():
                tables[name] = torch.empty((len(rounds), len(row)), dtype=row.dtype)
        for name, row in rows.items():
            tables[name][index] = row
    assert update is not None
    return LocalUpdates(
        client=client,
        rounds=tuple(rounds),
        before=tables["before"],
        after=tables["after"],
        deltas=tables.get("deltas"),
        last_update=update,
    )


def check_update(update: Update, previous: Update | None) -> Update:
    """Return `update` if it is weights or a delta of the same model as the `previous` one's."""
    where = update.name
    if update.gradient is not None:
        raise AttackError(
            f"{where}: it sent a gradient, from which no local model is learnt this way; "
            "attack a recording of clients that send weights (strategy fedavg)"
        )
    names = trained_names(update)
    if not names:
        raise AttackError(f"{where}: the message holds no floating-point parameters; choose other rounds")
    shapes = {name: update.after[name].shape for name in names}
    for name, shape in shapes.items():
        if name not in update.before or update.before[name].shape != shape:
            raise AttackError(f"{where}: it returned other tensors than it was sent; choose other rounds")
    if previous is not None:
        _check_same_model(update, previous, shapes)
    for state in (update.before, update.after):
        if broken := non_finite_names(state):
            raise AttackError(f"{where}: {broken[0]} holds NaN or infinite values; leave this round out")
    return update


def _check_same_model(update: Update, previous: Update, shapes: dict[str, torch.Size]) -> None:
    where = update.name
    if update.payload.kind != previous.payload.kind:
        raise AttackError(
            f"{where}: it sent {update.payload.kind}, in round {previous.round} "
            f"{previous.payload.kind}; choose rounds in which it sent one of them"
        )
    if shapes != {name: previous.after[name].shape for name in trained_names(previous)}:
        raise AttackError(
            f"{where}: the model is another one than in round {previous.round}; choose rounds of one model"
        )


def trained_names(update: Update) -> list[str]:
    """Return the names of the trained parameters: floating-point and no running statistics."""
    names = []
    for name, tensor in update.after.items():
        if tensor.is_floating_point() and name.rpartition(".")[2] not in _STATISTICS:
            names.append(name)
    return names


def flatten_state(update: Update, state: State) -> Tensor:
    """Return `parameter`, the trained parameters of `state`, one tensor after the other."""
    return torch.cat([state[name].reshape(-1) for name in trained_names(update)])


class UpdateSpan:
    """Orthonormal coordinates of the models that were seen, and of the updates.

    A model is `origin + coordinates @ basis`. The rows of the basis, `rank parameter`, are never
    stored, because they are combinations of the messages: n messages of d parameters cost their own
    memory and O(n^2 d) operations.

    Attributes:
        origin: `parameter`, the mean of the broadcast models.
        before: `message rank`, coordinates of the broadcast models.
        after: `message rank`, coordinates of the returned models.
        deltas: `message rank`, coordinates of the updates in the span of the updates alone, another
            basis.
    """

    def __init__(self, updates: LocalUpdates) -> None:
        self._updates = updates
        count = len(updates.rounds)
        self.origin = updates.before.double().mean(0)
        gram = sum(block @ block.T for _, block in self._row_blocks())
        assert isinstance(gram, Tensor)
        coordinates, self._basis_weights = _orthonormal_coordinates(gram)
        self.before, deltas = coordinates[:count], coordinates[count:]
        self.after = self.before + deltas
        self.deltas, _ = _orthonormal_coordinates(gram[count:, count:])

    def model(self, coordinates: Tensor) -> Tensor:
        """Return `parameter` in float64, the model at `rank` coordinates."""
        weights = coordinates.double() @ self._basis_weights
        model = self.origin.clone()
        for start, block in self._row_blocks():
            model[start : start + block.shape[1]] += weights @ block
        return model

    def _row_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield blocks of parameters of all rows, with the index of the first parameter.

        The rows, `2 message`, are the centred broadcast models and then the updates.
        """
        for start in range(0, len(self.origin), _BLOCK_SIZE):
            columns = slice(start, start + _BLOCK_SIZE)
            block = slice(None), columns
            centred = self._updates.before[block].double() - self.origin[columns]
            yield start, torch.cat([centred, self._updates.compute_deltas(block, torch.float64)])


def _orthonormal_coordinates(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates of rows with these inner products in an orthonormal basis.

    Returns:
        The coordinates, `row rank`, and the basis as combinations of the rows, `rank row`.
    """
    values, vectors = torch.linalg.eigh(gram)
    tiny = torch.finfo(gram.dtype).tiny
    significant = values > _RELATIVE_ROUNDING * values[-1].clamp_min(tiny)
    roots, vectors = values[significant].flip(0).sqrt(), vectors[:, significant].flip(1)
    return vectors * roots, (vectors / roots).T
