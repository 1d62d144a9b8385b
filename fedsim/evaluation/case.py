"""What an audit is about, and what the evaluator knows of it: a run of our own, or a recording made elsewhere.

Both answer the same questions, so nobody else asks which of the two it is. No attack ever holds a case.
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

from fedsim.attacks import Attack
from fedsim.errors import DataError, KnowledgeError
from fedsim.evaluation.score import Public
from fedsim.evaluation.truth import Truth
from fedsim.experiments.build import Experiment
from fedsim.task import Task

_PUBLIC = 5000
"""Most public examples that floors are made of."""


@dataclass(frozen=True)
class Case(ABC):
    """What a recording is of.

    Attributes:
        files: by client, what a [truth] table says that it held; it goes before anything else.
    """

    files: Mapping[str, Path]

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of the run; 0 for recordings made elsewhere."""

    @property
    @abstractmethod
    def experiment(self) -> Experiment | None:
        """The federation behind the recording; None where nobody here knows it."""

    @property
    @abstractmethod
    def task(self) -> Task | None:
        """What the federation learns; None where it is not known."""

    @property
    @abstractmethod
    def clients(self) -> int | None:
        """How many clients the federation has; None where it is not known."""

    @property
    @abstractmethod
    def tokens(self) -> Sequence[str]:
        """What the tokens of texts are called; empty where that is not known, or the data are no texts."""

    @abstractmethod
    def public(self) -> Public | None:
        """Examples of the same kind that no client holds, for floors; None where there are none."""

    @abstractmethod
    def check_kind(self, title: str, attack: Attack) -> None:
        """Raise KnowledgeError where the data are not of the kind that the attack called `title` is for."""

    @abstractmethod
    def truth_of_all(self) -> Truth:
        """What all clients of the federation held together.

        Raises:
            DataError: nobody says.
        """

    @abstractmethod
    def _held(self, clients: Sequence[int], number: int | None) -> Truth | None:
        """What `truth` says of these clients together where no file does."""

    def check_files(self) -> None:
        """Raise DataError where a file of the truth cannot be read."""
        for file in self.files.values():
            Truth.load(file)

    def truth(self, victim: int, number: int | None, members: Sequence[int] = ()) -> Truth | None:
        """What `victim` held, or None where nobody says; where it stands for a group, what its `members` held together.

        Of a client that sends gradients, the mini-batch of round `number`, or all its training examples where it is
        None; for an attack on several rounds, that is the first of them in which the victim took part.
        """
        if str(victim) in self.files:
            return self._described(Truth.load(self.files[str(victim)]))
        return self._held(members or (victim,), number)

    def _described(self, truth: Truth) -> Truth:
        """`truth` with what is known of a table's columns."""
        return truth


@dataclass(frozen=True)
class OwnRun(Case):
    """A run of our own: what each client held follows from its experiment file."""

    own: Experiment

    @property
    def experiment(self) -> Experiment:
        """The federation behind the recording."""
        return self.own

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.own.seed

    @property
    def task(self) -> Task:
        """What the federation learns."""
        return self.own.dataset.task

    @property
    def clients(self) -> int:
        """How many clients the federation has."""
        return self.own.config.federation.clients

    @property
    def tokens(self) -> Sequence[str]:
        """What the tokens of texts are called."""
        return self.own.dataset.tokens

    def public(self) -> Public:
        """The first of the test set."""
        test = self.own.dataset.test
        data = self.own.dataset.in_unit_range(test.inputs(slice(0, _PUBLIC)))
        return Public(data=data, labels=test.labels[:_PUBLIC])

    def check_kind(self, title: str, attack: Attack) -> None:
        """Raise KnowledgeError where the attack is for texts, tables, numbers or classes and the data are not."""
        dataset = self.own.dataset
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
        """The training examples of all clients."""
        inputs, labels = (
            torch.cat(of_all) for of_all in zip(*self.own.data.train_parts(range(self.clients)), strict=True)
        )
        return self._as_claimed(inputs, labels)

    def _held(self, clients: Sequence[int], number: int | None) -> Truth:
        held = [
            self.own.data.train(client) if number is None else self.own.attacked(client, number) for client in clients
        ]
        return self._as_claimed(*map(torch.cat, zip(*held, strict=True)))

    def _as_claimed(self, inputs: Tensor, labels: Tensor) -> Truth:
        dataset = self.own.dataset
        return self._described(Truth(data=dataset.in_unit_range(inputs), labels=labels, padding=dataset.padding))

    def _described(self, truth: Truth) -> Truth:
        columns = self.own.dataset.columns
        if not columns or truth.data.shape[1:] != self.own.dataset.task.input_shape:
            return truth
        return replace(truth, columns=tuple(column.width for column in columns), deviations=self._deviations)

    @cached_property
    def _deviations(self) -> Tensor:
        """`feature`, standard deviations of public rows."""
        deviations = self.public().data.std(0)
        for column in self.own.dataset.columns:
            if len(column.categories) == 1:  # which a row has whatever the value of its only feature
                deviations[column.features] = math.inf
        return deviations


@dataclass(frozen=True)
class ForeignRecording(Case):
    """A recording made elsewhere: nothing is known but what the attack file and its truth files say."""

    experiment = None
    seed = 0
    task = None
    clients = None
    tokens = ()

    def public(self) -> None:
        """Nobody says what such data look like."""

    def check_kind(self, title: str, attack: Attack) -> None:
        """Of what kind the data are is not known."""

    def truth_of_all(self) -> Truth:
        """Raise DataError: files speak of single victims."""
        raise DataError(
            "truth: examples of the whole federation are claimed, and of a recording made elsewhere only those of "
            "some victims are named; claim 'client'"
        )

    def _held(self, clients: Sequence[int], number: int | None) -> None:
        del clients, number
