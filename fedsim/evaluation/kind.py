"""A kind of finding: what it must look like, what it is worth, and what a page shows of it.

Each kind has one evaluator, a plug-in of the group `fedsim.findings`, called as the finding's class says (`kind`). A
stranger's kind registers likewise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fedsim.attacks import Knowledge
from fedsim.errors import AttackError
from fedsim.evaluation.case import Case
from fedsim.evaluation.score import Public, Score
from fedsim.evaluation.truth import Truth
from fedsim.findings import Finding
from fedsim.plugins import registry
from fedsim.randomness import generator
from fedsim.recording.reading import Reading
from fedsim.recording.transcript import Transcript
from fedsim.task import Task
from fedsim.wire.messages import State

F = TypeVar("F", bound=Finding)
About = Mapping[str, Any]
"""What a finding says of itself: attack, victim, rounds, what was granted ..."""
VICTIMS = "victims"
"""What scoring adds: all whom this attack was made on in these rounds, ascending."""


@dataclass(frozen=True, kw_only=True)
class Owed:
    """What a finding about one victim has to look like, which takes no truth to say. None is not known.

    Attributes:
        where: round and client, for messages.
        knowledge: what the attack was handed.
        before: reads the state that the server sent.
        task: of the federation behind the recording.
        clients: of the federation.
    """

    where: str
    knowledge: Knowledge
    before: Callable[[], State] | None = None
    task: Task | None = None
    clients: int | None = None

    def expect(self, what: str, got: object, expected: object) -> None:
        """Raise AttackError where the attack claims `what` otherwise than expected."""
        if got != expected:
            raise AttackError(f"{self.where}: the attack claims {what} {got}, expected {expected}; mend the attack")

    def expect_below(self, what: str, numbers: Tensor, end: int) -> None:
        """Likewise where one of `numbers` is not below `end`."""
        if not numbers.is_floating_point() and (highest := max(numbers.flatten().tolist())) >= end:
            self.expect(f"{what} up to", highest, f"at most {end - 1}")


class OptimumOf(Protocol):
    """Gives the optimal local model of a client, from w_0 on or from other random weights."""

    def __call__(self, client: int, *, elsewhere: bool = False) -> State:
        """See `fedsim.evaluation.local_optimum`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What an evaluator may look at, and what it need not find out twice.

    Attributes:
        case: who held what.
        recording: folder of the messages.
        knowledge: all that is known of the protocol.
        optimum: of a run of our own.
        weights: folder with network weights for LPIPS.
        reading: what the messages mean.
        kept: by evaluator, whatever it wants to find again at the next finding.
    """

    case: Case
    recording: Path
    knowledge: Knowledge
    optimum: OptimumOf
    weights: Path | None = None
    reading: Reading = field(default_factory=Reading)
    kept: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def public(self) -> Public | None:
        """See `Case.public`."""
        return self.case.public()

    @property
    def transcript(self) -> Transcript:
        """The messages.

        Raises:
            TranscriptError: they are not there.
        """
        return Transcript(self.recording, reading=self.reading)

    def rng(self, victim: int) -> torch.Generator:
        """What guesses about `victim` are drawn with."""
        return guessing(self.case, victim)


def guessing(case: Case, victim: int) -> torch.Generator:
    """What guesses about `victim` are drawn with."""
    return generator(case.seed, "floor", victim)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The scores of one finding, none where nobody knows the truth, and of how many examples they speak."""

    scores: Sequence[Score] = ()
    examples: int = 0


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Images to draw: claimed ones, the true ones that they are assigned to, and what is written below each.

    Attributes:
        claimed: `image channel height width` in [0, 1].
        true: likewise, in the same order; None where nobody knows.
        psnr: in dB; empty where nobody knows the truth.
        certified: whether the attack is sure of it; empty where it never says.
        steps: `step image channel height width`, what the attack had at `iterations`; None where it kept nothing.
        iterations: of `steps`.
    """

    claimed: Tensor
    true: Tensor | None = None
    psnr: Sequence[float] = ()
    certified: Sequence[bool] = ()
    steps: Tensor | None = None
    iterations: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a table to show: claimed ones, `row feature` in [0, 1], and the true ones that they are assigned to.

    `entropy` is `row column`, how unsure the attack is of what is claimed; None where it never says. `right` is `row
    column`, whether a value counts as recovered; None where nobody says what the columns are.
    """

    claimed: Tensor
    true: Tensor | None = None
    entropy: Tensor | None = None
    right: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Word:
    """One claimed word.

    `right` says whether it is the true one at its place, or one of a set of words; true where nobody knows.
    """

    text: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A true text, empty where nobody knows it, and the words of the claimed one assigned to it; or sets of words."""

    true: str
    claimed: Sequence[Word]


@dataclass(frozen=True, kw_only=True)
class Roc:
    """The ROC curve of scores that tell members from others.

    Attributes:
        false: `point`, share of the others at or above a threshold, ascending from 0 to 1.
        true: `point`, share of the members there.
    """

    false: Tensor
    true: Tensor

    def at(self, rate: float) -> float:
        """The highest share of members at a threshold that at most `rate` of the others reach."""
        return float(self.true[self.false <= rate].max())


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a page shows of a finding besides its curves.

    Attributes:
        examples: how many there are; of a `bag` claimed words, of which `texts` shows the first.
        known: the truth is shown beside them.
        sheet: images.
        rows: of a table.
        texts: claimed and true; of a `bag`, which tells which words there are and no texts, one pair of sets.
        typical: it tells what classes look like.
        roc: of candidates, which only the evaluator can know.
        curves: further ones, which only the evaluator can know: name to iterations and values.
    """

    examples: int = 0
    known: bool = False
    sheet: Sheet | None = None
    rows: Rows | None = None
    texts: Sequence[Pair] = ()
    bag: bool = False
    typical: bool = False
    roc: Roc | None = None
    curves: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator(ABC, Generic[F]):
    """Judges one kind of finding."""

    finding: ClassVar[type[Finding]]

    @abstractmethod
    def form(self, finding: F, owed: Owed) -> None:
        """Raise AttackError unless `finding` has the form that it can be judged in."""

    @abstractmethod
    def judge(self, finding: F, about: About, bench: Bench) -> Judgement:
        """What it is worth.

        Raises:
            DataError: it does not fit what the victim held.
        """

    def truth(self, finding: F, about: About, case: Case) -> Truth | None:
        """What those held whose examples `finding` claims; None where nobody says, or it claims none.

        Raises:
            DataError: nobody says, and it takes the truth to judge it.
        """
        del finding, about, case
        return None

    def show(self, finding: F, truth: Truth | None, tokens: Sequence[str], metric: str) -> Shown:
        """What a page shows of it; by default its curves alone.

        Args:
            truth: see `truth`.
            tokens: what those of texts are called.
            metric: the one that its attack is read by; empty where it names none.
        """
        del finding, truth, tokens, metric
        return Shown()

    def guess(self, finding: F, truth: Truth, name: str, public: Public | None, rng: torch.Generator) -> Tensor | None:
        """The images of the guess called `name` that `finding` is judged beside, one for each that `show` shows.

        Args:
            public: see `Bench.public`.
            rng: see `Bench.rng`; fresh, so that what is drawn at random is what was drawn for the score.
        """
        del finding, truth, name, public, rng
        return None


def evaluator_of(finding: Finding) -> Evaluator[Any]:
    """Who judges `finding`.

    Raises:
        AttackError: nobody here does.
    """
    if getattr(finding, "kind", None) not in registry.names("findings"):
        raise AttackError(
            f"the attack returned a {type(finding).__name__}, which nobody here can judge; known: "
            f"{', '.join(registry.names('findings'))}; register an evaluator of it under fedsim.findings"
        )
    evaluator: Evaluator[Any] = registry.build("findings", finding.kind, {}, finding.kind)
    return evaluator


def members(about: About) -> Sequence[int]:
    """For whom the victim of a finding stands: the group whose sum was attacked; nobody where it stands for itself."""
    stands_for: Sequence[int] = about.get("members", ())
    return stands_for


def first_round(about: About) -> int:
    """The first round in which the victim of a finding sent something."""
    return int(about["first_round"])
