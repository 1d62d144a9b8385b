"""The derivative of a ReLU's step, in place of which a density stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adversaries.inversion.inverting_gradients import InvertingGradients
from fedsim.base.randomness import generator
from fedsim.inversion.relu_jumps import SmoothReluJumps
from tests.support.digit_clients import knowledge, make_update

RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "function": functional.relu,
    "function by name": lambda inputs: functional.relu(input=inputs),
    "function in place": lambda inputs: functional.relu(inputs, True),
    "function in place by name": lambda inputs: functional.relu(inputs, inplace=True),
    "torch": torch.relu,
    "method": lambda inputs: inputs.relu(),
}


def in_place_without_result(inputs: Tensor) -> Tensor:
    inputs = inputs.clone()
    torch.relu_(inputs)
    return inputs


def derivatives(relu: Callable[[Tensor], Tensor], width: float) -> tuple[list[Tensor], Tensor]:
    """The loss of two layers and its gradient, and the derivative of that gradient by the data."""
    rng = generator("relu jumps")
    data, first, second = (torch.randn(shape, generator=rng) for shape in ((7, 4), (5, 4), (3, 5)))
    weights = [first.requires_grad_(), second.requires_grad_()]
    data.requires_grad_()

    def loss() -> Tensor:
        return (relu(data @ first.T) @ second.T).square().sum()

    if width:
        with SmoothReluJumps(width):
            value = loss()
    else:
        value = loss()
    gradient = torch.autograd.grad(value, weights, create_graph=True)
    return [value, *gradient], torch.autograd.grad(sum(part.sin().sum() for part in gradient), data)[0]


@pytest.mark.parametrize("relu", [*RELUS.values(), in_place_without_result], ids=[*RELUS, "in place without result"])
def test_outputs_and_gradients_are_exact_and_jumps_are_seen(relu: Callable[[Tensor], Tensor]) -> None:
    exact, smooth = derivatives(relu, 0.0), derivatives(relu, 0.3)
    assert all(map(torch.equal, exact[0], smooth[0]))
    assert not torch.allclose(exact[1], smooth[1], rtol=0.01)
    torch.testing.assert_close(smooth[1], derivatives(functional.relu, 0.3)[1])


def test_the_density_adds_up_to_the_jump_and_is_as_wide_as_it_says() -> None:
    inputs = torch.linspace(-4, 4, 4001, dtype=torch.float64, requires_grad=True)
    with SmoothReluJumps(0.2):
        outputs = functional.relu(inputs)
    (step,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    assert torch.equal(step, (inputs > 0).double())
    (density,) = torch.autograd.grad(step.sum(), inputs)
    spacing = 8 / 4000
    assert density.sum().item() * spacing == pytest.approx(1.0, abs=1e-6)
    deviation = (density * inputs.detach().square()).sum().mul(spacing).sqrt().item()
    assert deviation == pytest.approx(0.2 * inputs.square().mean().sqrt().item(), rel=1e-3)


def test_inputs_without_a_size_have_no_jumps() -> None:
    """As of dummy data of 0 behind a layer without bias, whose density would be infinite."""
    inputs = torch.zeros(5, requires_grad=True)
    with SmoothReluJumps(0.05):
        (step,) = torch.autograd.grad(functional.relu(inputs).sum(), inputs, create_graph=True)
    assert torch.equal(torch.autograd.grad(step.sum(), inputs)[0], torch.zeros(5))


def test_restarts_that_are_batched_see_the_same_jumps() -> None:
    """By `vmap`, each with the width of its own inputs."""
    weights = torch.randn((5, 4), generator=generator("batched"))

    def descend(data: Tensor) -> Tensor:
        return torch.func.grad(lambda data: gradient_of(data).sin().sum())(data)

    def gradient_of(data: Tensor) -> Tensor:
        return torch.func.grad(lambda point: functional.relu(data @ point.T).square().sum())(weights)

    starts = torch.randn((3, 7, 4), generator=generator("starts")) * torch.tensor([0.1, 1.0, 10.0])[:, None, None]
    with SmoothReluJumps(0.3):
        torch.testing.assert_close(torch.func.vmap(descend)(starts), torch.stack([descend(start) for start in starts]))


def test_matching_comes_closer_where_it_sees_jumps() -> None:
    update, facts = make_update(0), knowledge(0)

    def distance(relu_width: float) -> float:
        attack = InvertingGradients(iterations=60, step_size=0.1, relu_width=relu_width)
        return float(attack.invert(update, facts, generator("attack"), lambda *_: None).trace["l_sim"][-1])

    assert distance(1.0) < 0.6 * distance(0.0)


def test_a_width_where_there_is_no_relu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    update, facts, attack = make_update(0), knowledge(0), InvertingGradients(iterations=1, relu_width=0.3)
    attack.invert(update, facts, generator("attack"), lambda *_: None)
    assert "relu_width" not in caplog.text
    clipped = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU6(), nn.Linear(64, 10))
    attack.invert(update, replace(facts, model=lambda: clipped), generator("attack"), lambda *_: None)
    assert (
        "round 1, client 0: relu_width does nothing, because the model calls no plain ReLU; leave it out" in caplog.text
    )
