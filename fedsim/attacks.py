"""The interface of an attack: what it needs to know, what it is given, what it returns.

An attack sees a `Transcript` and a `Knowledge`, nothing else. Ground truth lives in
`fedsim.evaluation.scoring`, which no attack may import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import numpy as np
import torch

from fedsim.errors import AttackError, KnowledgeError, PluginError, did_you_mean, first_line
from fedsim.findings import Finding
from fedsim.knowledge import FACTS, Knowledge, KnownCandidates, PartialRecords, PropertyRecords, Records
from fedsim.paper import Paper
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update, non_finite

__all__ = [
    "CLIENT",
    "GLOBAL",
    "GROUP",
    "GROUPS",
    "LAST_RETURNED",
    "OPTIMAL",
    "Attack",
    "Knowledge",
    "KnownCandidates",
    "Order",
    "Outcome",
    "Paper",
    "PartialRecords",
    "Progress",
    "PropertyRecords",
    "Records",
    "single_update",
]
"""What the author of an attack imports."""

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Called as `progress(iteration, iterations, values)`; values hold at least `objective`."""


CLIENT, GROUP, GROUPS = "client", "group", "groups"
"""Observations: the update of one client; the sum over a group, see `Update.members`; such sums over groups that change
from round to round, in some of which the victim is."""
NO_ATTACKS = GLOBAL, LAST_RETURNED, OPTIMAL = "global", "last-returned", "optimal"
"""Model sources that are no attack: w_t of the last round, the victim's last w_T, and its optimal local model, which
only the evaluator has. What reads one of them counts as no attack of its own in a report."""


FAILURES = (Exception, SystemExit)
"""What an attack on one victim may raise without ending those on others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """One of several victims that are attacked.

    Attributes:
        transcript: as in `Attack.run`, and so are `knowledge`, `victim`, `rng` and `progress`.
        turn: entered around what is done for this victim alone, so that warnings can be told apart.
    """

    transcript: Transcript
    knowledge: Knowledge
    victim: int
    rng: torch.Generator
    progress: Progress = lambda iteration, iterations, values: None
    turn: Callable[[], AbstractContextManager[object]] = nullcontext


Outcome = Finding | BaseException
"""What an attack found, or what it raised."""


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Base of all attacks: a frozen dataclass whose fields are its hyperparameters.

    A subclass names its `paper`, what it `needs` and `uses`, and implements `_run`. One instance attacks all victims,
    so nothing may be kept on it.

    Class attributes:
        paper: the publication that describes it.
        needs: names of `Knowledge` fields without which it cannot work.
        uses: names of further fields that it reads where they are granted. What it declares in neither is not handed
            to it, so that a report can say what it used.
        reads: the observations that it can use, some of `CLIENT`, `GROUP` and `GROUPS`. Of a group, the victim is the
            client under whom the sum is filed, N its total and B that of all members together; for one that reads
            `GROUPS` it may be any member. Several rounds of a `GROUP` are such of the same members.
        temporal: whether one run reads several rounds of the victim; otherwise it reads one update.
        texts: whether it is made for texts, whose inputs are tokens, instead of data of numbers.
        main_metric: the metric of `scores.csv` that the report judges it by first of all; empty for the first one.
    """

    paper: ClassVar[Paper]
    needs: ClassVar[frozenset[str]] = frozenset()
    uses: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUP})
    temporal: ClassVar[bool] = False
    texts: ClassVar[bool] = False
    main_metric: ClassVar[str] = ""

    @property
    def builds_on(self) -> str | None:
        """The attack, by its title in the file, whose local models are in `knowledge.models`; or OPTIMAL, or None."""
        return None

    @property
    def observes(self) -> frozenset[str]:
        """`reads`, and of an attack that builds on another any, since it reads the models that it is handed."""
        return self.reads if self.builds_on is None else self.reads | {GROUPS}

    @property
    def called(self) -> str:
        """Its title in the user's file; without one, its class."""
        return str(vars(self).get("_title", type(self).__name__))

    def entitled(self, title: str) -> Self:
        """The same attack, which calls itself `title` in what it says."""
        named = copy(self)
        vars(named)["_title"] = title
        return named

    @property
    def adaptive(self) -> bool:
        """Whether it is to be handed the defenses of the clients, where they are granted and it reads them."""
        return bool(vars(self).get("_adaptive", False))

    def adapted(self, title: str) -> Self:
        """The same attack by an adversary who knows the defenses."""
        adaptive = self.entitled(title)
        vars(adaptive)["_adaptive"] = True
        return adaptive

    @final
    def run(
        self,
        transcript: Transcript,
        knowledge: Knowledge,
        *,
        victim: int,
        rng: torch.Generator,
        progress: Progress | None = None,
    ) -> Finding:
        """Attack `victim` using nothing but `transcript` and `knowledge`.

        Args:
            transcript: what the server saw; restrict it with `only` to the rounds to be used.
            knowledge: what the threat model grants; the attack gets what it declares of it.
            victim: client id in the transcript.
            rng: source of every random draw of the attack.
            progress: told about each iteration.

        Raises:
            KnowledgeError: something in `needs` is withheld; nothing was computed.
            AttackError: the update cannot be attacked, the attack diverged, or it claims nothing.
            TranscriptError: a round is damaged, or the victim is not in it.
        """
        self.check(knowledge)
        with _named_singularities():
            finding = self._run(transcript, knowledge.only(self.declared()), victim, rng, progress or _silent)
        return self._claimed(finding)

    @final
    def run_several(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Outcome]]:
        """Attack several victims, each as `run` does, at once where the attack can and that saves time.

        Args:
            orders: read as they are needed.

        Yields:
            Each order with its finding or with what it raised, as soon as it is there.
        """
        given, refused = dict[Order, Order](), list[tuple[Order, Outcome]]()

        def allowed() -> Iterator[Order]:
            for order in orders:
                try:
                    self.check(order.knowledge)
                except KnowledgeError as error:
                    refused.append((order, error))
                    continue
                own = replace(order, knowledge=order.knowledge.only(self.declared()))
                given[own] = order
                yield own

        for own, outcome in self._run_several(allowed()):
            try:
                found = outcome if isinstance(outcome, BaseException) else self._claimed(outcome)
            except AttackError as error:
                found = error
            yield given.pop(own), found
        yield from refused

    @classmethod
    def declared(cls) -> frozenset[str]:
        """All that it reads of what is granted: what it needs and what it uses."""
        read = cls.needs | cls.uses
        implied = {"local_epochs": "local_steps", "loss": "label_smoothing"}
        return read | {other for name, other in implied.items() if name in read}

    @final
    def handed(self) -> frozenset[str]:
        """What it is handed of what is granted: all that it declares; the clients' defenses if it is `adaptive`."""
        return self.declared() - (frozenset() if self.adaptive else {"defenses"})

    @final
    def check(self, knowledge: Knowledge, granted: Sequence[str] = ()) -> None:
        """Raise KnowledgeError unless `knowledge`, or what will be `granted`, covers `needs`."""
        for where in ("needs", "uses"):
            for name in sorted(getattr(self, where) - set(FACTS)):
                raise PluginError(
                    f"{type(self).__name__}.{where}: '{name}' is nothing that can be known, {did_you_mean(name, FACTS)}"
                )
        known = {*knowledge.granted(), *granted}
        missing = sorted(self.needs - known - ({"local_epochs"} if "local_steps" in known else set()))
        if missing:
            raise KnowledgeError(
                f"{self.called} needs {', '.join(missing)}, which the threat model withholds; "
                "grant it under [adversary.knowledge] or choose another attack"
            )

    def _claimed(self, finding: object) -> Finding:
        """What `_run` returned, which has to be a finding."""
        if not isinstance(finding, Finding):
            got = type(finding).__name__
            raise AttackError(f"{self.called} returned {got}, expected a Finding")
        return finding

    @abstractmethod
    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding: ...

    def _run_several(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Outcome]]:
        """See `run_several`; one after the other, unless a subclass can do better."""
        return one_by_one(
            orders,
            lambda order: self._run(order.transcript, order.knowledge, order.victim, order.rng, order.progress),
        )


def one_by_one(orders: Iterable[Order], find: Callable[[Order], Finding]) -> Iterator[tuple[Order, Outcome]]:
    """Each order with what `find` finds of it, or with what that raised, one after the other."""
    for order in orders:
        try:
            with order.turn(), _named_singularities():
                found: Outcome = find(order)
        except FAILURES as error:
            found = error
        yield order, found


def single_update(transcript: Transcript, victim: int) -> Update:
    """The one update of `victim` that `transcript` shows.

    Raises:
        AttackError: the transcript shows several rounds, or weights or a gradient that are NaN or infinite.
    """
    if len(transcript.rounds) != 1:
        raise AttackError(
            f"this attack reads one update, the transcript shows rounds {transcript.rounds}; use transcript.only([r])"
        )
    update = transcript.update(transcript.rounds[0], victim)
    for state, what in ((update.before, ""), (update.after, ""), (update.gradient or {}, "the gradient of ")):
        if broken := non_finite(state):
            raise AttackError(
                f"round {update.round}, client {victim}: {what}{broken[0]} holds NaN or infinite values; "
                "this update cannot be attacked, choose another round or victim"
            )
    return update


@contextmanager
def _named_singularities() -> Iterator[None]:
    """Say of what was sent that a matrix of it cannot be solved, in place of a library's complaint."""
    try:
        yield
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise AttackError(
            f"what was sent is too degenerate for this attack: a matrix of it is singular ({first_line(error)}); "
            "choose another round or victim"
        ) from error


def _silent(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    """Report nothing."""
