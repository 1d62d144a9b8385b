"""What a recorded federation shows to others than its server: to clients, and to who gets the models.

A server that averages sends w_t in one round and the mean of all replies in the next, so whoever
sees both models sees the sum of the updates of that round. Clients subtract their own from it::

    u_rest = N (w_{t+1} - w_t) - sum of N_k u_k over the colluding clients k

Beside the models they are taken to know the numbers of examples N of the round, which Flower tells
the server alone; without them they would know u_rest up to a scale.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base.errors import ConfigError
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.computed_transcript import ComputedTranscript
from fedsim.recording.header import FORMAT_VERSION, Header, Reply
from fedsim.recording.payloads import Dense, Form, Kind, Payload, State
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update

_LARGEST_ERROR = 1e-3
"""Largest norm of the difference between the rest by models and by replies, relative to the latter.

Momentum, an adaptive step or a median leave some tenths."""
_ROUNDINGS = 8
"""How many roundings of the next model may add to that. Of small updates, or where many collude against
few, they are more than a share of the rest."""


@dataclass(frozen=True)
class FinalModel:
    """Model after the last round, which everybody gets.

    Attributes:
        sha256: of the file that it is from.
    """

    round: int
    state: State
    sha256: str


class ObservedTranscript(ComputedTranscript):
    """Recording as those see it who get models: one sum a round, over all but the colluding clients.

    It has the rounds of which they see the models before and after: an outsider all, a client, or an
    eavesdropper on its link, those in which it is asked, as in the next one. One that straggles or
    fails was sent the model all the same. The model after the last round is handed over to outsiders
    and clients; no round sends it, so that nobody hears it.

    Args:
        recording: what the server saw.
        role: an outsider, colluding clients, or an eavesdropper who hears uploads masked.
        final: the model after the last round, where it is there.
        equal_clients: number of clients by which the server divides a sum in which all count alike,
            as under central privacy; None where it takes the mean weighted by N.

    Raises:
        ConfigError: they see no round, or the recording does not hold what they see.
        TranscriptError: a round is damaged.
    """

    def __init__(
        self, recording: Transcript, role: AdversaryRole, final: FinalModel | None, equal_clients: float | None = None
    ) -> None:
        super().__init__(recording, role)
        self._final = final
        self.equal_clients = equal_clients
        self._choose_rounds()

    def broadcast(self, round: int, client: int, message: int = 1) -> State:
        """Return the verified w_t of the round."""
        del client, message
        replies = self._recording.header(round).replies
        return self._recording.broadcast(round, replies[0].client, replies[0].message)

    def recorded_update(self, round: int, client: int, message: int = 1) -> Update:
        """Return the sum of all updates of the round but those of the colluders, as their mean."""
        reply = self._find_reply(round, client, message)
        before, following = self.broadcast(round, client), self._following_model(round)
        colluders = self._colluders_in(round)
        # The sum over all, and by what the rest's share of it is divided.
        if self.equal_clients is None:
            total: float = reply.num_examples + _count_examples(colluders)
            rest_total: float = reply.num_examples
        else:  # nobody colludes
            total, rest_total = self.equal_clients, len(reply.senders)
        own = self._sum_moves(round, colluders)
        moves = {}
        for name, mean_move in self._mean_moves(round, before, following).items():
            moves[name] = (total * mean_move - own.get(name, 0)) / rest_total
        return Update(
            round=round,
            client=reply.client,
            before=before,
            payload=_make_payload(before, following, moves, self._gradient_names(round)),
            num_examples=reply.num_examples,
            config=self.header(round).config,
            members=tuple(reply.members),
        )

    def check_mean(self, number: int) -> None:
        """Check that the next model is the mean of the replies of this round, as who attacks supposes."""
        seen = self.recorded_update(number, self.header(number).replies[0].client)
        sums = self._sum_moves(number, self._replies_of_others(number))
        sizes, errors = 0.0, 0.0
        for name, move in _moves(seen).items():
            true_move = sums[name] / seen.num_examples
            sizes += float(true_move.square().sum())
            errors += float((move - true_move).square().sum())
        allowed = _LARGEST_ERROR * math.sqrt(sizes) + _ROUNDINGS * self._rounding_error(number, seen.num_examples)
        if not math.sqrt(errors) <= allowed:
            raise ConfigError(
                f"adversary.who: the model after round {number} is not the mean of its replies (it differs by "
                f"{math.sqrt(errors / sizes) if sizes else math.inf:.2g} of their updates), so models do not show "
                f"{self._role} what the others sent; take strategy fedavg or fedsgd, or attack as "
                "the server"
            )

    def _rounding_error(self, number: int, rest_examples: int) -> float:
        """Return the norm by which one rounding of the next model moves the rest that is computed from it."""
        gradient_names = self._gradient_names(number)
        total = 0.0
        for name, tensor in self._following_model(number).items():
            if tensor.is_floating_point():
                scale = self._step_size(number) if name in gradient_names else 1.0
                total += (torch.finfo(tensor.dtype).eps * float(tensor.double().norm()) / scale) ** 2
        return math.sqrt(total) * _count_examples(self._recording.header(number).replies) / rest_examples

    def _find_hindrance(self, number: int) -> str:
        header = self._recording.header(number)
        senders = {client for reply in header.replies for client in reply.senders}
        if not senders:
            return "nobody sent anything"
        if len(header.broadcasts) != 1:
            return "clients were sent different models"
        if any(reply.records for reply in header.replies) or self._recording._sends_controls(number):
            return "control variates, or other records, are sent beside the model"
        if not all(reply.num_examples for reply in header.replies):
            return "clients sent no number of examples"
        if header.replies[0].kind == "gradient" and "learning-rate" not in header.config:
            return "clients send gradients, and the server sends no learning-rate"
        colluders, receivers = set(self._role.colluders), set(self._role.clients)
        if any(colluders & set(reply.senders) and reply.members for reply in header.replies):
            return "the recording holds sums alone, and not what these clients sent; set who = 'outsider'"
        if receivers and not receivers & header.asked_clients:
            return "none of these clients takes part"
        if not senders - colluders:
            return "nobody else takes part"
        if self._final_after(number) is not None:
            return ""
        if number + 1 not in self._recording.rounds:
            return "the model after it is not recorded"
        following = self._recording.header(number + 1)
        if not following.broadcasts:
            return "the model after it is not recorded, since nobody answered it"
        if len(following.broadcasts) != 1:
            return "clients were sent different models after it"
        if receivers and not receivers & following.asked_clients:
            return "none of these clients is sent the model after it"
        return ""

    def _colluders_in(self, number: int) -> list[Reply]:
        return [reply for reply in self._recording.header(number).replies if reply.client in self._role.colluders]

    def _replies_of_others(self, number: int) -> list[Reply]:
        return [reply for reply in self._recording.header(number).replies if reply.client not in self._role.colluders]

    def _sum_moves(self, number: int, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """Return by name the sum of what these replies add to w_t, each times its N."""
        sums: dict[str, Tensor] = {}
        for reply in replies:
            update = self._recording.recorded_update(number, reply.client, reply.message)
            for name, move in _moves(update).items():
                sums[name] = sums.get(name, 0) + update.num_examples * move
        return sums

    def _make_header(self, number: int) -> Header:
        recorded = self._recording.header(number)
        colluders, replies = self._colluders_in(number), self._replies_of_others(number)
        senders = sorted({client for reply in replies for client in reply.senders})
        # The hash stands for what the sum is computed from.
        sources = [recorded.broadcasts[0], self._following_hash(number), *(reply.sha256 for reply in colluders)]
        reply = Reply(
            client=senders[0],
            num_examples=_count_examples(replies),
            broadcast=0,
            sha256=hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
            kind="gradient" if replies[0].kind == "gradient" else "weights",
            metrics={},
            members=tuple(senders) if len(senders) > 1 else (),
        )
        return Header(
            version=FORMAT_VERSION,
            round=number,
            broadcasts=recorded.broadcasts,
            replies=[reply],
            failures={},
            config=recorded.config,
        )

    def _final_after(self, number: int) -> FinalModel | None:
        """Return the last model if it is the one after this round, and shown."""
        if self._final is None or self._final.round != number or self._role.party == "eavesdropper":
            return None
        return self._final

    def _following_hash(self, number: int) -> str:
        if (final := self._final_after(number)) is not None:
            return final.sha256
        return self._recording.header(number + 1).broadcasts[0]

    def _following_model(self, number: int) -> State:
        """Return the model after a round."""
        if (final := self._final_after(number)) is not None:
            return final.state
        replies = self._recording.header(number + 1).replies
        return self._recording.broadcast(number + 1, replies[0].client, replies[0].message)

    def _mean_moves(self, number: int, before: State, following: State) -> dict[str, Tensor]:
        """Return by name the weighted mean of what replies add to w_t, or of negative gradients, in float64."""
        gradient_names = self._gradient_names(number)
        moves = {}
        for name, tensor in before.items():
            if tensor.is_floating_point() and name in following:
                moves[name] = following[name].double() - tensor.double()
                if name in gradient_names:
                    moves[name] /= self._step_size(number)
        return moves

    def _gradient_names(self, number: int) -> Container[str]:
        """Return the tensors of which clients send gradients, as the protocol says; none where they send weights."""
        reply = self._recording.header(number).replies[0]
        if reply.kind != "gradient":
            return ()
        return self._recording.recorded_update(number, reply.client, reply.message).gradient or ()

    def _step_size(self, number: int) -> float:
        """Return the step size of a server that averages gradients, which it tells all clients."""
        return float(str(self._recording.header(number).config["learning-rate"]))


def _count_examples(replies: Iterable[Reply]) -> int:
    return sum(reply.num_examples for reply in replies)


def _moves(update: Update) -> dict[str, Tensor]:
    """Return what an update adds to w_t, or the negative gradient, in float64; counters are left out."""
    moves = {}
    for name, tensor in update.after.items():
        before = update.before.get(name)
        if before is not None and before.is_floating_point():
            moves[name] = tensor.double() - before.double()
    for name, tensor in (update.gradient or {}).items():
        moves[name] = -tensor.double()
    return moves


def _make_payload(
    before: State, following: State, moves: Mapping[str, Tensor], gradient_names: Container[str]
) -> Payload:
    """Return a payload as a client's; counters are those of the next model."""
    tensors: dict[str, tuple[Kind, Form]] = {}
    for name, tensor in before.items():
        if name in gradient_names:
            tensors[name] = "gradient", Dense((-moves[name]).to(tensor.dtype))
        elif name in moves:
            tensors[name] = "weights", Dense((tensor.double() + moves[name]).to(tensor.dtype))
        elif name in following:
            tensors[name] = "weights", Dense(following[name])
    return Payload(tensors)
