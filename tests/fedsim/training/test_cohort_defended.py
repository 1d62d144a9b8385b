"""Clients under DP-SGD that train at once do what each does by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clients.app
from clients.defenses.dp_sgd import DpSgd
from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.mixup import Mixup
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import ClientRound
from fedsim.recording.wire_format import State
from fedsim.training import cohort_clipping
from fedsim.training.cohort import TOLERANCE, LocalData, can_vectorise, local_updates
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.small_training import Shown

SETTINGS = LocalTraining(local_epochs=2, batch_size=2, learning_rate=0.1)
DP = DpSgd(clip=0.5, noise_multiplier=0.7)


def net(layers: tuple[int, ...] = (9, 7)) -> nn.Module:
    with seed_globals("net"):
        return Mlp(hidden=layers).build(Task((1, 4, 4), 5))


def share(
    count: int, place: int, defenses: list[Defense], model: nn.Module, how: LocalTraining = SETTINGS
) -> LocalData:
    inputs, labels = torch.randn((count, 1, 4, 4), generator=generator("x", place)), torch.arange(count) % 5
    key = (1, "train", 1, place)
    hooks = TrainingHooks(defenses, model, how, count, ClientRound(key=key, broadcast=copy_state(model)))
    return LocalData(inputs=inputs, labels=labels, key=key, hooks=hooks)


def distance(one: State, other: State) -> float:
    return math.sqrt(sum((one[name] - other[name]).square().sum().item() for name in one))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "proximal_mu": 0.5},
        {"label_smoothing": 0.1},
        {"local_epochs": None, "local_steps": 7, "batch_size": 1},
    ],
)
@pytest.mark.parametrize("defense", [DP, DpSgd(clip=0.5, clipping="per-layer", noise_multiplier=0.7)])
def test_each_does_what_it_would_do_by_itself(how: dict[str, Any], defense: DpSgd) -> None:
    """With clients of different sizes, so with different rates, steps, and batches that may be empty."""
    assert_each_does_what_it_would_do_by_itself(net(), LocalTraining(**{**vars(SETTINGS), **how}), defense)


def assert_each_does_what_it_would_do_by_itself(model: nn.Module, settings: LocalTraining, defense: DpSgd) -> None:
    before = copy_state(model)
    shares = [share(count, place, [defense], model, settings) for place, count in enumerate((3, 11, 20, 7))]
    assert any(len(index) == 0 for who in shares for index in share_order(who, defense, model, settings))
    for who, done in zip(shares, local_updates(model, before, shares, settings), strict=True):
        own, loss = local_update(model, before, who.inputs, who.labels, settings, key=who.key, defenses=[defense])
        assert done is not None
        assert distance(done[0], own) < TOLERANCE * distance(own, before)
        assert done[1] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("most_numbers", [1 << 26, 40], ids=["at once", "a few examples at once"])
@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_convolutions_are_clipped_as_in_the_loop(
    clipping: Any, most_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a linear layer that multiplies each row of an image."""
    monkeypatch.setattr(cohort_clipping, "_MAX_GRADIENT_NUMBERS", most_numbers)
    defense = DpSgd(clip=0.5, clipping=clipping, noise_multiplier=0.7)
    with seed_globals("convolutions"):
        first = nn.Conv2d(1, 4, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1))  # gives images of 4 x 3
        body = nn.Sequential(first, nn.Linear(3, 4), nn.Tanh(), nn.AvgPool2d(2))
        last = nn.Sequential(nn.Conv2d(4, 3, 1, stride=(1, 2), bias=False), nn.Flatten(), nn.Linear(6, 5))
        model = nn.Sequential(body, last)
    assert can_vectorise(model, SETTINGS, [defense], torch.device("cuda"))
    assert not can_vectorise(model, SETTINGS, [defense])
    assert_each_does_what_it_would_do_by_itself(model, SETTINGS, defense)


def share_order(who: LocalData, defense: DpSgd, model: nn.Module, settings: LocalTraining) -> list[Tensor]:
    return list(TrainingHooks([defense], model, settings, len(who.labels), ClientRound(key=who.key)).batch_order(None))


def test_one_whose_batches_are_all_empty_is_left_to_the_loop() -> None:
    settings, model = LocalTraining(local_steps=1, batch_size=1, learning_rate=0.1), net()
    shares = [share(40, place, [DP], model, settings) for place in range(12)]
    empty = [not len(share_order(who, DP, model, settings)[0]) for who in shares]
    assert 0 < sum(empty) < 12
    assert [done is None for done in local_updates(model, copy_state(model), shares, settings)] == empty


def test_who_may_train_at_once() -> None:
    model = net()
    assert can_vectorise(model, SETTINGS, [DP])
    assert can_vectorise(model, SETTINGS, [DP, UpdateNoise(noise_multiplier=1.0)])
    assert not can_vectorise(model, SETTINGS, [DP, GradientPrune()])
    assert not can_vectorise(model, SETTINGS, [Mixup(), DpSgd(noise_multiplier=1.0, with_mixing=True)])
    assert not can_vectorise(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(inplace=True), nn.Linear(4, 5)), SETTINGS, [DP]
    )
    assert not can_vectorise(nn.Linear(4, 4), SETTINGS, [DP])
    assert not can_vectorise(model, SETTINGS, [Shown(noise_multiplier=1.0)])


def test_a_federation_trains_them_at_once_and_those_with_canaries_alone(
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[int] = []

    def note_group_size(model: nn.Module, before: State, shares: list[LocalData], *rest: Any) -> Any:
        groups.append(len(shares))
        return local_updates(model, before, shares, *rest)

    monkeypatch.setattr(clients.app, "local_updates", note_group_size)
    config = make_tiny_config(
        defense=[{"name": "dp-sgd", "noise_multiplier": 1.0}],
        federation={"clients": 6, "rounds": 1},
        canaries={"count": 20, "clients": [2]},
    )
    run_serial(config, tmp_path / "run")
    assert groups == [5]
