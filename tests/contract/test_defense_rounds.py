"""What a defense does from round to round is tried, and not taken from what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fedsim.contract import defense_rounds, defenses
from fedsim.contract.checks import Check, CheckResult
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State
from tests.support import checked_classes

Ask = Callable[..., CheckResult]
ACTS, NOISE = defense_rounds.says_in_which_rounds_it_acts, defense_rounds.noise_follows_no_earlier_data
SMALL, BEGINS = defense_rounds.noise_follows_no_small_data, defense_rounds.noise_begins_with_the_first_message


@dataclass(frozen=True, kw_only=True)
class Noisy(Defense):
    """Add noise."""

    paper: ClassVar[Paper] = Paper(title="An example", authors="Nobody", venue="nowhere", year=2026)

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: tensor + torch.randn(tensor.shape, generator=context.rng) for name, tensor in update.items()}


class Early(Noisy):
    """Add noise in three rounds."""

    def on_update(self, update: State, context: LocalContext) -> State:
        return super().on_update(update, context) if context.round <= 3 else update


class SaidToBeEarly(Early):
    """Add noise in three rounds, and say so."""

    def acts_in(self, number: int) -> bool:
        return number <= 3


class ByChance(Noisy):
    """Add noise in two rounds of five."""

    def on_update(self, update: State, context: LocalContext) -> State:
        acts = float(torch.rand((), generator=context.rng)) > 0.6
        return super().on_update(update, context) if acts else update


class WithBudget(Noisy):
    """Add noise to the first messages of each client."""

    def on_update(self, update: State, context: LocalContext) -> State:
        count = int(context.memory.get("count", torch.tensor(0)))
        context.memory["count"] = torch.tensor(count + 1)
        return super().on_update(update, context) if count < 3 else update


class Delayed(Noisy):
    """Send the mean of an update and of the one before."""

    def on_update(self, update: State, context: LocalContext) -> State:
        before = {name: context.memory.get(name, tensor) for name, tensor in update.items()}
        context.memory.update(update)
        return {name: (tensor + before[name]) / 2 for name, tensor in update.items()} if before else update


class Clips(Noisy):
    """Clip to a limit that grows from round to round."""

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: tensor.clamp(-(1.1**context.round), 1.1**context.round) for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class Private(Noisy):
    """Clip to norm 1 and add noise."""

    def on_update(self, update: State, context: LocalContext) -> State:
        norm = torch.stack([tensor.norm() for tensor in update.values()]).norm()
        clip = self.choose_clip(norm, context)
        noise = super().on_update({name: torch.zeros_like(tensor) for name, tensor in update.items()}, context)
        return {name: tensor * (clip / norm.clamp(min=clip)) + clip * noise[name] for name, tensor in update.items()}

    def choose_clip(self, norm: torch.Tensor, context: LocalContext) -> float:
        del norm, context
        return 1.0

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        return Guarantee(epsilon=participation.rounds, delta=delta, neighbours="one client", accountant="none")


class FollowsData(Private):
    """Clip to the norm of the update before."""

    def choose_clip(self, norm: torch.Tensor, context: LocalContext) -> float:
        before = context.memory.get("norm", torch.tensor(1.0))
        context.memory["norm"] = norm.clamp(min=1e-3)
        return float(before)


class FollowsSmallData(Private):
    """Clip to the norm of the update before, up to 1, so that all large ones are followed by the same noise."""

    def choose_clip(self, norm: torch.Tensor, context: LocalContext) -> float:
        before = context.memory.get("norm", torch.tensor(1.0))
        context.memory["norm"] = norm.clamp(1e-3, 1.0)
        return float(before)


class FollowsDataInPart(Private):
    """Clip to 1 and the norm of the update before, up to 1: what is far below the clip changes little."""

    def choose_clip(self, norm: torch.Tensor, context: LocalContext) -> float:
        before = context.memory.get("norm", torch.tensor(0.0))
        context.memory["norm"] = norm.clamp(max=1.0)
        return 1 + float(before)


class FollowsLargeMessages(Private):
    """Clip to 2 after a message of norm above 6, which the server knows."""

    def choose_clip(self, norm: torch.Tensor, context: LocalContext) -> float:
        return float(context.memory.get("clip", torch.tensor(1.0)))

    def on_update(self, update: State, context: LocalContext) -> State:
        sent = super().on_update(update, context)
        norm = torch.stack([tensor.norm() for tensor in sent.values()]).norm()
        context.memory["clip"] = torch.where(norm > 6, 2.0, 1.0)
        return sent


class FollowsMessages(Private):
    """Clip to the norm of the message before, which the server knows."""

    def choose_clip(self, norm: torch.Tensor, context: LocalContext) -> float:
        return float(context.memory.get("sent", torch.tensor(1.0)))

    def on_update(self, update: State, context: LocalContext) -> State:
        sent = super().on_update(update, context)
        context.memory["sent"] = torch.stack([tensor.norm() for tensor in sent.values()]).norm().clamp(0.1, 10)
        return sent


class WarmsUp(Private):
    """Clip alone in the first three messages of a client."""

    def on_update(self, update: State, context: LocalContext) -> State:
        count = context.memory.get("count", torch.tensor(0))
        context.memory["count"] = count + 1
        norm = torch.stack([tensor.norm() for tensor in update.values()]).norm().clamp(min=1)
        return super().on_update(update, context) if count >= 3 else {n: t / norm for n, t in update.items()}


class SaysNothingFirst(WarmsUp):
    """Send zeros in the first three messages of a client."""

    def on_update(self, update: State, context: LocalContext) -> State:
        is_first = context.memory.get("count", torch.tensor(0)) < 3
        sent = super().on_update(update, context)
        return {name: 0 * tensor for name, tensor in sent.items()} if is_first else sent


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    def check(asked: Check, cls: type) -> CheckResult:
        return checked_classes.check_class(asked, "defenses", cls, tmp_path)

    return check


@pytest.mark.parametrize(
    ("check", "cls", "words"),
    [
        (ACTS, Early, "it changes nothing in round 4, in which acts_in says that it acts"),
        (NOISE, FollowsData, "on_update draws 1e+03 times the noise after a larger update that gave the same message"),
        (
            SMALL,
            FollowsSmallData,
            "on_update draws 300 times the noise after a larger update that is hidden in the noise",
        ),
        (SMALL, FollowsDataInPart, "on_update draws 1.96 times the noise after a larger update that is hidden"),
        (BEGINS, WarmsUp, "on_update adds no noise to message 1 of a client, and some to others"),
    ],
)
def test_what_a_defense_does_not_say_is_found(ask: Ask, check: Check, cls: type, words: str) -> None:
    result = ask(check, cls)
    assert (result.verdict, words in result.reason) == ("failed", True), result.reason


@pytest.mark.parametrize("cls", [Noisy, SaidToBeEarly, ByChance, WithBudget, Delayed, Clips])
def test_defenses_that_act_in_each_round_or_say_so_are_good(ask: Ask, cls: type) -> None:
    result = ask(ACTS, cls)
    assert result.is_good, result.reason


@pytest.mark.parametrize(
    ("check", "cls"),
    [
        (NOISE, Private),
        (NOISE, FollowsSmallData),
        (SMALL, Private),
        (SMALL, FollowsMessages),
        (SMALL, FollowsLargeMessages),
        (BEGINS, Private),
        (BEGINS, SaysNothingFirst),
    ],
)
def test_noise_that_follows_settings_or_messages_passes(ask: Ask, check: Check, cls: type) -> None:
    assert ask(check, cls).verdict == "passed"


def test_a_defense_that_acts_by_chance_has_an_effect(ask: Ask) -> None:
    assert ask(defenses.has_an_effect, ByChance).verdict == "passed"
