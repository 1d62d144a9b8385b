"""Who attacked, in the words of pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from fedsim.audit.observers import read_who
from fedsim.audit.variants import WHO
from fedsim.base.errors import AttackError
from fedsim.recording.adversary_role import AdversaryRole, Who

SERVER = "the server"


def name_attacker(settings: str) -> str:
    """Name who made an attack.

    >>> name_attacker("{}"), name_attacker('{"adversary.who": [3]}')
    ('the server', 'client 3')
    """
    return str(AdversaryRole.parse(json.loads(settings).get(WHO, "server")))


def list_attackers(findings: Iterable[Mapping[str, Any]]) -> list[Who]:
    """Return who made these findings, each once, in the order of the findings."""
    attackers: list[Who] = []
    for about in findings:
        with suppress(AttackError):  # such a finding is not scored either
            who = read_who(about)
            if who not in attackers:
                attackers.append(who)
    return attackers
