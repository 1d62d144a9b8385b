"""Where a value would be the smallest there is and say that all is exposed, though nothing is: it is undefined."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.base.task import squared_error
from fedsim.exposure.angular_lipschitz import AngularLipschitz
from fedsim.exposure.expected_error import ExpectedError
from fedsim.exposure.jacobian_norm import JacobianNorm
from fedsim.exposure.lavp import Lavp
from fedsim.exposure.lipschitz import Lipschitz
from fedsim.exposure.measure import Measure
from fedsim.exposure.sensitivity import Sensitivity
from fedsim.exposure.spectrum import Spectrum

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


def compute_measure(measure: Measure, alive: bool) -> dict[str, float]:
    inputs = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    return measure.compute(network(alive), squared_error, inputs, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("measure", SMALLER_IS_MORE, ids=repr)
def test_what_does_not_depend_on_the_inputs_is_not_exposed_most(measure: Measure) -> None:
    assert all(math.isnan(value) for value in compute_measure(measure, alive=False).values())
    assert compute_measure(measure, alive=True)["max"] > 1e-4


def test_a_gradient_that_noise_stretches_and_never_turns_exposes_nothing_by_its_angle() -> None:
    """Of two classes and one bias the gradient is (p - 1, 1 - p), so what is left of its turning is rounding."""
    model = network(alive=True)
    model[-1] = nn.Linear(16, 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "4.bias")
    inputs = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    batch: Any = model, nn.functional.cross_entropy, inputs, torch.tensor([1])
    found = Lavp(steps=5).compute(*batch)
    assert found["max"] > 1e-6
    assert all(math.isnan(found[name]) for name in ("ang_max", "ang_min", "fusion"))
    for exact in (1024, 0):
        assert all(math.isnan(value) for value in Spectrum(distance="cosine", exact=exact).compute(*batch).values())
        assert Spectrum(exact=exact).compute(*batch)["max"] == pytest.approx(found["max"], rel=1e-4)
    assert ExpectedError().compute(*batch)["share"] == pytest.approx(1)
    assert ExpectedError(distance="l2").compute(*batch)["share"] < 0.9999


@pytest.mark.parametrize("measure", [*SMALLER_IS_MORE, Spectrum(distance="cosine")], ids=repr)
def test_what_is_below_the_rounding_of_what_is_sent_is_not_exposed_most(measure: Measure) -> None:
    model = network(alive=False)
    model[1] = nn.LeakyReLU(1e-9)
    inputs = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    batch: Any = model, squared_error, inputs, torch.tensor([1.0, 2.0, 3.0])
    assert all(math.isnan(value) for value in measure.compute(*batch).values())
    assert ExpectedError().compute(*batch)["share"] == pytest.approx(1)


def test_an_example_that_is_learnt_has_the_angles_that_float64_finds_and_no_eigenvalue_that_float32_cannot_hold() -> (
    None
):
    """Its gradient is about exp(-60), whose square is no number in float32."""
    model: Any = nn.Sequential(nn.Linear(6, 2)).requires_grad_()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(2, 6, generator=torch.Generator().manual_seed(0)))
        model[0].bias.copy_(torch.tensor([0.0, 60.0]))
    inputs = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    batch: Any = model, nn.functional.cross_entropy, inputs, torch.tensor([1])
    exact: Any = copy.deepcopy(model).double(), nn.functional.cross_entropy, inputs.double(), torch.tensor([1])
    for measure in (Lipschitz(noises=20), AngularLipschitz(noises=20), ExpectedError(), JacobianNorm()):
        assert measure.compute(*batch) == pytest.approx(measure.compute(*exact), rel=5e-3, abs=0)
    found, true = Lavp(steps=5).compute(*batch), Lavp(steps=5).compute(*exact)
    assert [found[name] for name in ("ang_max", "ang_min")] == pytest.approx(
        [true[name] for name in ("ang_max", "ang_min")], rel=1e-3
    )
    assert all(math.isnan(found[name]) for name in ("max", "min", "fusion"))
    assert ExpectedError(distance="l2").compute(*batch)["share"] == pytest.approx(1)


def test_where_more_is_exposed_at_larger_values_or_at_less_than_a_share_of_1_it_is_so_told() -> None:
    assert compute_measure(JacobianNorm(), alive=False) == {"norm": 0}
    assert compute_measure(Sensitivity(), alive=False) == {"mean": 0}
    assert compute_measure(ExpectedError(), alive=False)["share"] == 1


def test_a_single_number_has_one_eigenvalue_and_cannot_turn() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    batch = model, squared_error, torch.tensor([[2.0]]), torch.tensor([1.0])
    found = Lavp(steps=10).compute(*batch)
    assert found["min"] == pytest.approx(found["max"], rel=1e-4)
    assert found["ang_min"] == pytest.approx(found["ang_max"], rel=1e-4)
    assert all(math.isnan(value) for value in AngularLipschitz(noises=5).compute(*batch).values())
