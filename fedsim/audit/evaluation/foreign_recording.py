"""Case of a recording made elsewhere: only the attack file and its truth files say what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation.case import Case, UnknownTruthError
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import ConfigError, DataError
from fedsim.federation.config import PUBLIC_KEY, AdversaryTable, AttackFile, validate_tables
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.knowledge import TRAINING_FACTS, Knowledge, Records
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.header import Header
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.observed import Observer
from fedsim.recording.wire_format import State


@dataclass(frozen=True)
class ForeignRecording(Case):
    """Recording made elsewhere: only the attack file and its truth files are known.

    Attributes:
        columns: number of features of each column of a table; empty where the file states none.
    """

    columns: Sequence[int] = ()
    is_described_by_file = True
    experiment = None
    seed = 0
    task = None
    clients = None
    tokens = ()
    training = None
    defenses = ()
    shows_sums_alone = False

    def require_experiment(self) -> NoReturn:
        """Raise UnknownTruthError."""
        raise UnknownTruthError("only an experiment says what the victim held")

    def count_equal_clients(self, who: Observer) -> None:
        """Return None: whether the server averages by N is found by what it did."""

    def public(self) -> PublicExamples | None:
        """Return the examples of the public file; None where there is none."""
        if PUBLIC_KEY not in self.files:
            return None
        truth = self._truths_in_files[PUBLIC_KEY]
        return PublicExamples(data=truth.data, labels=truth.labels)

    def _add_columns(self, truth: Truth) -> Truth:
        """Add the columns that the file states, and deviations of public rows."""
        public, shape = self.public(), truth.data.shape[1:]
        if public is None or not public.data.shape[1:] == shape == (sum(self.columns),):
            return truth
        return replace(truth, columns=tuple(self.columns), deviations=public.data.std(0))

    def check_kind(self, title: str, attack: Attack) -> None:
        """Do nothing: the kind of the data is not known."""

    def check_format(self, message_format: MessageFormat) -> None:
        """Do nothing: only the attack file can say what messages mean."""

    def check_message_kind(self, headers: Sequence[Header], victim: int) -> None:
        """Do nothing: the recording alone says which kind of message a client sent."""

    def tables_of_finding(self, spec: AttackFile, about: Mapping[str, Any]) -> tuple[MessageFormat, AdversaryTable]:
        """Return [app] and [adversary] as they were when the attack was made.

        The attack file may say otherwise by now; a finding that was read from gradients does not
        become one about weights.
        """
        adversary = spec.adversary
        if about["knowledge"] is None:
            return spec.app, adversary
        table_class = type(adversary.knowledge)
        values = adversary.knowledge.model_dump(exclude_unset=True) | about["knowledge"]
        fields = table_class.model_fields
        values = {name: value for name, value in values.items() if value != fields[name].default}
        app = validate_tables(MessageFormat, about["app"] or {}, "app")
        knowledge = validate_tables(table_class, values, "adversary.knowledge")
        return app, adversary.model_copy(update={"knowledge": knowledge})

    def hashed_knowledge(self, knowledge: Knowledge) -> Knowledge:
        """Return all of `knowledge`, because truth files may change."""
        return knowledge

    def protocol_facts(self) -> dict[str, Any]:
        """Return the loss that nearly all apps train with."""
        return {"loss": cross_entropy}

    def full_knowledge(self, grant: Callable[[], Knowledge]) -> Knowledge:
        """Return what the attack file grants: nobody knows more."""
        return grant()

    def check_grant(self, adversary: AdversaryTable, name: str) -> None:
        """Raise ConfigError where the file grants the fact `name` without saying what it is."""
        if name == "auxiliary" and PUBLIC_KEY in self.files:
            return
        if name in ("auxiliary", "property_records"):
            raise ConfigError(
                f"adversary.knowledge.{name}: it is not known which records the clients of a recording "
                "made elsewhere do not train on; attack the run of an experiment, pass them to `fedsim.attack`, or "
                f"name a file of auxiliary ones as truth.{PUBLIC_KEY}"
            )
        is_asked_for = name in adversary.knowledge.model_fields_set
        if getattr(adversary.knowledge, name) is not True or not is_asked_for:
            return
        if name not in self.protocol_facts() and name not in TRAINING_FACTS:
            raise ConfigError(
                f"adversary.knowledge.{name}: a recording made elsewhere has none to grant; write it out, or leave the "
                "key out"
            )

    def public_records(self, adversary: AdversaryTable) -> dict[str, Any]:
        """Return the records of the public file in model units, as auxiliary ones."""
        public, value_range = self.public(), adversary.knowledge.value_range
        if public is None or not adversary.knowledge.auxiliary:
            return {}
        if not isinstance(value_range, list):
            raise ConfigError(
                "adversary.knowledge.auxiliary: the public file is in [0, 1], and without value_range it cannot be "
                "converted to inputs of the model; give value_range"
            )
        chosen = slice(0, adversary.auxiliary)
        inputs = _to_model_units(public.data[chosen], value_range)
        return {"auxiliary": Records(inputs=inputs, labels=public.labels[chosen])}

    def check_truth_source(self, fact: str) -> None:
        """Raise ConfigError where there is no truth file to take a private fact from."""
        if not self.files:
            raise ConfigError(f"adversary.knowledge.{fact}: there is no truth to take them from; add a [truth] table")

    def check_candidate_source(self) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(
            "adversary.knowledge.candidates: it is not known which records the victim of a "
            "recording made elsewhere does not hold; attack the run of an experiment"
        )

    def check_private_parts(self) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(
            "adversary.knowledge.private_parts: a recording made elsewhere does not have what clients keep; leave the "
            "key out"
        )

    def private_parts(self, client: int, *, is_first_round: bool) -> State:
        """Raise ConfigError; see `check_private_parts`."""
        self.check_private_parts()

    def client_records(self, knowledge: Knowledge, clients: Sequence[int], truth: Truth) -> Records:
        """Return the examples of a truth file in model units."""
        if knowledge.value_range is None:
            raise ConfigError(
                "adversary.knowledge.records: the truth is in [0, 1], and without value_range it cannot be "
                "converted to inputs of the model; give value_range"
            )
        return Records(inputs=_to_model_units(truth.data, knowledge.value_range), labels=truth.labels)

    def candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> NoReturn:
        """Raise ConfigError."""
        self.check_candidate_source()

    def known_candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> NoReturn:
        """Raise ConfigError."""
        self.check_candidate_source()

    def sensitive_column(self, name: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(
            "adversary.knowledge.partial_records: a recording made elsewhere names no columns; attack the run of an "
            "experiment whose data are a table"
        )

    def truth_of_all(self) -> Truth:
        """Raise DataError: truth files are about single victims."""
        raise DataError(
            "truth: examples of the whole federation are claimed, and of a recording made elsewhere only those of "
            "some victims are named; claim 'client'"
        )

    def _client_truth(self, clients: Sequence[int], number: int | None) -> None:
        del clients, number


def _to_model_units(data: Tensor, value_range: Sequence[float | Sequence[float]]) -> Tensor:
    """Return examples in [0, 1] in the units that models are fed with."""
    shape = (-1, *[1] * (data.ndim - 2))
    low, high = (torch.tensor(end).reshape(shape) for end in value_range)
    return low + data * (high - low)
