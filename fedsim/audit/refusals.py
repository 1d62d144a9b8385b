"""Say which attacks of an audit cannot be made, and why."""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedsim.audit.observers import shows_sums
from fedsim.audit.targets import explain_hidden_terms
from fedsim.audit.threat_model import facts_in_headers, private_facts, scale_to_group
from fedsim.audit.visibility import explain_group_refusal
from fedsim.base.errors import AttackError, KnowledgeError, TranscriptError
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.config import Config
from fedsim.federation.run_folder import read_refusals
from fedsim.interfaces.attack import GROUP, GROUPS, Attack
from fedsim.interfaces.attack_warnings import discard_warnings
from fedsim.recording.header import Header

if TYPE_CHECKING:
    from fedsim.audit.audit import Audit

log = logging.getLogger(__name__)


def find_refusals(audit: Audit) -> dict[str, str]:
    """Map the title of each attack that cannot be made to the sentence that says why.

    Such an attack lacks knowledge that it needs, is for other data or networks, cannot read sums over groups, or
    builds on an attack that cannot be made.
    """
    granted_facts = [*private_facts(audit.spec.adversary), *_facts_in_headers(audit)]
    attacks = {table.title: attack for table, attack in audit.attacks}
    reasons: dict[str, str] = {}
    for title in itertools.chain.from_iterable(audit.stages):
        attack = attacks[title]
        try:
            audit.case.check_kind(title, attack)
            attack.check_knowledge(audit.granted_knowledge, granted_facts)
            _check_observations(audit, attack)
            _check_message_facts(audit, attack)
            _check_message_kind(audit, attack)
            _check_round_count(audit, attack)
            _check_client_count(audit, attack)
            _check_facts(audit, attack)
        except KnowledgeError as error:
            reasons[title] = str(error)
        source = attack.builds_on
        if source in reasons:
            reasons.setdefault(title, f"{title} builds on '{source}', which is not made; name another source")
    return reasons


def save_refusals(audit: Audit) -> None:
    """Save why attacks are not made for the report, and keep the reasons that other files wrote."""
    folder = audit.folder
    old_refusals = read_refusals(folder)
    titles = {table.title for table, _ in audit.attacks}
    of_other_files = {title: reason for title, reason in old_refusals.items() if title not in titles}
    new_refusals = of_other_files | audit.refusal_reasons
    if new_refusals != old_refusals:
        rows = [{"attack": title, "why": reason} for title, reason in new_refusals.items()]
        folder.write_table(folder.refusals, ("attack", "why"), rows)


def _check_observations(audit: Audit, attack: Attack) -> None:
    """Raise KnowledgeError where the adversary sees nothing that `attack` reads."""
    who = audit.spec.adversary.who
    is_of_feature_party = attack.subject == "embedding gradients"
    if is_of_feature_party and who != "feature-party":
        raise KnowledgeError(
            f"{attack.title} is an attack of a feature party, which sees gradients of its embeddings and no "
            "labels; set who = 'feature-party' in [adversary]"
        )
    if who == "feature-party" and not is_of_feature_party:
        raise KnowledgeError(
            f"{attack.title} does not apply: a feature party sees its own messages alone, and this attack is on "
            "what others hold or sent; leave out who"
        )
    role = audit.spec.adversary.role
    shows_sums_alone = role.reads_messages and not role.colluders and audit.case.shows_sums_alone
    # How many others take part is known as soon as a round is recorded.
    if who not in ("server", "feature-party") and audit.has_messages:
        shows_sums_alone = shows_sums(audit.transcript)
    if shows_sums_alone and not attack.accepted_observations & {GROUP, GROUPS}:
        raise KnowledgeError(f"{attack.title} does not apply: {explain_group_refusal(attack, who)}")
    if audit.experiment and who == "server" and not shows_sums_alone and attack.accepted_observations == {GROUP}:
        raise KnowledgeError(
            f"{attack.title} does not apply: it reads sums over clients, and the server sees each message in clear; "
            "choose an attack on single messages, or set [secure_aggregation]"
        )


def _check_facts(audit: Audit, attack: Attack) -> None:
    """Raise KnowledgeError where `attack` refuses what is known before any message.

    See `Attack.check_facts` and `Attack.check_message`.
    """
    facts, private = attack.facts_to_grant(), private_facts(audit.spec.adversary)
    try:
        # An accelerator that this process began to use could not be used by those that it forks.
        knowledge = replace(audit.granted_knowledge.restrict_to(facts), device=torch.device("cpu"))
        knowledge = scale_to_group(knowledge, audit.case.count_members(audit.spec.adversary))
        attack.check_facts(knowledge, audit.least_num_examples, private)
        message = audit.expected_message
        if message is None:
            return
        made_up = audit.case.expect_private_facts(message.num_examples, facts.intersection(private))
        # It may be changed in place, and w_0 is that of the experiment.
        message, made_up = deepcopy((message, made_up))
        knowledge = replace(knowledge, **made_up)
        with discard_warnings():  # those of the attack itself come with its findings
            attack.check_message(message, knowledge)
    except (AttackError, KnowledgeError, TranscriptError) as error:
        raise KnowledgeError(f"{attack.title} does not apply: {error}") from error
    except Exception as error:  # whatever a stranger's network raises; the attack itself says it of each victim
        log.debug("%s: its check before any message failed (%s)", attack.title, error)


def _check_message_facts(audit: Audit, attack: Attack) -> None:
    """Raise KnowledgeError where `attack` reads what messages show and the threat model withholds."""
    adversary = audit.spec.adversary
    if not adversary.knowledge.num_examples and attack.needs_num_examples:
        raise KnowledgeError(
            f"{attack.title} reads N, the number of examples of a client, which the threat model withholds; grant "
            "it (adversary.knowledge.num_examples), or choose client-size, which finds it, or another attack that "
            "works without it, as membership-cosine"
        )
    several = adversary.rounds == "all" or len(adversary.rounds or ()) > 1
    joins_rounds = several and not attack.reads_one_round() and attack.needs_client_ids
    if not adversary.knowledge.client_ids and joins_rounds:
        raise KnowledgeError(
            f"{attack.title} joins what a client sent in several rounds, and the threat model withholds which "
            "messages are of the same client; grant it (adversary.knowledge.client_ids), attack one round "
            "(adversary.rounds), or choose linkability, which finds the messages of a client"
        )
    message = None if adversary.knowledge.client_ids else audit.expected_message
    if message is not None and message.gradient_move is not None:
        raise KnowledgeError(f"{attack.title} does not apply: {explain_hidden_terms('in each round')}")


def _check_message_kind(audit: Audit, attack: Attack) -> None:
    """Raise KnowledgeError where clients of a run of our own send what `attack` cannot read."""
    training, adversary = audit.case.training, audit.spec.adversary
    needed = attack.message_kind
    if training is None or needed in ("any", training.sends) or not adversary.role.reads_messages:
        return
    sent, remedy = ("weights", "gradients (strategy fedsgd)") if needed == "gradient" else ("gradients", "weights")
    raise KnowledgeError(
        f"{attack.title} does not read {sent}, which clients send; attack clients that send {remedy}, or choose "
        "another attack, as inverting-gradients"
    )


def _check_round_count(audit: Audit, attack: Attack) -> None:
    """Raise KnowledgeError where fewer rounds are to be attacked than `attack` reads, which shows before any is run."""
    count = _count_rounds(audit.spec.adversary, audit.config)
    if attack.reads_one_round() or count is None:
        return
    needed = attack.count_fewest_rounds(audit.case.count_parameters())
    if count >= needed:
        return
    raise KnowledgeError(
        f"{attack.title} needs at least {needed} rounds of a client, and {count} {'is' if count == 1 else 'are'} to be "
        "attacked; name more (adversary.rounds), and record as many"
    )


def _check_client_count(audit: Audit, attack: Attack) -> None:
    """Raise KnowledgeError where the attacked rounds show fewer clients than `attack` compares."""
    if attack.clients_needed == 1:
        return
    count = audit.case.count_clients(audit.spec.adversary)
    if count is not None and count < attack.clients_needed:
        raise KnowledgeError(
            f"{attack.title} compares a client with others and needs {attack.clients_needed} clients in the attacked "
            f"rounds, which have at most {count}; record more, or choose an attack that reads its victim alone"
        )


def _count_rounds(adversary: AdversaryTable, config: Config | None) -> int | None:
    """Return how many rounds at most are to be attacked; None where a recording made elsewhere decides."""
    if adversary.rounds != "all":
        return len(adversary.rounds or (1,))
    if config is None:
        return None
    recorded = config.recording.rounds
    numbers = range(1, config.federation.rounds + 1) if recorded is None else recorded
    return len(numbers[:: config.recording.every])


def _facts_in_headers(audit: Audit) -> list[str]:
    """Name the facts that headers of a foreign recording state, except those withheld."""
    if not audit.case.is_described_by_file or not audit.folder.path.is_dir():
        return []
    transcript, headers = audit.transcript, list[Header]()
    for number in transcript.rounds:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            headers = [transcript.header(number)]
            break
    knowledge = audit.spec.adversary.knowledge
    return [name for name in facts_in_headers(headers) if getattr(knowledge, name) is not False]
