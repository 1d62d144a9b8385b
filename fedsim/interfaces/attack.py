"""The interface of an attack: the knowledge it needs, the inputs it gets, the finding it returns.

An attack sees a `Transcript` and a `Knowledge`, nothing else. Ground truth lives in
`fedsim.audit.evaluation.scoring`, which no attack may import.
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

from fedsim.base.errors import AttackError, KnowledgeError, PluginError, did_you_mean, first_line
from fedsim.base.papers import Paper
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.knowledge import FACTS, Knowledge, KnownCandidates, PartialRecords, PropertyRecords, Records
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update, non_finite_names

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
    "Outcome",
    "Paper",
    "PartialRecords",
    "Progress",
    "PropertyRecords",
    "Records",
    "VictimTask",
    "single_update",
]
"""The names that the author of an attack imports."""

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Callback `progress(iteration, iterations, values)`; values hold at least `objective`."""


CLIENT, GROUP, GROUPS = "client", "group", "groups"
"""Kinds of observations: the update of one client; the sum of the updates of a group of clients
(`Update.members`); such sums over groups that change from round to round, some of which contain the
victim."""
BASELINE_SOURCES = GLOBAL, LAST_RETURNED, OPTIMAL = "global", "last-returned", "optimal"
"""Sources of a victim's model that are no attack: w_t of the last round, the victim's last w_T, and
its optimal local model, which only the evaluator has. A report counts an attack that reads one of
them as a baseline."""


FAILURES = (Exception, SystemExit)
"""Exceptions of an attack on one victim after which the attacks on the other victims go on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VictimTask:
    """Inputs of an attack on one of several victims.

    Attributes:
        transcript: see `Attack.run`, as for `knowledge`, `victim`, `rng` and `progress`.
        log_context: makes a context manager that is entered while the attack works on this victim
            only, so that each warning is logged for the right victim.
    """

    transcript: Transcript
    knowledge: Knowledge
    victim: int
    rng: torch.Generator
    progress: Progress = lambda iteration, iterations, values: None
    log_context: Callable[[], AbstractContextManager[object]] = nullcontext


Outcome = Finding | BaseException
"""The finding of an attack, or the exception that it raised."""


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Base of all attacks: a frozen dataclass whose fields are its hyperparameters.

    A subclass names its `paper`, declares in `needs` and `uses` which knowledge it reads, and
    implements `_run`. One instance attacks all victims, so a subclass must not store state on
    `self`.

    Class attributes:
        paper: the publication that describes the attack.
        needs: names of `Knowledge` fields without which the attack cannot work.
        uses: names of further `Knowledge` fields that the attack reads where they are granted. All
            fields in neither set are None in the knowledge it gets, so that a report can say what
            it used.
        reads: the kinds of observations that it can use, some of `CLIENT`, `GROUP` and `GROUPS`.
            With `GROUP`, the victim is the client under whose id the sum is recorded; N and B are
            totals of all members, and all rounds are of the same members. With `GROUPS`, the victim
            may be any member.
        temporal: whether one run reads several rounds of the victim; otherwise it reads one update.
        texts: whether it attacks texts, whose inputs are tokens, instead of numeric data.
        main_metric: the column of `scores.csv` that the report ranks it by; empty for the first
            one.
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
        """Name the attack whose local models it reads from `knowledge.models`, if any.

        The name is a title in the experiment file, or `OPTIMAL`; None for an attack that reads no
        models.
        """
        return None

    @property
    def accepted_observations(self) -> frozenset[str]:
        """Return the kinds of observations it accepts.

        These are `reads`. An attack that builds on another accepts any, since it reads that one's
        models.
        """
        return self.reads if self.builds_on is None else self.reads | {GROUPS}

    @property
    def title(self) -> str:
        """Return its title in the experiment file, or the name of its class where it has none."""
        return str(vars(self).get("_title", type(self).__name__))

    def with_title(self, title: str) -> Self:
        """Return a copy with this `title`, which stands in its errors and log lines."""
        titled = copy(self)
        vars(titled)["_title"] = title
        return titled

    @property
    def adaptive(self) -> bool:
        """Return whether it gets the clients' defenses where they are granted and declared."""
        return bool(vars(self).get("_adaptive", False))

    def adaptive_copy(self, title: str) -> Self:
        """Return a copy for an adversary who knows the clients' defenses."""
        adaptive = self.with_title(title)
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
            transcript: the messages that the server saw, restricted to the rounds to attack.
            knowledge: the facts that the threat model grants; the attack gets those that it
                declares.
            victim: client id in the transcript.
            rng: source of every random draw of the attack.
            progress: called after each iteration.

        Raises:
            KnowledgeError: something in `needs` is withheld; nothing was computed.
            AttackError: the update cannot be attacked, the attack diverged, or it claims nothing.
            TranscriptError: a round is damaged, or the victim is not in it.
        """
        self.check_knowledge(knowledge)
        declared_knowledge = knowledge.restrict_to(self.declared_facts())
        with _translate_singular_matrices():
            finding = self._run(transcript, declared_knowledge, victim, rng, progress or _ignore_progress)
        return self._check_finding(finding)

    @final
    def run_several(self, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Attack several victims, each as `run` does, in one batch where that saves time.

        Args:
            tasks: an iterable that is read lazily, so that not all transcripts are in memory.

        Yields:
            Each task with its finding, or the exception that its attack raised, as soon as it is
            done.
        """
        original_tasks = dict[VictimTask, VictimTask]()
        refusals = list[tuple[VictimTask, Outcome]]()

        def permitted_tasks() -> Iterator[VictimTask]:
            for task in tasks:
                try:
                    self.check_knowledge(task.knowledge)
                except KnowledgeError as error:
                    refusals.append((task, error))
                    continue
                restricted = replace(task, knowledge=task.knowledge.restrict_to(self.declared_facts()))
                original_tasks[restricted] = task
                yield restricted

        for restricted, result in self._run_several(permitted_tasks()):
            try:
                outcome = result if isinstance(result, BaseException) else self._check_finding(result)
            except AttackError as error:
                outcome = error
            yield original_tasks.pop(restricted), outcome
        yield from refusals

    @classmethod
    def declared_facts(cls) -> frozenset[str]:
        """Return the names of all facts that it reads: `needs`, `uses`, and what they imply."""
        read = cls.needs | cls.uses
        implied = {"local_epochs": "local_steps", "loss": "label_smoothing"}
        return read | {implied_name for name, implied_name in implied.items() if name in read}

    @final
    def facts_to_grant(self) -> frozenset[str]:
        """Return the facts to grant it: all that it declares; `defenses` only if `adaptive`."""
        return self.declared_facts() - (frozenset() if self.adaptive else {"defenses"})

    @final
    def check_knowledge(self, knowledge: Knowledge, granted: Sequence[str] = ()) -> None:
        """Raise KnowledgeError unless `knowledge` and the facts to be `granted` cover `needs`."""
        # A misspelt declaration is the plug-in's mistake, not the threat model's.
        for attribute in ("needs", "uses"):
            for name in sorted(getattr(self, attribute) - set(FACTS)):
                raise PluginError(
                    f"{type(self).__name__}.{attribute}: '{name}' is nothing that can be known, "
                    f"{did_you_mean(name, FACTS)}"
                )
        known = {*knowledge.granted_facts(), *granted}
        # The number of local steps is accepted in place of the number of local epochs.
        replaceable = {"local_epochs"} if "local_steps" in known else set()
        missing = sorted(self.needs - known - replaceable)
        if missing:
            raise KnowledgeError(
                f"{self.title} needs {', '.join(missing)}, which the threat model withholds; "
                "grant it under [adversary.knowledge] or choose another attack"
            )

    def _check_finding(self, finding: object) -> Finding:
        if not isinstance(finding, Finding):
            got = type(finding).__name__
            raise AttackError(f"{self.title} returned {got}, expected a Finding")
        return finding

    @abstractmethod
    def _run(
        self,
        transcript: Transcript,
        knowledge: Knowledge,
        victim: int,
        rng: torch.Generator,
        progress: Progress,
    ) -> Finding: ...

    def _run_several(self, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Attack one victim after the other; subclasses that can attack a batch override it."""

        def run_task(task: VictimTask) -> Finding:
            return self._run(task.transcript, task.knowledge, task.victim, task.rng, task.progress)

        return run_sequentially(tasks, run_task)


def run_sequentially(
    tasks: Iterable[VictimTask], find: Callable[[VictimTask], Finding]
) -> Iterator[tuple[VictimTask, Outcome]]:
    """Yield each task with the finding that `find` returns, or the exception that it raises."""
    for task in tasks:
        try:
            with task.log_context(), _translate_singular_matrices():
                outcome: Outcome = find(task)
        except FAILURES as error:
            outcome = error
        yield task, outcome


def single_update(transcript: Transcript, victim: int) -> Update:
    """Return the update of `victim` in the only round of `transcript`.

    Raises:
        AttackError: the transcript shows several rounds; or weights or a gradient are NaN or
            infinite.
    """
    if len(transcript.rounds) != 1:
        raise AttackError(
            f"this attack reads one update, the transcript shows rounds {transcript.rounds}; "
            "use transcript.restrict_to([r])"
        )
    update = transcript.update(transcript.rounds[0], victim)
    states = ((update.before, ""), (update.after, ""), (update.gradient or {}, "the gradient of "))
    for state, prefix in states:
        if broken := non_finite_names(state):
            raise AttackError(
                f"round {update.round}, client {victim}: {prefix}{broken[0]} holds NaN or infinite values; "
                "this update cannot be attacked, choose another round or victim"
            )
    return update


@contextmanager
def _translate_singular_matrices() -> Iterator[None]:
    """Raise AttackError in place of a library's error about a singular matrix."""
    try:
        yield
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise AttackError(
            "the update is too degenerate for this attack: a matrix computed from it is singular "
            f"({first_line(error)}); choose another round or victim"
        ) from error


def _ignore_progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    """Report nothing."""
