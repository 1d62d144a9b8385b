"""The sum of shortened gradients is that of the gradients themselves, and what is not known is left to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.defenses.dp_sgd import DpSgd
from fedsim.base.errors import PluginError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task, smooth_labels, squared_error
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, supports_ghost_clipping
from fedsim.interfaces.defense_checks import check_defense
from fedsim.interfaces.local_context import ClientRound
from fedsim.training.canaries import Canaries
from fedsim.training.ghost_clipping import can_clip, clipped_sum
from fedsim.training.gradients import example_gradients
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.lenet import LeNet
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.resnet import ResNet8
from fedsim.training.models.sme import SmeCnn
from fedsim.training.models.vgg import Vgg9
from fedsim.training.penalties import LocalObjective
from fedsim.training.settings import LocalTraining
from tests.support.small_training import Shown

TASK = Task((3, 32, 32), 10)
SETTINGS = LocalTraining(local_steps=4, batch_size=5, learning_rate=0.1)
ODD = nn.Sequential(
    nn.Conv2d(3, 4, (5, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False),
    nn.Sequential(nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.Flatten()),
    nn.Linear(5 * 5 * 14, 12, bias=False),
    nn.Tanh(),
    nn.Linear(12, 10),
)
ACTIVATION = nn.Tanh()
SHARED = nn.Sequential(
    nn.Flatten(),
    nn.Linear(3072, 5),
    ACTIVATION,
    nn.Sequential(nn.Linear(5, 5), ACTIVATION, nn.Linear(5, 9)),
    ACTIVATION,
    nn.Linear(9, 10),
)
SEQUENCES = {"odd": ODD, "one activation in three places": SHARED}
NETWORKS = {"lenet": LeNet(), "sme-cnn": SmeCnn(), "mlp": Mlp(hidden=(9, 7)), "vgg9": Vgg9()}


def network(name: str) -> nn.Module:
    with seed_globals("network"):
        return SEQUENCES[name] if name in SEQUENCES else NETWORKS[name].build(TASK)  # type: ignore[attr-defined]


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    return torch.rand((count, 3, 32, 32), generator=generator("x")), torch.arange(count) % 10


@pytest.mark.parametrize(
    "name", ["lenet", "sme-cnn", "mlp", pytest.param("vgg9", marks=pytest.mark.thorough), *SEQUENCES]
)
@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
@pytest.mark.parametrize("soft", [False, True])
def test_it_is_the_sum_of_the_clipped_gradients(name: str, clipping: Any, soft: bool) -> None:
    model, (inputs, labels) = network(name).train(), batch()
    loss, targets = (
        (cross_entropy, labels.float()[:, None] / 10 + torch.eye(10)[:6])
        if soft
        else (smooth_labels(cross_entropy, 0.2), labels)
    )
    assert can_clip(model)
    each, losses = example_gradients(model, inputs, targets, loss)
    clip = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0).median().item()
    defense = DpSgd(clip=clip, clipping=clipping, noise_multiplier=1.0)
    found = clipped_sum(model, inputs, targets, loss, defense.example_factors)
    assert found is not None
    torch.testing.assert_close(found[1], losses)
    torch.testing.assert_close(found[0], dict(defense.clipped_sum(each)), rtol=1e-4, atol=1e-5 * clip)


def test_a_regression_too() -> None:
    with seed_globals("regression"):
        model = Mlp(hidden=(8,)).build(Task((5,), 0))
    inputs, targets = torch.randn((6, 5), generator=generator("x")), torch.randn(6, generator=generator("y"))
    each, _ = example_gradients(model, inputs, targets, squared_error)
    defense = DpSgd(clip=0.5, noise_multiplier=1.0)
    found = clipped_sum(model, inputs, targets, squared_error, defense.example_factors)
    assert found is not None
    torch.testing.assert_close(found[0], dict(defense.clipped_sum(each)), rtol=1e-4, atol=1e-6)


def without(model: nn.Module, name: str) -> nn.Module:
    model.get_parameter(name).requires_grad_(False)
    return model


def tied() -> nn.Module:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return nn.Sequential(one, two)


class Other(nn.Sequential):
    """A sequence that does something else."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self[1].weight.sum()  # type: ignore[operator, no-any-return]


def hooked(register: str) -> nn.Module:
    """A sequence with a function that may change what its first layer computes, or a gradient."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    getattr(model[0], register)(lambda layer, *values: None)
    return model


TWICE = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "model",
    [
        ResNet8().build(TASK),
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding="same")),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)),
        nn.Sequential(TWICE, nn.ReLU(), TWICE),
        nn.Linear(4, 4),
        Other(nn.Flatten(), nn.Linear(4, 4)),
        nn.Sequential(Other(nn.Flatten(), nn.Linear(4, 4))),
        without(nn.Sequential(nn.Linear(4, 4)), "0.bias"),
        tied(),
        hooked("register_forward_hook"),
        hooked("register_forward_pre_hook"),
        hooked("register_full_backward_hook"),
        hooked("register_full_backward_pre_hook"),
        nn.Sequential(nn.Flatten()),
    ],
)
def test_networks_of_which_it_is_not_known_are_left_out(model: nn.Module) -> None:
    assert not can_clip(model)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6, 10)), torch.rand(4, 6)),
        (nn.Sequential(nn.Linear(6, 6), nn.Flatten(), nn.Linear(18, 10)), torch.rand(4, 3, 6)),
    ],
    ids=["changed in place", "another shape"],
)
def test_what_is_found_on_the_way_to_be_different_is_left_to_the_gradients(model: nn.Module, inputs: Tensor) -> None:
    assert can_clip(model)
    labels, defense = torch.arange(4), DpSgd(clip=0.3, noise_multiplier=1e-6)
    assert clipped_sum(model, inputs, labels, cross_entropy, defense.example_factors) is None
    settings = LocalTraining(local_steps=1, batch_size=4, learning_rate=1.0)
    before = copy_state(model)
    after, _ = local_update(model, before, inputs, labels, settings, key=("fallback",), defenses=[defense])
    assert sum((after[n] - before[n]).square().sum().item() for n in before) ** 0.5 <= 0.3 * (1 + 1e-3)


@pytest.mark.parametrize("trained", [["0.bias"], ["2.weight", "2.bias"]])
def test_of_parameters_that_an_algorithm_does_not_train_nothing_is_clipped_along(trained: list[str]) -> None:
    """With one example, of large gradient, a step is as long as the clip in what is trained alone."""
    with seed_globals("parts"):
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    before, defense = copy_state(model), DpSgd(clip=1e-3, noise_multiplier=1e-6)
    settings = LocalTraining(local_steps=1, batch_size=1, learning_rate=1.0)
    after, _ = local_update(
        model,
        before,
        torch.ones(1, 6),
        torch.zeros(1, dtype=torch.int64),
        settings,
        key=("parts",),
        defenses=[defense],
        objective=LocalObjective(trained=trained),
    )
    moved = {name: (after[name] - before[name]).norm().item() for name in before}
    assert {name for name, length in moved.items() if length} == set(trained)
    assert sum(length**2 for length in moved.values()) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_a_client_trains_the_same_either_way() -> None:
    namesake: Any = type("DpSgd", (Shown,), {})  # what a defense draws is keyed by its name
    model, (inputs, labels) = network("lenet"), batch(20)
    before = copy_state(model)
    short, shown = (
        local_update(
            model, before, inputs, labels, SETTINGS, key=("ways",), defenses=[d(clip=0.4, noise_multiplier=0.5)]
        )
        for d in (DpSgd, namesake)
    )
    assert not all(torch.equal(short[0][name], shown[0][name]) for name in before)  # other sums, or nothing is shown
    torch.testing.assert_close(short[0], shown[0], rtol=1e-4, atol=1e-5)
    assert short[1] == pytest.approx(shown[1], rel=1e-4)


def test_whose_own_on_examples_it_is_that_is_called() -> None:
    model = network("lenet")
    assert supports_ghost_clipping(DpSgd(noise_multiplier=1.0))
    assert not supports_ghost_clipping(Shown(noise_multiplier=1.0))

    def hooks(defense: Defense, canaries: Canaries | None = None) -> TrainingHooks:
        return TrainingHooks([defense], model, SETTINGS, 20, ClientRound(key=("key",)), canaries)

    assert hooks(DpSgd(noise_multiplier=1.0)).clipping_factors is not None
    assert hooks(Shown(noise_multiplier=1.0)).clipping_factors is None
    assert hooks(DpSgd(noise_multiplier=1.0), Canaries(seed=0, client=0, count=3)).clipping_factors is None


class Half(Defense):
    """Has the shortcut, and not what it is one of."""

    paper = Paper(title="none", authors="nobody", venue="none", year=2000, url="")

    def example_factors(self, norms: Tensor) -> Tensor:
        return norms / norms

    def sampling(self, num_examples: int, batch_size: int) -> None:
        return None


def test_a_shortcut_alone_is_refused() -> None:
    with pytest.raises(
        PluginError, match="'example_factors' is a shortcut of 'on_examples' and is not called without it"
    ):
        check_defense(Half())
