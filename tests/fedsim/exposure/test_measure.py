"""How exposed a batch is: what a measure may say, and the length of a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.task import squared_error
from fedsim.exposure.gradient_norm import GradientNorm
from fedsim.exposure.measure import Measure
from fedsim.plugins import registry
from fedsim.training.settings import LocalTraining


def line() -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_gradient_norm_is_that_of_all_trained_parameters_together() -> None:
    """Of one example x with target y at weights 0 the gradient is -2 y (x, 1)."""
    model, inputs, targets = line(), torch.tensor([[3.0, 4.0]]), torch.tensor([1.0])
    assert GradientNorm().compute(model, squared_error, inputs, targets)["norm"] == pytest.approx(2 * 26**0.5)
    model.bias.requires_grad_(False)
    assert GradientNorm().compute(model, squared_error, inputs, targets)["norm"] == pytest.approx(10)


def test_gradient_norm_is_undefined_where_the_gradient_is_zero() -> None:
    value = GradientNorm().compute(line(), squared_error, torch.ones(2, 2), torch.zeros(2))
    assert math.isnan(value["norm"])


def test_all_is_undefined_where_the_gradient_is_not_finite() -> None:
    model = line()
    nn.init.constant_(model.weight, math.inf)
    assert math.isnan(GradientNorm().compute(model, squared_error, torch.ones(2, 2), torch.zeros(2))["norm"])


def test_gradient_norm_needs_something_to_train() -> None:
    with pytest.raises(ConfigError, match="no parameter to train"):
        GradientNorm().compute(line().requires_grad_(False), squared_error, torch.ones(2, 2), torch.zeros(2))


def test_dropout_and_batch_norm_do_not_make_a_measure_impure() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    inputs, labels = torch.rand(5, 4), torch.arange(5) % 3
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss: Any = nn.functional.cross_entropy
    first = GradientNorm().compute(model, loss, inputs, labels)
    assert first == GradientNorm().compute(model, loss, inputs, labels)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_each_example_has_its_share_of_a_gradient_and_none_of_an_update() -> None:
    """At weights 0 the gradient of the mean of two losses is -(y_1 (x_1, 1) + y_2 (x_2, 1))."""
    inputs, targets = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0])
    each = GradientNorm().compute_per_example(line(), squared_error, inputs, targets)["norm"]
    assert each[0].item() == pytest.approx(26**0.5)
    assert each[1].isnan()
    training = LocalTraining(local_steps=2, batch_size=1)
    with pytest.raises(ConfigError, match="no example has a share of its own"):
        GradientNorm().compute_per_example(line(), squared_error, inputs, targets, training=training)


@dataclass(frozen=True, kw_only=True)
class Says(Measure):
    values: Any = None
    quantities: ClassVar[Any] = {"level": "more"}

    def _compute(self, sent: Any) -> Any:
        return self.values

    def said(self, inputs: int = 2, labels: int = 2) -> dict[str, float]:
        return self.compute(line(), squared_error, torch.ones(inputs, 2), torch.ones(labels))


def test_a_measure_gives_the_values_that_it_names() -> None:
    assert Says(values={"level": torch.tensor(2.0)}).said() == {"level": 2.0}
    assert math.isnan(Says(values={"level": math.nan}).said()["level"])
    with pytest.raises(RunError, match="expected the quantities level, got height"):
        Says(values={"height": 1.0}).said()


def test_an_infinite_value_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(RunError, match="level is infinite; return NaN where the measure is undefined"):
        Says(values={"level": math.inf}).said()
    with pytest.raises(ConfigError, match="got 0 inputs and 0 labels"):
        Says().said(0, 0)
    with pytest.raises(ConfigError, match="got 2 inputs and 3 labels"):
        Says().said(2, 3)


def test_measures_are_built_by_name() -> None:
    assert registry.build("measures", "gradient-norm", {}, "measure") == GradientNorm()
