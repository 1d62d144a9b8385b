"""Say what form the finding of a job must have, and what is saved with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.audit.cache import MESSAGES_HASH
from fedsim.audit.evaluation.evaluator import FindingSpec
from fedsim.audit.evaluation.memberships import CANDIDATES_DIGEST
from fedsim.audit.job_log import JobLog
from fedsim.audit.targets import PendingJob
from fedsim.audit.variants import changed_settings, settings_of
from fedsim.base.errors import name_rounds
from fedsim.plugins.code_hashes import hash_plugin_code
from fedsim.recording.wire_format import State

if TYPE_CHECKING:
    from fedsim.audit.audit import Audit


def make_finding_spec(audit: Audit, pending: PendingJob) -> FindingSpec:
    """Return the form that a finding of this job must have."""

    def broadcast() -> State:
        transcript = audit.transcript
        reply = transcript.header(pending.first).find_reply(pending.job.victim)
        assert reply is not None
        return transcript.update(pending.first, reply.client).before

    return FindingSpec(
        where=f"{name_rounds(pending.job.round)}, client {pending.job.victim}",
        knowledge=pending.target.knowledge,
        before=broadcast,
        task=audit.case.task,
        clients=audit.case.clients,
    )


def make_finding_metadata(audit: Audit, pending: PendingJob, job_log: JobLog) -> dict[str, object]:
    """Return what is saved with a finding."""
    job, target, adversary = pending.job, pending.target, audit.spec.adversary
    granted = adversary.knowledge.model_dump(mode="json")
    partial_records = target.knowledge.partial_records
    return {
        "attack": job.title,
        "plugin": job.plugin,
        "round": job.round,
        "rounds": list(job.rounds),
        "first_round": pending.first,
        "victim": job.victim,
        "members": list(target.members),
        "repeat": job.repeat,
        "settings": settings_of(job.attack),
        "changed": changed_settings(job.attack),
        "variant": audit.cache.variants[job.title],
        "command": audit.command,
        "code": hash_plugin_code(type(job.attack)),
        "model_code": audit.cache.model_code,
        "granted": target.knowledge.granted_facts(),
        "knowledge": {name: granted[name] for name in sorted(job.attack.facts_to_grant())}
        | audit.cache.withheld_messages,
        "app": audit.spec.app.model_dump(mode="json", exclude_defaults=True),
        "partial_records": partial_records.column if partial_records else "",
        "fingerprint": pending.fingerprint,
        MESSAGES_HASH: audit.cache.hash_messages(job.rounds),
        "warnings": job_log.warnings,
        "seconds": round(job_log.seconds, 2),
        **_tuning_note(audit, job.title),
        **_candidates_note(audit, pending),
        **({} if adversary.who == "server" else {"attacker": adversary.who}),
    }


def _tuning_note(audit: Audit, title: str) -> dict[str, str]:
    """Return how the settings of an attack were chosen, where its table says so."""
    for table, _ in audit.attacks:
        if table.title == title and table.tuned:
            return {"tuned": table.tuned}
    return {}


def _candidates_note(audit: Audit, pending: PendingJob) -> dict[str, str]:
    """Return the hash of the candidates where truth files hold them, since these files may change."""
    adversary, target = audit.spec.adversary, pending.target
    if target.knowledge.candidates is None or not audit.case.is_described_by_file:
        return {}
    clients = target.members or (pending.job.victim,)
    drawn = audit.case.draw_candidates(clients, str(adversary.knowledge.candidates), adversary.candidates)
    return {CANDIDATES_DIGEST: drawn.digest}
