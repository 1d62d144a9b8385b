"""Interface of evaluators: check, judge and show one kind of finding.

Each kind has one evaluator, a plug-in of the group `fedsim.findings` that is registered under the
`kind` of the finding's class. Kinds of other packages are registered likewise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.metric import describe_metric
from fedsim.interfaces.modality import PublicExamples
from fedsim.plugins import registry
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State

FindingT = TypeVar("FindingT", bound=Finding)
FindingMetadata = Mapping[str, Any]
"""Metadata of a finding: attack, victim, rounds, what was granted ..."""
VICTIMS = "victims"
"""Key that scoring adds to the metadata: all victims of this attack in these rounds, ascending."""


@dataclass(frozen=True, kw_only=True)
class FindingSpec:
    """Form that a finding about one victim must have; it follows without the truth.

    Attributes:
        where: round and client, for error texts.
        knowledge: what the attack was granted.
        before: reads the state that the server sent; None where it is not known.
        task: of the federation behind the recording; None where it is not known.
        clients: number of clients of the federation; None where it is not known.
    """

    where: str
    knowledge: Knowledge
    before: Callable[[], State] | None = None
    task: Task | None = None
    clients: int | None = None

    def expect(self, name: str, claimed: object, expected: object) -> None:
        """Raise AttackError unless what the attack claims is as expected."""
        if claimed != expected:
            raise AttackError(f"{self.where}: the attack claims {name} {claimed}, expected {expected}; fix the attack")

    def expect_below(self, name: str, numbers: Tensor, end: int) -> None:
        """Raise AttackError unless all of these integers are below `end`."""
        if numbers.is_floating_point():
            return
        highest = max(numbers.flatten().tolist())
        if highest >= end:
            self.expect(f"{name} up to", highest, f"at most {end - 1}")


class OptimumFunction(Protocol):
    """Function that gives the optimal local model of a client, from w_0 or other random weights."""

    def __call__(self, client: int, *, other_start: bool = False) -> State:
        """See `fedsim.audit.evaluation.local_optimum`."""
        ...


@dataclass(frozen=True, kw_only=True)
class EvaluationContext:
    """Truth, messages and caches that an evaluator may read.

    Attributes:
        case: what is known of the clients' data.
        open_recording: opens the messages as the finding's adversary saw them.
        knowledge: all that is known of the protocol.
        optimum: gives optimal local models of a run of our own.
        weights: folder with network weights for LPIPS.
        read_auxiliary: returns the auxiliary records that attacks are granted, in the units of findings; None where
            none are, or where they are public examples.
        cached_values: of evaluators, for the next finding; each uses keys of its own.
    """

    case: Case
    open_recording: Callable[[], Transcript]
    knowledge: Knowledge
    optimum: OptimumFunction
    weights: Path | None = None
    read_auxiliary: Callable[[], PublicExamples | None] | None = None
    cached_values: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def public(self) -> PublicExamples | None:
        """Examples that no client holds, see `Case.public`."""
        return self.case.public()

    @cached_property
    def auxiliary(self) -> PublicExamples | None:
        """Auxiliary records, see `read_auxiliary`."""
        return None if self.read_auxiliary is None else self.read_auxiliary()

    def examples_of_others(self, clients: Collection[int]) -> PublicExamples | None:
        """Return examples that these clients do not hold; None where none are known.

        They are the public ones; of a recording made elsewhere, those in truth files of other clients.
        """
        return self.public or self.case.examples_in_files(clients)

    @cached_property
    def transcript(self) -> Transcript:
        """Messages as the finding's adversary saw them.

        Raises:
            TranscriptError: they are not there.
        """
        return self.open_recording()

    def guess_generator(self, victim: int) -> torch.Generator:
        """Return the random generator for guesses about `victim`."""
        return guess_generator(self.case, victim)


def guess_generator(case: Case, victim: int) -> torch.Generator:
    """Return the random generator for guesses about `victim`, fresh at each call."""
    return generator(case.seed, "floor", victim)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Scores of one finding, and the number of examples that they are about.

    There are no scores where the truth is not known.
    """

    scores: Sequence[Score] = ()
    examples: int = 0


@dataclass(frozen=True)
class Evaluator(ABC, Generic[FindingT]):
    """Evaluator of one kind of finding; it alone gets the truth.

    The methods are called in this order: `check_form` as soon as an attack returns; `judge`, which may
    call `truth`, when the attacks are done; `truth` and `show`, and `guess` for images, when a page
    is written.

    `about` has the metadata of the finding: `attack`, `victim` (a client), `round`, `rounds`,
    `first_round` (the first attacked round in which the victim sent something), `members` (the
    group whose sum was attacked, or none), `granted` (names of facts) and `settings`.

    Class attributes:
        finding: class of the findings; its `kind` is the evaluator's registered name.
    """

    finding: ClassVar[type[Finding]]

    @abstractmethod
    def check_form(self, finding: FindingT, spec: FindingSpec) -> None:
        """Raise AttackError unless `finding` has the form that is needed to judge it."""

    @abstractmethod
    def judge(self, finding: FindingT, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score a finding.

        Raises:
            DataError: it does not fit the victim's data.
            UnknownTruthError: they are not known.
        """

    def fact_about(self, finding: FindingT) -> str:
        """Return the granted fact that `finding` is about, such as the records that it scores; empty for none."""
        del finding
        return ""

    def truth(self, finding: FindingT, about: FindingMetadata, case: Case) -> Truth | None:
        """Return the data that `finding` is about; None where they are not known or none.

        Raises:
            UnknownTruthError: only an experiment could say.
            DataError: they are not known, and the finding cannot be judged without them.
        """
        del finding, about, case
        return None

    def show(self, finding: FindingT, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Return what a page shows of a finding; by default only its curves.

        Args:
            truth: see `truth`.
            tokens: names of the tokens of texts.
            metric: main metric of its attack; empty where it names none.
        """
        del finding, truth, tokens, metric
        return Display()

    def guess(
        self,
        finding: FindingT,
        truth: Truth,
        name: str,
        public: PublicExamples | None,
        rng: torch.Generator,
    ) -> Tensor | None:
        """Return the images of a guess, one for each image that `show` shows.

        Args:
            name: of the guess.
            public: see `EvaluationContext.public`.
            rng: see `guess_generator`; fresh, so that the same random numbers are drawn as for the
                score.
        """
        del finding, truth, name, public, rng
        return None


def evaluator_of(finding: Finding) -> Evaluator[Any]:
    """Return the evaluator of the kind of `finding`.

    Raises:
        AttackError: none is registered.
    """
    if getattr(finding, "kind", None) not in registry.registered_names("findings"):
        raise AttackError(
            f"the attack returned a {type(finding).__name__}, for which no evaluator is registered; known: "
            f"{', '.join(registry.registered_names('findings'))}; register an evaluator of it under fedsim.findings"
        )
    evaluator: Evaluator[Any] = registry.build("findings", finding.kind, {}, finding.kind)
    return evaluator


def check_claim(finding: Finding, spec: FindingSpec) -> None:
    """Raise AttackError unless `finding` has the form that is needed to judge and to show it.

    A curve of its trace must not bear the name of a metric of examples, which only the evaluator
    can compute.
    """
    for name in finding.trace:
        if describe_metric(name).of_examples:
            raise AttackError(
                f"{spec.where}: the attack calls a curve of its trace '{name}', which only the evaluator can know; "
                "rename the curve"
            )
    evaluator = evaluator_of(finding)
    if (fact := evaluator.fact_about(finding)) and getattr(spec.knowledge, fact) is None:
        raise AttackError(
            f"{spec.where}: what the attack claims is about {fact}, which it was not given; name '{fact}' in its "
            "'needs', and grant it under [adversary.knowledge]"
        )
    evaluator.check_form(finding, spec)


def group_members(about: FindingMetadata) -> Sequence[int]:
    """Return the group whose sum was attacked; empty where the victim stands for itself."""
    clients: Sequence[int] = about.get("members", ())
    return clients


def first_round(about: FindingMetadata) -> int:
    """Return the first attacked round in which the victim sent something."""
    return int(about["first_round"])
