"""The error that a damped Gauss-Newton step leaves, against the same made with the whole Hessian."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.base.errors import ConfigError
from fedsim.exposure.expected_error import ExpectedError
from fedsim.exposure.hessian import Distance, Hessian
from fedsim.exposure.lanczos import lanczos_quadrature
from fedsim.training.message_function import ClientMessage
from fedsim.training.settings import LocalTraining

LOSS: Any = nn.functional.cross_entropy


def small(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 5))
    return model.double(), torch.randn(2, 1, 6, 6, dtype=torch.double), torch.tensor([1, 3])


@pytest.mark.parametrize("distance", ["l2", pytest.param("cosine", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "training",
    [pytest.param(None, marks=pytest.mark.thorough), LocalTraining(local_steps=3, batch_size=1, learning_rate=0.1)],
)
def test_it_is_what_the_whole_hessian_says(distance: Distance, training: LocalTraining | None) -> None:
    model, inputs, labels = small()
    values = ExpectedError(distance=distance, steps=72).compute(model, LOSS, inputs, labels, training=training)
    matrix = Hessian(ClientMessage.create(model, LOSS, inputs, labels, training=training), distance).matrix()
    damping = 1e-3 * torch.linalg.eigvalsh(matrix)[-1]
    left = damping * torch.linalg.solve(matrix + damping * torch.eye(72, dtype=torch.double), inputs.flatten())
    assert values["error"] == pytest.approx(left.square().mean().item(), rel=1e-6)
    assert values["share"] == pytest.approx((left.square().sum() / inputs.square().sum()).item(), rel=1e-6)


def test_few_steps_come_close() -> None:
    model, inputs, labels = small()
    few, many = (ExpectedError(steps=steps).compute(model, LOSS, inputs, labels)["share"] for steps in (30, 72))
    assert few == pytest.approx(many, rel=0.05)


def test_of_one_example_the_others_are_known() -> None:
    model, inputs, labels = small()
    each = ExpectedError(distance="l2", steps=72).compute_per_example(model, LOSS, inputs, labels)["share"]
    alone = [
        ExpectedError(distance="l2", steps=72).compute(model, LOSS, inputs[[i]], labels[[i]])["share"] for i in (0, 1)
    ]
    assert each.tolist() == pytest.approx(alone, rel=1e-6)  # by L2 and without BatchNorm, halves change nothing


def test_all_is_left_of_what_the_gradient_does_not_tell() -> None:
    """The first pixel reaches no weight: it is half of what differs from 0, and stays."""
    model, inputs, labels = small()
    blind = nn.Sequential(Masked(), *model)
    inputs = torch.zeros_like(inputs)
    inputs[:, :, 0, 0] = 1.0
    inputs[:, :, 3, 3] = 1.0
    share = ExpectedError(distance="l2", damping=1e-9, steps=72).compute(blind, LOSS, inputs, labels)["share"]
    assert share == pytest.approx(0.5, abs=1e-4)


class Masked(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(inputs)
        mask[:, :, 0, 0] = 0
        return inputs * mask


def test_a_batch_whose_scale_is_normalised_away_is_refused_and_its_examples_are_not() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, eps=1e-12), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)
    model = nn.Sequential(*layers)
    _, inputs, labels = small()
    with pytest.raises(ConfigError, match="does not change along the line from the mean"):
        ExpectedError().compute(model, LOSS, inputs.float(), labels)
    each = ExpectedError().compute_per_example(model, LOSS, inputs.float(), labels)["share"]
    assert bool(((each > 0) & (each < 1)).all())
    assert 0 < ExpectedError().compute(model.eval(), LOSS, inputs.float(), labels)["share"] < 1


def test_it_is_undefined_where_the_example_is_the_mean() -> None:
    model, inputs, labels = small()
    assert math.isnan(ExpectedError().compute(model, LOSS, torch.zeros_like(inputs), labels)["share"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"damping": 0.0}, "damping: expected a value above 0"), ({"steps": 0}, "steps: expected at least 1")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ExpectedError(**settings)


def test_quadrature_is_exact_with_as_many_steps_as_numbers_and_stops_where_nothing_is_left() -> None:
    model, inputs, labels = small()
    hessian = Hessian(ClientMessage.create(model, LOSS, inputs, labels), "l2")
    start = torch.randn(72, dtype=torch.double)
    values, vectors = torch.linalg.eigh(hessian.matrix())
    wanted = ((vectors.T @ start) ** 2 / start.square().sum() * (values.clamp_min(0) + 0.01).log()).sum()
    points, weights = lanczos_quadrature(hessian, start, 500)
    assert len(points) <= 72
    assert weights.sum().item() == pytest.approx(1)
    assert (weights * (points + 0.01).log()).sum().item() == pytest.approx(wanted.item(), rel=1e-6)
    points, _ = lanczos_quadrature(hessian, vectors[:, -1], 10)
    assert len(points) == 1
    assert points[0].item() == pytest.approx(values[-1].item())
