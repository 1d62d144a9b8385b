"""Where a value would be the smallest there is and say that all is exposed, though nothing is: it is undefined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.exposure.angular_lipschitz import AngularLipschitz
from fedsim.exposure.expected_error import ExpectedError
from fedsim.exposure.jacobian_norm import JacobianNorm
from fedsim.exposure.lavp import Lavp
from fedsim.exposure.lipschitz import Lipschitz
from fedsim.exposure.sensitivity import Sensitivity
from fedsim.exposure.spectrum import Spectrum
from fedsim.measure import Measure
from fedsim.task import squared_error

SMALLER_IS_MORE = [
    Lavp(steps=5),
    Lipschitz(noises=20),
    AngularLipschitz(noises=20),
    Spectrum(),
    Spectrum(exact=0, probes=2, steps=5),
]


def network(alive: bool) -> nn.Module:
    """Where it is not alive, only biases of the last layers take part, whatever the inputs are."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)]
    nn.init.constant_(layers[0].bias, 5.0 if alive else -50.0)  # type: ignore[arg-type]
    return nn.Sequential(*layers)


def measured(measure: Measure, alive: bool) -> dict[str, float]:
    inputs = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    return measure.of(network(alive), squared_error, inputs, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("measure", SMALLER_IS_MORE, ids=repr)
def test_what_does_not_depend_on_the_inputs_is_not_exposed_most(measure: Measure) -> None:
    assert all(math.isnan(value) for value in measured(measure, alive=False).values())
    assert measured(measure, alive=True)["max"] > 1e-4


def test_where_more_is_exposed_at_larger_values_or_at_less_than_a_share_of_1_it_is_so_told() -> None:
    assert measured(JacobianNorm(), alive=False) == {"norm": 0}
    assert measured(Sensitivity(), alive=False) == {"mean": 0}
    assert measured(ExpectedError(), alive=False)["share"] == 1


def test_a_single_number_has_one_eigenvalue_and_cannot_turn() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    batch = model, squared_error, torch.tensor([[2.0]]), torch.tensor([1.0])
    found = Lavp(steps=10).of(*batch)
    assert found["min"] == pytest.approx(found["max"], rel=1e-4)
    assert found["ang_min"] == pytest.approx(found["ang_max"], rel=1e-4)
    assert all(math.isnan(value) for value in AngularLipschitz(noises=5).of(*batch).values())
