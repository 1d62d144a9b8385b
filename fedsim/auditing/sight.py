"""Whom the server saw in some rounds, alone or in groups, and so whom an attack can be made on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fedsim.attacks import GROUP, GROUPS, Attack
from fedsim.errors import some_of
from fedsim.recording.header import Header, Reply

log = logging.getLogger(__name__)

_SHOWN = 10
"""Most clients named in a sentence."""
_DECODER = "disaggregation"
"""The attack that finds single clients in sums over groups."""


@dataclass(frozen=True)
class Sight:
    """What the server saw in the rounds of an attack.

    Attributes:
        headers: of these rounds, ascending.
    """

    headers: Sequence[Header]

    @cached_property
    def filed(self) -> list[int]:
        """Under whom updates and sums are filed, ascending: each client, or the first of each group."""
        return sorted({reply.client for reply in self._replies()})

    @cached_property
    def everyone(self) -> list[int]:
        """All clients that sent something, ascending."""
        return sorted({client for reply in self._replies() for client in (reply.client, *reply.members)})

    @cached_property
    def of_groups(self) -> bool:
        """Whether the server saw sums over groups."""
        return any(reply.members for reply in self._replies())

    def victims(
        self, attack: Attack, chosen: Sequence[int] | Literal["all"] | None, failures: list[str]
    ) -> Sequence[int]:
        """Whom `attack` is made on: clients, or those under whom the sums of their groups are filed.

        Args:
            chosen: by the adversary; None is the first.
            failures: gets one sentence where the attack does not apply.
        """
        if not self.of_groups:
            return _of(self.filed, chosen)
        if GROUPS in attack.observes:
            return _of(self.everyone, chosen)
        if GROUP not in attack.observes:
            _fail(failures, attack, does_not_read(attack))
            return ()
        seats = {client: self._seat(client) for client in _of(self.filed, chosen)}
        if moving := [client for client, seat in seats.items() if seat is None]:
            why = (
                "it reads several rounds of one group, and the members of groups change from round to round, as those "
                f"of client {some_of(moving, _SHOWN)}; attack one round (adversary.rounds)"
            )
            _fail(failures, attack, why)
        return list(dict.fromkeys(seat for seat in seats.values() if seat is not None))

    def _seat(self, client: int) -> int | None:
        """Under whom the group of `client` is filed; itself where it is in none, None where groups differ."""
        seen = [reply for header in self.headers if (reply := header.reply_of(client)) is not None]
        groups = {tuple(reply.members) or (reply.client,) for reply in seen}
        if len(groups) > 1:
            return None
        return seen[0].client if seen else client

    def _replies(self) -> Iterable[Reply]:
        return (reply for header in self.headers for reply in header.replies)


def does_not_read(attack: Attack) -> str:
    """Why `attack` is not made on sums over groups."""
    source = f" and, where it reads models, can build on '{_DECODER}' (source)" if _can_build(attack) else ""
    return (
        "it reads the updates of single clients, and under secure aggregation the server sees sums over groups; it is "
        f"for federations without{source}"
    )


def _can_build(attack: Attack) -> bool:
    """Whether it takes models that `disaggregation` decoded as its `source`."""
    try:
        return replace(attack, source=_DECODER).builds_on == _DECODER  # type: ignore[call-arg]
    except (TypeError, ValueError):  # it has no such setting, or refuses this source
        return False


def _of(present: list[int], chosen: Sequence[int] | Literal["all"] | None) -> Sequence[int]:
    if chosen == "all":
        return present
    return present[:1] if chosen is None else chosen


def _fail(failures: list[str], attack: Attack, why: str) -> None:
    sentence = f"{attack.called} does not apply: {why}"
    if sentence not in failures:
        failures.append(sentence)
        log.error("%s", sentence)
