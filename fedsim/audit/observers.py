"""Open a recording as the adversary of an audit sees it: the server, an eavesdropper, an outsider or clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError

from fedsim.audit.evaluation.case import Case
from fedsim.base.errors import AttackError, ConfigError, RunError, join_first
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.recording.adversary_role import AdversaryRole, Who, find_error_in_who
from fedsim.recording.collusion import CollusionTranscript
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.observed_transcript import FinalModel, ObservedTranscript
from fedsim.recording.sealed_files import read_seal, read_sealed_file
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State

if TYPE_CHECKING:
    from fedsim.federation.open_run import OpenRun

_MAX_NAMED_CLIENTS = 10


def observe_run(folder: OpenRun, case: Case, adversary: AdversaryTable, message_format: MessageFormat) -> Transcript:
    """Return the messages of a run that an adversary sees."""
    recording, role = folder.recording.in_format(message_format), adversary.role
    if role.party in ("server", "feature-party") and not role.colluders:
        return recording  # a party's own messages are all that such an attack reads
    _check_clients_exist(recording, case, role)
    if role.party == "eavesdropper" and not (case.shows_sums_alone or shows_sums(recording)):
        adversary.check_victims_are_heard()
        return _read_links(recording, role) if role.links else recording
    if not (adversary.knowledge.num_examples and adversary.knowledge.client_ids):
        raise ConfigError(
            f"adversary.knowledge: num_examples and client_ids are withheld; under secure aggregation {role} "
            "computes with sums, and is assumed to know whose they are and how many examples they have; remove them"
        )
    if message_format.changes_updates:
        raise ConfigError(
            "adversary.who: which part of the messages is the model is said by [app], and others than the server are "
            "known to see whole models alone; leave out those keys of [app], or attack as the server"
        )
    if role.party == "server":
        own_updates = _open_own_updates(folder, case, role)
        return CollusionTranscript(recording, own_updates, role, is_unweighted=case.sums_are_unweighted)
    return ObservedTranscript(recording, role, read_final_model(folder, recording), case.count_equal_clients(role))


def _open_own_updates(folder: OpenRun, case: Case, role: AdversaryRole) -> Transcript:
    """Return what the run kept of colluding clients, each file as it was written."""
    case.check_colluders(role)
    paths = sorted(folder.colluders.glob("round-*.safetensors"))
    if not paths:
        raise ConfigError(
            f"adversary.who: {folder.colluders} holds nothing that colluding clients added to sums; put the folder "
            "back where it is missing, or name clients that took part in a recorded round"
        )
    for path in paths:
        if folder.manifest.contents is not None and not folder.manifest.vouches_for(path):
            raise RunError(f"{path}: is not what this run wrote; put it back, or begin again")
    return Transcript(folder.colluders)


def _read_links(recording: Transcript, role: AdversaryRole) -> Transcript:
    """Return the messages on the links of the clients that `role` names."""
    heard = recording.restrict_to_links(role.links)
    if not any(heard.header(number).replies for number in heard.rounds):
        raise ConfigError(
            f"adversary.who: {role} sees no update, since no recorded update is from these clients; name "
            "others, or all links"
        )
    return heard


def _check_clients_exist(recording: Transcript, case: Case, role: AdversaryRole) -> None:
    """Raise ConfigError where a named client is not of this federation, as far as it is known."""
    if not role.clients:
        return
    clients = set(range(case.clients or 0))
    if not clients:
        for number in recording.rounds:
            clients |= recording.header(number).asked_clients
    if unknown := [client for client in role.clients if client not in clients]:
        raise ConfigError(
            f"adversary.who: client {unknown[0]} is not of this federation, whose clients are "
            f"{join_first(sorted(clients), _MAX_NAMED_CLIENTS)}; name some of these"
        )


def check_observed_rounds(transcript: Transcript, rounds: Iterable[int]) -> None:
    """Check that models show the sum of the updates in these rounds, as who attacks supposes.

    Under central privacy they show it clipped and with noise, which is what an outsider has.
    """
    if isinstance(transcript, ObservedTranscript) and transcript.equal_clients is None:
        for number in rounds:
            transcript.check_mean(number)


def shows_sums(transcript: Transcript) -> bool:
    """Return whether an update of any round is a sum over clients."""
    return any(reply.members for number in transcript.rounds for reply in transcript.header(number).replies)


def read_who(about: Mapping[str, Any]) -> Who:
    """Return who made a finding."""
    attacker = about.get("attacker", "server")
    try:
        who = TypeAdapter[Who](Who).validate_python(attacker)
        if not find_error_in_who(who):
            return who
    except ValidationError:
        pass
    raise AttackError(f"it says that {attacker!r} attacked; remove it, and attack again")


def read_final_model(folder: OpenRun, recording: Transcript) -> FinalModel | None:
    """Return the model after the last round, in the types of w_t; None where there is no checkpoint."""
    if not folder.checkpoint.is_file():
        return None
    header, stored = read_sealed_file(folder.checkpoint)
    number = header["round"]
    if number not in recording.rounds:
        return None
    reply = recording.header(number).replies[0]
    sent: State = recording.broadcast(number, reply.client, reply.message)
    state = {}
    for name, tensor in sent.items():
        array = stored.get(f"model/{name}")
        if array is None or array.shape != tuple(tensor.shape):
            return None
        state[name] = torch.from_numpy(array).to(tensor.dtype)
    return FinalModel(number, state, read_seal(folder.checkpoint))
