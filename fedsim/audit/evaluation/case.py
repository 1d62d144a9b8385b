"""Knowledge about a recording: a run of our own, or a recording made elsewhere.

Both have the same interface, so no other module asks which of the two it is. No attack gets a case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError, join_first
from fedsim.base.task import Task
from fedsim.data import Column
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.candidates import CandidateRecords
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.knowledge import Knowledge, KnownCandidates, Records
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.header import Header
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.wire_format import State, Update
from fedsim.training.settings import LocalTraining

MAX_NAMES = 6
"""Most clients that one sentence names."""


class UnknownTruthError(DataError):
    """Only the experiment has the data of the victim, and it is not known."""


@dataclass(frozen=True)
class Case(ABC):
    """Knowledge of the evaluator about one recording.

    Attributes:
        files: by client, the file that a [truth] table names; it goes before any other source.
        is_described_by_file: whether the attack file alone says what messages mean and who held
            what, so that both have to fit the recording.
    """

    files: Mapping[str, Path]
    is_described_by_file: ClassVar[bool]

    @property
    @abstractmethod
    def experiment(self) -> Experiment | None:
        """Return the federation behind the recording; None where it is not known."""

    @property
    @abstractmethod
    def defenses(self) -> Sequence[Defense]:
        """Return the defenses of the clients; empty where none are known."""

    @property
    @abstractmethod
    def is_defended(self) -> bool:
        """Return whether the attack file says that clients defend themselves in ways that are not known."""

    def require_experiment(self) -> Experiment:
        """Return the federation behind the recording.

        Raises:
            UnknownTruthError: it is not known.
        """
        if not self.experiment:
            raise UnknownTruthError("only an experiment says what the victim held")
        return self.experiment

    @property
    def seed(self) -> int:
        """Return the seed of the run; 0 for recordings made elsewhere."""
        return self.experiment.seed if self.experiment else 0

    @property
    def task(self) -> Task | None:
        """Return the task of the federation; None where it is not known."""
        return self.experiment.dataset.task if self.experiment else None

    @property
    def clients(self) -> int | None:
        """Return the number of clients of the federation; None where it is not known."""
        return self.experiment.config.federation.clients if self.experiment else None

    @property
    def tokens(self) -> Sequence[str]:
        """Return the names of text tokens; empty where none are known."""
        return self.experiment.dataset.tokens if self.experiment else ()

    @property
    def training(self) -> LocalTraining | None:
        """Return the settings of local training; None where they are not known."""
        return self.experiment.training if self.experiment else None

    @property
    def shows_sums_alone(self) -> bool:
        """Return whether the server is known to see sums over groups alone."""
        return self.experiment.config.secure_aggregation is not None if self.experiment else False

    @property
    def sums_are_unweighted(self) -> bool:
        """Return whether all clients of a secure sum have weight 1, as where they share noise; else N."""
        return self.experiment.distributed_privacy is not None if self.experiment else False

    @abstractmethod
    def check_colluders(self, role: AdversaryRole) -> None:
        """Check that what the clients that collude with the server added to sums was kept.

        Raises:
            ConfigError: it was not, or the server sees single updates anyway.
        """

    @abstractmethod
    def count_equal_clients(self, role: AdversaryRole) -> float | None:
        """Return by how many clients the server divides a sum in which all count alike; None elsewhere.

        Raises:
            ConfigError: models do not show `role` the sum of what was recorded.
        """

    @abstractmethod
    def least_num_examples(self, adversary: AdversaryTable, reported: Mapping[str, Collection[int]]) -> int | None:
        """Return the least N of any message that `adversary` may attack; None where it is not known.

        Args:
            reported: the numbers of examples N that each client reported in recorded messages.
        """

    @abstractmethod
    def count_members(self, adversary: AdversaryTable) -> int:
        """Return of how many clients at least a message is that `adversary` may attack: 1, or more of sums alone."""

    @abstractmethod
    def count_clients(self, adversary: AdversaryTable) -> int | None:
        """Return how many clients at most the attacked rounds show; None where it is not known."""

    def expect_message(self, adversary: AdversaryTable, num_examples: int | None) -> Update | None:
        """Return a message as clients send it to what `adversary` sees; None where it is not known.

        Args:
            num_examples: N; 1 where it is not known.
        """
        del adversary, num_examples
        return None

    def expect_private_facts(self, num_examples: int, names: Collection[str]) -> dict[str, Any]:
        """Return facts of a victim of such a message, of those that are among `names`, with made-up values."""
        del num_examples, names
        return {}

    def count_parameters(self) -> int | None:
        """Return how many parameters clients train and send; None where it is not known."""
        return None

    @abstractmethod
    def public(self) -> PublicExamples | None:
        """Return examples of the same kind that no client holds; None where none are known."""

    @abstractmethod
    def check_kind(self, title: str, attack: Attack) -> None:
        """Raise KnowledgeError where an attack is for another kind of data."""

    @abstractmethod
    def check_format(self, message_format: MessageFormat) -> None:
        """Raise ConfigError where [app] states what is known already."""

    @abstractmethod
    def check_message_kind(self, headers: Sequence[Header], victim: int) -> None:
        """Raise ConfigError where `victim` sent another kind of message than it was to send."""

    @abstractmethod
    def tables_of_finding(self, spec: AttackFile, about: Mapping[str, Any]) -> tuple[MessageFormat, AdversaryTable]:
        """Return [app] and [adversary] that a finding is judged with.

        Args:
            spec: the present file.
        """

    @abstractmethod
    def hashed_knowledge(self, knowledge: Knowledge) -> Knowledge:
        """Return the part of `knowledge` that may change, and with it the findings made with it."""

    @abstractmethod
    def protocol_facts(self) -> dict[str, Any]:
        """Return what the server knows anyway, by the names of the facts."""

    @abstractmethod
    def full_knowledge(self, grant: Callable[[], Knowledge]) -> Knowledge:
        """Return all that the evaluator knows of the protocol.

        Args:
            grant: returns what the attack file grants.
        """

    @abstractmethod
    def check_grant(self, adversary: AdversaryTable, name: str) -> None:
        """Raise ConfigError where there is nothing to grant as the fact `name`."""

    def auxiliary_examples(self, adversary: AdversaryTable) -> PublicExamples | None:
        """Return the auxiliary records that `adversary` is granted, where they are others than the public examples."""
        del adversary
        return None

    @abstractmethod
    def public_records(self, adversary: AdversaryTable) -> dict[str, Any]:
        """Return the granted records that no client trains on, by the names of their facts."""

    @abstractmethod
    def check_truth_source(self, fact: str) -> None:
        """Raise ConfigError where there is nothing to take a victim's private `fact` from."""

    @abstractmethod
    def check_candidate_source(self, non_members: str) -> None:
        """Raise ConfigError where it is unknown which records of the source `non_members` a victim does not hold."""

    @abstractmethod
    def check_private_parts(self) -> None:
        """Raise ConfigError where no part of the model is known that stays with the clients."""

    @abstractmethod
    def private_parts(self, client: int, *, is_first_round: bool) -> State:
        """Return the parts of the model that stay with `client`, as they are before it trains.

        Args:
            is_first_round: whether the attacked round is the first in which the victim takes part.

        Raises:
            DataError: it is another one, before which they have been trained.
        """

    @abstractmethod
    def client_records(self, knowledge: Knowledge, clients: Sequence[int], truth: Truth) -> Records:
        """Return all training examples of these clients in model units.

        Args:
            knowledge: of the adversary about every victim.
            clients: the victim, or the group that it stands for.
        """

    @abstractmethod
    def candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> Records:
        """Return records of which half are among those of `clients`, in model units."""

    @abstractmethod
    def draw_candidates(self, clients: Sequence[int], non_members: str, most: int) -> CandidateRecords:
        """Draw at most `most` of them, with what the adversary is not told: which are members.

        Raises:
            DataError: there are none.
            UnknownTruthError: it is unknown what these clients held.
        """

    @abstractmethod
    def known_candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> KnownCandidates:
        """Return other such records, with their membership."""

    @abstractmethod
    def sensitive_column(self, name: str) -> Column:
        """Return the column that `partial_records` withholds.

        Raises:
            ConfigError: there is none of this name, or it cannot be withheld.
        """

    @abstractmethod
    def truth_of_all(self) -> Truth:
        """Return the training data of all clients together.

        Raises:
            DataError: they are not known.
        """

    @abstractmethod
    def _client_truth(self, clients: Sequence[int], number: int | None) -> Truth | None:
        """Return the data of these clients together, where no truth file has them."""

    def check_files(self) -> None:
        """Raise DataError where a file of the truth cannot be read."""
        for file in self.files.values():
            Truth.load(file)

    def truth(self, victim: int, number: int | None, members: Sequence[int] = ()) -> Truth | None:
        """Return the data of `victim`, or of its group; None where they are not known.

        Args:
            number: round. A client that sends gradients has its mini-batch of this round as data;
                None stands for all its training examples. For an attack on several rounds it is the
                first of them in which the victim took part.
            members: of the group that the victim stands for; their data are joined.
        """
        if str(victim) in self.files:
            return self._add_columns(self._truth_in_files(victim, members))
        return self._client_truth(members or (victim,), number)

    def _truth_in_files(self, victim: int, members: Sequence[int]) -> Truth:
        """Join what the files of the members of a group say; one file alone holds the examples of all of them.

        Raises:
            DataError: some members have a file and others have none, or one file cannot hold the examples of all.
        """
        clients = [member for member in members if str(member) in self.files]
        if len(clients) < 2:
            clients = [victim]
            self.check_file_of_sum(victim, members)
        elif len(clients) < len(members):
            lacking = join_first([str(member) for member in members if member not in clients], MAX_NAMES)
            raise DataError(
                f"truth.{victim}: of the sum over clients {join_first(map(str, members), MAX_NAMES)}, several have a "
                f"file, and {lacking} none; name one of each, or one alone that holds the examples of all"
            )
        truths = [Truth.load(self.files[str(client)]) for client in clients]
        for client, truth in zip(clients, truths, strict=True):
            if truth.answers:
                raise DataError(
                    f"truth.{client}: the file holds answers to queries, and examples are claimed; write these with "
                    "fedsim.write_truth"
                )
        if len({(truth.data.shape[1:], truth.data.dtype, truth.labels.shape[1:]) for truth in truths}) > 1:
            raise DataError(
                f"truth.{victim}: the files of clients {join_first(map(str, clients), MAX_NAMES)} hold examples of "
                "different kinds, which are in one sum; write them from the same data set"
            )
        if len(truths) == 1:
            return truths[0]
        data, labels = torch.cat([truth.data for truth in truths]), torch.cat([truth.labels for truth in truths])
        return replace(truths[0], data=data, labels=labels, rows=None)

    def check_file_of_sum(self, victim: int, members: Sequence[int]) -> None:
        """Raise DataError where the file of `victim` alone cannot hold the examples of all `members` of a sum."""
        del victim, members

    def answers_in_file(self, victim: int) -> Truth | None:
        """Return what a truth file says that `victim` answered to queries; None where there is no file.

        Raises:
            DataError: it cannot be read, or holds examples.
        """
        if str(victim) not in self.files:
            return None
        truth = Truth.load(self.files[str(victim)])
        if not truth.answers:
            raise DataError(
                f"truth.{victim}: the file holds examples, and answers to queries are claimed; write these with "
                "fedsim.write_answers"
            )
        return truth

    @cached_property
    def _truths_in_files(self) -> Mapping[str, Truth]:
        """What each file says, by client; it is asked for each victim anew."""
        return {client: Truth.load(file) for client, file in self.files.items()}

    def examples_in_files(self, clients: Collection[int | str]) -> PublicExamples | None:
        """Return what truth files say that others than `clients` held; None where they say nothing.

        Raises:
            DataError: a file cannot be read.
        """
        excluded = {str(client) for client in clients}
        truths = [truth for client, truth in self._truths_in_files.items() if client not in excluded]
        kinds = {(truth.data.shape[1:], truth.data.dtype, truth.labels.dtype) for truth in truths}
        if len(kinds) != 1:
            return None
        return PublicExamples(
            data=torch.cat([truth.data for truth in truths]), labels=torch.cat([truth.labels for truth in truths])
        )

    def _add_columns(self, truth: Truth) -> Truth:
        """Add what is known of a table's columns to `truth`."""
        return truth


def least_of_victims(counts: Mapping[int, int], adversary: AdversaryTable) -> int | None:
    """Return the least N of the clients that `adversary` attacks, of the least of each; None where none is known."""
    named = adversary.victims if isinstance(adversary.victims, list) and adversary.who == "server" else []
    return min((counts[client] for client in named if client in counts), default=min(counts.values(), default=None))
