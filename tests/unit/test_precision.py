"""The gradient that an attack differentiates, in float32, in bfloat16 and in both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.precision import Precision, computing_in
from fedsim.randomness import generator

INPUTS = torch.randn(16, 3, 16, 16, generator=generator("inputs"))
LABELS = torch.arange(16) % 10


class Attending(nn.Module):
    """Products that no layer makes: `@`, and a call of `torch.matmul`."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(48, 48), nn.Linear(48, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(len(inputs), 16, 48)
        weights = (self.query(tokens) @ tokens.transpose(1, 2) / 7).relu()
        found: Tensor = self.head(torch.matmul(weights, tokens).mean(1))
        return found


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def slopes(model: nn.Module, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the gradient of all weights, and the slope of its squared length at the inputs."""
    inputs = INPUTS.clone().requires_grad_()
    with computing_in(precision, "cpu"):
        outputs = model(inputs)
        gradient = torch.autograd.grad(cross_entropy(outputs, LABELS), list(model.parameters()), create_graph=True)
        whole = torch.cat([part.float().flatten() for part in gradient])
        (slope,) = torch.autograd.grad(whole.square().sum(), inputs)
    return outputs.detach(), whole.detach(), slope


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("build", [convolutional, Attending])
def test_mixed_has_float32_values_and_nearer_slopes_than_bfloat16(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    exact, mixed, half = (slopes(model, precision) for precision in ("float32", "mixed", "bfloat16"))
    assert mixed[0].dtype == torch.float32
    torch.testing.assert_close(mixed[0], exact[0])
    assert apart(half[0], exact[0]) > 1e-3
    for place in (1, 2):
        assert 0 < apart(mixed[place], exact[place]) < 0.5 * apart(half[place], exact[place])


def test_float32_is_untouched() -> None:
    torch.manual_seed(0)
    model = convolutional()
    with computing_in("float32", "cpu"):
        inside = model(INPUTS)
    assert torch.equal(inside, model(INPUTS))
