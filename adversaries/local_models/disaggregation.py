"""Average updates of single clients, out of sums over groups whose members are known (Lam et al. 2021)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.local_updates import checked, flat, trained
from fedsim.attacks import CLIENT, GROUPS, Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError, some_of
from fedsim.findings import Finding, LocalModel
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update

log = logging.getLogger("fedsim." + __name__)

_BLOCK = 1 << 16
"""Parameters that are worked on at once, in float64."""
_ZERO = 1e-9
"""Singular values below this share of the largest, and what differs by less from 0 or 1, are rounding."""
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Disaggregation(Attack):
    """Claim for a client the last model that it was sent, moved by its average update.

    Under secure aggregation the server sees N_g, the sum of N_i over the clients i of a group g, and the mean of their
    updates d_i with these weights, so also the sum of u_i = N_i d_i. It knows who is in which group. Over many groups,
    of many rounds, these are linear equations, P n = N and P u = N d, where P is the participant matrix, `group
    client`, of zeros and ones; u and n are their solutions by least squares, and d_i = u_i / n_i. What follows from
    them for one client is exact where clients send the same update in each round. In truth updates change with the
    model that is sent, which is noise to the regression, and the less of it the nearer training is to its end.

    A client's update follows from the sums where P, as it is or in part, tells the client apart from all others: there
    are as many groups as clients or more, and who is together with whom changes. The attack fails for others and says
    so. So one group of all clients in each round hides what groups drawn anew give away.

    The finding's curves have one value each: `residual` is the norm of what the solution leaves unexplained relative
    to that of the sums, `standard_error` the standard error of the claimed update relative to its norm; there is
    none where as many equations as unknowns leave no residual.

    References:
        Lam et al.: Gradient Disaggregation: Breaking Privacy in Federated Learning by Reconstructing the User
        Participant Matrix, ICML 2021. Differs: who took part is known to a server that runs the protocol, so that the
        matrix is not searched for (their Sect. 4), and only the regression on it is left; clients are weighted by N,
        which is found from the totals; clients are told apart one by one, where P has less than full rank.
    """

    paper: ClassVar[Paper] = Paper(
        title="Gradient Disaggregation: Breaking Privacy in Federated Learning by Reconstructing the User Participant "
        "Matrix",
        authors="Lam, Wei, Brooks, Reddi, Mitzenmacher",
        venue="ICML",
        year=2021,
        url="https://arxiv.org/abs/2106.06089",
    )
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUPS})
    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        sums = read_sums(transcript, victim)
        solver = sums.solver(victim)
        moved, unexplained, total = sums.solved(solver, victim)
        count = float(solver[sums.clients.index(victim)] @ sums.examples)
        if not count > 0:
            raise AttackError(
                f"client {victim}: by the totals it has {count:.3g} examples, so N of clients changes from round to "
                "round; inspect rounds in which it does not"
            )
        trace = {"residual": torch.tensor([(unexplained / total) ** 0.5 if total else 0.0])}
        if (freedom := len(sums.examples) - sums.rank) > 0:
            spread = unexplained / freedom * solver[sums.clients.index(victim)].square().sum()
            trace["standard_error"] = (spread.sqrt() / moved.norm().clamp_min(1e-30)).reshape(1)
        else:
            log.warning(
                "%s, client %d: %d sums determine as many unknowns, so nothing tells whether updates were constant; "
                "inspect more rounds",
                self.called,
                victim,
                len(sums.examples),
            )
        progress(1, 1, {"objective": float(trace["residual"])})
        return LocalModel(state=sums.state(moved / count), trace=trace)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What was seen of groups, one row each; a client that was seen alone is a group of one.

    Attributes:
        clients: `client`, all that were seen, ascending.
        participation: `group client`, P, float64.
        examples: `group`, N, float64.
        moves: `group parameter`, the mean updates w_T - w_t, weighted by N.
        last: the last message that the victim was in.
    """

    clients: Sequence[int]
    participation: Tensor
    examples: Tensor
    moves: Tensor
    last: Update

    @property
    def rank(self) -> int:
        """Of P."""
        return int(torch.linalg.matrix_rank(self.participation, rtol=_ZERO))

    def solver(self, victim: int) -> Tensor:
        """`client group`, the pseudo-inverse of P.

        Raises:
            AttackError: what `victim` sent does not follow from the sums.
        """
        inverse: Tensor = torch.linalg.pinv(self.participation, rtol=_ZERO)
        place = self.clients.index(victim)
        if abs(float(inverse[place] @ self.participation[:, place]) - 1) < _ZERO**0.5:
            return inverse
        column = self.participation[:, place : place + 1]
        alike = (self.participation == column).all(0)
        together = [client for client, same in zip(self.clients, alike.tolist(), strict=True) if same]
        why = f"clients {some_of(together, _SHOWN)} are always in the same groups; " if len(together) > 1 else ""
        raise AttackError(
            f"client {victim}: its update does not follow from the sums: {len(self.examples)} sums over "
            f"{len(self.clients)} clients have rank {self.rank}; {why}inspect more rounds, in which other clients are "
            "together"
        )

    def solved(self, solver: Tensor, victim: int) -> tuple[Tensor, float, float]:
        """Of `victim`, u as `parameter`; the squared norm of what all of u leaves unexplained, and of the sums."""
        own, unexplained, total = torch.empty(self.moves.shape[1], dtype=torch.float64), 0.0, 0.0
        for place in range(0, len(own), _BLOCK):
            block = slice(place, place + _BLOCK)
            seen = self.moves[:, block].double() * self.examples[:, None]
            found = solver @ seen
            own[block] = found[self.clients.index(victim)]
            unexplained += float((seen - self.participation @ found).square().sum())
            total += float(seen.square().sum())
        return own, unexplained, total

    def state(self, move: Tensor) -> dict[str, Tensor]:
        """The model that the victim was sent last, moved by `parameter`.

        Other tensors (running statistics of BatchNorm) are as they came back last.
        """
        state = {name: tensor.clone() for name, tensor in self.last.after.items()}
        names = trained(self.last)
        pieces = torch.split(move, [state[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            before = self.last.before[name]
            state[name].copy_(before.double() + piece.view(before.shape))
        return state


def read_sums(transcript: Transcript, victim: int) -> Sums:
    """All messages that `transcript` shows.

    Raises:
        AttackError: `victim` is in none of them, clients sent gradients, or weights that are NaN or infinite.
    """
    moves, examples, members = list[Tensor](), list[int](), list[tuple[int, ...]]()
    update, last = None, None
    for number in transcript.rounds:
        for client in transcript.clients(number):
            update = checked(transcript.update(number, client), update)
            moves.append(-flat(update, update.pseudo_gradient))
            examples.append(update.num_examples)
            members.append(update.members or (client,))
            last = update if victim in members[-1] else last
    if last is None:
        raise AttackError(
            f"client {victim}: took part in none of the {len(transcript.rounds)} rounds to be attacked, alone or in a "
            "group; choose another victim or other rounds"
        )
    clients = sorted({client for group in members for client in group})
    places = {client: place for place, client in enumerate(clients)}
    participation = torch.zeros(len(members), len(clients), dtype=torch.float64)
    for row, group in enumerate(members):
        participation[row, [places[client] for client in group]] = 1
    return Sums(
        clients=clients,
        participation=participation,
        examples=torch.tensor(examples, dtype=torch.float64),
        moves=torch.stack(moves),
        last=last,
    )
