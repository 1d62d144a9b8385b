"""Each check of the contract fails where a plug-in breaks what it asks for, and says how."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from annotated_types import Lt, MinLen
from flwr.app import Array, ArrayRecord, Error, Message, MessageType
from flwr.serverapp.strategy import FedAvg
from markupsafe import Markup
from torch import nn

import fedsim.federation.engines.cohort
from fedsim.audit.evaluation.evaluator import Evaluator, Judgement
from fedsim.base.constraints import PositiveInt, PositiveShareBelowOne, Share
from fedsim.base.errors import AttackError, ConfigError, PluginError, RunError
from fedsim.contract import attacks, common, datasets, defenses, engines, measures, models, panels, partitions
from fedsim.contract import findings as kinds
from fedsim.contract import strategies as strategy_checks
from fedsim.contract.checks import Check, CheckedPlugin, CheckResult, run_check, run_checks
from fedsim.contract.common import find_violations, keeps_to_its_ranges
from fedsim.data import Dataset, Examples
from fedsim.exposure.measure import Measure
from fedsim.federation.engines.cohort import ORDER_RECORD
from fedsim.federation.engines.engine import Engine, FederationJob
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.interfaces.attack import Attack, Knowledge, Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation
from fedsim.interfaces.findings import Membership, Reconstruction
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts
from fedsim.interfaces.panel import Panel
from fedsim.plugins import registry
from fedsim.recording.wire_format import State, Update
from fedsim.report.reported_run import ReportedRun
from tests.support import checked_classes

PAPER = Paper(title="An example", authors="Nobody", venue="nowhere", year=2026)


@dataclass(frozen=True, kw_only=True)
class Fine(Attack):
    """Claim grey images.

    Args:
        level: how grey, in [0, 1].

    References:
        Nobody.
    """

    level: Share = 0.5
    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset({"input_shape"})

    def _run(self, target: Any, progress: Any) -> Any:
        count = target.read_update().num_examples
        progress(1, 1, {"objective": 0.0})
        data = torch.full((count, *target.knowledge.input_shape), self.level)
        return Reconstruction(data=self.spoil(data, target), labels=torch.zeros(count).long())

    def spoil(self, data: Any, target: Any) -> Any:
        return data


@dataclass(frozen=True, kw_only=True)
class DrawsGlobally(Fine):
    """Draw from torch's own generator."""

    def spoil(self, data: Any, target: Any) -> Any:
        return torch.rand(data.shape)


@dataclass(frozen=True, kw_only=True)
class Reseeds(Fine):
    """Seed Python's generator."""

    def spoil(self, data: Any, target: Any) -> Any:
        random.seed(1)
        return data


@dataclass(frozen=True, kw_only=True)
class NeedsMore(Fine):
    """Declare too little."""

    needs: ClassVar[frozenset[str]] = frozenset()
    uses: ClassVar[frozenset[str]] = frozenset({"input_shape"})

    def spoil(self, data: Any, target: Any) -> Any:
        return data

    def _run(self, target: Any, progress: Any) -> Any:
        if target.knowledge.input_shape is None:
            raise AttackError("no shape is known")
        return super()._run(target, progress)


@dataclass(frozen=True, kw_only=True)
class UsesNothing(Fine):
    """Declare to use what is never read."""

    uses: ClassVar[frozenset[str]] = frozenset({"labels"})


@dataclass(frozen=True, kw_only=True)
class ReadsMore(Fine):
    """Read what it did not declare."""

    def spoil(self, data: Any, target: Any) -> Any:
        return data if target.knowledge.labels is None else data / 2


@dataclass(frozen=True, kw_only=True)
class Spoils(Fine):
    """Change the records that it is given."""

    needs: ClassVar[frozenset[str]] = frozenset({"input_shape", "records"})

    def spoil(self, data: Any, target: Any) -> Any:
        target.knowledge.records.inputs.mul_(0.5)
        return data


@dataclass(frozen=True, kw_only=True)
class Turns(Fine):
    """Change which of the known candidates are members."""

    needs: ClassVar[frozenset[str]] = frozenset({"input_shape", "known_candidates"})

    def spoil(self, data: Any, target: Any) -> Any:
        target.knowledge.known_candidates.members.logical_not_()
        return data


@dataclass(frozen=True, kw_only=True)
class Silent(Fine):
    """Never report progress."""

    def _run(self, target: Any, progress: Any) -> Any:
        return super()._run(target, lambda *_: None)


@dataclass(frozen=True, kw_only=True)
class WrongShape(Fine):
    """Claim images of another shape."""

    def spoil(self, data: Any, target: Any) -> Any:
        return data[..., :4]


@dataclass(frozen=True, kw_only=True)
class Crashes(Fine):
    """Divide by zero."""

    def spoil(self, data: Any, target: Any) -> Any:
        return 1 / 0


@dataclass(frozen=True, kw_only=True)
class Leaves(Fine):
    """End the program."""

    def spoil(self, data: Any, target: Any) -> Any:
        raise SystemExit(0)


@dataclass(frozen=True, kw_only=True)
class TakesNothing(Fine):
    """Refuse every update."""

    def _run(self, target: Any, progress: Any) -> Any:
        raise AttackError("this update is not for me")


@dataclass(frozen=True, kw_only=True)
class ClaimsInputs(Fine):
    """Claim images in the units of the model."""

    needs: ClassVar[frozenset[str]] = frozenset({"input_shape", "value_range"})

    def spoil(self, data: Any, target: Any) -> Any:
        return torch.full_like(data, target.knowledge.value_range[1][0])


@dataclass(frozen=True, kw_only=True)
class ClaimsWrongly(Fine):
    """Claim scores that are no tensor, of classes alone."""

    needs: ClassVar[frozenset[str]] = frozenset({"candidates"})

    def _run(self, target: Any, progress: Any) -> Any:
        torch.eye(10)[target.knowledge.candidates.labels]
        return Membership(scores=np.zeros(2))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class WantsTheSecret(Fine):
    """Need what is nothing."""

    needs: ClassVar[frozenset[str]] = frozenset({"truth"})


class RefusesAll(Fine):
    """Refuses each message before a federation runs, and works on it."""

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        raise AttackError("no message is good")


@dataclass(frozen=True, kw_only=True)
class ChecksNothing(Fine):
    """Run without asking whether it may."""

    def run(self, *given: Any, **named: Any) -> Any:  # type: ignore[misc]
        return None


@dataclass
class Thawed:
    """Is not frozen."""

    def run(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Forgets(Fine):
    """Is not equal to its copies."""

    token: Any = field(default_factory=object)


@dataclass(frozen=True, kw_only=True)
class Unexplained(Fine):
    """Explain no setting of its own.

    References:
        Nobody.
    """

    further: int = 1


@dataclass(frozen=True, kw_only=True)
class SkipsRanges(Fine):
    """Check settings against each other, and forget the check of each."""

    first: tuple[PositiveInt, ...] | None = None
    last: int = 2

    def __post_init__(self) -> None:
        if self.first is not None and max(self.first) > self.last:
            raise ConfigError("first: expected less than last")


@dataclass(frozen=True, kw_only=True)
class ForgetsNaN:
    """Images that check the ends of a range, and NaN only for a setting of a longer name."""

    share: Share = 0.5
    share_of_all: float = 0.5

    def __post_init__(self) -> None:
        if self.share < 0 or self.share > 1:
            raise ConfigError("share: expected 0 to 1")
        if self.share != self.share:
            raise ConfigError("share_of_all: expected more than share")

    def load(self, folder: Path | None) -> Dataset:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PlainDots:
    """Black images, of a class that checks nothing."""

    test_fraction: PositiveShareBelowOne = 0.5

    def load(self, folder: Path | None) -> Dataset:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Halves(Defense):
    """Send half of the update."""

    paper: ClassVar[Paper] = PAPER

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return {name: tensor / 2 for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class Identity(Defense):
    """Do nothing."""

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return update


@dataclass(frozen=True, kw_only=True)
class ActsLonger(Halves):
    """Act on, after the rounds in which it says that it does."""

    def acts_in(self, number: int) -> bool:
        return number <= 2


@dataclass(frozen=True, kw_only=True)
class SamplesOddly(Halves):
    """Ask for sampling that there is not."""

    def sampling(self, num_examples: int, batch_size: int) -> Any:
        return 0.5


@dataclass(frozen=True, kw_only=True)
class NoHook(Defense):
    """Override nothing."""


@dataclass(frozen=True, kw_only=True)
class NoisyDefense(Defense):
    """Draw from torch's own generator."""

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return {name: tensor + torch.randn(tensor.shape) for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class DividesByNorm(Defense):
    """Divide by a norm that may be zero."""

    def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
        return {name: tensor / tensor.norm() for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class ShortensOtherwise(Defense):
    """Cut gradients in half where they are shown, and say of their factors that they stay as they are."""

    def on_examples(self, gradients: Any, expected: float, context: LocalContext) -> Any:
        return {name: each.sum(0) / (2 * expected) for name, each in gradients.items()}

    def example_factors(self, norms: Any) -> Any:
        return torch.ones_like(norms)

    def on_sum(self, total: Any, expected: float, context: LocalContext) -> Any:
        return {name: tensor / expected for name, tensor in total.items()}


_SEEN: list[int] = []


@dataclass(frozen=True, kw_only=True)
class KeepsElsewhere(Defense):
    """Keep something outside its memory."""

    def on_update(self, update: Any, context: LocalContext) -> Any:
        _SEEN.append(1)
        return {name: tensor * len(_SEEN) for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class PromisesLess(Halves):
    """Promise more with every round."""

    def guarantee(self, participation: Participation, delta: float) -> Guarantee:
        return Guarantee(epsilon=1 / participation.rounds, delta=delta, neighbours="none", accountant="none")


@dataclass(frozen=True, kw_only=True)
class KnowsNoiseOfAnother(Halves):
    """Model the noise of a tensor that no message has."""

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise:
        return MessageNoise(deviations={"another": torch.ones(2)})


@dataclass(frozen=True, kw_only=True)
class SeesSigns(Halves):
    """Show an adversary the signs alone, which cannot be differentiated."""

    def adversary_view(self, gradient: State, sent: State) -> State:
        return {name: tensor.sign() for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class SeesNoise(Halves):
    """Show an adversary noise of its own."""

    def adversary_view(self, gradient: State, sent: State) -> State:
        return {name: tensor + torch.randn(tensor.shape) for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class SeesLess(Halves):
    """Show an adversary one tensor."""

    def adversary_view(self, gradient: State, sent: State) -> State:
        return dict(list(gradient.items())[:1])


@dataclass(frozen=True, kw_only=True)
class SeesFlat(Halves):
    """Show an adversary tensors without their axes."""

    def adversary_view(self, gradient: State, sent: State) -> State:
        return {name: tensor.flatten() for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class SeesLengths(Halves):
    """Show an adversary directions, of zeros too."""

    def adversary_view(self, gradient: State, sent: State) -> State:
        return {name: tensor / tensor.norm() for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class SeesInPlace(Halves):
    """Halve what an adversary hands it."""

    def adversary_view(self, gradient: State, sent: State) -> State:
        return {name: tensor.mul_(0.5) for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class Mixes(Halves):
    """Say that an adversary has one mixture of all records."""

    mixes: ClassVar[bool] = True

    def on_batch(self, inputs: Any, labels: Any, context: LocalContext) -> Any:
        return inputs.flip(0), labels.flip(0)

    def adversary_batch(self, inputs: Any, labels: Any) -> Any:
        return inputs.mean(0, keepdim=True), labels.mean(0, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class MixesLabelsTwice(Mixes):
    """Say that an adversary has labels that are no probabilities."""

    def adversary_batch(self, inputs: Any, labels: Any) -> Any:
        return inputs, labels + labels.roll(1, 0)


@dataclass(frozen=True, kw_only=True)
class MixesDetached(Mixes):
    """Say that an adversary has mixtures that do not change with the records."""

    def adversary_batch(self, inputs: Any, labels: Any) -> Any:
        return inputs.detach(), labels


@dataclass(frozen=True, kw_only=True)
class MixesInSilence(Halves):
    """Make one example of each two neighbours, and say that examples stay records."""

    def on_batch(self, inputs: Any, labels: Any, context: LocalContext) -> Any:
        return inputs[: len(inputs) // 2 * 2].unflatten(0, (-1, 2)).mean(1), labels[: len(labels) // 2]


@dataclass(frozen=True, kw_only=True)
class Remembers(Defense):
    """Add what was sent before, from the second round on."""

    paper: ClassVar[Paper] = PAPER

    def on_update(self, update: Any, context: LocalContext) -> Any:
        sent = {name: tensor + context.memory.get(name, 0) for name, tensor in update.items()}
        context.memory.update(sent)
        return sent


@dataclass(frozen=True, kw_only=True)
class PullsBack(Defense):
    """Pull the weights of local training to w_t."""

    def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
        pull = {name: weights - context.broadcast[name] for name, weights in context.weights.items()}
        return {name: tensor + pull[name] for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class PrunesLeast(Defense):
    """Prune the features that change least with the inputs, over their size."""

    def on_features(self, features: Any, inputs: Any, context: LocalContext) -> Any:
        shares = torch.zeros(features.shape[1])
        for index in range(features.shape[1]):
            (slopes,) = torch.autograd.grad(features[:, index].sum(), inputs, retain_graph=True)
            shares[index] = (slopes.flatten(1).norm(dim=1) / (features[:, index] + 1e-9)).sum()
        return features * (shares.abs() >= shares.quantile(0.4))


@dataclass(frozen=True, kw_only=True)
class ProvesOneRound(Defense):
    """Add noise in each round, and prove something of one of them."""

    promise: ClassVar[str] = "an epsilon"

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return {name: tensor + torch.randn(tensor.shape, generator=context.rng) for name, tensor in update.items()}

    def guarantee(self, participation: Participation, delta: float) -> Guarantee:
        return Guarantee(epsilon=0.97, delta=delta, neighbours="any", accountant="none")


@dataclass(frozen=True, kw_only=True)
class Cools(ProvesOneRound):
    """Add less noise from round to round of the federation."""

    def count_rounds(self, context: LocalContext) -> int:
        return context.round

    def on_update(self, update: Any, context: LocalContext) -> Any:
        scale = 0.9 ** self.count_rounds(context)
        return {name: t + scale * torch.randn(t.shape, generator=context.rng) for name, t in update.items()}

    def guarantee(self, participation: Participation, delta: float) -> Guarantee:
        epsilon = sum(0.9**-number for number in range(participation.rounds))
        return Guarantee(epsilon=epsilon, delta=delta, neighbours="any", accountant="none")


@dataclass(frozen=True, kw_only=True)
class CoolsByItsOwnRounds(Cools):
    """Add less noise from round to round of the client."""

    def count_rounds(self, context: LocalContext) -> int:
        context.memory["rounds"] = context.memory.get("rounds", torch.zeros(1)) + 1
        return int(context.memory["rounds"])


@dataclass(frozen=True, kw_only=True)
class KeepsToATotal(ProvesOneRound):
    """Add noise that follows from an epsilon of all rounds together."""

    noise: float = 1.0

    def of_client(self, participation: Participation) -> Defense:
        return replace(self, noise=float(participation.rounds) ** 0.5)

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return {
            name: tensor + self.noise * torch.randn(tensor.shape, generator=context.rng)
            for name, tensor in update.items()
        }


@dataclass(frozen=True, kw_only=True)
class ProvesItsSilence(Defense):
    """Send nothing, round after round, which reveals no more in many rounds."""

    promise: ClassVar[str] = "an epsilon"

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return {name: tensor * 0 for name, tensor in update.items()}

    def guarantee(self, participation: Participation, delta: float) -> Guarantee:
        return Guarantee(epsilon=0.97, delta=delta, neighbours="any", accountant="none")


@dataclass(frozen=True, kw_only=True)
class ProvesInSilence(Halves):
    """Have a guarantee, and say that there is none."""

    def guarantee(self, participation: Participation, delta: float) -> Guarantee:
        return Guarantee(epsilon=1.0, delta=delta, neighbours="none", accountant="none")


@dataclass(frozen=True, kw_only=True)
class SaysTooMuch(Halves):
    """Say that something is proved."""

    promise: ClassVar[str] = "perfect secrecy"


@dataclass(frozen=True, kw_only=True)
class ChoosesByMask(Halves):
    """Choose examples by a mask, where places are expected."""

    def on_data(self, local: Any, context: LocalContext) -> Any:
        return torch.rand(len(local.labels), generator=context.rng) < 0.5


@dataclass(frozen=True, kw_only=True)
class Breaks(Defense):
    """Return another shape."""

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return {name: tensor[:1] for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Two classes of numbers.

    Args:
        shuffled: draw them anew each time.
        labels: most of them.
        level: highest input.
        licence: of use.
        modality: kind of the examples.
    """

    shuffled: bool = False
    labels: int = 1
    level: float = 1.0
    licence: str = "none"
    modality: str = "table"

    def load(self, folder: Path | None) -> Dataset:
        raw = torch.linspace(0, self.level, 20)[:, None].repeat(1, 2)
        raw = raw[torch.randperm(20)] if self.shuffled else raw
        examples = Examples(raw=raw, labels=torch.arange(20) % (self.labels + 1), scale=1.0)
        return Dataset(
            name="dots",
            train=examples,
            test=examples,
            num_classes=2,
            source="here",
            licence=self.licence,
            modality=self.modality,
        )


@dataclass(frozen=True, kw_only=True)
class Nowhere(Dots):
    """Its files are missing."""

    def load(self, folder: Path | None) -> Dataset:
        raise ConfigError("data: its file is missing")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Cut the data into shares.

    Args:
        ways: how it goes wrong.
    """

    ways: str = ""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Any]:
        order = np.random.permutation(200) if self.ways == "global" else rng.permutation(200)  # noqa: NPY002
        shares = list(np.array_split(order, clients))
        if self.ways == "twice":
            shares[0] = np.append(shares[0], shares[0][:1])
        if self.ways == "shared":
            shares[0] = np.append(shares[0], shares[1][:1])
        return shares[1:] if self.ways == "few" else shares


@dataclass(frozen=True, kw_only=True)
class Net:
    """A layer.

    Args:
        way: how it goes wrong.
    """

    way: str = ""

    def build(self, task: Any) -> Any:
        if task.modality != "table":
            raise ConfigError(
                "no" if self.way == "rude" else f"model: net takes rows, got {task.modality}s; choose mlp"
            )
        net = nn.Linear(task.input_shape[0], task.outputs)
        if self.way == "unseeded":
            _SEEN.append(1)
            nn.init.constant_(net.weight, len(_SEEN))
        if self.way == "unused":
            net.idle = nn.Linear(1, 1)
        if self.way == "infinite":
            nn.init.constant_(net.bias, float("inf"))
        return "a network" if self.way == "text" else net


@dataclass(frozen=True, kw_only=True)
class Mean(Measure):
    """Mean of the inputs, or something worse.

    Args:
        way: how it goes wrong.
    """

    way: str = ""
    quantities = {"mean": "more"}  # noqa: RUF012

    def _compute(self, sent: Any) -> Any:
        if self.way == "nan":
            return {"mean": torch.tensor(torch.nan)}
        if self.way == "changing":
            _SEEN.append(1)
            return {"mean": torch.tensor(float(len(_SEEN)))}
        value = sent.unknown_inputs.mean()
        if self.way == "moving":
            sent.inputs.add_(1)
        if self.way == "training":
            next(sent.model.parameters()).data.add_(1)
        return {"high" if self.way == "text" else "mean": value if self.way != "moving" else torch.tensor(1.0)}


class Peeks(Mean):
    """It differentiates, though it says that it does not."""

    black_box = True

    def _compute(self, sent: Any) -> Any:
        return {"mean": sent.jacobian.pull_back(sent.vector).norm()}


class Mute(Mean):
    """It does not say what its value means."""

    quantities = {"mean": "perhaps"}  # noqa: RUF012


@dataclass(frozen=True)
class Odd(Evaluator[Reconstruction]):
    """Judge what is of another kind."""

    finding = Reconstruction

    def check_form(self, finding: Any, spec: Any) -> None: ...

    def judge(self, finding: Any) -> Judgement:  # type: ignore[override]
        return Judgement()


class Nothing:
    """No strategy and no measure, but by its methods."""

    def aggregate_train(self) -> None: ...

    def compute(self) -> None: ...


class Stuck(FedAvg):
    """Send the first model again and again."""

    sends = "postcards"

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.first = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return self.first, super().aggregate_train(server_round, replies)[1]


class Wanders(FedAvg):
    """Add what comes from nowhere."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        _SEEN.append(1)
        return ArrayRecord({name: Array(array.numpy() + len(_SEEN)) for name, array in arrays.items()}), metrics


@dataclass(frozen=True, kw_only=True)
class WrongSeed(Engine):
    """Carry another experiment than the one it is given."""

    def carry(self, job: FederationJob) -> None:
        federation = job.config.federation.model_copy(update={"seed": 99})
        other = replace(job, config=job.config.model_copy(update={"federation": federation}))
        other.run_rounds(InProcessGrid(job.client_app))


@dataclass(frozen=True, kw_only=True)
class LeavesThread(Engine):
    """Go away while a thread of it still works."""

    def carry(self, job: FederationJob) -> None:
        job.run_rounds(InProcessGrid(job.client_app))
        threading.Thread(target=time.sleep, args=(2,), name="straggler").start()


@dataclass(frozen=True, kw_only=True)
class Hushes(Engine):
    """End well whatever happened."""

    def carry(self, job: FederationJob) -> None:
        with contextlib.suppress(RunError):
            job.run_rounds(InProcessGrid(job.client_app))


class Drops(InProcessGrid):
    """Lose what clients say of the model."""

    def answer_message(self, message: Message) -> Message:
        reply = super().answer_message(message)
        order = message.content.get(ORDER_RECORD, {"message-type": ""})
        is_evaluation = str(order["message-type"]).startswith(MessageType.EVALUATE)
        return Message(Error(code=1, reason="lost"), reply_to=message) if is_evaluation else reply


@dataclass(frozen=True, kw_only=True)
class LosesEvaluation(Engine):
    """Carry all but what clients say of the model."""

    def carry(self, job: FederationJob) -> None:
        job.run_rounds(Drops(job.client_app))


class Carries:
    """Have the method of an engine, and be none."""

    def carry(self, job: FederationJob) -> None:
        raise AssertionError


class SortsScores(Panel):
    """Bring the scores into an order of its own, for all panels after it.

    References:
        Nobody.
    """

    title = "Order"

    def render(self, run: ReportedRun) -> str | None:
        run.scores.sort(key=lambda row: row["value"])  # type: ignore[attr-defined]
        for row in run.scores:
            row["missing"] = ""  # type: ignore[index]
        return None


class NamesRun(Panel):
    """Say which run it is.

    References:
        Nobody.
    """

    title = "Name"

    def render(self, run: ReportedRun) -> str | None:
        return Markup("<p>{}</p>").format(run.name)


class RawName(Panel):
    """Take the name of a run for HTML."""

    title = "Name"

    def render(self, run: ReportedRun) -> str | None:
        return Markup(f"<p>{run.name}</p>")


class Throws(Panel):
    """Throw dice."""

    title = "Dice"

    def render(self, run: ReportedRun) -> str | None:
        return str(random.random())


class AddsNotes(Panel):
    """Change the run."""

    title = "Notes"

    def render(self, run: ReportedRun) -> str | None:
        run.notes.append("seen")
        return str(len(run.notes))


class CountsCalls(Panel):
    """Count on."""

    title = "Count"

    def render(self, run: ReportedRun) -> str | None:
        _SEEN.append(1)
        return str(len(_SEEN))


class WritesFile(Panel):
    """Leave a file in the run folder."""

    title = "File"

    def render(self, run: ReportedRun) -> str | None:
        (run.folder.path / "panel.txt").write_text("here")
        return None


class ReturnsNumber(Panel):
    """Return no text."""

    title = "Number"

    def render(self, run: ReportedRun) -> str | None:
        return 3  # type: ignore[return-value]


@dataclass(frozen=True)
class HasSettings(Panel):
    """Ask for what no file can say."""

    title: ClassVar[str] = "Settings"
    size: int = 3

    def render(self, run: ReportedRun) -> str | None:
        return None


class Renders:
    """Have the method of a panel, and be none."""

    def render(self, run: ReportedRun) -> str | None:
        raise AssertionError


@pytest.fixture
def check_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CheckResult]:
    """What a check says of a class of this module."""
    # A node that failed is asked again at once.
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_PAUSES", (0.0, 0.0))

    def check(asked: Check, group: registry.Group, cls: type, **settings: Any) -> CheckResult:
        return checked_classes.check_class(asked, group, cls, tmp_path, **settings)

    return check


BROKEN: list[tuple[Check, registry.Group, type, dict[str, Any], str]] = [
    (common.is_made, "attacks", Fine, {"levle": 1}, "unknown setting"),
    (common.is_a_frozen_dataclass, "attacks", Thawed, {}, "Thawed is not frozen"),
    (keeps_to_its_ranges, "attacks", SkipsRanges, {}, r"setting 'level' accepts -1; derive the class from"),
    (keeps_to_its_ranges, "datasets", ForgetsNaN, {}, r"setting 'share' accepts nan; derive the class from"),
    (keeps_to_its_ranges, "datasets", PlainDots, {}, r"setting 'test_fraction' accepts -1; derive .*CheckedSettings"),
    (common.survives_copying, "attacks", Forgets, {}, "are not equal"),
    (common.is_documented, "attacks", Unexplained, {}, "does not explain the setting 'further'"),
    (common.is_documented, "attacks", Reseeds, {}, "has no part 'References:'"),
    (attacks.is_an_attack, "attacks", WantsTheSecret, {}, "to read 'truth', which is nothing that can be known"),
    (
        attacks.finishes_tiny_case,
        "attacks",
        WrongShape,
        {},
        r"claims examples of shape \(1, 8, 4\), expected \(1, 8, 8\)",
    ),
    (
        attacks.finishes_tiny_case,
        "attacks",
        Crashes,
        {},
        r"ZeroDivisionError: division by zero \(.*test_checks.py:\d+\)",
    ),
    (attacks.finishes_tiny_case, "attacks", Leaves, {}, r"it called sys.exit\(0\)"),
    (attacks.is_deterministic, "attacks", DrawsGlobally, {}, "draw from 'rng' alone"),
    (attacks.leaves_the_global_generators, "attacks", Reseeds, {}, "it draws from Python's global generator"),
    (attacks.needs_are_enough, "attacks", NeedsMore, {}, "and nothing else it does not work: no shape is known"),
    (attacks.reads_what_it_declares, "attacks", UsesNothing, {}, "it declares to use labels, and reads nothing"),
    (attacks.reads_what_it_declares, "attacks", ReadsMore, {}, "changes with knowledge that it does not declare"),
    (attacks.leaves_arguments_unchanged, "attacks", Spoils, {}, r"it changes the records.inputs"),
    (attacks.leaves_arguments_unchanged, "attacks", Turns, {}, r"it changes the known_candidates.members"),
    (attacks.reports_progress, "attacks", Silent, {}, "it never calls 'progress'"),
    (defenses.is_a_defense, "defenses", NoHook, {}, "overrides none of"),
    (defenses.has_an_effect, "defenses", Identity, {}, "it changes nothing"),
    (defenses.acts_in_its_rounds_alone, "defenses", ActsLonger, {}, "changes something in round 3, in which acts_in"),
    (defenses.draws_from_its_generator, "defenses", NoisyDefense, {}, "torch's global generator"),
    (defenses.hooks_return_valid_tensors, "defenses", DividesByNorm, {}, "on_gradient makes NaN or infinite"),
    (defenses.hooks_return_valid_tensors, "defenses", ChoosesByMask, {}, "expected ascending places of examples"),
    (defenses.hooks_return_valid_tensors, "defenses", Breaks, {}, "expected 'a' as a floating tensor of shape"),
    (defenses.keeps_state_in_memory_only, "defenses", KeepsElsewhere, {}, "so it keeps something elsewhere"),
    (
        defenses.ghost_clipping_matches_examples,
        "defenses",
        ShortensOtherwise,
        {},
        "make another gradient than on_examples",
    ),
    (defenses.guarantee_is_valid, "defenses", PromisesLess, {}, "epsilon falls"),
    (defenses.guarantee_is_valid, "defenses", ProvesOneRound, {}, "epsilon = 0.97 for 10 rounds as for 20, and draws"),
    (
        defenses.noise_holds_in_any_round,
        "defenses",
        Cools,
        {},
        "times the noise of round 1 in round 100, where a client",
    ),
    (defenses.mixing_is_declared, "defenses", MixesInSilence, {}, "mixes 2 records into an example; set mixes = True"),
    (defenses.adversary_batch_is_valid, "defenses", Mixes, {}, "expected the shapes that it was given"),
    (defenses.adversary_batch_is_valid, "defenses", MixesLabelsTwice, {}, "labels that are not probabilities"),
    (defenses.adversary_batch_is_valid, "defenses", MixesDetached, {}, "does not change with the records"),
    (defenses.message_noise_is_valid, "defenses", KnowsNoiseOfAnother, {}, "describes 'another' in another shape"),
    (defenses.adversary_view_is_valid, "defenses", SeesSigns, {}, "does not change with the gradient"),
    (defenses.adversary_view_is_valid, "defenses", SeesNoise, {}, "it draws from torch's global generator"),
    (defenses.adversary_view_is_valid, "defenses", SeesLess, {}, "something else than a tensor for each name"),
    (defenses.adversary_view_is_valid, "defenses", SeesFlat, {}, "expected shape"),
    (defenses.adversary_view_is_valid, "defenses", SeesLengths, {}, "NaN or infinite values"),
    (defenses.adversary_view_is_valid, "defenses", SeesInPlace, {}, "adversary_view changes its arguments"),
    (defenses.guarantee_is_valid, "defenses", ProvesInSilence, {}, "declares none; set 'promise'"),
    (defenses.guarantee_is_valid, "defenses", SaysTooMuch, {}, "overrides no 'guarantee'"),
    (defenses.client_can_train, "defenses", Breaks, {}, "expected 'network.1.weight'|floating tensor of shape"),
    (datasets.inputs_are_in_their_range, "datasets", Dots, {"level": 2.0}, "go from 0.0 to 2.0"),
    (datasets.fits_its_modality, "datasets", Dots, {"modality": "series"}, "modality 'series' has the axes channel"),
    (datasets.labels_fit, "datasets", Dots, {"labels": 4}, "labels go from 0 to 4, expected several from 0 to 1"),
    (datasets.is_deterministic, "datasets", Dots, {"shuffled": True}, "global generator|in another order"),
    (partitions.gives_each_client_its_examples, "partitions", Cut, {"ways": "few"}, "for 5 clients it gives 4"),
    (partitions.gives_each_client_its_examples, "partitions", Cut, {"ways": "twice"}, "holds an example twice"),
    (partitions.gives_no_example_twice, "partitions", Cut, {"ways": "shared"}, "two clients hold the same"),
    (partitions.draws_from_its_generator, "partitions", Cut, {"ways": "global"}, "global generator"),
    (models.explains_refusals, "models", Net, {"way": "rude"}, "it refuses a task with 'no'"),
    (models.learns_its_tasks, "models", Net, {"way": "unused"}, "'idle.weight' has no gradient"),
    (models.learns_its_tasks, "models", Net, {"way": "text"}, "build returns a str"),
    (models.weights_are_floats, "models", Net, {"way": "infinite"}, "'bias' is NaN or infinite"),
    (models.is_deterministic, "models", Net, {"way": "unseeded"}, "'weight' has other weights"),
    (measures.gives_values, "measures", Mean, {"way": "nan"}, "undefined"),
    (measures.gives_values, "measures", Mean, {"way": "text"}, "expected the quantities mean, got high"),
    (measures.explains_its_quantities, "measures", Mute, {}, "each with 'more' or 'less'"),
    (measures.is_a_pure_function, "measures", Mean, {"way": "changing"}, "of the same batch it gives something else"),
    (measures.is_a_pure_function, "measures", Mean, {"way": "moving"}, "it changes the batch"),
    (measures.is_a_pure_function, "measures", Mean, {"way": "training"}, "it changes the model"),
    (kinds.is_an_evaluator, "findings", Odd, {}, "'judge' cannot be called as judge"),
    (kinds.is_of_a_finding, "findings", Odd, {}, "the kind of Reconstruction is 'reconstruction', expected '.*:Odd'"),
    (attacks.refuses_before_any_work, "attacks", ChecksNothing, {}, "without input_shape it runs"),
    (attacks.refuses_nothing_that_works, "attacks", RefusesAll, {}, "and refuses them beforehand: no message is good"),
    (defenses.sampling_is_poisson_or_none, "defenses", SamplesOddly, {}, "sampling returns a float"),
    (datasets.names_its_source, "datasets", Dots, {"licence": ""}, "its licence is empty"),
    (measures.takes_no_derivative, "measures", Peeks, {}, "it takes derivatives of the model by its inputs"),
    (measures.is_a_measure, "measures", Nothing, {}, "Nothing does not derive from fedsim.Measure"),
    (strategy_checks.declares_messages, "strategies", Stuck, {}, "declares sends = 'postcards'"),
    (strategy_checks.aggregates_rounds, "strategies", Stuck, {}, "the model never changes"),
    (strategy_checks.is_deterministic, "strategies", Wanders, {}, "aggregated to another model"),
    (engines.is_an_engine, "engines", Carries, {}, "Carries does not derive from fedsim.Engine"),
    (engines.records_same_bytes, "engines", WrongSeed, {}, "its recording round-000001.safetensors is not that of"),
    (engines.cleans_up, "engines", LeavesThread, {}, "it leaves a thread that is never ended: straggler"),
    (engines.records_same_bytes, "engines", LosesEvaluation, {}, "its run has no metrics of round 1, 0"),
    (
        engines.reports_failures,
        "engines",
        Hushes,
        {},
        "is reported as 'engine '.*:Hushes' ended before round 2",
    ),
    (panels.is_a_panel, "panels", Renders, {}, "Renders does not derive from fedsim.Panel"),
    (panels.is_a_panel, "panels", HasSettings, {}, "HasSettings has settings, which no file could set"),
    (panels.shows_something_or_nothing, "panels", ReturnsNumber, {}, "of a run with findings .*: .* returns int, exp"),
    (panels.escapes_text, "panels", RawName, {}, "it shows .* of a run as it is; put it in by markupsafe"),
    (panels.returns_the_same_bytes, "panels", Throws, {}, "it draws from Python's global generator"),
    (panels.returns_the_same_bytes, "panels", AddsNotes, {}, "a second time it returns something else"),
    (panels.returns_the_same_bytes, "panels", CountsCalls, {}, "a second time it returns something else"),
    (panels.leaves_the_run_as_it_is, "panels", SortsScores, {}, "it changes the scores of a run with findings, which"),
    (panels.writes_no_files, "panels", WritesFile, {}, "it writes into the run folder"),
    (strategy_checks.is_made, "strategies", Nothing, {}, "Nothing is not a flwr.serverapp.strategy.Strategy"),
]


@pytest.mark.parametrize(
    ("asked", "group", "cls", "settings", "sentence"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[2].__name__}{''.join(map(str, case[3]))}") for case in BROKEN],
)
def test_what_breaks_the_contract_is_told(
    check_class: Callable[..., CheckResult],
    asked: Check,
    group: registry.Group,
    cls: type,
    settings: Any,
    sentence: str,
) -> None:
    found = check_class(asked, group, cls, **settings)
    assert found.verdict == "failed"
    assert_says(found.reason, sentence)


def assert_says(said: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(said)


@pytest.mark.parametrize(
    ("group", "cls"),
    [
        ("attacks", Fine), ("defenses", Halves), ("datasets", Dots), ("partitions", Cut), ("models", Net),
        ("measures", Mean), ("panels", NamesRun),
    ],
)  # fmt: skip
def test_what_keeps_to_it_passes_all(check_class: Callable[..., CheckResult], group: registry.Group, cls: type) -> None:
    """So a failure above is of the one thing that is broken."""
    asked = {"attacks": attacks, "defenses": defenses, "datasets": datasets, "partitions": partitions}
    checks = ({**asked, "models": models, "measures": measures, "panels": panels}[group]).CHECKS
    found = [check_class(check, group, cls) for check in checks if check is not common.is_documented]
    assert [outcome for outcome in found if not outcome.is_good] == []


def test_a_defense_may_act_where_most_do_not_and_promise_what_it_does_not_draw(
    check_class: Callable[..., CheckResult],
) -> None:
    for cls in (Remembers, PullsBack, PrunesLeast):
        assert check_class(defenses.has_an_effect, "defenses", cls).verdict == "passed"
    for cls in (ProvesItsSilence, KeepsToATotal):
        assert check_class(defenses.guarantee_is_valid, "defenses", cls).verdict == "passed"
    assert check_class(defenses.noise_holds_in_any_round, "defenses", CoolsByItsOwnRounds).verdict == "passed"


def test_one_cause_is_told_once(check_class: Callable[..., CheckResult], tmp_path: Path) -> None:
    drawn = check_class(attacks.reads_what_it_declares, "attacks", DrawsGlobally)
    assert (drawn.verdict, drawn.reason) == ("not checked", "it finds something else each time, whatever it knows")
    subject = CheckedPlugin(group="attacks", name=f"{__name__}:TakesNothing", folder=tmp_path)
    first, second = (run_check(check, subject) for check in (attacks.finishes_tiny_case, attacks.is_deterministic))
    assert first.reason.count("this update is not for me") == 1
    assert (second.verdict, second.reason) == ("not checked", "it works on no tiny case, as said above")
    units = check_class(attacks.finishes_tiny_case, "attacks", ClaimsInputs)
    assert "claims data outside [0, 1], or NaN; of inputs of the model, claim (inputs - low)" in units.reason
    wrong = check_class(attacks.finishes_tiny_case, "attacks", ClaimsWrongly)
    assert wrong.reason.startswith("it works on no tiny case: the attack claims scores of type ndarray, expected")


def test_what_cannot_be_checked_never_passes(check_class: Callable[..., CheckResult]) -> None:
    refused = check_class(attacks.finishes_tiny_case, "attacks", TakesNothing)
    assert refused.verdict == "not checked"
    assert "this update is not for me" in refused.reason
    missing = check_class(datasets.labels_fit, "datasets", Nowhere)
    assert (missing.verdict, missing.reason) == ("not checked", "data: its file is missing")
    assert not refused.is_good
    assert not missing.is_good


def test_a_check_that_does_not_apply_says_why(check_class: Callable[..., CheckResult]) -> None:
    found = check_class(defenses.keeps_state_in_memory_only, "defenses", DividesByNorm)
    assert (found.verdict, found.reason, found.is_good) == ("does not apply", "it does not act on updates", True)


def test_every_group_has_checks_and_a_name_that_nobody_registered_is_refused() -> None:
    from fedsim.contract.checks import load_checks

    for group in registry.GROUPS:
        assert len(load_checks(group)) > 2
        with pytest.raises(PluginError, match="nothing is called 'nobodys'"):
            next(iter(run_checks(group, "nobodys", {})))


@pytest.mark.parametrize(
    ("kind", "violations"),
    [
        (int, []),
        (PositiveInt, [0]),
        (PositiveInt | None, [0]),
        (Share, [-1, 2, "nan"]),
        (tuple[PositiveInt, ...] | None, [(0,)]),
        (Annotated[tuple[str, ...], MinLen(1)], [()]),
        (Annotated[float, Lt(3)], [3, 4, "nan"]),
        (Literal["sum", "mean"] | None, ["not one of the words"]),
    ],
)
def test_values_beyond_each_end_of_a_range_are_found(kind: Any, violations: list[Any]) -> None:
    assert ["nan" if value != value else value for value in find_violations(kind)] == violations
    assert (0, 0) in find_violations(tuple[PositiveInt, Share])


def test_settings_without_a_range_need_no_check(check_class: Callable[..., CheckResult]) -> None:
    found = check_class(keeps_to_its_ranges, "models", Net)
    assert (found.verdict, found.reason) == ("does not apply", "no type of a setting has a range")


def test_each_check_is_broken_by_something() -> None:
    in_files_of_their_own = {
        attacks.infers_senders_from_messages,  # test_sender_claims
        defenses.noise_begins_with_the_first_message,  # test_defense_rounds
        defenses.noise_follows_no_earlier_data,  # test_defense_rounds
        defenses.noise_follows_no_small_data,  # test_defense_rounds
        defenses.says_in_which_rounds_it_acts,  # test_defense_rounds
    }
    tested = {case[0] for case in BROKEN} | in_files_of_their_own
    parts = (attacks, defenses, datasets, partitions, models, measures, kinds, strategy_checks, engines, panels)
    assert {check for part in parts for check in part.CHECKS} == tested
