"""Make the target of each job of an audit: the messages to read, and what the adversary knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fedsim.audit.cache import FindingCache, LazyModels
from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.local_optimum import OPTIMUM_METHOD
from fedsim.audit.optima import OptimumStore
from fedsim.audit.plan import AttackJob
from fedsim.audit.threat_model import apply_headers, grant_private, private_facts, scale_to_group
from fedsim.audit.visibility import ObservedClients
from fedsim.base.errors import AttackError, join_first
from fedsim.base.randomness import adversary_key, generator
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.interfaces.attack import GROUPS, OPTIMAL, Knowledge, Target
from fedsim.recording.header import Reply
from fedsim.recording.transcript import Transcript

log = logging.getLogger(__name__)
_MAX_METRICS = 4
"""Most metrics that one sentence names."""


def explain_hidden_terms(where: str) -> str:
    """Return why an update cannot be read where clients add known terms and nobody knows who sent what."""
    return (
        f"{where}: clients add control variates, or a linear term, to their gradients, which follow from all that each "
        "sent before, and the threat model withholds who sent that; grant it (adversary.knowledge.client_ids)"
    )


@dataclass(frozen=True, kw_only=True)
class PendingJob:
    """Job whose finding is not in the run folder yet.

    Attributes:
        first: the first round in which its victim took part.
    """

    job: AttackJob
    first: int
    target: Target
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class TargetMaker:
    """Makes the targets of one adversary's attacks on one recording.

    Attributes:
        granted: what it knows of every victim, see `threat_model.grant_knowledge`.
        cache: findings that are there, with the local models that attacks build on.
    """

    transcript: Transcript
    adversary: AdversaryTable
    granted: Knowledge
    case: Case
    cache: FindingCache
    optimum: OptimumStore

    def prepare(self, job: AttackJob) -> PendingJob | None:
        """Make the target of `job`; return None where its finding is in the run folder already."""
        first = self._first_round(job)
        if not self.adversary.knowledge.client_ids and self.transcript.adds_known_terms(first):
            raise AttackError(explain_hidden_terms(f"round {first}"))
        members = self._group_members(first, job)
        knowledge, model_hashes = self._job_knowledge(job, first, members)
        fingerprint = self.cache.fingerprint(job, knowledge, self.transcript, model_hashes)
        if self.cache.is_up_to_date(job, fingerprint):
            return None
        key = adversary_key(self.case.seed)
        transcript = self.transcript.restrict_to(job.rounds)
        if not self.adversary.knowledge.num_examples:
            transcript = transcript.without_example_counts()
        target = Target(
            transcript=transcript,
            victim=job.victim,
            members=members,
            knowledge=knowledge,
            rng=generator(key, "attack", job.span, job.victim, job.repeat),
        )
        return PendingJob(job=job, first=first, target=target, fingerprint=fingerprint)

    def _first_round(self, job: AttackJob) -> int:
        """Return the first round in which the victim took part, singly or in a group."""
        for number in job.rounds:
            if self.transcript.header(number).find_reply(job.victim) is not None:
                return number
        if len(job.rounds) == 1:
            # This raises the error that says why the update is not there.
            self.transcript.update(job.rounds[0], job.victim)
        raise AttackError(f"client {job.victim}: is recorded in none of the rounds {job.round}; attack another client")

    def _is_first_participation(self, victim: int, number: int) -> bool:
        """Return whether the recording shows that `victim` took part in no round before `number`."""
        recorded = set(self.transcript.rounds)
        for earlier in range(1, number):
            if earlier not in recorded or self.transcript.header(earlier).find_reply(victim) is not None:
                return False
        return True

    def _group_members(self, number: int, job: AttackJob) -> tuple[int, ...]:
        """Return the group that the victim stands for; empty where it stands for itself."""
        victim, reply = job.victim, self.transcript.header(number).find_reply(job.victim)
        assert reply is not None
        message_format = self.transcript.message_format
        counts = self.adversary.knowledge.num_examples and job.attack.subject != "answers"
        if counts and not message_format.num_examples_of(victim, reply.num_examples):
            raise AttackError(f"round {number}, client {victim}: {self._describe_missing_count(number, reply)}")
        if not reply.members or GROUPS in job.attack.accepted_observations:
            return ()
        members = ", ".join(map(str, reply.members))
        log.warning("round %d: client %d stands for the sum over clients %s", number, victim, members)
        return tuple(reply.members)

    def _describe_missing_count(self, number: int, reply: Reply) -> str:
        """Say that a client reported no N, and why, if its reply shows the reason."""
        move = self.transcript.update(number, reply.client).pseudo_gradient
        if move and not any(tensor.any() for tensor in move.values()):
            return "it answered with the model that it was sent, and no number of examples: it did not train"
        counts: list[str] = []
        for name, value in reply.metrics.items():
            if value > 0 and float(value).is_integer():
                counts.append(f"{name} {value:g}")
        named_counts = f", but {join_first(counts, _MAX_METRICS)}, of which one may be it" if counts else ""
        return f"it reported no number of examples that it trained on{named_counts}; say it with [app] num_examples"

    def _job_knowledge(self, job: AttackJob, first: int, members: Sequence[int]) -> tuple[Knowledge, list[str]]:
        """Return what the attack of `job` is granted, and the hashes of its source models."""
        adversary, declared = self.adversary, job.attack.facts_to_grant()
        reads_private = declared.intersection(private_facts(adversary))
        truth = self.case.truth(job.victim, first, members) if reads_private else None
        all_headers = [self.transcript.header(number) for number in job.rounds]
        headers = [header for header in all_headers if header.find_reply(job.victim)]
        self.case.check_message_kind(headers, job.victim)
        # What headers state goes before the experiment; what is private to the victim comes last.
        stated = apply_headers(self.granted, adversary, headers, declared)
        common = scale_to_group(stated, len(members))
        is_first_round = "private_parts" in reads_private and self._is_first_participation(job.victim, first)
        knowledge = grant_private(
            common, adversary, self.case, job.victim, truth, declared, members, is_first_round=is_first_round
        )
        knowledge = knowledge.restrict_to(declared)
        source = job.attack.builds_on
        if source is None:
            return knowledge, []
        if source == OPTIMAL:
            clients = ObservedClients(all_headers).all_clients
            optima = LazyModels({client: partial(self.optimum, client) for client in clients})
            return replace(knowledge, models=optima), [OPTIMUM_METHOD]
        models, hashes = self.cache.load_models(source, job)
        return replace(knowledge, models=models), hashes
