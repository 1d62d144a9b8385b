"""How exposed a batch is: what a measure may say, and the length of a gradient."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.errors import ConfigError, RunError
from fedsim.exposure.gradient_norm import GradientNorm
from fedsim.measure import Measure
from fedsim.plugins import registry
from fedsim.task import squared_error


def line() -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_gradient_norm_is_that_of_all_trained_parameters_together() -> None:
    """Of one example x with target y at weights 0 the gradient is -2 y (x, 1)."""
    model, inputs, targets = line(), torch.tensor([[3.0, 4.0]]), torch.tensor([1.0])
    assert GradientNorm().of(model, squared_error, inputs, targets).item() == pytest.approx(2 * 26**0.5)
    model.bias.requires_grad_(False)
    assert GradientNorm().of(model, squared_error, inputs, targets).item() == pytest.approx(10)


def test_gradient_norm_is_undefined_where_the_gradient_is_zero() -> None:
    value = GradientNorm().of(line(), squared_error, torch.ones(2, 2), torch.zeros(2))
    assert value.isnan()


def test_gradient_norm_needs_something_to_train() -> None:
    with pytest.raises(ConfigError, match="no parameter to train"):
        GradientNorm().of(line().requires_grad_(False), squared_error, torch.ones(2, 2), torch.zeros(2))


def test_dropout_and_batch_norm_do_not_make_a_measure_impure() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    inputs, labels = torch.rand(5, 4), torch.arange(5) % 3
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss: Any = nn.functional.cross_entropy
    first = GradientNorm().of(model, loss, inputs, labels)
    assert torch.equal(first, GradientNorm().of(model, loss, inputs, labels))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@dataclass(frozen=True, kw_only=True)
class Says(Measure):
    value: Any = None

    def _of(self, model: Any, loss: Any, inputs: Any, labels: Any) -> Any:
        return self.value


@pytest.mark.parametrize("value", [None, 1.0, torch.tensor(1), torch.zeros(3), torch.zeros(2, 1)])
def test_a_measure_says_one_number_a_batch_or_one_an_example(value: Any) -> None:
    for fits in (torch.tensor(1.0), torch.zeros(2), torch.tensor(torch.nan)):
        Says(value=fits).of(line(), squared_error, torch.ones(2, 2), torch.zeros(2))
    with pytest.raises(RunError, match="expected one floating value, or one for each of 2 examples, got"):
        Says(value=value).of(line(), squared_error, torch.ones(2, 2), torch.zeros(2))


def test_an_infinite_value_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(RunError, match="return NaN where the measure is undefined"):
        Says(value=torch.tensor(torch.inf)).of(line(), squared_error, torch.ones(2, 2), torch.zeros(2))
    with pytest.raises(ConfigError, match="got 0 inputs and 0 labels"):
        Says(value=torch.tensor(1.0)).of(line(), squared_error, torch.ones(0, 2), torch.zeros(0))
    with pytest.raises(ConfigError, match="got 2 inputs and 3 labels"):
        Says(value=torch.tensor(1.0)).of(line(), squared_error, torch.ones(2, 2), torch.zeros(3))


def test_measures_are_built_by_name_and_need_neither_flower_nor_ray() -> None:
    assert registry.build("measures", "gradient-norm", {}, "measure") == GradientNorm()
    code = "import sys, fedsim.exposure.gradient_norm; print([m for m in ('flwr', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
