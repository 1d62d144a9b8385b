"""Case of a run of our own: what clients hold and what the server knows follow from its experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedsim.audit.architecture import Architecture
from fedsim.audit.evaluation.case import Case, least_of_victims
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.expected_message import expect_message, expect_private_facts
from fedsim.base.errors import ConfigError, DataError, KnowledgeError, did_you_mean
from fedsim.base.randomness import derive_seed
from fedsim.data import Column
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.auxiliary import auxiliary_records, draw_auxiliary
from fedsim.federation.candidates import CandidateRecords, draw_candidates, draw_known_candidates
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.federated_data import GUESSED_EXAMPLES
from fedsim.federation.properties import property_records
from fedsim.federation.secure_aggregation import group_sizes
from fedsim.federation.strategy_checks import sample_size
from fedsim.interfaces.attack import Attack, check_subject, vector_target_error
from fedsim.interfaces.defense import Defense, overrides
from fedsim.interfaces.knowledge import FACTS, TRAINING_FACTS, Knowledge, KnownCandidates, Records
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.adversary_role import AdversaryRole, find_error_in_collusion
from fedsim.recording.header import Header
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.wire_format import State, Update

_PLAIN_STRATEGIES = ("fedavg", "fedprox", "fedsgd")
"""Strategies that add the mean of the updates, or a step by the mean gradient, to the model."""


@dataclass(frozen=True)
class OwnRun(Case):
    """Run of our own: the data of each client follow from its experiment file."""

    own_experiment: Experiment

    is_described_by_file = False
    is_defended = False

    @property
    def experiment(self) -> Experiment:
        """Return the federation behind the recording."""
        return self.own_experiment

    @property
    def defenses(self) -> Sequence[Defense]:
        """Return the defenses of the clients."""
        return self.own_experiment.defenses

    def check_colluders(self, role: AdversaryRole) -> None:
        """Raise ConfigError where the run did not keep what these clients added to sums."""
        kept = self.own_experiment.config.recording.colluders or ()
        if error := find_error_in_collusion(role, kept, sees_sums=self.shows_sums_alone):
            raise ConfigError(error)

    def count_equal_clients(self, role: AdversaryRole) -> float | None:
        """Return by how many clients central privacy divides a sum; None without it."""
        config, privacy = self.own_experiment.config, self.own_experiment.central_privacy
        if config.recording.clients is not None:
            raise ConfigError(
                "adversary.who: an adversary that sees models sees the sum over all clients, and this run recorded "
                "some of them alone (recording.clients); attack as the server, or record all"
            )
        if privacy is None:
            return None
        if role.colluders:
            raise ConfigError(
                "adversary.who: under central_privacy the server clips what each client sends, to a norm that they do "
                "not know, so they cannot subtract their updates; set who = 'outsider'"
            )
        if config.strategy.name not in _PLAIN_STRATEGIES:
            raise ConfigError(
                f"adversary.who: strategy {config.strategy.name} does more with the noisy sum than a plain step, so "
                f"models do not reveal it; use one of {', '.join(_PLAIN_STRATEGIES)}, or attack as the server"
            )
        return privacy.expected

    def least_num_examples(self, adversary: AdversaryTable, reported: Mapping[str, Collection[int]]) -> int | None:
        """Return the least N that follows from the partition; None where a defense chooses how many examples train."""
        experiment = self.own_experiment
        if any(overrides(defense, "on_data") for defense in experiment.defenses):
            return None
        counts = dict(enumerate(experiment.data.counts))
        if experiment.training.sends == "gradient":  # the last batch of an epoch may be smaller
            batch_size = experiment.training.batch_size
            counts = {client: count % batch_size or batch_size for client, count in counts.items()}
        if (members := self.count_members(adversary)) > 1:
            return sum(sorted(counts.values())[:members])
        if adversary.victims is None and adversary.who == "server" and self._all_take_part:
            return counts[min(experiment.config.recording.clients or counts)]  # the first recorded client
        return least_of_victims(counts, adversary)

    def count_members(self, adversary: AdversaryTable) -> int:
        """Return how many members of the smallest group have to answer; 1 where single messages are seen."""
        table = self.own_experiment.config.secure_aggregation
        if table is None or adversary.role.colluders:
            return 1
        return table.min_survivors(group_sizes(table.groups, self._sample_size)[-1])

    def count_clients(self, adversary: AdversaryTable) -> int:
        """Return how many clients are recorded, of a single round no more than are sampled."""
        config = self.own_experiment.config
        is_one_round = adversary.rounds != "all" and len(adversary.rounds or (1,)) == 1
        clients = self._sample_size if is_one_round else config.federation.clients
        return min(clients, len(config.recording.clients or range(clients)))

    def expect_message(self, adversary: AdversaryTable, num_examples: int | None) -> Update:
        """Return a message of the form that follows from model, algorithm and settings of training."""
        return expect_message(self.own_experiment, adversary, num_examples, self.count_members(adversary))

    def expect_private_facts(self, num_examples: int, names: Collection[str]) -> dict[str, Any]:
        """Return labels and private parts of the forms that clients have."""
        return expect_private_facts(self.own_experiment, num_examples, names)

    def count_parameters(self) -> int:
        """Return how many parameters clients train and send."""
        private = self.own_experiment.private_names
        named = self.own_experiment.model.named_parameters()
        return sum(tensor.numel() for name, tensor in named if tensor.requires_grad and name not in private)

    @property
    def _all_take_part(self) -> bool:
        """Whether each client sends in each round."""
        federation = self.own_experiment.config.federation
        return not federation.straggler_probability and self._sample_size == federation.clients

    @property
    def _sample_size(self) -> int:
        """How many clients are sampled for a round."""
        settings = self.own_experiment.strategy_settings(self.own_experiment.new_strategy())
        return sample_size(settings, self.own_experiment.config.federation.clients)

    def public(self) -> PublicExamples:
        """Return the first examples of the test set."""
        test = self.own_experiment.dataset.test
        data = self.own_experiment.dataset.to_unit_range(test.inputs(slice(0, GUESSED_EXAMPLES)))
        return PublicExamples(data=data, labels=test.labels[:GUESSED_EXAMPLES])

    def auxiliary_examples(self, adversary: AdversaryTable) -> PublicExamples | None:
        """Return the auxiliary records that `adversary` is granted."""
        if not adversary.knowledge.auxiliary:
            return None
        data = self.own_experiment.data
        examples, chosen = draw_auxiliary(data, adversary.auxiliary, "auxiliary")
        unit_data = data.dataset.to_unit_range(examples.inputs(chosen))
        return PublicExamples(data=unit_data, labels=examples.labels[chosen])

    def check_kind(self, title: str, attack: Attack) -> None:
        """Raise KnowledgeError where an attack is for another kind of data."""
        dataset = self.own_experiment.dataset
        if (
            dataset.vocabulary
            and attack.subject != "texts"
            and not attack.needs.isdisjoint(("value_range", "input_shape"))
        ):
            raise KnowledgeError(
                f"{title} is an attack on numbers, and '{dataset.name}' holds texts; choose an attack on texts, as "
                "tgias-ro-text, or data of numbers"
            )
        check_subject(title, attack)
        if "columns" in attack.needs and not dataset.columns:
            raise KnowledgeError(
                f"{title} is an attack on tables, and '{dataset.name}' has no columns; choose an attack on "
                "images, as sme, or a table"
            )
        if "num_classes" in attack.needs and not dataset.task.num_classes:
            raise KnowledgeError(
                f"{title} is an attack on classes, and what is learned of '{dataset.name}' is "
                f"{dataset.task.describe_goal()}; choose another attack, or data with classes"
            )
        if dataset.task.target_shape and not attack.vector_targets:
            raise vector_target_error(title, dataset.task.describe_goal())
        if attack.subject == "texts" and not dataset.vocabulary:
            raise KnowledgeError(
                f"{title} is an attack on texts, and '{dataset.name}' holds numbers; choose an attack on numbers, or "
                "texts"
            )

    def check_format(self, message_format: MessageFormat) -> None:
        """Raise ConfigError where the attack file states what messages mean, which is known."""
        if message_format != MessageFormat():
            raise ConfigError(
                "app: states what the messages of another app mean, but this is a run of fedsim, "
                "whose messages are known; leave [app] out"
            )

    def check_message_kind(self, headers: Sequence[Header], victim: int) -> None:
        """Raise ConfigError where `victim` sent another kind of message than the experiment says.

        The truth would be another: all its examples for weights, one mini-batch for a gradient.
        """
        expected = self.own_experiment.training.sends
        for header in headers:
            for reply in header.replies:
                kind = "gradient" if reply.kind == "gradient" else "weights"  # a delta counts as weights
                if reply.client == victim and kind != expected:
                    raise ConfigError(
                        f"training.sends: the experiment says {expected!r}, but in round {header.round} "
                        f"client {victim} sent {kind!r}, as the recording says; make the run again"
                    )

    def tables_of_finding(self, spec: AttackFile, about: Mapping[str, Any]) -> tuple[MessageFormat, AdversaryTable]:
        """Return the tables of the present file: neither changes what is known of the protocol."""
        del about
        return spec.app, spec.adversary

    def hashed_knowledge(self, knowledge: Knowledge) -> Knowledge:
        """Return `knowledge` without the victim's records, which follow from the seed.

        Candidates and auxiliary records do not: they change with the number of them that is
        granted.
        """
        return replace(knowledge, records=None, partial_records=None, private_parts=None)

    def protocol_facts(self) -> dict[str, Any]:
        """Return what the server of a federation knows anyway, because it wrote the protocol.

        The model is granted as a builder of networks: a method of the experiment would carry the data.
        """
        experiment = self.own_experiment
        task, data, model = experiment.dataset.task, experiment.data, experiment.config.model
        input_facts: dict[str, Any] = {}
        if not task.vocabulary:
            input_facts["value_range"] = data.value_range()
            if data.standardise:
                input_facts["input_mean"], input_facts["input_std"] = data.moments()
        columns = experiment.dataset.columns
        if columns:
            input_facts["columns"] = tuple(column.width for column in columns)
        architecture = Architecture(
            model.name,
            model.settings,
            task,
            derive_seed(experiment.seed, "model"),
            experiment.training.dropout,
        )
        model_facts = {"model": architecture, "defenses": tuple(experiment.defenses)}
        task_facts = {
            "loss": experiment.client_loss,
            "input_shape": task.input_shape,
            "num_classes": task.num_classes or None,
        }
        noise_facts: dict[str, Any] = {}
        if (privacy := experiment.central_privacy) is not None:
            covariance = privacy.compute_noise_covariance(experiment.config.federation.rounds)
            noise_facts["noise_covariance"] = torch.from_numpy(covariance)
        return input_facts | model_facts | task_facts | noise_facts | self._training_facts()

    def _training_facts(self) -> dict[str, Any]:
        """Return the settings of local training.

        A gradient is one step on one batch, which the server takes with its own learning rate.
        """
        facts = {name: getattr(self.own_experiment.training, name) for name in TRAINING_FACTS}
        facts |= self.own_experiment.algorithm.training_facts()
        if self.own_experiment.training.sends == "gradient":
            facts |= {"learning_rate": self.own_experiment.server_rate, "local_epochs": 1}
        return facts

    def full_knowledge(self, grant: Callable[[], Knowledge]) -> Knowledge:
        """Return all that is known of the protocol, whatever the attack file grants."""
        del grant
        return Knowledge(**self.protocol_facts(), modality=self.own_experiment.dataset.task.modality)

    def check_grant(self, adversary: AdversaryTable, name: str) -> None:
        """Do nothing: the experiment has every fact."""

    def public_records(self, adversary: AdversaryTable) -> dict[str, Any]:
        """Return the granted records that no client trains on, by the names of their facts."""
        records: dict[str, Any] = {}
        if adversary.knowledge.auxiliary:
            records["auxiliary"] = auxiliary_records(self.own_experiment.data, adversary.auxiliary)
        name = adversary.knowledge.property_records
        if name is not False:
            if not isinstance(name, str):
                expected = FACTS["property_records"].expected
                raise ConfigError(f"adversary.knowledge.property_records: name the property, {expected}; got {name}")
            records["property_records"] = property_records(self.own_experiment.data, name, adversary.auxiliary)
        return records

    def check_truth_source(self, fact: str) -> None:
        """Do nothing: the experiment has the data of all clients."""

    def check_candidate_source(self, non_members: str) -> None:
        """Do nothing: the experiment says which records no client holds."""

    def check_private_parts(self) -> None:
        """Raise ConfigError where clients send the whole model."""
        if not self.own_experiment.private_names:
            raise ConfigError(
                "adversary.knowledge.private_parts: clients of this run send the whole model, so that no part stays "
                "with them; leave the key out"
            )

    def private_parts(self, client: int, *, is_first_round: bool) -> State:
        """Return the parts that `client` keeps, as they are before its first round."""
        if not is_first_round:
            raise DataError(
                f"adversary.knowledge.private_parts: client {client} took part before, or the recording does not say, "
                "and what it has trained since is not kept; attack the first round in which it takes part, or leave "
                "the key out"
            )
        return self.own_experiment.initial_private_state(client)

    def client_records(self, knowledge: Knowledge, clients: Sequence[int], truth: Truth) -> Records:
        """Return all training examples of these clients in model units."""
        data = self.own_experiment.data
        inputs, labels = map(torch.cat, zip(*data.train_by_client(clients), strict=True))
        return Records(inputs=data.to_model(inputs), labels=labels)

    def candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> Records:
        """Draw candidate records, without saying which of them are members."""
        table, data = adversary.knowledge, self.own_experiment.data
        drawn = draw_candidates(data, clients, table.candidates, adversary.candidates, int(table.known_candidates))
        return Records(inputs=data.to_model(drawn.inputs), labels=drawn.labels)

    def draw_candidates(self, clients: Sequence[int], non_members: str, most: int) -> CandidateRecords:
        """Draw the candidates of a finding about `most` of them."""
        return draw_candidates(self.own_experiment.data, clients, non_members, most)

    def known_candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> KnownCandidates:
        """Draw records that are not among the candidates, with their membership."""
        table, data = adversary.knowledge, self.own_experiment.data
        drawn = draw_known_candidates(data, clients, table.candidates, table.known_candidates)
        return KnownCandidates(inputs=data.to_model(drawn.inputs), labels=drawn.labels, members=drawn.members)

    def sensitive_column(self, name: str) -> Column:
        """Return the column that `partial_records` withholds."""
        dataset = self.own_experiment.dataset
        columns = {column.name: column for column in dataset.columns}
        column = columns.get(name)
        if column is None:
            raise ConfigError(
                f"adversary.knowledge.partial_records: '{dataset.name}' has no column '{name}', "
                f"{did_you_mean(name, columns)}"
            )
        if len(column.categories) < 2:
            possible = ", ".join(column.name for column in columns.values() if len(column.categories) > 1)
            content = "numbers, and candidates for these cannot be listed"
            if column.categories:
                content = "one category alone"
            remedy = f"name one of: {possible}" if possible else "it has no column of several categories"
            raise ConfigError(f"adversary.knowledge.partial_records: column '{name}' holds {content}; {remedy}")
        return column

    def truth_of_all(self) -> Truth:
        """Return the training examples of all clients."""
        parts = self.own_experiment.data.train_by_client(range(self.own_experiment.config.federation.clients))
        inputs, labels = map(torch.cat, zip(*parts, strict=True))
        return self._make_truth(inputs, labels)

    def _client_truth(self, clients: Sequence[int], number: int | None) -> Truth:
        if number is None:
            parts = [self.own_experiment.data.train(client) for client in clients]
        else:
            parts = [self.own_experiment.attacked_examples(client, number) for client in clients]
        return self._make_truth(*map(torch.cat, zip(*parts, strict=True)))

    def _make_truth(self, inputs: Tensor, labels: Tensor) -> Truth:
        """Return examples in the units of findings: numbers in [0, 1]."""
        dataset = self.own_experiment.dataset
        truth = Truth(
            data=dataset.to_unit_range(inputs), labels=labels, padding=dataset.padding, modality=dataset.task.modality
        )
        return self._add_columns(truth)

    def _add_columns(self, truth: Truth) -> Truth:
        columns = self.own_experiment.dataset.columns
        if not columns or truth.data.shape[1:] != self.own_experiment.dataset.task.input_shape:
            return truth
        return replace(truth, columns=tuple(column.width for column in columns), deviations=self._deviations)

    @cached_property
    def _deviations(self) -> Tensor:
        """Standard deviations of public rows, `feature`."""
        deviations = self.public().data.std(0)
        for column in self.own_experiment.dataset.columns:
            # A column of one category is right whatever the value of its only feature.
            if len(column.categories) == 1:
                deviations[column.features] = math.inf
        return deviations
