"""What a server sees under secure aggregation that colludes with clients: sums without what these sent.

A sum over a group, unmasked, is the weighted mean of its updates. Who knows what some of the group
added takes it away, and has the mean of the others; of a group of which one client is left, its
update as it was rounded::

    u_rest = (N u_group - sum of N_k u_k) / (N - sum of N_k)    over the colluding clients k of the group

Recordings hold no update of a single client. What colluding clients added is kept apart, where an
experiment asks for it (`recording.colluders`), and read for this adversary alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from torch import Tensor

from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.computed_transcript import ComputedTranscript
from fedsim.recording.header import Header, Reply
from fedsim.recording.payloads import Dense, Form, Kind, Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update


class CollusionTranscript(ComputedTranscript):
    """Recording of sums without what colluding clients added to them.

    Args:
        recording: sums over groups, as the server saw them.
        own_updates: of each colluding client in each round, what it added to its group's sum: its update, clipped and
            rounded, with its noise.
        role: the server, and the clients with which it colludes.
        is_unweighted: whether all clients of a sum have weight 1; else N.

    Raises:
        ConfigError: no round shows an update of anybody else.
        TranscriptError: a round is damaged.
    """

    def __init__(
        self, recording: Transcript, own_updates: Transcript, role: AdversaryRole, *, is_unweighted: bool = False
    ) -> None:
        super().__init__(recording, role)
        self._own_updates = own_updates
        self._is_unweighted = is_unweighted
        self._choose_rounds()

    def recorded_update(self, round: int, client: int, message: int = 1) -> Update:
        """Return the mean of the updates of a group without the colluding clients."""
        reply = self._find_reply(round, client, message)
        recorded_reply = self._recording.header(round).find_reply(client)
        assert recorded_reply is not None  # it is among the members of the group
        group = self._recording.recorded_update(round, recorded_reply.client, recorded_reply.message)
        config = self.header(round).config
        colluders = self._colluders_of(round, recorded_reply)
        if not colluders:
            return replace(group, config=config)
        rest_weight = self._weigh(recorded_reply) - sum(map(self._weigh, colluders))
        sums: dict[str, Tensor] = {}
        for name, (_, values) in _dense_tensors(group).items():
            sums[name] = self._weigh(recorded_reply) * values.double()
        for own_reply in colluders:
            own = self._own_updates.recorded_update(round, own_reply.client, own_reply.message)
            for name, (_, values) in _dense_tensors(own).items():
                sums[name] = sums[name] - self._weigh(own_reply) * values.double()
        tensors: dict[str, tuple[Kind, Form]] = {}
        for name, (kind, values) in _dense_tensors(group).items():
            tensors[name] = kind, Dense((sums[name] / rest_weight).to(values.dtype))
        return Update(
            round=round,
            client=reply.client,
            before=group.before,
            payload=Payload(tensors),
            num_examples=reply.num_examples,
            config=config,
            members=tuple(reply.members),
        )

    def _weigh(self, reply: Reply) -> int:
        """Return the weight of a client in its sum, or of a group."""
        return len(reply.senders) if self._is_unweighted else reply.num_examples

    def _colluders_of(self, number: int, group: Reply) -> list[Reply]:
        """Return what the colluding clients of a group added to its sum."""
        if number not in self._own_updates.rounds:
            return []
        replies = self._own_updates.header(number).replies
        return [reply for reply in replies if reply.client in self._role.colluders and reply.client in group.senders]

    def _find_hindrance(self, number: int) -> str:
        header = self._recording.header(number)
        if not header.replies:
            return "nobody sent anything"
        if self._recording._sends_controls(number):
            return "control variates are sent with the model"
        for group in header.replies:
            known = {reply.client for reply in self._colluders_of(number, group)}
            if unknown := set(group.senders) & set(self._role.colluders) - known:
                return f"what client {min(unknown)} added to its sum is not there"
        if not any(set(group.senders) - set(self._role.colluders) for group in header.replies):
            return "nobody else takes part"
        return ""

    def _make_header(self, number: int) -> Header:
        recorded = self._recording.header(number)
        replies = []
        for group in recorded.replies:
            rest = sorted(set(group.senders) - set(self._role.colluders))
            colluders = self._colluders_of(number, group)
            if not colluders:
                replies.append(group)
            elif rest:
                # The hash stands for what the rest is computed from.
                sources = [group.sha256, *(reply.sha256 for reply in colluders)]
                replies.append(
                    Reply(
                        client=rest[0],
                        num_examples=group.num_examples - sum(reply.num_examples for reply in colluders),
                        broadcast=group.broadcast,
                        sha256=hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
                        kind=group.kind,
                        metrics={},
                        members=tuple(rest) if len(rest) > 1 else (),
                    )
                )
        replies.sort(key=lambda reply: reply.client)
        return replace(recorded, replies=replies)


def _dense_tensors(update: Update) -> dict[str, tuple[Kind, Tensor]]:
    """Return by name the kind and the values of the tensors that an update has, none of which is sparse."""
    tensors: dict[str, tuple[Kind, Tensor]] = {}
    for name, (kind, _) in update.payload.tensors.items():
        tensors[name] = kind, update.payload.values(kind, update.before)[name]
    return tensors
