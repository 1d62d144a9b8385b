"""A client's messages over many rounds as matrices, and coordinates of what they span: what LMRA reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks import Paper
from fedsim.errors import AttackError
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import State, Update, non_finite

PAPER = Paper(
    title="Local Model Reconstruction Attacks in Federated Learning and their Uses",
    authors="Driouich, Xu, Neglia, Giroire, Thomas",
    venue="arXiv",
    year=2022,
    url="https://arxiv.org/abs/2210.16205",
)

_STATISTICS = ("running_mean", "running_var")
_BLOCK = 1 << 16  # parameters that are worked on at once, in float64
_NEGLIGIBLE = 1e-12  # eigenvalues of a Gram matrix below this share of the largest are float32's rounding


@dataclass(frozen=True, kw_only=True)
class LocalUpdates:
    """What one client got and returned, one row a message, by ascending round.

    Attributes:
        client: whose messages these are.
        rounds: `message`.
        before: `message parameter`, theta_t, the models that the server broadcast.
        after: `message parameter`, theta_c,t, what it returned.
        deltas: `message parameter`, theta_c,t - theta_t as it sent them; None where it sent weights.
        last: its last message.
    """

    client: int
    rounds: tuple[int, ...]
    before: Tensor
    after: Tensor
    deltas: Tensor | None
    last: Update

    @property
    def where(self) -> str:
        """The client and the rounds, for errors."""
        return f"client {self.client}, rounds {self.rounds[0]}-{self.rounds[-1]}"

    def moves(self, where: int | tuple[slice, slice] | slice = slice(None), dtype: torch.dtype | None = None) -> Tensor:
        """theta_c,t - theta_t of some messages and parameters, in `dtype`; to the bit as sent where deltas were."""
        if self.deltas is not None:
            return self.deltas[where].to(dtype)
        return self.after[where].to(dtype) - self.before[where].to(dtype)

    def state(self, model: Tensor) -> dict[str, Tensor]:
        """`parameter` as a state with the names, shapes and types of the messages.

        Other tensors (running statistics of BatchNorm, integers) are as the client returned them last.
        """
        state = {name: tensor.clone() for name, tensor in self.last.after.items()}
        for name, tensor in self.named(model).items():
            state[name].copy_(tensor)
        return state

    def named(self, model: Tensor) -> dict[str, Tensor]:
        """Views of `parameter`, under the names and in the shapes of the messages; of trained parameters only."""
        shapes = {name: self.last.after[name].shape for name in trained(self.last)}
        pieces = torch.split(model, [shape.numel() for shape in shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def read_updates(transcript: Transcript, client: int, *, fewest: int, remedy: str) -> LocalUpdates:
    """All messages of `client` that `transcript` shows.

    Args:
        fewest: how many messages the attack needs.
        remedy: what to do where there are fewer.

    Raises:
        AttackError: it is in none of the rounds, in too few, sent gradients, or weights that are NaN or infinite.
    """
    rounds = rounds_of(transcript, client)
    if len(rounds) < fewest:
        told = "1 message is" if len(rounds) == 1 else f"{len(rounds)} messages are"
        raise AttackError(f"client {client}: {told} recorded, expected at least {fewest}; {remedy}")
    tables: dict[str, Tensor] = {}
    update = None
    for place, number in enumerate(rounds):
        update = checked(transcript.update(number, client), update)
        rows = {"before": flat(update, update.before), "after": flat(update, update.after)}
        if update.sends_delta:
            rows["deltas"] = -flat(update, update.pseudo_gradient)
        tables = tables or {name: torch.empty((len(rounds), len(row)), dtype=row.dtype) for name, row in rows.items()}
        for name, row in rows.items():
            tables[name][place] = row
    assert update is not None
    return LocalUpdates(
        client=client,
        rounds=tuple(rounds),
        before=tables["before"],
        after=tables["after"],
        deltas=tables.get("deltas"),
        last=update,
    )


def rounds_of(transcript: Transcript, client: int, *, in_groups: bool = False) -> list[int]:
    """The rounds in which `client` took part, ascending.

    Args:
        in_groups: also where it is one of a group whose sum is all that was seen.

    Raises:
        AttackError: there is none.
    """
    replies = {number: transcript.header(number).reply_of(client) for number in transcript.rounds}
    rounds = [number for number, reply in replies.items() if reply and (in_groups or reply.client == client)]
    if not rounds:
        everyone = sorted({other for number in transcript.rounds for other in transcript.clients(number)})
        told = ", ".join(map(str, everyone[:20])) + (", ..." if len(everyone) > 20 else "")
        raise AttackError(
            f"client {client}: took part in none of the {len(transcript.rounds)} rounds to be attacked; "
            f"choose another victim (recorded: {told or 'nobody'}) or other rounds"
        )
    return rounds


def checked(update: Update, previous: Update | None) -> Update:
    """`update`, if it is weights or a delta of the same model as those of the `previous` one.

    Raises:
        AttackError: it is not, or holds NaN or infinite values.
    """
    where = f"round {update.round}, client {update.client}"
    if update.gradient is not None:
        raise AttackError(
            f"{where}: it sent a gradient, from which no local model is learnt this way; attack a recording of "
            "clients that send weights (strategy fedavg)"
        )
    names = trained(update)
    if not names:
        raise AttackError(f"{where}: the message holds no floating-point parameters; choose other rounds")
    shapes = {name: update.after[name].shape for name in names}
    if any(name not in update.before or update.before[name].shape != shape for name, shape in shapes.items()):
        raise AttackError(f"{where}: it returned other tensors than it was sent; choose other rounds")
    if previous is not None and update.payload.kind != previous.payload.kind:
        raise AttackError(
            f"{where}: it sent {update.payload.kind}, in round {previous.round} {previous.payload.kind}; choose rounds "
            "in which it sent one of them"
        )
    if previous is not None and shapes != {name: previous.after[name].shape for name in trained(previous)}:
        raise AttackError(
            f"{where}: the model is another one than in round {previous.round}; choose rounds of one model"
        )
    for state in (update.before, update.after):
        if broken := non_finite(state):
            raise AttackError(f"{where}: {broken[0]} holds NaN or infinite values; leave this round out")
    return update


def trained(update: Update) -> list[str]:
    """Names of what is trained: floating-point tensors that are no running statistics."""
    return [
        name
        for name, tensor in update.after.items()
        if tensor.is_floating_point() and name.rpartition(".")[2] not in _STATISTICS
    ]


def flat(update: Update, state: State) -> Tensor:
    """`parameter`, all that is trained of `state`, one tensor after the other."""
    return torch.cat([state[name].reshape(-1) for name in trained(update)])


class Span:
    """Orthonormal coordinates of the models that were seen, and of the updates.

    A model is `origin + coordinates @ basis`, where the rows of the basis, `rank parameter`, are never stored: they
    are combinations of the messages. 2 n messages of d parameters cost their own memory and O(n^2 d) operations.

    Attributes:
        origin: `parameter`, the mean of the broadcast models.
        before: `message rank`, coordinates of the broadcast models.
        after: `message rank`, coordinates of the returned models.
        moves: `message rank`, coordinates of the updates in the span of the updates alone, another basis.
    """

    def __init__(self, updates: LocalUpdates) -> None:
        self._updates = updates
        count = len(updates.rounds)
        self.origin = updates.before.double().mean(0)
        gram = sum(piece @ piece.T for _, piece in self._pieces())
        assert isinstance(gram, Tensor)
        coordinates, self._combine = _orthonormal(gram)
        self.before, moved = coordinates[:count], coordinates[count:]
        self.after = self.before + moved
        self.moves, self._combine_moves = _orthonormal(gram[count:, count:])

    def model(self, coordinates: Tensor) -> Tensor:
        """`parameter` in float64, the model at `rank` coordinates."""
        weights = coordinates.double() @ self._combine
        model = self.origin.clone()
        for place, piece in self._pieces():
            model[place : place + piece.shape[1]] += weights @ piece
        return model

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        """`2 message` rows, the centred broadcast models and then the updates, a block of parameters at a time."""
        for place in range(0, len(self.origin), _BLOCK):
            block = slice(None), slice(place, place + _BLOCK)
            given = self._updates.before[block].double()
            yield place, torch.cat([given - self.origin[block[1]], self._updates.moves(block, torch.float64)])


def _orthonormal(gram: Tensor) -> tuple[Tensor, Tensor]:
    """`row rank` coordinates of rows with these inner products, and `rank row`, the basis as combinations of rows."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _NEGLIGIBLE * values[-1].clamp_min(torch.finfo(gram.dtype).tiny)
    roots, vectors = values[kept].flip(0).sqrt(), vectors[:, kept].flip(1)
    return vectors * roots, (vectors / roots).T
