"""Determine which clients the server observed, singly or in groups: the possible victims."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fedsim.base.errors import join_first
from fedsim.interfaces.attack import GROUP, GROUPS, Attack
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.header import Header, Reply

log = logging.getLogger(__name__)

_MAX_CLIENTS = 10
"""Most clients named in a sentence."""
_DISAGGREGATION = "disaggregation"
"""The attack that decodes models of single clients from sums over groups."""


@dataclass(frozen=True)
class ObservedClients:
    """Clients whose updates, or the sums over whose groups, the server saw in the attacked rounds."""

    headers: Sequence[Header]

    @cached_property
    def recorded_clients(self) -> list[int]:
        """Clients under whose id an update or a sum is recorded, ascending.

        A sum over a group is recorded under the id of its first member.
        """
        return sorted({reply.client for reply in self._replies()})

    @cached_property
    def all_clients(self) -> list[int]:
        """All clients that sent something, ascending."""
        clients = set[int]()
        for reply in self._replies():
            clients.update((reply.client, *reply.members))
        return sorted(clients)

    @cached_property
    def has_groups(self) -> bool:
        """Whether the server saw sums over groups."""
        return any(reply.members for reply in self._replies())

    def victims(
        self, attack: Attack, chosen: Sequence[int] | Literal["all"] | None, failures: list[str]
    ) -> Sequence[int]:
        """Return the victims of `attack`: clients, or those under whose id their group is recorded.

        Args:
            chosen: by the adversary; None is the first.
        """
        if not self.has_groups:
            return _select_victims(self.recorded_clients, chosen)
        if GROUPS in attack.accepted_observations:
            return _select_victims(self.all_clients, chosen)
        if GROUP not in attack.accepted_observations:
            _report_failure(failures, attack, explain_group_refusal(attack))
            return ()
        # The victim of a sum is the client under whose id the sum is recorded.
        group_ids: dict[int, int | None] = {}
        for client in _select_victims(self.recorded_clients, chosen):
            group_ids[client] = self._group_id(client)
        changing = [client for client, group_id in group_ids.items() if group_id is None]
        if changing:
            needs_several = isinstance(attack.rounds_needed, int) and attack.rounds_needed > 1
            staying = "record a group that stays the same, as all clients do ([secure_aggregation] groups = 'all')"
            reason = (
                "it reads several rounds of one group, and the members of groups change from round to round, as those "
                f"of client {join_first(changing, _MAX_CLIENTS)}; "
                + (staying if needs_several else "attack one round (adversary.rounds)")
            )
            _report_failure(failures, attack, reason)
        return list(dict.fromkeys(i for i in group_ids.values() if i is not None))

    def _group_id(self, client: int) -> int | None:
        """Return the client under whose id the group of `client` is recorded.

        That is `client` itself where it is in no group, and None where its group changes.
        """
        replies = [header.find_reply(client) for header in self.headers]
        present = [reply for reply in replies if reply is not None]
        groups = {tuple(reply.members) or (reply.client,) for reply in present}
        if len(groups) > 1:
            return None
        return present[0].client if present else client

    def _replies(self) -> Iterable[Reply]:
        return (reply for header in self.headers for reply in header.replies)


def explain_group_refusal(attack: Attack, who: str | Sequence[int | str] = "server") -> str:
    """Explain why `attack` of `who` is not made on sums over groups."""
    source, cause = "", "under secure aggregation the server sees sums over groups"
    role = AdversaryRole.parse(who)
    if role.party == "server" and role.colluders:
        cause = "what colluding clients leave of sums is still of several clients"
    elif role.party == "eavesdropper":
        cause = "under secure aggregation uploads are masked, and models show an eavesdropper the sum over all clients"
    elif who != "server":
        cause = "models show others than the server the sum over all clients"
    if _accepts_decoded_models(attack):
        source = f" and, where it reads models, can build on '{_DISAGGREGATION}' (source)"
    return f"it reads the updates of single clients, and {cause}; it is for a server that sees each of them{source}"


def _accepts_decoded_models(attack: Attack) -> bool:
    """Return whether models that `disaggregation` decoded can be its `source`."""
    try:
        return replace(attack, source=_DISAGGREGATION).builds_on == _DISAGGREGATION  # type: ignore[call-arg]
    except (TypeError, ValueError):  # it has no such setting, or refuses this source
        return False


def _select_victims(present: list[int], chosen: Sequence[int] | Literal["all"] | None) -> Sequence[int]:
    if chosen == "all":
        return present
    return present[:1] if chosen is None else chosen


def _report_failure(failures: list[str], attack: Attack, reason: str) -> None:
    sentence = f"{attack.title} does not apply: {reason}"
    if sentence not in failures:
        failures.append(sentence)
        log.error("%s", sentence)
