"""Parties of a federation, aims of attacks, and texts that auditors refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.dossier.contents import Aim, ObservingParty, Reference
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.report.attacker_names import list_attackers

_AIMS: Mapping[tuple[str, ...], str] = {
    ("reconstruction", "texts"): "recover the examples themselves: images, records, series or texts",
    ("representatives",): "show what the examples of a class look like",
    ("membership",): "infer whether a client trained on a known record",
    ("inference",): "infer a hidden attribute of a record, or which client holds the record",
    ("property",): "infer whether a client's data have some property",
    ("label-distribution",): "infer how often each label occurs in a client's data",
    ("example-count",): "infer how many examples a client holds, where messages do not say it",
    ("linkage",): "find the messages that the same client sent",
    ("example-groups",): "find which examples of a secure sum are from the same client",
    ("answers",): "find a client's answers to queries, and the values of single people",
    ("row-labels", "row-features"): "infer labels or columns that another party of a vertical federation holds",
    ("local-model",): "reconstruct a client's local model, which fits its data better than the shared one",
}
"""What attacks are after, by the kinds of findings that claim it."""
_NO_FINDING = "no attack of this kind has a result here"
_NOT_TRIED = "No attack in this dossier had this view."
_SUMS_OF_OTHERS = (
    "From the models before and after a round, and their own updates, they computed the sum of the updates of all "
    "others; they were assumed to know how many examples these hold."
)
_SUMS_WITHOUT_COLLUDERS = (
    "If the server was among them, it subtracted the contributions of these clients from the sums that it unmasked "
    "under secure aggregation."
)
_EACH_MODEL = (
    "The attacks assumed an adversary that gets the model of each round, and so sees the sum of all its updates (with "
    "central privacy, clipped and with noise). This is more than the last model reveals."
)
_HEARS_UPDATES = (
    "The attacks read messages as they are sent, before the server sums or adds noise; links were assumed not to be "
    "encrypted."
)
_HEARS_MODELS = (
    "Secure aggregation masks what clients send, so the attacks read the models of successive rounds, and hence the "
    "sum of all updates; links were assumed not to be encrypted."
)
_SEES_UPDATES = (
    "every message of every client: the model or update that it sends, how many examples it holds, and the metrics "
    "that it reports; and the settings that it sends itself"
)
_SEES_SUMS = (
    "the sums over groups of clients, with the number of examples of the group and who is in it, and no update of a "
    "single client, if secure aggregation works as simulated; and the settings that it sends itself"
)
REFERENCES = (
    Reference(
        name="EDPB Opinion 28/2024",
        asks="All means reasonably likely to be used, and a likelihood that is insignificant for each data subject.",
        answered_in="What was attacked, and what was not; The most exposed clients",
    ),
    Reference(
        name="EDPS TechDispatch 1/2025",
        asks="For federated learning: who sees what (server, clients, colluders, outsiders), of updates and of the "
        "final model.",
        answered_in="Who sees what",
    ),
    Reference(
        name="NIST SP 800-226",
        asks="Differential privacy stated with unit, adjacency, epsilon, delta, accountant, whom it trusts, and "
        "hazards.",
        answered_in="What is proved and what was measured; Cautions",
    ),
    Reference(
        name="OWASP AISVS 1.0, 11.2.4 and 11.2.5",
        asks="Named by its numbers only; its text is not quoted here.",
        answered_in="What was attacked, and what was not",
    ),
    Reference(
        name="MITRE ATLAS AML.T0024, with .000 and .001",
        asks="Named by its numbers only; its text is not quoted here.",
        answered_in="What was attacked, and what was not",
    ),
)
"""What auditors refer to. Nothing is said of a text that is not known word for word."""


def list_observers(findings: Iterable[Mapping[str, Any]], *, holds_sums: bool) -> list[ObservingParty]:
    """Return who sees what, and from whose view attacks were made.

    Args:
        holds_sums: whether the server sees sums over groups in place of single updates.
    """
    attackers = list_attackers(findings)
    roles = [AdversaryRole.parse(who) for who in attackers]
    is_attacked = "server" in attackers
    # Clients that attacked: one alone, or several together.
    numbers = {len(role.clients) for role in roles if role.party == "clients"}
    remarks_on_colluders = []
    if max(numbers, default=0) > 1:
        remarks_on_colluders.append(_SUMS_OF_OTHERS)
    has_server = any(role.party == "server" and role.colluders for role in roles)
    remarks_on_colluders.append(_SUMS_WITHOUT_COLLUDERS if has_server else "The server was not among them.")
    are_colluders_examined = has_server or max(numbers, default=0) > 1
    hears_links = any(role.party == "eavesdropper" for role in roles)
    server_remark = (
        "It follows the protocol and only reads. A server that alters the model or the protocol to learn more was not "
        "examined."
    )
    return [
        ObservingParty(
            who="The server",
            sees=_SEES_SUMS if holds_sums else _SEES_UPDATES,
            is_examined=is_attacked,
            remark=server_remark if is_attacked else f"No attack was run, or none left a finding. {server_remark}",
        ),
        ObservingParty(
            who="Another client",
            sees="the shared model of each round in which it takes part, and its own data",
            is_examined=1 in numbers,
            remark=_SUMS_OF_OTHERS if 1 in numbers else _NOT_TRIED,
        ),
        ObservingParty(
            who="Colluders: clients together, or clients with the server",
            sees="all that each of them sees",
            is_examined=are_colluders_examined,
            remark=" ".join(remarks_on_colluders) if are_colluders_examined else _NOT_TRIED,
        ),
        ObservingParty(
            who="An outsider on the network",
            sees="what is not encrypted in transit, at worst every message; transport is not simulated",
            is_examined=hears_links,
            remark=(_HEARS_MODELS if holds_sums else _HEARS_UPDATES) if hears_links else _NOT_TRIED,
        ),
        ObservingParty(
            who="A recipient of the final model",
            sees="the shared model after the last round",
            is_examined=False,
            remark=_EACH_MODEL if "outsider" in attackers else _NOT_TRIED,
        ),
        *([_FEATURE_PARTY] if "feature-party" in attackers else []),
    ]


_FEATURE_PARTY = ObservingParty(
    who="A party that holds some columns of the rows",
    sees="the gradients of the embeddings that it sends, and its own columns",
    is_examined=True,
    remark="It attacked the labels, which another party holds.",
)


def list_aims(findings: Iterable[Mapping[str, Any]]) -> list[Aim]:
    """Return what attacks can be after, and which attacks have a finding that claims it."""
    attacks_by_kind: dict[str, dict[str, None]] = {}
    for finding in findings:
        attacks_by_kind.setdefault(str(finding.get("kind", "")), {})[str(finding["attack"])] = None
    aims = []
    for kinds, aim in _AIMS.items():
        attacks = [attack for kind in kinds for attack in attacks_by_kind.pop(kind, {})]
        aims.append(Aim(aim=aim, attacks=attacks, why_not="" if attacks else _NO_FINDING))
    # Kinds of findings that other packages bring.
    for kind, further_attacks in attacks_by_kind.items():
        aims.append(Aim(aim=kind, attacks=list(further_attacks), why_not=""))
    return aims
