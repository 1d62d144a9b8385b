"""What the evaluator knows of a recording: a run of our own, or a recording made elsewhere.

Both have the same interface, so no other module asks which of the two it is. No attack gets a case.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedsim.audit.evaluation.score import PublicExamples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError, KnowledgeError
from fedsim.base.task import Task
from fedsim.federation.build import Experiment
from fedsim.interfaces.attack import Attack

_MAX_PUBLIC = 5000
"""Most public examples that guesses are made from."""


@dataclass(frozen=True)
class Case(ABC):
    """Knowledge of the evaluator about one recording.

    Attributes:
        files: by client, the file that a [truth] table names; it goes before any other source.
    """

    files: Mapping[str, Path]

    @property
    @abstractmethod
    def seed(self) -> int:
        """Return the seed of the run; 0 for recordings made elsewhere."""

    @property
    @abstractmethod
    def experiment(self) -> Experiment | None:
        """Return the federation behind the recording; None where it is not known."""

    @property
    @abstractmethod
    def task(self) -> Task | None:
        """Return the task of the federation; None where it is not known."""

    @property
    @abstractmethod
    def clients(self) -> int | None:
        """Return the number of clients of the federation; None where it is not known."""

    @property
    @abstractmethod
    def tokens(self) -> Sequence[str]:
        """Return the names of text tokens; empty where none are known."""

    @abstractmethod
    def public(self) -> PublicExamples | None:
        """Return examples of the same kind that no client holds; None where none are known."""

    @abstractmethod
    def check_kind(self, title: str, attack: Attack) -> None:
        """Raise KnowledgeError where an attack is for another kind of data."""

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
            return self._add_columns(Truth.load(self.files[str(victim)]))
        return self._client_truth(members or (victim,), number)

    def _add_columns(self, truth: Truth) -> Truth:
        """Add what is known of a table's columns to `truth`."""
        return truth


@dataclass(frozen=True)
class OwnRun(Case):
    """Run of our own: the data of each client follow from its experiment file."""

    own_experiment: Experiment

    @property
    def experiment(self) -> Experiment:
        """Return the federation behind the recording."""
        return self.own_experiment

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.own_experiment.seed

    @property
    def task(self) -> Task:
        """Return the task of the federation."""
        return self.own_experiment.dataset.task

    @property
    def clients(self) -> int:
        """Return the number of clients of the federation."""
        return self.own_experiment.config.federation.clients

    @property
    def tokens(self) -> Sequence[str]:
        """Return the names of text tokens."""
        return self.own_experiment.dataset.tokens

    def public(self) -> PublicExamples:
        """Return the first examples of the test set."""
        test = self.own_experiment.dataset.test
        data = self.own_experiment.dataset.to_unit_range(test.inputs(slice(0, _MAX_PUBLIC)))
        return PublicExamples(data=data, labels=test.labels[:_MAX_PUBLIC])

    def check_kind(self, title: str, attack: Attack) -> None:
        """Raise KnowledgeError where an attack is for another kind of data."""
        dataset = self.own_experiment.dataset
        if dataset.vocabulary and not attack.texts and "value_range" in attack.needs:
            raise KnowledgeError(
                f"{title} needs a value range, which the tokens of '{dataset.name}' do not have; choose an attack on "
                "texts, as tgias-ro-text, or data of numbers"
            )
        if "columns" in attack.needs and not dataset.columns:
            raise KnowledgeError(
                f"{title} is an attack on tables, and '{dataset.name}' has no columns; choose an attack on "
                "images, as sme, or a table"
            )
        if "num_classes" in attack.needs and not dataset.task.num_classes:
            raise KnowledgeError(
                f"{title} is an attack on classes, which the regression of '{dataset.name}' does not have; choose "
                "another attack, or data with classes"
            )
        if attack.texts and not dataset.vocabulary:
            raise KnowledgeError(
                f"{title} is an attack on texts, and '{dataset.name}' holds numbers; choose an attack on numbers, or "
                "texts"
            )

    def truth_of_all(self) -> Truth:
        """Return the training examples of all clients."""
        parts = self.own_experiment.data.train_by_client(range(self.clients))
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
        return self._add_columns(Truth(data=dataset.to_unit_range(inputs), labels=labels, padding=dataset.padding))

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


@dataclass(frozen=True)
class ForeignRecording(Case):
    """Recording made elsewhere: only the attack file and its truth files are known."""

    experiment = None
    seed = 0
    task = None
    clients = None
    tokens = ()

    def public(self) -> None:
        """Return None: no public data of the kind are known."""

    def check_kind(self, title: str, attack: Attack) -> None:
        """Do nothing: the kind of the data is not known."""

    def truth_of_all(self) -> Truth:
        """Raise DataError: truth files are about single victims."""
        raise DataError(
            "truth: examples of the whole federation are claimed, and of a recording made elsewhere only those of "
            "some victims are named; claim 'client'"
        )

    def _client_truth(self, clients: Sequence[int], number: int | None) -> None:
        del clients, number
