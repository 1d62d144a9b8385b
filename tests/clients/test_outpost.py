"""Outpost: which numbers of which steps get how much noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clients.defenses.outpost import Outpost
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

GRADIENT = {"wide": torch.randn(200, 100, generator=generator("wide")), "bias": torch.randn(50, generator=generator(2))}
WEIGHTS = {"wide": 0.5 * torch.randn(200, 100, generator=generator(3)), "bias": torch.full((50,), 0.7)}


def perturbed(
    defense: Outpost, step: int = 0, seed: int = 0, weights: dict[str, Tensor] = WEIGHTS
) -> dict[str, Tensor]:
    given = {name: tensor.clone() for name, tensor in GRADIENT.items()}
    return dict(defense.on_gradient(given, LocalContext(rng=generator(seed), step=step, broadcast=weights)))


def test_noise_is_where_the_fisher_information_is_largest() -> None:
    got = perturbed(Outpost(noise_scale=2.0, noised=0.4, pruned=0.0))
    moved = got["wide"] != GRADIENT["wide"]
    assert moved.float().mean().item() == pytest.approx(0.4, abs=0.01)
    assert GRADIENT["wide"][moved].abs().min() >= GRADIENT["wide"][~moved].abs().max()


def test_the_most_informative_numbers_are_those_of_all_tensors_before_any_is_set_to_zero() -> None:
    """Of 10 numbers the 4 largest, all in one tensor; 3 of them are zero by then, and one of the other tensor."""
    gradient = {"large": torch.tensor([8.0, -7.0, 6.0, 5.0, 0.5]), "small": torch.tensor([0.1, -0.4, 0.3, 0.2, 0.05])}
    weights = dict.fromkeys(gradient, torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0]))
    defense = Outpost(noise_scale=1.0, noised=0.4, pruned=0.8)
    got = defense.on_gradient(gradient, LocalContext(rng=generator(0), broadcast=weights))
    assert (got["large"] != torch.tensor([8.0, 0.0, 0.0, 0.0, 0.0])).tolist() == [True] * 4 + [False]
    torch.testing.assert_close(got["small"], torch.tensor([0.0, -0.4, 0.0, 0.0, 0.0]))


def test_its_scale_is_the_variance_of_the_weights_of_that_tensor_at_most_1() -> None:
    defense = Outpost(noise_scale=2.0, noised=1.0, pruned=0.0)
    spread = WEIGHTS["wide"].var().item()
    assert (perturbed(defense)["wide"] - GRADIENT["wide"]).std().item() == pytest.approx(2.0 * spread, rel=0.03)
    wider = {**WEIGHTS, "wide": 30 * WEIGHTS["wide"]}
    assert (perturbed(defense, weights=wider)["wide"] - GRADIENT["wide"]).std().item() == pytest.approx(2.0, rel=0.03)
    assert torch.equal(perturbed(defense)["bias"], GRADIENT["bias"]), "weights that are all alike"


def test_the_smallest_numbers_of_each_tensor_become_zero() -> None:
    got = perturbed(Outpost(noise_scale=0.0, pruned=0.8))
    assert [(tensor == 0).sum().item() for tensor in got.values()] == [16_000, 40]
    kept = got["wide"] != 0
    assert torch.equal(got["wide"][kept], GRADIENT["wide"][kept])


@pytest.mark.parametrize(("step", "chance"), [(0, 1.0), (8, 0.5), (56, 0.125)])
def test_later_steps_are_perturbed_more_rarely(step: int, chance: float) -> None:
    defense = Outpost(decay=0.125)
    times = sum(not torch.equal(perturbed(defense, step, seed)["wide"], GRADIENT["wide"]) for seed in range(300))
    assert times / 300 == pytest.approx(chance, abs=0.08)


def test_the_steps_of_a_round_are_counted() -> None:
    """With a decay without end only the first of four steps is perturbed, and so is a gradient that is sent."""
    task = Task((1, 4, 4), 3)
    with seed_globals("outpost"):
        model = Mlp(hidden=(5,)).build(task)
    before = copy_state(model)
    inputs, labels = torch.rand(8, 1, 4, 4, generator=generator(4)), torch.arange(8) % 3
    steps: list[int] = []

    class Watched(Outpost):
        def on_gradient(self, gradient: State, context: LocalContext) -> State:
            step, weights = context.step, context.weights
            assert step or all(torch.equal(weights[name], before[name]) for name in gradient)
            assert not step or any(not torch.equal(weights[name], before[name]) for name in gradient)
            steps.append(step)
            got = super().on_gradient(gradient, context)
            assert (got is gradient) == (step > 0)
            return dict(got)

    settings = LocalTraining(local_epochs=2, batch_size=4, learning_rate=0.1)
    defense = Watched(decay=1e12)
    for _ in range(2):
        local_update(model, before, inputs, labels, settings, key=("round",), defenses=[defense])
    local_gradient(model, before, inputs, labels, settings, key=("round",), defenses=[defense])
    assert steps == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_an_adversary_who_knows_it_takes_zeros_for_zeros() -> None:
    sent = {"a": torch.tensor([0.0, 2.0])}
    seen = Outpost().adversary_view({"a": torch.tensor([5.0, 7.0])}, sent)
    assert seen["a"].tolist() == [0.0, 7.0]


@pytest.mark.parametrize(
    "settings", [{"noise_scale": -1.0}, {"decay": math.nan}, {"noised": 1.5}, {"pruned": 1.0}, {"pruned": -0.1}]
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}: expected"):
        Outpost(**settings)
