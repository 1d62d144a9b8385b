"""Say in `fedsim inspect` who attacks a run, and what is kept of clients that collude with its server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fedsim.base.errors import FedsimError, join_first

if TYPE_CHECKING:
    from fedsim.federation.open_run import OpenRun

_MAX_CLIENTS = 10


def describe_adversary(folder: OpenRun) -> Iterator[tuple[str, str]]:
    """Yield the rows of the summary: whose points of view a run was attacked from, and its colluders."""
    from fedsim.recording.adversary_role import AdversaryRole
    from fedsim.recording.transcript import Transcript
    from fedsim.report.attacker_names import list_attackers

    contents = folder.manifest.contents
    settings = (contents.settings if contents else None) or {}
    attackers = []
    if (who := settings.get("adversary.who")) and settings.get("adversary.when") != "never":
        attackers.append(str(AdversaryRole.parse(who)))
    if names := [str(AdversaryRole.parse(who)) for who in list_attackers(_read_findings(folder))]:
        attackers += [name for name in names if name not in attackers]
    if attackers:
        yield "adversary", "; ".join(attackers)
    if folder.colluders.is_dir():
        kept = Transcript(folder.colluders)
        clients = sorted({client for number in kept.rounds for client in kept.clients(number)})
        yield "colluders", f"{join_first(clients, _MAX_CLIENTS)}, of which the run keeps what they added to sums"


def _read_findings(folder: OpenRun) -> Iterator[dict[str, Any]]:
    """Yield what is known of each finding that can be read."""
    from fedsim.audit.finding_files import read_facts

    for path in sorted(folder.findings.glob("*/*.safetensors")):
        with suppress(FedsimError):  # a damaged finding is named where files are compared
            yield read_facts(path)
