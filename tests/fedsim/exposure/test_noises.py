"""Measures by noise on the inputs: what they are, in float32, and within a memory budget."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator
from fedsim.exposure.angular_lipschitz import AngularLipschitz
from fedsim.exposure.lipschitz import Lipschitz
from fedsim.exposure.noises import NoiseMeasure, cosine_distances
from fedsim.exposure.sensitivity import Sensitivity
from fedsim.training.settings import LocalTraining
from tests.support.networks import build_convolution

LOSS: Any = nn.functional.cross_entropy
KINDS: list[type[NoiseMeasure]] = [Sensitivity, Lipschitz, AngularLipschitz]
UPDATE = LocalTraining(local_steps=2, batch_size=2, learning_rate=0.1)


def batch(size: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(size) % 4


def gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    slopes = torch.autograd.grad(LOSS(model(inputs), labels), list(model.parameters()))
    return torch.cat([slope.flatten() for slope in slopes])


def by_hand(noises: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each noise in float64: how far it moves the gradient, how long it is, and L^cos by cosines."""
    model, (inputs, labels) = build_convolution().double(), batch()
    inputs, random = inputs.double(), generator("measure", "noises")
    before, rows = gradient(model, inputs, labels), []
    for _ in range(noises):
        noise = 0.001 * torch.randn(inputs.shape, generator=random, dtype=torch.float64)
        after = gradient(model, inputs + noise, labels)
        turned = [
            1 - torch.cosine_similarity(a, b, dim=0)
            for a, b in ((after, before), ((inputs + noise).flatten(), inputs.flatten()))
        ]
        rows.append([(after - before).norm(), noise.norm(), turned[0] / turned[1]])
    moved, length, ratio = torch.tensor(rows, dtype=torch.float64).T
    return moved, length, ratio


def test_they_are_what_their_formulas_say_and_float32_is_within_a_thousandth() -> None:
    moved, length, ratio = by_hand(40)
    model, (inputs, labels) = build_convolution(), batch()
    sensitivity = Sensitivity(noises=40).compute(model, LOSS, inputs, labels)
    assert sensitivity["mean"] == pytest.approx(moved.mean().item(), rel=1e-3)
    lipschitz = Lipschitz(noises=40).compute(model, LOSS, inputs, labels)
    assert lipschitz["max"] == pytest.approx((moved / length).max().item(), rel=1e-3)
    assert lipschitz["q99"] == pytest.approx((moved / length).quantile(0.99).item(), rel=1e-3)
    angular = AngularLipschitz(noises=40).compute(model, LOSS, inputs, labels)
    assert angular["max"] == pytest.approx(ratio.max().item(), rel=1e-3)
    assert angular["q99"] == pytest.approx(ratio.quantile(0.99).item(), rel=1e-3)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("training", [None, UPDATE])
@pytest.mark.parametrize("norm", [False, True])
def test_angles_in_float32_are_those_of_float64(
    activation: type[nn.Module], training: LocalTraining | None, norm: bool
) -> None:
    model, (inputs, labels), measure = build_convolution(activation, norm), batch(4), AngularLipschitz(noises=50)
    single = measure.compute(model, LOSS, inputs, labels, training=training)
    double = measure.compute(deepcopy(model).double(), LOSS, inputs.double(), labels, training=training)
    assert single == pytest.approx(double, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_take_no_digits_from_an_update(kind: type[NoiseMeasure]) -> None:
    """The rounding of weights that move by a millionth is larger than what noise changes."""
    small = LocalTraining(local_steps=2, batch_size=2, learning_rate=1e-6)
    inputs, labels = batch()
    measure = kind(noises=20)
    found = measure.compute(build_convolution(), LOSS, inputs, labels, training=small)
    true = measure.compute(build_convolution().double(), LOSS, inputs.double(), labels, training=small)
    assert found == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_that_what_is_sent_does_not_survive_is_refused(kind: type[NoiseMeasure]) -> None:
    with pytest.raises(ConfigError, match=r"^sigma: with noise of 1e\+39 the message is NaN or infinite"):
        kind(noises=3, sigma=1e39).compute(build_convolution(), LOSS, *batch())


def test_one_minus_a_cosine_in_float32_is_rounding_error_and_the_chord_is_not() -> None:
    one = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    other = one + 3e-4 * torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    true = 1 - torch.cosine_similarity(one.double(), other.double(), dim=0).item()
    naive = 1 - torch.cosine_similarity(one, other, dim=0).item()
    assert cosine_distances(other[None], one).item() == pytest.approx(true, rel=1e-3)
    assert naive != pytest.approx(true, rel=0.1)


def test_batch_norm_in_train_and_in_eval_mode_are_two_things() -> None:
    model, (inputs, labels) = build_convolution(norm=True), batch()
    model[1].running_var.fill_(4.0)
    train, evaluated = (
        AngularLipschitz(noises=20).compute(m, LOSS, inputs, labels)["max"] for m in (model, deepcopy(model).eval())
    )
    assert train != pytest.approx(evaluated, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_changes_nothing_but_rounding_and_one_noise_has_to_fit(kind: type[NoiseMeasure]) -> None:
    model, (inputs, labels), measure = build_convolution(), batch(), kind(noises=30)
    much = measure.compute(model, LOSS, inputs, labels)
    assert measure.compute(model, LOSS, inputs, labels, memory=100_000) == pytest.approx(much, rel=1e-4)
    with pytest.raises(ConfigError, match=r"one perturbed batch takes about .* MiB, and memory is .* raise memory"):
        measure.compute(model, LOSS, inputs, labels, memory=1000)


@pytest.mark.parametrize("kind", KINDS)
def test_of_one_example_the_others_are_known(kind: type[NoiseMeasure]) -> None:
    model, (inputs, labels) = build_convolution(), batch()
    each = kind(noises=20).compute_per_example(model, LOSS, inputs, labels)
    alone = kind(noises=20).compute(model, LOSS, inputs[:1], labels[:1])
    name = next(iter(each))
    assert all(len(values) == 3 and values.isfinite().all() for values in each.values())
    if kind is not AngularLipschitz:  # the mean of three losses has a third of it
        assert each[name][0].item() == pytest.approx(alone[name] / 3, rel=1e-2)


def test_a_single_noise_that_crosses_a_kink_sets_the_maximum_and_not_the_quantile() -> None:
    changes = torch.tensor([*range(1000)], dtype=torch.float64)
    spiked = changes.clone()
    spiked[0] = 1e6
    measure = Lipschitz()
    plain, torn = measure._summarise_changes(changes), measure._summarise_changes(spiked)
    assert torn["max"] == 1e6
    assert torn["q99"].item() == pytest.approx(plain["q99"].item(), rel=2e-3)


def test_inputs_without_a_direction_have_no_angle() -> None:
    values = AngularLipschitz(noises=3).compute(
        build_convolution(), LOSS, torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
    )
    assert all(math.isnan(value) for value in values.values())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sigma": 0.0}, "sigma: expected a value above 0"),
        ({"sigma": math.nan}, "sigma: expected a finite value"),
        ({"noises": 0}, "noises: expected at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Lipschitz(**settings)


def test_noise_that_rounding_swallows_is_refused_and_may_be_so_small_in_float64() -> None:
    model, (inputs, labels), measure = build_convolution(), batch(), Lipschitz(sigma=1e-6, noises=5)
    with pytest.raises(ConfigError, match=r"lost in the rounding of torch\.float32 inputs"):
        measure.compute(model, LOSS, inputs, labels)
    small = measure.compute(model.double(), LOSS, inputs.double(), labels)
    assert small == pytest.approx(Lipschitz(noises=5).compute(model, LOSS, inputs.double(), labels), rel=1e-2)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.embedding(tokens))[0][:, -1])
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_refused(kind: type[NoiseMeasure]) -> None:
    with pytest.raises(ConfigError, match="the inputs are token ids"):
        kind(noises=2).compute(Embedded(), LOSS, torch.randint(9, (2, 6)), torch.tensor([0, 1]))
