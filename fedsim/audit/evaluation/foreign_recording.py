"""Case of a recording made elsewhere: only the attack file and its truth files say what is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation.case import MAX_NAMES, Case, UnknownTruthError, least_of_victims
from fedsim.audit.evaluation.example_metrics import EXACT, reach_psnr
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import ConfigError, DataError, join_first
from fedsim.base.randomness import generator
from fedsim.data import Examples
from fedsim.federation.adversary_tables import AdversaryTable, is_stated
from fedsim.federation.candidates import CandidateRecords, draw_foreign_candidates
from fedsim.federation.config import PUBLIC_KEY, AttackFile
from fedsim.federation.overlap import hash_records
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.knowledge import HELD_OUT, OTHER_CLIENTS, TRAINING_FACTS, Knowledge, Records
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.header import Header
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.wire_format import State

log = logging.getLogger(__name__)

_MUCH = 0.5
"""Share of public rows that are equal to clients' from which on it is no chance."""
_CHUNK_SIZE = 1000
"""Most public images that are compared at once."""


@dataclass(frozen=True)
class ForeignRecording(Case):
    """Recording made elsewhere: only the attack file and its truth files are known.

    Attributes:
        columns: number of features of each column of a table; empty where the file states none.
        defenses: that fedsim put around the clients of an app that it ran; empty where it did not, or none are granted.
        is_defended: whether the attack file says that the app's clients defend themselves.
        groups: clients that each recorded message is of: one, or the members of a sum.
    """

    columns: Sequence[int] = ()
    defenses: Sequence[Defense] = ()
    is_defended: bool = False
    groups: Collection[tuple[int, ...]] = ()
    is_described_by_file = True
    experiment = None

    def check_colluders(self, role: AdversaryRole) -> NoReturn:
        """Raise ConfigError: what clients added to sums was not recorded."""
        raise ConfigError(
            "adversary.who: a recording made elsewhere does not hold what colluding clients added to sums; set who "
            "= 'server', or these clients alone"
        )

    def count_equal_clients(self, role: AdversaryRole) -> None:
        """Return None: whether the server averages by N is found by what it did."""

    def check_file_of_sum(self, victim: int, members: Sequence[int]) -> None:
        """Raise DataError where `victim` also sends alone, or in a sum over others."""
        other_groups = [group for group in self.groups if victim in group and group != tuple(members)]
        if len(members) > 1 and other_groups:
            which = (
                f"a sum over clients {join_first(other_groups[0], MAX_NAMES)}"
                if len(other_groups[0]) > 1
                else "its own messages"
            )
            raise DataError(
                f"truth.{victim}: client {victim} is in the sum over clients {join_first(members, MAX_NAMES)} and in "
                f"{which}, and one file cannot hold the examples behind both; name a file of each client, with its own "
                "examples"
            )

    def least_num_examples(self, adversary: AdversaryTable, reported: Mapping[str, Collection[int]]) -> int | None:
        """Return the least N that was reported; None where nothing was recorded yet."""
        return least_of_victims({int(client): min(sizes) for client, sizes in reported.items()}, adversary)

    def count_members(self, adversary: AdversaryTable) -> int:
        """Return the size of the smallest group that sent a message."""
        return min(map(len, self.groups), default=1)

    def count_clients(self, adversary: AdversaryTable) -> int | None:
        """Return how many clients were recorded in any round; None where nothing was recorded yet."""
        return len({client for group in self.groups for client in group}) or None

    def public(self) -> PublicExamples | None:
        """Return the examples of the public file that no client holds; None where there are none.

        Guesses by an image of the victim's would raise the floors, and what leaks would look harmless. Rows of a table
        may be equal by chance, and are left as they are.
        """
        return self._public_examples

    @cached_property
    def _public_examples(self) -> PublicExamples | None:
        public = self._public_file
        if public is None:
            return None
        kept = _find_unheld_examples(public, self._truths_of_clients)
        count = len(public.data)
        equal = count - len(kept)
        is_table = public.data.ndim < 3 or not public.data.is_floating_point()
        if not equal or (is_table and equal < _MUCH * count):
            return public
        log.warning(
            "truth.%s: %d of %d examples are equal to ones that clients hold%s; if the app tests on them, its accuracy "
            "is that of memory",
            *(PUBLIC_KEY, equal, count, "" if is_table else ", and are left out"),
        )
        if is_table:
            return public
        return PublicExamples(data=public.data[kept], labels=public.labels[kept]) if kept else None

    @cached_property
    def _public_file(self) -> PublicExamples | None:
        """All examples of the public file; None where there is none."""
        if PUBLIC_KEY not in self.files:
            return None
        truth = self._truths_in_files[PUBLIC_KEY]
        return PublicExamples(data=truth.data, labels=truth.labels)

    @property
    def _truths_of_clients(self) -> list[Truth]:
        return [truth for key, truth in self._truths_in_files.items() if key != PUBLIC_KEY]

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
        table_class = type(adversary.knowledge)
        values = adversary.knowledge.model_dump(exclude_unset=True) | about["knowledge"]
        values = {name: value for name, value in values.items() if is_stated(name, value)}
        app = validate_tables(MessageFormat, about["app"], "app")
        knowledge = validate_tables(table_class, values, "adversary.knowledge")
        return app, adversary.model_copy(update={"knowledge": knowledge})

    def hashed_knowledge(self, knowledge: Knowledge) -> Knowledge:
        """Return all of `knowledge`, because truth files may change."""
        return knowledge

    def protocol_facts(self) -> dict[str, Any]:
        """Return the loss that nearly all apps train with."""
        return {"loss": cross_entropy} | ({"defenses": tuple(self.defenses)} if self.defenses else {})

    def full_knowledge(self, grant: Callable[[], Knowledge]) -> Knowledge:
        """Return what the attack file grants; nothing else is known."""
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
        if name == "defenses" and not self.defenses and adversary.knowledge.defenses is True:
            raise ConfigError(
                "adversary.knowledge.defenses: fedsim put no defense around these clients, and it is unknown "
                "what an app does itself; leave the key out"
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
        public, value_range = self._public_file, adversary.knowledge.value_range
        if public is None or not adversary.knowledge.auxiliary:
            return {}
        public = drop_held_examples(public, self._truths_of_clients)
        order = torch.arange(len(public.data))
        if len(order) > adversary.auxiliary:  # a file may be in the order of its classes
            order = torch.randperm(len(order), generator=generator("auxiliary"))[: adversary.auxiliary]
        value_range = value_range if isinstance(value_range, list) else None
        return {
            "auxiliary": _records_in_model_units(public.data[order], public.labels[order], value_range, "auxiliary")
        }

    def check_truth_source(self, fact: str) -> None:
        """Raise ConfigError where there is no truth file to take a private fact from."""
        if not self.files:
            raise ConfigError(f"adversary.knowledge.{fact}: there is no truth to take them from; add a [truth] table")

    def check_candidate_source(self, non_members: str) -> None:
        """Raise ConfigError where no truth file has records that the victim does not hold."""
        if non_members == HELD_OUT and PUBLIC_KEY not in self.files:
            raise ConfigError(
                "adversary.knowledge.candidates: it is not known which records the victim of a recording made "
                f"elsewhere does not hold; name a file of records that no client holds as truth.{PUBLIC_KEY}, or take "
                f"those of '{OTHER_CLIENTS}'"
            )
        if non_members == OTHER_CLIENTS and len(set(self.files) - {PUBLIC_KEY}) < 2:
            raise ConfigError(
                "adversary.knowledge.candidates: no truth file says what other clients hold; name those of several "
                f"clients under [truth], or take '{HELD_OUT}'"
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
        return _records_in_model_units(truth.data, truth.labels, knowledge.value_range, "records")

    def candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> Records:
        """Return records of which half are in the truth file of the victim, in model units."""
        knowledge = adversary.knowledge
        drawn = self.draw_candidates(clients, str(knowledge.candidates), adversary.candidates)
        value_range = knowledge.value_range if isinstance(knowledge.value_range, list) else None
        return _records_in_model_units(drawn.inputs, drawn.labels, value_range, "candidates")

    def draw_candidates(self, clients: Sequence[int], non_members: str, most: int) -> CandidateRecords:
        """Draw members from the victim's truth file, others from the public file or from those of other clients."""
        held = self.truth(clients[0], None, clients if len(clients) > 1 else ())
        in_other_files = self.examples_in_files({*map(str, clients), PUBLIC_KEY})
        pool = self.public() if non_members == HELD_OUT else in_other_files
        if held is None or pool is None:
            raise UnknownTruthError(f"no truth file says what client {clients[0]} held, and another what it did not")
        if (pool.data.shape[1:], pool.labels.dtype) != (
            held.data.shape[1:],
            held.labels.dtype,
        ):
            raise DataError(
                f"adversary.knowledge.candidates: records of '{non_members}' are of shape "
                f"{tuple(pool.data.shape[1:])}, those of client {clients[0]} of {tuple(held.data.shape[1:])}, or "
                "their labels differ in kind; write both files from the same data"
            )
        return draw_foreign_candidates(_as_examples(held), _as_examples(pool), clients, non_members, most)

    def known_candidates(self, adversary: AdversaryTable, clients: Sequence[int]) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(
            "adversary.knowledge.known_candidates: only candidates are drawn from truth files; attack the run of an "
            "experiment, or leave the key out"
        )

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


def _as_examples(records: Truth | PublicExamples) -> Examples:
    scale = 1.0 if records.data.is_floating_point() else None
    return Examples(raw=records.data, labels=records.labels, scale=scale)


def _records_in_model_units(
    data: Tensor, labels: Tensor, value_range: Sequence[float | Sequence[float]] | None, fact: str
) -> Records:
    """Return records of truth files as the model is fed with them, which tokens are as they are."""
    if not data.is_floating_point():
        return Records(inputs=data, labels=labels)
    if value_range is None:
        raise ConfigError(
            f"adversary.knowledge.{fact}: the truth is in [0, 1], and without value_range it cannot be "
            "converted to inputs of the model; give value_range"
        )
    return Records(inputs=_to_model_units(data, value_range), labels=labels)


def _to_model_units(data: Tensor, value_range: Sequence[float | Sequence[float]]) -> Tensor:
    """Return examples in [0, 1] in the units that models are fed with."""
    shape = (-1, *[1] * (data.ndim - 2))
    low, high = (torch.tensor(end).reshape(shape) for end in value_range)
    return low + data * (high - low)


def drop_held_examples(public: PublicExamples, truths: Sequence[Truth]) -> PublicExamples:
    """Return the public examples without those that a client holds, which would give them away; a warning counts them.

    Images count as equal where one would be an exact claim of the other, as a re-encoded copy is.
    """
    kept = _find_unheld_examples(public, truths)
    count = len(public.data)
    if len(kept) == count:
        return public
    if not kept:
        raise ConfigError(
            f"truth.{PUBLIC_KEY}: each of its {count} examples is equal to one of a client's, so none can be "
            "granted as an auxiliary record; name a file of other ones"
        )
    log.warning(
        "truth.%s: %d of %d examples are not auxiliary records, because each is equal to one of a client's",
        PUBLIC_KEY,
        count - len(kept),
        count,
    )
    return PublicExamples(data=public.data[kept], labels=public.labels[kept])


def _find_unheld_examples(public: PublicExamples, truths: Sequence[Truth]) -> list[int]:
    """Return the indices of the public examples that are equal to none of a client's, whatever their labels."""
    if public.data.is_floating_point() and public.data.ndim > 2:
        same_shape = [truth.data for truth in truths if truth.data.shape[1:] == public.data.shape[1:]]
        is_held = torch.zeros(len(public.data), dtype=torch.bool)
        for held_images in same_shape:
            parts = [reach_psnr(images, held_images, EXACT).any(1) for images in public.data.split(_CHUNK_SIZE)]
            is_held |= torch.cat(parts)
        return (~is_held).nonzero().flatten().tolist()
    held = {record for truth in truths for record in _hash_examples(truth.data)}
    return [index for index, record in enumerate(_hash_examples(public.data)) if record not in held]


def _hash_examples(data: Tensor) -> Iterator[bytes]:
    """Yield a hash of each example, whatever its label."""
    return hash_records(data, torch.zeros(len(data)))
