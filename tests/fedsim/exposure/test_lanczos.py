"""Where power iteration would be, against power iteration itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.exposure.hessian import Distance, Hessian
from fedsim.exposure.lanczos import smallest_by_power_iteration
from fedsim.training.message_function import ClientMessage

LOSS: Any = nn.functional.cross_entropy
NETWORKS: dict[str, Any] = {
    "tanh": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 5)),
    "relu": lambda: nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 5)),
    "narrow": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2), nn.Sigmoid(), nn.Linear(2, 5)),
}
"""The last tells least: its gradient leaves most directions of the inputs open."""


def hessian_of(network: str, distance: Distance, dtype: torch.dtype) -> Hessian:
    torch.manual_seed(0)
    model, inputs = NETWORKS[network](), torch.randn(2, 3, 8, 8)
    return Hessian(ClientMessage.create(model.to(dtype), LOSS, inputs.to(dtype), torch.tensor([1, 3])), distance)


def by_power_iteration(hessian: Hessian, steps: int) -> float:
    vector = hessian.start_vector.to(hessian.message.vector.dtype)
    vector = vector / vector.norm()
    for _ in range(steps):
        left = hessian.largest_eigenvalue * vector - hessian @ vector
        vector = left / left.norm()
    return float(hessian.apply_root(vector).double().square().sum())


@pytest.mark.parametrize("steps", [1, 10, *(pytest.param(steps, marks=pytest.mark.thorough) for steps in (40, 200))])
@pytest.mark.parametrize("distance", ["l2", "cosine"])
@pytest.mark.parametrize("network", ["tanh", pytest.param("relu", marks=pytest.mark.thorough), "narrow"])
def test_it_is_what_power_iteration_leaves(network: str, distance: Distance, steps: int) -> None:
    exact, single = (hessian_of(network, distance, dtype) for dtype in (torch.float64, torch.float32))
    expected = by_power_iteration(exact, steps)
    assert smallest_by_power_iteration(exact, steps) == pytest.approx(expected, rel=1e-5)
    assert smallest_by_power_iteration(single, steps) == pytest.approx(expected, rel=1e-3)


def test_many_steps_take_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    hessian, products = hessian_of("tanh", "l2", torch.float64), []
    assert hessian.largest_eigenvalue
    times = Hessian.__matmul__

    def count_product(self: Hessian, directions: Tensor) -> Tensor:
        products.append(directions)
        return times(self, directions)

    monkeypatch.setattr(Hessian, "__matmul__", count_product)
    smallest_by_power_iteration(hessian, 100)
    assert len(products) == 41


def test_it_falls_to_the_smallest() -> None:
    hessian = hessian_of("tanh", "l2", torch.float64)
    left = [smallest_by_power_iteration(hessian, steps) for steps in (1, 10, 100)]
    assert all(more > less for more, less in pairwise(left))
    assert left[-1] >= torch.linalg.eigvalsh(hessian.matrix())[0]


def test_where_all_eigenvalues_are_the_largest_it_is_that() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    sent = ClientMessage.create(model, nn.functional.mse_loss, torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    hessian = Hessian(sent, "l2")
    assert smallest_by_power_iteration(hessian, 100) == pytest.approx(hessian.largest_eigenvalue)
