"""The interface of an attack: the knowledge it needs, the target it gets, the finding it returns.

An attack sees a `Target`, nothing else. Ground truth lives in `fedsim.audit.evaluation.scoring`,
which no attack may import.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, final, get_args

import numpy as np
import torch

from fedsim.base.constraints import CheckedSettings
from fedsim.base.errors import (
    AttackError,
    KnowledgeError,
    PluginError,
    TranscriptError,
    did_you_mean,
    first_line,
)
from fedsim.base.papers import Paper
from fedsim.base.task import goal_of
from fedsim.interfaces.attack_warnings import warn
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.knowledge import (
    FACTS,
    Knowledge,
    KnownCandidates,
    KnownRows,
    PartialRecords,
    PropertyRecords,
    Records,
    describe_grants,
)
from fedsim.interfaces.target import Target, check_one_round
from fedsim.recording.wire_format import Update

__all__ = [
    "ALL",
    "CLIENT",
    "GLOBAL",
    "GROUP",
    "GROUPS",
    "LAST_RETURNED",
    "OPTIMAL",
    "Attack",
    "Knowledge",
    "KnownCandidates",
    "KnownRows",
    "MessageKind",
    "Outcome",
    "Paper",
    "PartialRecords",
    "Progress",
    "PropertyRecords",
    "Records",
    "RoundsNeeded",
    "Subject",
    "Target",
    "VictimTask",
    "warn",
]
"""The names that the author of an attack imports."""

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Callback `progress(iteration, iterations, values)`; values hold at least `objective`."""


CLIENT, GROUP, GROUPS = "client", "group", "groups"
"""Kinds of observations: the update of one client; the sum of the updates of a group of clients
(`Update.members`); such sums over groups that change from round to round, some of which contain the
victim."""
Subject = Literal["numbers", "texts", "trees", "answers", "embeddings", "embedding gradients"]
"""What an attack is made on, see `Attack`."""
_SUBJECTS = ", ".join(map(repr, get_args(Subject)))
_SUBJECTS_OF_OTHERS = {
    "trees": ("trees, and these clients train a network", "an app that trains trees"),
    "answers": ("answers to queries, and these clients train a network", "an app of federated analytics"),
    **dict.fromkeys(
        ("embeddings", "embedding gradients"),
        ("embeddings of split learning, and these clients send models", "a vertical federation"),
    ),
}
"""By the subject of an attack that no run of fedsim has, what it is, and whose recording has it."""
MessageKind = Literal["any", "weights", "gradient"]
"""What clients send: the weights after local training, or a gradient."""
RoundsNeeded = int | Literal["all"]
"""How many rounds of its victim an attack reads, see `Attack`."""
ALL: Literal["all"] = "all"
"""As many rounds as are to be attacked, at once."""
BASELINE_SOURCES = GLOBAL, LAST_RETURNED, OPTIMAL = "global", "last-returned", "optimal"
"""Sources of a victim's model that are no attack: w_t of the last round, the victim's last w_T, and
its optimal local model, which only the evaluator has. A report counts an attack that reads one of
them as a baseline."""


FAILURES = (Exception, SystemExit)
"""Exceptions of an attack on one victim after which the attacks on the other victims go on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VictimTask:
    """Target of one of several attacks that are made at once, and whom to tell of its progress.

    Attributes:
        target: see `Attack.run`, as for `progress`.
        log_context: makes a context manager that is entered while the attack works on this target
            only, so that each warning is logged for the right victim.
    """

    target: Target
    progress: Progress = lambda iteration, iterations, values: None
    log_context: Callable[[], AbstractContextManager[object]] = nullcontext


Outcome = Finding | BaseException
"""The finding of an attack, or the exception that it raised."""


@dataclass(frozen=True, kw_only=True)
class Attack(CheckedSettings, ABC):
    """Base of all attacks: a frozen dataclass whose fields are its hyperparameters.

    A subclass names its `paper`, declares in `needs`, `uses` and `rounds_needed` what it reads, and
    implements `_run(self, target, progress)`, which reads the `Target`, calls
    `progress(iteration, iterations, {"objective": ...})` now and then, and returns a `Finding`. One
    instance attacks all victims, so a subclass must not store state on `self`.

    Class attributes:
        paper: the publication that describes the attack.
        needs: names of `Knowledge` fields without which the attack cannot work.
        uses: names of further `Knowledge` fields that the attack reads where they are granted. All
            fields in neither set are None in the knowledge it gets, so that a report can say what
            it used. Where a setting asks for a further fact, `required_facts` adds it.
        reads: the kinds of observations that it can use, some of `CLIENT`, `GROUP` and `GROUPS`.
            With `GROUP`, the victim is the client under whose id the sum is recorded; N and B are
            totals of all members, and all rounds are of the same members. With `GROUPS`, the victim
            may be any member.
        rounds_needed: how many rounds of the victim one run reads: 1 is a single round, so that it
            is made on each round to be attacked by itself; `ALL` is all of these at once, and a
            larger number is all of them, too, but refused where the victim took part in fewer.
        clients_needed: how many clients the attacked rounds have to show, for an attack that compares its victim with
            others; where fewer can be recorded, it is refused.
        needs_num_examples: whether it reads N, so that it is refused where the threat model withholds it.
        needs_client_ids: whether an attack on several rounds joins them by the id of its victim, so that it is
            refused where clients have other pseudonyms in each round.
        subject: what it is made on: messages of a network that learns from `numbers` or `texts` (tokens), or in
            place of a network `trees` (one array of bytes) or `answers` to queries, as of federated analytics; in
            split learning `embeddings`, by the party with labels on those who send them, or `embedding gradients`,
            by such a party on labels.
        vector_targets: whether it takes targets that are several labels or numbers an example (`example target`) or
            masks (`example height width`); without this it is refused there, before it could take them for classes.
        main_metric: the column of `scores.csv` that the report ranks it by; empty for the first
            one.
    """

    paper: ClassVar[Paper]
    needs: ClassVar[frozenset[str]] = frozenset()
    uses: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUP})
    rounds_needed: ClassVar[RoundsNeeded] = 1
    clients_needed: ClassVar[int] = 1
    needs_num_examples: ClassVar[bool] = True
    needs_client_ids: ClassVar[bool] = True
    subject: ClassVar[Subject] = "numbers"
    vector_targets: ClassVar[bool] = False
    main_metric: ClassVar[str] = ""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _check_declarations(cls)

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
        """Return a copy for an adversary that knows the clients' defenses."""
        adaptive = self.with_title(title)
        vars(adaptive)["_adaptive"] = True
        return adaptive

    @property
    def required_facts(self) -> frozenset[str]:
        """Return the facts without which it cannot work as it is set: `needs`, and what a setting adds to them."""
        return self.needs

    @final
    def readable_facts(self) -> frozenset[str]:
        """Return the names of all facts that it reads as it is set: `declared_facts`, and what a setting adds."""
        return self.declared_facts() | self.required_facts

    @classmethod
    def reads_one_round(cls) -> bool:
        """Return whether it is made on each round by itself, and not on all of them at once."""
        return cls.rounds_needed == 1

    @property
    def message_kind(self) -> MessageKind:
        """Return what clients have to send so that it can be made as it is set."""
        return "any"

    def count_fewest_rounds(self, num_parameters: int | None) -> int:
        """Return how many rounds of its victim it needs at least as it is set.

        Args:
            num_parameters: of those that clients train and send; None where it is not known before any message.
        """
        del num_parameters
        return self.rounds_needed if isinstance(self.rounds_needed, int) else 1

    @final
    def run(self, target: Target, progress: Progress | None = None) -> Finding:
        """Attack a client using nothing but `target`, of whose knowledge it gets what it declares.

        Args:
            target: whom to attack, in which rounds, with which knowledge.
            progress: called after each iteration.

        Raises:
            KnowledgeError: something in `needs` is withheld; nothing was computed.
            AttackError: there are too few rounds or too many, and nothing was computed; or the
                update cannot be attacked, the attack diverged, or it claims nothing.
            TranscriptError: a round is damaged, or the victim is not in it.
        """
        declared_target = self._check_target(target)
        with _translate_singular_matrices():
            finding = self._run(declared_target, progress or _ignore_progress)
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
                    permitted = replace(task, target=self._check_target(task.target))
                except (KnowledgeError, AttackError, TranscriptError) as error:
                    refusals.append((task, error))
                    continue
                original_tasks[permitted] = task
                yield permitted

        for permitted, result in self._run_several(permitted_tasks()):
            try:
                outcome = result if isinstance(result, BaseException) else self._check_finding(result)
            except AttackError as error:
                outcome = error
            yield original_tasks.pop(permitted), outcome
        yield from refusals

    @classmethod
    def declared_facts(cls) -> frozenset[str]:
        """Return the names of all facts that it reads: `needs`, `uses`, and what they imply."""
        read = cls.needs | cls.uses
        implied = {"local_epochs": "local_steps", "loss": "label_smoothing"}
        return read | {implied_name for name, implied_name in implied.items() if name in read}

    @final
    def facts_to_grant(self) -> frozenset[str]:
        """Return the facts to grant it: all that it reads; `defenses` only if `adaptive`."""
        return self.readable_facts() - (frozenset() if self.adaptive else {"defenses"})

    @final
    def check_knowledge(self, knowledge: Knowledge, granted: Sequence[str] = ()) -> None:
        """Raise KnowledgeError unless `knowledge` and the facts to be `granted` cover `required_facts`."""
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
        missing = sorted(self.required_facts - known - replaceable)
        if missing:
            raise KnowledgeError(
                f"{self.title} needs {', '.join(missing)}, which the threat model withholds; "
                f"grant it under [adversary.knowledge]{describe_grants(missing)} or choose another attack"
            )

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse what is known before any message to be nothing that it can be made on; nothing by default.

        It is called before a federation runs, and `run` does not rely on it.

        Args:
            knowledge: what it is granted, without what is private to a victim.
            num_examples: the least N of the clients that may be attacked; None where it is not known yet.
            granted: names of the facts private to a victim that it will be granted besides, such as `labels`.

        Raises:
            AttackError: such as of a network of a form that it does not read, of too few auxiliary records, or of more
                examples than the network's first layer can distinguish.
        """
        del knowledge, num_examples, granted

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse messages of a form that it cannot be made on; nothing by default.

        It is called before a federation of fedsim runs, with a message as clients will send it, so that the code with
        which `_run` begins can read it; `run` does not rely on it. Nothing may be refused for its values, which are
        made up.

        Args:
            update: has names and shapes of the tensors to come, w_0, and the least N that may be attacked, or 1 where
                that is not known yet.
            knowledge: what it is granted; of what is private to a victim, `labels` and `private_parts` are made up
                where they will be granted, and everything else is left out.

        Raises:
            AttackError, KnowledgeError, TranscriptError: such as of an attack that needs a part of the model that
                clients do not send.
        """
        del update, knowledge

    def _check_target(self, target: Target) -> Target:
        """Check that knowledge and rounds suffice; return the target with the declared facts."""
        self.check_knowledge(target.knowledge)
        self.check_rounds(target)
        self._check_targets(target.knowledge)
        return replace(target, knowledge=target.knowledge.restrict_to(self.readable_facts()))

    def _check_targets(self, knowledge: Knowledge) -> None:
        """Raise KnowledgeError where targets are vectors, which it would take for classes."""
        if self.vector_targets:
            return
        labels = [knowledge.labels, *(records.labels for records in knowledge.tables.values())]
        has_one_label = knowledge.labels is not None and knowledge.labels.ndim == 1
        goal = goal_of(knowledge.loss)
        if goal == "masks":
            raise vector_target_error(self.title, "masks")
        if (goal == "labels" and not has_one_label) or any(values is not None and values.ndim > 1 for values in labels):
            raise vector_target_error(self.title, "several labels or numbers an example")

    @final
    def check_rounds(self, target: Target) -> None:
        """Check that the victim took part in as many rounds as `rounds_needed` says.

        Raises:
            AttackError: it took part in fewer, or there are several where one is read.
            TranscriptError: one of several rounds is damaged.
        """
        if self.reads_one_round():
            check_one_round(target.transcript)
            return
        rounds = target.participation_rounds(in_groups=GROUPS in self.accepted_observations)
        if self.rounds_needed != ALL and len(rounds) < self.rounds_needed:
            raise AttackError(
                f"client {target.victim}: took part in {len(rounds)} of the "
                f"{len(target.transcript.rounds)} rounds to be attacked, {self.title} needs at least "
                f"{self.rounds_needed}; record more, or attack more of them (adversary.rounds)"
            )

    def _check_finding(self, finding: object) -> Finding:
        if not isinstance(finding, Finding):
            got = type(finding).__name__
            raise AttackError(f"{self.title} returned {got}, expected a Finding")
        return finding

    @abstractmethod
    def _run(self, target: Target, progress: Progress) -> Finding: ...

    def _run_several(self, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Attack one victim after the other; subclasses that can attack a batch override it."""

        def run_task(task: VictimTask) -> Finding:
            return self._run(task.target, task.progress)

        return run_sequentially(tasks, run_task)


def vector_target_error(title: str, goal: str) -> KnowledgeError:
    """Return the error that refuses an attack whose targets are vectors, which it does not take."""
    return KnowledgeError(
        f"{title} takes one class or one number an example, and what is learned here is {goal}; choose another attack, "
        "as inverting-gradients, analytic or membership-loss"
    )


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


def _check_declarations(cls: type[Attack]) -> None:
    """Refuse a class of attacks whose hook or rounds are not declared as `Attack` says.

    Raises:
        PluginError: `_run` cannot be called with a target, `subject` is none that there is, or `rounds_needed` is no
            number of rounds; for an attack that would be made on other data or rounds than its author meant.
    """
    if cls.subject not in get_args(Subject):
        raise PluginError(f"{cls.__name__}.subject: expected one of {_SUBJECTS}, got {cls.subject!r}")
    needed = vars(cls).get("rounds_needed", 1)
    if needed != ALL and (type(needed) is not int or needed < 1):
        raise PluginError(f"{cls.__name__}.rounds_needed: expected 1, a larger number or '{ALL}', got {needed!r}")
    hook = vars(cls).get("_run")
    if not inspect.isfunction(hook):
        return
    parameters = inspect.signature(hook)
    try:
        parameters.bind("self", "target", "progress")
    except TypeError as error:
        raise PluginError(
            f"{cls.__name__}._run: expected (self, target, progress), got "
            f"({', '.join(parameters.parameters)}); target is a fedsim.Target, which has the transcript, the "
            "knowledge, the victim and rng"
        ) from error


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


def check_subject(title: str, attack: Attack) -> None:
    """Raise KnowledgeError where an attack is not on clients that train a network and send its weights or gradients."""
    if attack.subject in _SUBJECTS_OF_OTHERS:
        subject, remedy = _SUBJECTS_OF_OTHERS[attack.subject]
        raise KnowledgeError(f"{title} is an attack on {subject}; choose another attack, or the recording of {remedy}")


def _ignore_progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    """Report nothing."""
