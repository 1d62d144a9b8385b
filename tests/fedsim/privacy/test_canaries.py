"""Canaries among a client's examples: what they change, and what they show of DP-SGD that is right or broken."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation, Poisson
from fedsim.interfaces.local_context import LocalContext
from fedsim.privacy.accountants import Steps, compute_epsilon
from fedsim.privacy.canary_bounds import EpsilonBound, best_lower_bound
from fedsim.recording.wire_format import State
from fedsim.training.canaries import CANARY_VALUE, Canaries, CanaryInsertion
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.modes import trained_shapes
from fedsim.training.settings import LocalTraining

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")
DELTA, CONFIDENCE = 1e-5, 0.99
COUNT, ROUNDS, EXAMPLES = 2000, 4, 60
SETTINGS = LocalTraining(local_steps=10, batch_size=6, learning_rate=0.05)


@dataclass(frozen=True, kw_only=True)
class Right(Defense):
    """DP-SGD with flat clipping to norm 1."""

    noise: float = 1.0
    paper: ClassVar[Paper] = PAPER

    def sampling(self, num_examples: int, batch_size: int) -> Poisson:
        return Poisson(rate=batch_size / num_examples)

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        rows = _clipped(gradients)
        return {
            name: (each.sum(0) + self.noise * torch.randn(each.shape[1:], generator=context.rng)) / expected
            for name, each in rows.items()
        }

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """Of a sampling rate B / N, whatever `sampling` says."""
        if not self.noise:
            return None
        rate = participation.batch_size / participation.num_examples
        steps = Steps(self.noise, rate, participation.steps * participation.rounds)
        return Guarantee(epsilon=compute_epsilon((steps,), delta), delta=delta, neighbours="", accountant="")


@dataclass(frozen=True, kw_only=True)
class NoiseBeforeClipping(Right):
    """Adds the noise to the gradient of each example, then clips: what is sent has no more than the clip."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        noisy = {
            name: each + self.noise * torch.randn(each.shape, generator=context.rng) for name, each in gradients.items()
        }
        return {name: each.sum(0) / expected for name, each in _clipped(noisy).items()}


@dataclass(frozen=True, kw_only=True)
class ClipsTheSum(Right):
    """Clips the noisy sum, so one example takes the place of all others and of the noise."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        noisy = {
            name: each.sum(0) + self.noise * torch.randn(each.shape[1:], generator=context.rng)
            for name, each in gradients.items()
        }
        return {name: each[0] / expected for name, each in _clipped({n: t[None] for n, t in noisy.items()}).items()}


@dataclass(frozen=True, kw_only=True)
class WrongRate(Right):
    """Samples each example eight times as often as the proof has it."""

    def sampling(self, num_examples: int, batch_size: int) -> Poisson:
        return Poisson(rate=8 * batch_size / num_examples)


@dataclass(frozen=True, kw_only=True)
class TooLittleNoise(Right):
    """Divides the noise, too, by how many examples are expected."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        return {
            name: (each.sum(0) + self.noise / expected * torch.randn(each.shape[1:], generator=context.rng)) / expected
            for name, each in _clipped(gradients).items()
        }


def _clipped(gradients: State) -> State:
    squares = [each.double().flatten(1).square().sum(1) for each in gradients.values()]
    factor = (1 / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
    return {name: (each.double() * factor.view(-1, *[1] * (each.ndim - 1))).float() for name, each in gradients.items()}


def the_model() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Mlp(hidden=[64]).build(Task(input_shape=(64,), num_classes=10))


INPUTS = torch.randn(EXAMPLES, 64, generator=generator("inputs"))
LABELS = torch.randint(10, (EXAMPLES,), generator=generator("labels"))


def trained_once(
    defense: Defense, canaries: Canaries | None, settings: LocalTraining = SETTINGS, seed: int = 0
) -> State:
    """The sum of w_t - w_T over the rounds of a client that goes on with its own model."""
    model = the_model()
    start = now = {name: tensor.clone() for name, tensor in copy_state(model).items()}
    for number in range(ROUNDS):
        now, _ = local_update(
            model, now, INPUTS, LABELS, settings, key=(seed, number), defenses=[defense], canaries=canaries
        )
        now = {name: tensor.clone() for name, tensor in now.items()}
    return {name: tensor - now[name] for name, tensor in start.items()}


DONE = Participation(num_examples=EXAMPLES, batch_size=SETTINGS.batch_size, steps=10, rounds=ROUNDS)


@functools.cache
def audit(defense: Defense, settings: LocalTraining = SETTINGS, seed: int = 0) -> EpsilonBound:
    canaries = Canaries(seed=seed, client=0, count=COUNT)
    sent = trained_once(defense, canaries, settings, seed)
    places = canaries.draw_coordinates(trained_shapes(the_model(), settings))
    scores = torch.stack([sent[name].flatten()[place] for name, place in places])
    declared = defense.mechanism(DONE)
    return best_lower_bound(scores, canaries.is_included, DELTA, CONFIDENCE, [declared] if declared else [])


def proved(defense: Defense) -> float:
    guarantee = defense.guarantee(DONE, DELTA)
    assert guarantee is not None
    return guarantee.epsilon


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 6))])
def test_dp_sgd_that_is_right_is_never_refuted(seed: int) -> None:
    for noise in (0.6, 2.0):
        right = Right(noise=noise)
        assert audit(right, seed=seed).epsilon <= proved(right)


def test_more_is_measured_where_there_is_less_noise() -> None:
    bounds = [audit(Right(noise=noise)).epsilon for noise in (2.0, 0.6, 0.0)]
    assert bounds == sorted(bounds)
    assert bounds[1] > 1
    assert bounds[2] > 4


@pytest.mark.parametrize(
    "broken", [NoiseBeforeClipping, ClipsTheSum, TooLittleNoise, pytest.param(WrongRate, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_broken_dp_sgd_is_refuted(broken: type[Right], seed: int) -> None:
    defense = broken(noise=2.0)
    assert audit(defense, seed=seed).epsilon > proved(defense) == proved(Right(noise=2.0))


@pytest.mark.parametrize(
    ("clipping", "share"), [("flat", 0.2), pytest.param("per-layer", 0.1, marks=pytest.mark.thorough)]
)
def test_the_dp_sgd_of_the_house_is_not_refuted_and_with_a_share_of_its_noise_is(clipping: Any, share: float) -> None:
    from clients.defenses.dp_sgd import DpSgd

    defense = DpSgd(epsilon=1.0, clipping=clipping).of_client(DONE)
    assert defense.noise_multiplier is not None
    quieter = replace(defense, epsilon=None, noise_multiplier=defense.noise_multiplier * share)
    assert audit(defense).epsilon <= proved(defense) < audit(quieter).epsilon


@pytest.mark.parametrize(
    "how",
    [
        {"momentum": 0.9},
        pytest.param({"optimizer": "adam"}, marks=pytest.mark.thorough),
        pytest.param({"weight_decay": 0.1}, marks=pytest.mark.thorough),
    ],
)
def test_other_steps_than_plain_ones_make_the_bound_weaker_and_leave_it_a_bound(how: dict[str, object]) -> None:
    settings = LocalTraining(local_steps=10, batch_size=6, learning_rate=0.01, **how)  # type: ignore[arg-type]
    right = Right(noise=0.6)
    assert audit(right, settings).epsilon <= proved(right)
    assert audit(NoiseBeforeClipping(noise=5.0), settings).epsilon > proved(Right(noise=5.0))


def test_canaries_are_the_same_again_and_others_for_another_client() -> None:
    canaries, again = (Canaries(seed=1, client=2, count=50) for _ in range(2))
    other = Canaries(seed=1, client=3, count=50)
    shapes = {"w": torch.Size((10, 9)), "b": torch.Size((9,))}
    assert canaries.draw_coordinates(shapes) == again.draw_coordinates(shapes)
    assert torch.equal(canaries.is_included, again.is_included)
    assert canaries.draw_coordinates(shapes) != other.draw_coordinates(shapes)
    assert not torch.equal(canaries.is_included, other.is_included)
    assert len(set(canaries.draw_coordinates(shapes))) == 50
    assert audit(Right()) == audit(Right())


def test_half_of_the_canaries_are_in() -> None:
    assert 0.45 < Canaries(seed=0, client=0, count=4000).is_included.double().mean() < 0.55


def test_more_canaries_than_trained_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected at most 12, the parameters that are trained, got 20"):
        Canaries(seed=0, client=0, count=20).draw_coordinates({"w": torch.Size((3, 4))})


def test_canaries_are_sampled_by_the_draws_of_the_examples_and_stand_after_them() -> None:
    canaries = Canaries(seed=0, client=0, count=20)
    inside = canaries.is_included.nonzero().flatten().tolist()
    insertion = CanaryInsertion(canaries, num_examples=3)
    own = next(iter(insertion.split_batches([torch.tensor([0, 2, 3, 5])])))
    assert own.tolist() == [0, 2]
    rows = insertion.append_gradients({"w": torch.ones(2, 5, 5), "b": torch.ones(2, 5)})
    assert (rows["w"].shape, rows["b"].shape) == ((4, 5, 5), (4, 5))
    assert torch.equal(rows["w"][:2], torch.ones(2, 5, 5))
    places = canaries.draw_coordinates({"w": torch.Size((5, 5)), "b": torch.Size((5,))})
    for row, canary in ((2, inside[0]), (3, inside[2])):
        name, place = places[canary]
        assert rows[name][row].flatten()[place] == CANARY_VALUE
        assert sum(int(each[row].count_nonzero()) for each in rows.values()) == 1


def test_a_client_without_canaries_trains_as_it_did() -> None:
    """The same defense and key, with no canary in: what they add is all that they change."""
    with_none, without = (trained_once(Right(), canaries) for canaries in (_none_in(), None))
    assert all(torch.equal(tensor, without[name]) for name, tensor in with_none.items())


def _none_in() -> Canaries:
    canaries = Canaries(seed=0, client=0, count=20)
    canaries.__dict__["is_included"] = torch.zeros(20, dtype=torch.bool)
    return canaries


@dataclass(frozen=True, kw_only=True)
class OnlySees(Defense):
    paper: ClassVar[Paper] = PAPER

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        return {name: each.sum(0) / expected for name, each in gradients.items()}


@dataclass(frozen=True, kw_only=True)
class Mixes(Defense):
    mixes: ClassVar[bool] = True
    paper: ClassVar[Paper] = PAPER

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        return inputs, labels


@pytest.mark.parametrize(
    ("defenses", "why"),
    [
        ([OnlySees()], "canaries: they are put among examples that are drawn by Poisson sampling"),
        ([Right(), Mixes()], "canaries: Mixes makes one example out of several records"),
    ],
)
def test_canaries_where_they_make_no_sense_are_refused(defenses: list[Defense], why: str) -> None:
    canaries, model = Canaries(seed=0, client=0, count=20), the_model()
    with pytest.raises(ConfigError, match=why):
        local_update(
            model, copy_state(model), INPUTS, LABELS, SETTINGS, key=("k",), defenses=defenses, canaries=canaries
        )


@dataclass(frozen=True, kw_only=True)
class ClipsNothing(Right):
    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        return {name: each.sum(0) / expected for name, each in gradients.items()}


def test_training_that_diverges_by_canaries_says_so() -> None:
    settings = LocalTraining(local_steps=40, batch_size=20, learning_rate=1e30)
    canaries, model = Canaries(seed=0, client=0, count=200), the_model()
    with pytest.raises(RunError, match="or no defense clips canaries, which are gradients of norm 1e"):
        local_update(
            model, copy_state(model), INPUTS, LABELS, settings, key=("k",), defenses=[ClipsNothing()], canaries=canaries
        )
