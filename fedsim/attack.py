"""The interface of an attack: what it needs to know, what it is given, what it returns.

An attack sees a `Transcript` and a `Knowledge`, nothing else. Ground truth lives in
`fedsim.evaluation.scoring`, which no attack may import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from fedsim.errors import AttackError, KnowledgeError, PluginError, did_you_mean
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import State, Update, non_finite

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Called as `progress(iteration, iterations, values)`; values hold at least `objective`."""


GLOBAL, LAST_RETURNED, OPTIMAL = "global", "last-returned", "optimal"
"""Model sources that are no attack: w_t of the last round, the victim's last w_T, and its optimal local model, which
only the evaluator has. What reads one of them counts as no attack of its own in a report."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records of the victim that the adversary knows.

    Attributes:
        inputs: `record feature` or `record channel height width`, in model units.
        labels: `record`, class indices, or targets of a regression.
    """

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class PartialRecords(Records):
    """Records of which one categorical column is not known.

    Attributes:
        inputs: `record feature`, in model units; zero at the column's features.
        column: its name.
        features: where its features are, one (0 or 1 in model units) a category.
        categories: what it may hold.
    """

    column: str
    features: slice
    categories: tuple[str, ...]

    def completed(self, category: int) -> Tensor:
        """`record feature`, as if the column held `category`, an index into `categories`, in all records."""
        inputs = self.inputs.clone()
        inputs[:, self.features.start + category] = 1
        return inputs


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What the threat model grants the adversary besides the messages. None means withheld, or not declared.

    Attributes:
        model: builds the architecture that the server broadcasts the weights of.
        loss: what clients minimise, `(logits, labels) -> mean loss`.
        input_shape: shape of one example, `channel height width`.
        num_classes: number of classes.
        value_range: lowest and highest possible value of an input, in the units the model is fed
            with: one pair, or one value a channel.
        input_mean: mean of the inputs in those units, 0 where clients standardise.
        input_std: standard deviation of the inputs in those units, 1 where clients standardise.
        learning_rate: step size of the clients' local training.
        local_epochs: E, passes of a client over its data in one round; 1 where it sends a gradient.
        local_steps: T, steps of a client in one round, where it takes a number of them instead of passes; whoever
            needs `local_epochs` makes do with it.
        batch_size: B, examples in one local step.
        optimizer: of the clients, `sgd`, `adam` or `adamw`.
        momentum: of their SGD.
        weight_decay: weight of the L2 penalty in their steps.
        proximal_mu: weight of FedProx's proximal term in their steps.
        labels: `example`, the victim's labels in ascending order; whoever cuts them into mini-batches shuffles them.
        records: the victim's records, for an attack that asks where they come from.
        partial_records: the victim's records without a sensitive attribute, for an attack that infers it.
        models: by client, what the attack named by `Attack.builds_on` claims to be its local model.
        device: where the attack computes.
    """

    model: Callable[[], nn.Module] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    value_range: tuple[Sequence[float], Sequence[float]] | None = None
    input_mean: Sequence[float] | None = None
    input_std: Sequence[float] | None = None
    learning_rate: float | None = None
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    proximal_mu: float | None = None
    labels: Tensor | None = None
    records: Records | None = None
    partial_records: PartialRecords | None = None
    models: Mapping[int, State] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def granted(self) -> list[str]:
        """Names of what is granted, in the order of the fields."""
        return [name for name in KNOWLEDGE if getattr(self, name) is not None]

    def only(self, names: Set[str]) -> Knowledge:
        """The same without what is granted but is not among `names`."""
        withheld: dict[str, Any] = {name: None for name in self.granted() if name not in names}
        return replace(self, **withheld)


KNOWLEDGE = tuple(item.name for item in fields(Knowledge) if item.name not in ("models", "device"))
"""Everything that a threat model can grant or withhold."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where a method was published; the report cites it."""

    title: str
    authors: str
    venue: str
    year: int
    url: str = ""

    def __str__(self) -> str:
        stop = "" if self.title.endswith("?") else "."
        return f"{self.authors}: {self.title}{stop} {self.venue}, {self.year}."


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Base of all attacks: a frozen dataclass whose fields are its hyperparameters.

    A subclass names its `paper`, what it `needs` and `uses`, and implements `_run`.

    Class attributes:
        paper: the publication that describes it.
        needs: names of `Knowledge` fields without which it cannot work.
        uses: names of further fields that it reads where they are granted. What it declares in neither is not handed
            to it, so that a report can say what it went by.
        temporal: whether one run reads several rounds of the victim; otherwise it reads one update.
        texts: whether it is made for texts, whose inputs are tokens, instead of data of numbers.
        main_metric: the metric of `scores.csv` that the report judges it by first of all; empty for the first one.
    """

    paper: ClassVar[Paper]
    needs: ClassVar[frozenset[str]] = frozenset()
    uses: ClassVar[frozenset[str]] = frozenset()
    temporal: ClassVar[bool] = False
    texts: ClassVar[bool] = False
    main_metric: ClassVar[str] = ""

    @property
    def builds_on(self) -> str | None:
        """The attack, by its title in the file, whose local models are in `knowledge.models`; or OPTIMAL, or None."""
        return None

    @property
    def called(self) -> str:
        """Its title in the user's file; without one, its class."""
        return str(vars(self).get("_title", type(self).__name__))

    def entitled(self, title: str) -> Self:
        """The same attack, which calls itself `title` in what it says."""
        named = copy(self)
        vars(named)["_title"] = title
        return named

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
        finding = self._run(transcript, knowledge.only(self.declared()), victim, rng, progress or _silent)
        if not isinstance(finding, Finding):
            got = type(finding).__name__
            raise AttackError(f"{self.called} returned {got}, expected a Finding")
        return finding

    @classmethod
    def declared(cls) -> frozenset[str]:
        """All that it reads of what is granted: what it needs and what it uses."""
        read = cls.needs | cls.uses
        return read | {"local_steps"} if "local_epochs" in read else read

    @final
    def check(self, knowledge: Knowledge, granted: Sequence[str] = ()) -> None:
        """Raise KnowledgeError unless `knowledge`, or what will be `granted`, covers `needs`."""
        for where in ("needs", "uses"):
            for name in sorted(getattr(self, where) - set(KNOWLEDGE)):
                raise PluginError(
                    f"{type(self).__name__}.{where}: '{name}' is nothing that can be known, "
                    f"{did_you_mean(name, KNOWLEDGE)}"
                )
        known = {*knowledge.granted(), *granted}
        missing = sorted(self.needs - known - ({"local_epochs"} if "local_steps" in known else set()))
        if missing:
            raise KnowledgeError(
                f"{self.called} needs {', '.join(missing)}, which the threat model withholds; "
                "grant it under [adversary.knowledge] or choose another attack"
            )

    @abstractmethod
    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding: ...


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


def _silent(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    """Report nothing."""
