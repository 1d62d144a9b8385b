"""The target of an attack: whom it attacks, what the server saw there, and what it may know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedsim.base.errors import AttackError, join_first
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update, non_finite_names

_MAX_CLIENTS = 20
"""Most clients named in a sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """One victim, with all that one attack on it is about; the plan of an audit makes it.

    An attack reads nothing else: no data, no truth, and no round that is not to be attacked.

    Attributes:
        transcript: the messages that the server saw in the rounds to attack.
        victim: the attacked client's id in the transcript.
        members: the clients of the group whose sum is recorded under the victim's id, where the
            victim stands for them; empty where it stands for itself.
        knowledge: the facts that the threat model grants, and those that the headers of these
            rounds state; an attack gets those that it declares.
        rng: the source of every random draw of the attack.
    """

    transcript: Transcript
    victim: int
    members: tuple[int, ...] = ()
    knowledge: Knowledge
    rng: torch.Generator

    def participation_rounds(self, *, in_groups: bool = False) -> list[int]:
        """Return those rounds to attack in which the victim took part, ascending.

        Args:
            in_groups: include rounds in which only the sum over a group with it was seen.

        Raises:
            AttackError: there is none.
            TranscriptError: a round is damaged.
        """
        rounds = []
        for number in self.transcript.rounds:
            reply = self.transcript.header(number).find_reply(self.victim)
            if reply and (in_groups or reply.client == self.victim):
                rounds.append(number)
        if not rounds:
            raise AttackError(
                f"client {self.victim}: took part in none of the {len(self.transcript.rounds)} "
                f"rounds to be attacked; choose another victim (recorded: {self._recorded_clients()}) "
                "or other rounds"
            )
        return rounds

    def read_update(self, round: int | None = None) -> Update:
        """Read the victim's verified update of one round.

        Args:
            round: one of the rounds to attack; None where there is only one.

        Raises:
            AttackError: weights or a gradient are NaN or infinite; or no round is named, and there
                are several.
            TranscriptError: the round is damaged, or the victim is not in it.
        """
        if round is None:
            check_one_round(self.transcript)
            round = self.transcript.rounds[0]
        update = self.transcript.update(round, self.victim)
        states = ((update.before, ""), (update.after, ""), (update.gradient or {}, "the gradient of "))
        for state, prefix in states:
            if broken := non_finite_names(state):
                raise AttackError(
                    f"round {round}, client {self.victim}: {prefix}{broken[0]} holds NaN or infinite "
                    "values; this update cannot be attacked, choose another round or victim"
                )
        return update

    def _recorded_clients(self) -> str:
        clients = set[int]()
        for number in self.transcript.rounds:
            clients.update(self.transcript.clients(number))
        return join_first(sorted(clients), _MAX_CLIENTS) or "no client"


def check_one_round(transcript: Transcript) -> None:
    """Raise AttackError unless `transcript` shows one round."""
    if len(transcript.rounds) != 1:
        raise AttackError(
            f"this attack reads one update, the transcript shows rounds {transcript.rounds}; "
            "use transcript.restrict_to([r])"
        )
