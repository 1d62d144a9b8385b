"""Who attacks a federation: its server, clients, an outsider or an eavesdropper, as `adversary.who` names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from fedsim.base.errors import join_first

PartyName = Literal["server", "outsider", "eavesdropper", "feature-party"]
"""A party that attacks; the feature party is that of split learning, whose messages are read."""
CompanyName = Literal["server", "eavesdropper"]
"""A party that may stand before ids of clients: a server that colludes with them, an eavesdropper on their links."""
Who = PartyName | list[int | CompanyName]
"""Value of `adversary.who`: a party, clients together, or a party and clients, see `CompanyName`."""
_MAX_CLIENTS = 10


@dataclass(frozen=True)
class AdversaryRole:
    """Who attacks.

    Attributes:
        party: a party, or `clients` where clients attack without one.
        clients: those who attack, alone or with the server, or whose links an eavesdropper hears; empty where it hears
            all.
    """

    party: PartyName | Literal["clients"]
    clients: tuple[int, ...] = ()

    @classmethod
    def parse(cls, who: str | Sequence[int | str]) -> AdversaryRole:
        """Return the role that a valid `adversary.who` names.

        >>> AdversaryRole.parse([7, 3])
        AdversaryRole(party='clients', clients=(3, 7))
        >>> AdversaryRole.parse(["eavesdropper", 3])
        AdversaryRole(party='eavesdropper', clients=(3,))
        """
        if isinstance(who, str):
            return cls(cast(PartyName, who))
        parties = [item for item in who if isinstance(item, str)]
        clients = tuple(sorted(item for item in who if not isinstance(item, str)))
        return cls(cast(PartyName, parties[0]) if parties else "clients", clients)

    @property
    def setting(self) -> Who:
        """Return the value of `adversary.who` that names this role, in its usual order."""
        if self.party == "clients":
            return list(self.clients)
        return [cast(CompanyName, self.party), *self.clients] if self.clients else self.party

    @property
    def colluders(self) -> tuple[int, ...]:
        """Return the clients that attack."""
        return () if self.party == "eavesdropper" else self.clients

    @property
    def links(self) -> tuple[int, ...]:
        """Return the clients whose links an eavesdropper hears; empty where it hears all, and for others."""
        return self.clients if self.party == "eavesdropper" else ()

    @property
    def reads_messages(self) -> bool:
        """Return whether it reads messages as they are sent, not models alone."""
        return self.party in ("server", "eavesdropper", "feature-party")

    def __str__(self) -> str:
        """Name who attacks.

        >>> str(AdversaryRole("clients", (3, 7))), str(AdversaryRole("eavesdropper"))
        ('clients 3, 7 together', 'an eavesdropper on all links')
        """
        names = f"client{'s' if len(self.clients) > 1 else ''} {join_first(self.clients, _MAX_CLIENTS)}"
        if self.party == "clients":
            return names if len(self.clients) == 1 else f"{names} together"
        if self.party == "eavesdropper":
            if not self.clients:
                return "an eavesdropper on all links"
            return f"an eavesdropper on the link{'s' if len(self.clients) > 1 else ''} of {names}"
        return f"{_PARTIES[self.party]} with {names}" if self.clients else _PARTIES[self.party]


_PARTIES = {
    "server": "the server",
    "outsider": "an outsider who gets each model",
    "feature-party": "the feature party whose messages are read",
}


def find_error_in_who(who: str | Sequence[int | str]) -> str:
    """Return what is wrong with an `adversary.who` of the right types; empty where nothing is.

    >>> find_error_in_who([3, 3])
    'expected the ids of colluding clients, each once, got [3, 3]'
    """
    if isinstance(who, str):
        return ""
    clients = [item for item in who if not isinstance(item, str)]
    parties = len(who) - len(clients)
    if not clients or min(clients) < 0 or len(set(clients)) < len(clients):
        of_whom = "clients whose links are heard" if "eavesdropper" in who else "colluding clients"
        return f"expected the ids of {of_whom}, each once, got {list(who)}"
    return f"expected one party besides clients, got {list(who)}" if parties > 1 else ""


def find_error_in_collusion(role: AdversaryRole, kept: Iterable[int], *, sees_sums: bool) -> str:
    """Return why clients that collude with the server add nothing to what it knows; empty where they do.

    Args:
        kept: clients of which the run keeps what they add to sums.
        sees_sums: whether the server sees sums alone.
    """
    if not sees_sums:
        return (
            "adversary.who: without [secure_aggregation] the server sees the update of each client, to which "
            "colluding clients add nothing; set who = 'server'"
        )
    colluders, known = set(role.colluders), set(kept)
    if colluders <= known:
        return ""
    return (
        f"adversary.who: a run does not keep what client {min(colluders - known)} adds to sums by default; run it "
        f"with recording.colluders = {sorted(colluders | known)}"
    )
