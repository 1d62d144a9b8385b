"""Gradient disaggregation: clients' updates from sums over known groups [Lam2021]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.errors import AttackError, join_first
from fedsim.base.papers import cite
from fedsim.interfaces.attack import (
    ALL,
    CLIENT,
    GROUPS,
    Attack,
    MessageKind,
    Paper,
    Progress,
    RoundsNeeded,
    Target,
    warn,
)
from fedsim.interfaces.findings import LocalModel
from fedsim.inversion.local_updates import check_update, flatten_state, trained_names
from fedsim.recording.wire_format import Update

_BLOCK_SIZE = 1 << 16
"""Parameters that are processed at once, in float64."""
_TOLERANCE = 1e-9
"""Singular values below this share of the largest count as zero."""
_MAX_LISTED_CLIENTS = 10


@dataclass(frozen=True, kw_only=True)
class Disaggregation(Attack):
    """Claim the last model that a client was sent, moved by its average update.

    Under secure aggregation the server sees N_g, the sum of N_i over the clients i of a group g,
    and the mean of their updates d_i with these weights, so also the sum of u_i = N_i d_i. It knows
    which clients are in which group.

    1. Build the participant matrix P, `group client`, of zeros and ones, over the groups of all
       rounds (`read_group_sums`).
    2. Solve P n = N and P u = N d by least squares (`GroupSums.pseudo_inverse`,
       `GroupSums.solve_victim`).
    3. Add d_i = u_i / n_i to the last broadcast model (`GroupSums.moved_model`).

    The result is exact if clients send the same update in each round. In reality updates change
    with the broadcast model, which is noise to the regression; it decreases as training converges.

    A client's update can be determined if its column of P is linearly independent of all others:
    there are at least as many groups as clients, and groups change. Otherwise the attack fails and
    says so. One group of all clients in each round therefore hides what groups drawn anew reveal.

    The finding's curves have one value each: `residual` is the norm of the residual relative to
    that of the sums, `standard_error` the standard error of the claimed update relative to its
    norm; it is missing if there are as many equations as unknowns.

    References:
        [Lam2021]. Differs: a server that runs the protocol knows who took part, so that the matrix
        need not be reconstructed (their Sect. 4), and only the regression on it is left; clients
        are weighted by N, which is estimated from the totals; clients are solved for one by one,
        where P has less than full rank.
    """

    paper: ClassVar[Paper] = cite("Lam2021")
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUPS})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    message_kind: ClassVar[MessageKind] = "weights"

    def _run(self, target: Target, progress: Progress) -> LocalModel:
        victim = target.victim
        sums = read_group_sums(target)
        inverse = sums.pseudo_inverse(victim)
        victim_row = inverse[sums.clients.index(victim)]
        weighted_update, squared_residual, squared_total = sums.solve_victim(inverse, victim)
        num_examples = float(victim_row @ sums.examples)
        if not num_examples > 0:
            raise AttackError(
                f"client {victim}: by the totals it has {num_examples:.3g} examples, so N of clients changes from "
                "round to round; inspect rounds in which it does not"
            )

        # Report how well the regression fits.
        residual = (squared_residual / squared_total) ** 0.5 if squared_total else 0.0
        trace = {"residual": torch.tensor([residual])}
        if (degrees_of_freedom := len(sums.examples) - sums.rank) > 0:
            variance = squared_residual / degrees_of_freedom * victim_row.square().sum()
            trace["standard_error"] = (variance.sqrt() / weighted_update.norm().clamp_min(1e-30)).reshape(1)
        else:
            warn(
                f"{self.title}, client {victim}: {len(sums.examples)} sums determine as many "
                "unknowns, so it is unknown whether updates were constant; inspect more rounds"
            )
        progress(1, 1, {"objective": float(trace["residual"])})
        return LocalModel(state=sums.moved_model(weighted_update / num_examples), trace=trace)


@dataclass(frozen=True, kw_only=True)
class GroupSums:
    """Sums over groups of clients, one row each; a client observed by itself is a group of one.

    Attributes:
        clients: `client`, the ids of all observed clients, ascending.
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
        """Return the rank of P."""
        return int(torch.linalg.matrix_rank(self.participation, rtol=_TOLERANCE))

    def pseudo_inverse(self, victim: int) -> Tensor:
        """Compute the pseudo-inverse of P, `client group`."""
        inverse: Tensor = torch.linalg.pinv(self.participation, rtol=_TOLERANCE)
        index = self.clients.index(victim)
        if abs(float(inverse[index] @ self.participation[:, index]) - 1) < _TOLERANCE**0.5:
            return inverse

        # Name the clients that cannot be distinguished from the victim.
        victim_column = self.participation[:, index : index + 1]
        in_same_groups = (self.participation == victim_column).all(0).tolist()
        same_groups = [client for client, same in zip(self.clients, in_same_groups, strict=True) if same]
        reason = ""
        if len(same_groups) > 1:
            reason = f"clients {join_first(same_groups, _MAX_LISTED_CLIENTS)} are always in the same groups; "
        raise AttackError(
            f"client {victim}: its update does not follow from the sums: {len(self.examples)} sums over "
            f"{len(self.clients)} clients have rank {self.rank}; {reason}inspect more rounds, in which other clients "
            "are together"
        )

    def solve_victim(self, inverse: Tensor, victim: int) -> tuple[Tensor, float, float]:
        """Solve P u = N d for all clients, a block of parameters at a time.

        Args:
            inverse: `client group`, the pseudo-inverse of P.

        Returns:
            u of `victim`, `parameter`; the squared norms of the residual and of N d.
        """
        victim_update = torch.empty(self.moves.shape[1], dtype=torch.float64)
        squared_residual, squared_total = 0.0, 0.0
        for start in range(0, len(victim_update), _BLOCK_SIZE):
            block = slice(start, start + _BLOCK_SIZE)
            sums = self.moves[:, block].double() * self.examples[:, None]
            solution = inverse @ sums
            victim_update[block] = solution[self.clients.index(victim)]
            squared_residual += float((sums - self.participation @ solution).square().sum())
            squared_total += float(sums.square().sum())
        return victim_update, squared_residual, squared_total

    def moved_model(self, move: Tensor) -> dict[str, Tensor]:
        """Return the model that the victim was sent last plus an update `parameter`.

        Other tensors (running statistics of BatchNorm) are as in its last message.
        """
        state = {name: tensor.clone() for name, tensor in self.last.after.items()}
        names = trained_names(self.last)
        pieces = torch.split(move, [state[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            before = self.last.before[name]
            state[name].copy_(before.double() + piece.view(before.shape))
        return state


def read_group_sums(target: Target) -> GroupSums:
    """Read the sums of all messages in the rounds to attack; the victim is in one of them."""
    transcript = target.transcript
    moves: list[Tensor] = []
    examples: list[int] = []
    members: list[tuple[int, ...]] = []
    update, last = None, None
    for number in transcript.rounds:
        for client in transcript.clients(number):
            update = check_update(transcript.update(number, client), update)
            moves.append(-flatten_state(update, update.pseudo_gradient))
            examples.append(update.num_examples)
            members.append(update.members or (client,))
            last = update if target.victim in members[-1] else last
    assert last is not None

    # Build the participant matrix.
    clients = sorted({client for group in members for client in group})
    columns = {client: column for column, client in enumerate(clients)}
    participation = torch.zeros(len(members), len(clients), dtype=torch.float64)
    for row, group in enumerate(members):
        participation[row, [columns[client] for client in group]] = 1
    return GroupSums(
        clients=clients,
        participation=participation,
        examples=torch.tensor(examples, dtype=torch.float64),
        moves=torch.stack(moves),
        last=last,
    )
